"""GRPO on images: the policy learns to name handwritten digits, from rewards alone.

This file is the whole experiment: models, data, reward, one step, loss, evaluation. One controller process runs it; it
calls the models in their worker groups. `recipes/reverse_rl` has the same step for all algorithms, PPO among them.
Legend: T tokens, S sequences, which are the completions of a step.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from mvp_engine.data.batch import PackedBatch
from mvp_engine.engine import StepContext
from mvp_engine.kit.rl import Answer, Experience, ModelGroups, Prompt, RLEngine, Updates, policy, prompt_loader

from .settings import DigitsConfig


class DigitsEngine(RLEngine):
    config_class = DigitsConfig
    config: DigitsConfig

    # ---- Models; the optimizer and schedule of those that are trained are in `optim`, by default AdamW

    def start_models(self, models: ModelGroups) -> None:
        """Each role is a worker group, on the processes of the actor or on its own. An evaluation has no optimizer."""
        models.start_actor()  # the policy, which is trained
        if self.config.rl.kl_coef:
            models.start_copy("reference")  # frozen; with LoRA it is the actor without its adapters
        models.start_copy("rollout")  # generates, if there is `groups.rollout`; else the actor does, or a server
        if self.config.reward.model is not None:
            models.start_reward_model(self.config.reward.model)

    # ---- Data: prompts, which are rows without their answers; their completions share the image ---

    def prepare_dataloader(self, split: str) -> Any:
        count, folder = self.config.rl.prompts_per_step, self.run.dir
        return prompt_loader(self.data, split, prompts=count, seed=self.config.seed, folder=folder)

    # ---- One step: prompts, rollout, reward, advantage, update -----------------------------------

    def reward(self, row: dict[str, Any], answer: Answer) -> float:
        """1 for the right answer and nothing else."""
        return float(answer.text.strip() == row["answer"])

    def sample(self, prompts: list[Prompt]) -> Experience:
        """Completions of the next prompts, and their rewards; with `rl.async_steps` one step ahead, in a thread."""
        samples = self.generate(prompts, self.sampling)  # rl.num_generations of each prompt
        with self.phase("reward"):
            rewards = self.rewards(prompts, samples)  # of `reward`, and of the reward model
        return Experience(prompts, samples, rewards)

    def train_step(self, ctx: StepContext, experience: Experience) -> Updates:
        """Advantages of the completions, then `rl.updates` optimizer steps on them."""
        # A sequence per completion, with the log-probs of sampler, actor and reference.
        batch = self.prepare_batch(ctx, experience)
        batch.token_fields["advantages"] = self.advantages(batch)
        return self.update(ctx, batch, partial(self.policy_loss, self.config, self.ratio_to(experience)))

    def advantages(self, batch: PackedBatch) -> Tensor:
        """(T,): the reward minus the mean of the prompt's completions, over their deviation (not in Dr.GRPO)."""
        rewards_S, groups_S = batch.sequence_fields["reward"], batch.sequence_fields["group"]
        advantages_S = policy.group_advantages(rewards_S, groups_S, std=self.config.rl.algorithm != "dr_grpo")
        return policy.spread(advantages_S, batch)

    @staticmethod
    def policy_loss(config: Any, ratio_to: str, model: Any, batch: PackedBatch, log: Any) -> tuple[Tensor, Tensor]:
        """The loss of a micro-batch, summed, and its weight. It runs in the actor's processes, without the engine."""
        rl, fields = config.rl, batch.token_fields
        outputs = model(batch, ["log_probs", "label_entropy"], temperature=config.generation.temperature)
        log_probs_T, advantages_T = outputs["log_probs"], fields["advantages"]
        # Of the policy before the step. Without the field it is the same one: this is the only update of the step.
        old_T = fields.get(f"{ratio_to}_log_probs", log_probs_T.detach())
        ratio_T = policy.probability_ratios(log_probs_T, old_T, batch)
        low, high = rl.clip_range
        plain_T = -advantages_T * ratio_T
        loss_T = torch.maximum(plain_T, -advantages_T * ratio_T.clamp(1 - low, 1 + high))
        is_clipped_T = loss_T != plain_T
        if "importance" in fields:  # rl.correction, for a sampler that is not the actor
            loss_T = loss_T * fields["importance"]
        if rl.kl_coef:
            kl_T = policy.kl_penalty(log_probs_T, fields["reference_log_probs"], "k3")
            loss_T = loss_T + rl.kl_coef * kl_T
            policy.log_tokens(log, batch, kl=kl_T)
        entropy_T = outputs["label_entropy"]
        policy.log_tokens(log, batch, ratio=ratio_T, clip_fraction=is_clipped_T, entropy=entropy_T)
        policy.log_distances(log, batch, log_probs_T, old_T)
        # GRPO: the mean of each completion; DAPO: over all tokens; Dr.GRPO: over the longest possible completion.
        return policy.normed(loss_T, batch, rl.loss_norm, config.generation.max_new_tokens)

    # ---- Evaluation: held-out prompts ------------------------------------------------------------

    def eval_sample(self, prompts: list[Prompt]) -> Experience:
        """Completions by the actor, greedy with `eval.samples=1`; logged are the mean reward and pass@k."""
        samples = self.complete(prompts)
        return Experience(prompts, samples, self.rewards(prompts, samples))

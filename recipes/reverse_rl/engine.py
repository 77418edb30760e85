"""Reinforcement learning on text: the policy learns to write a number backwards, from rewards alone.

This file is the whole experiment: models, data, reward, one step, loss, evaluation. One controller process runs it; it
calls the models in their worker groups. Legend: T tokens, S sequences, which are the completions of a step.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from mvp_engine.data.batch import PackedBatch
from mvp_engine.engine import StepContext
from mvp_engine.kit.rl import Answer, Experience, ModelGroups, Prompt, RLEngine, Updates, policy, prompt_loader

from .settings import ReverseConfig


class ReverseEngine(RLEngine):
    config_class = ReverseConfig

    # ---- Models; the optimizer and schedule of those that are trained are in `optim`, by default AdamW

    def start_models(self, models: ModelGroups) -> None:
        """Each role is a worker group, on the processes of the actor or on its own. An evaluation has no optimizer."""
        models.start_actor()  # the policy, which is trained
        if self.config.rl.algorithm == "ppo":
            models.start_critic(lr=self.config.rl.critic_lr)  # its value model
        if self.config.rl.kl_coef:
            models.start_copy("reference")  # frozen; with LoRA it is the actor without its adapters
        models.start_copy("rollout")  # generates, if there is `groups.rollout`; else the actor does, or a server
        if self.config.reward.model is not None:
            models.start_reward_model(self.config.reward.model)

    # ---- Data: prompts, which are rows without their answers -------------------------------------

    def prepare_dataloader(self, split: str) -> Any:
        count, folder = self.config.rl.prompts_per_step, self.run.dir
        return prompt_loader(self.data, split, prompts=count, seed=self.config.seed, folder=folder)

    # ---- One step: prompts, rollout, reward, advantage, update -----------------------------------

    def reward(self, row: dict[str, Any], answer: Answer) -> float:
        """The share of right characters; an answer of another length has none."""
        wanted = row["answer"]
        if len(answer.text) != len(wanted):
            return 0.0
        return sum(a == b for a, b in zip(answer.text, wanted, strict=True)) / len(wanted)

    def sample(self, prompts: list[Prompt]) -> Experience:
        """Completions of the next prompts, and their rewards; with `rl.async_steps` one step ahead, in a thread."""
        samples = self.generate(prompts, self.sampling)  # rl.num_generations of each prompt
        with self.phase("reward"):
            rewards = self.rewards(prompts, samples)  # of `reward`, and of the reward model
        return Experience(prompts, samples, rewards)

    def train_step(self, ctx: StepContext, experience: Experience) -> Updates:
        """Advantages of the completions, then `rl.updates` optimizer steps on them."""
        # A sequence per completion, with the log-probs of sampler, actor and reference, and the critic's values.
        batch = self.prepare_batch(ctx, experience)
        batch.token_fields |= self.advantages(batch)
        policy_loss = partial(self.policy_loss, self.config, self.ratio_to(experience))
        return self.update(ctx, batch, policy_loss, policy.ValueLoss(clip=0.2))

    def advantages(self, batch: PackedBatch) -> dict[str, Tensor]:
        """(T,): how much better than expected a token is, or its whole completion; of ppo also the critic's targets."""
        rl, fields = self.config.rl, batch.token_fields
        rewards_S, groups_S = batch.sequence_fields["reward"], batch.sequence_fields["group"]
        kl_T = torch.zeros(batch.num_tokens)  # some subtract the KL divergence from the rewards
        if rl.kl_coef and rl.preset.kl_in_reward:
            reference_T = fields["reference_log_probs"]
            kl_T = policy.kl_penalty(policy.old_log_probs(batch), reference_T, "k1")
        match rl.algorithm:
            case "rloo":  # minus the mean of the prompt's other completions
                rewards_S = rewards_S - rl.kl_coef * policy.sums_of_actions(kl_T, batch)
                advantages_S = policy.group_advantages(rewards_S, groups_S, std=False, leave_one_out=True)
            case "opo":  # minus the mean of the prompt's completions, weighted by their lengths
                lengths_S = policy.Actions.of(batch).counts
                advantages_S = policy.group_advantages(rewards_S, groups_S, std=False, weights_S=lengths_S)
            case "reinforce_source":  # minus the mean of all completions of the source, over their deviation
                rewards_S = rewards_S - rl.kl_coef * policy.sums_of_actions(kl_T, batch)
                advantages_S = policy.group_advantages(rewards_S, batch.sequence_fields["source"])
            case "remax":  # the return of each token minus the reward of the prompt's greedy completion
                rewards_T = policy.token_rewards(rewards_S, batch, kl_T, rl.kl_coef)
                return {"advantages": policy.remax(rewards_T, batch.sequence_fields["baseline"], batch)}
            case "reinforce_pp":  # the return of each token, whitened over the step
                rewards_T = policy.token_rewards(rewards_S, batch, kl_T, rl.kl_coef)
                return {"advantages": policy.reinforce_pp(rewards_T, batch)}
            case "ppo":  # generalized advantage estimation with the critic's values
                rewards_T = policy.token_rewards(rewards_S, batch, kl_T, rl.kl_coef)
                advantages_T, returns_T = policy.gae(fields["old_values"], rewards_T, batch, lam=rl.gae_lambda)
                return {"advantages": policy.whiten(advantages_T, batch), "returns": returns_T}
            case name:  # minus the mean of the prompt's completions; but for dr_grpo, over their standard deviation
                advantages_S = policy.group_advantages(rewards_S, groups_S, std=name != "dr_grpo")
        return {"advantages": policy.spread(advantages_S, batch)}

    @staticmethod
    def policy_loss(config: Any, ratio_to: str, model: Any, batch: PackedBatch, log: Any) -> tuple[Tensor, Tensor]:
        """The loss of a micro-batch, summed, and its weight. It runs in the actor's processes, without the engine."""
        rl, fields = config.rl, batch.token_fields
        outputs = model(batch, ["log_probs", "label_entropy"], temperature=config.generation.temperature)
        log_probs_T, entropy_T, advantages_T = outputs["log_probs"], outputs["label_entropy"], fields["advantages"]
        # Of the policy before the step. Without the field it is the same one: this is the only update of the step.
        old_T = fields.get(f"{ratio_to}_log_probs", log_probs_T.detach())
        low, high = rl.clip_range
        own_T = log_probs_T
        if rl.algorithm == "gmpo":  # clipped before the mean
            own_T = policy.clipped_log_probs(log_probs_T, old_T, advantages_T, (low, high))
        of_sequence = rl.algorithm in ("gspo", "gmpo")  # its geometric mean
        ratio_T = policy.probability_ratios(own_T, old_T, batch, of_sequence=of_sequence)
        clipped_T = ratio_T.clamp(1 - low, 1 + high)
        if rl.algorithm == "cispo":  # the clipped ratio is a weight without gradient
            loss_T = -clipped_T.detach() * advantages_T * log_probs_T
            is_clipped_T = clipped_T != ratio_T
        elif rl.algorithm == "sapo":  # a soft gate instead of clipping
            loss_T = -advantages_T * policy.soft_gate(ratio_T, advantages_T)
            is_clipped_T = torch.zeros_like(ratio_T)
        elif rl.algorithm == "gmpo":
            loss_T, is_clipped_T = -advantages_T * ratio_T, own_T != log_probs_T
        else:
            loss_T = torch.maximum(-advantages_T * ratio_T, -advantages_T * clipped_T)
            loss_T = policy.dual_clipped(loss_T, advantages_T, rl.dual_clip)
            is_clipped_T = loss_T != -advantages_T * ratio_T
        if "importance" in fields:  # rl.correction, for a sampler that is not the actor
            loss_T = loss_T * fields["importance"]
        if rl.kl_coef:
            is_in_loss = not rl.preset.kl_in_reward
            kl_T = policy.kl_penalty(log_probs_T, fields["reference_log_probs"], "k3")
            loss_T = loss_T + is_in_loss * rl.kl_coef * kl_T
            policy.log_tokens(log, batch, kl=kl_T)
        if rl.entropy:
            loss_T = loss_T - rl.entropy * entropy_T
        policy.log_tokens(log, batch, ratio=ratio_T, clip_fraction=is_clipped_T, entropy=entropy_T)
        policy.log_distances(log, batch, log_probs_T, old_T)
        return policy.normed(loss_T, batch, rl.loss_norm, config.generation.max_new_tokens)

    # ---- Evaluation: held-out prompts ------------------------------------------------------------

    def eval_sample(self, prompts: list[Prompt]) -> Experience:
        """Completions by the actor, greedy with `eval.samples=1`; logged are the mean reward and pass@k."""
        samples = self.complete(prompts)
        return Experience(prompts, samples, self.rewards(prompts, samples))

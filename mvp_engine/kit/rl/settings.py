"""The config of an RLEngine: algorithm, rollouts, rewards, and where the models run. It imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mvp_engine.config.schema import (
    CHECKPOINTING_MODES,
    Count,
    Fraction,
    GroupParallel,
    NonNegative,
    Positive,
    Section,
)
from mvp_engine.kit.settings import MLLMConfig, MLLMEval

AlgorithmName = Literal["grpo", "dapo", "dr_grpo", "rloo", "reinforce_pp", "ppo", "gspo", "cispo"]


@dataclass(frozen=True)
class Algorithm:
    name: str
    # group: the reward minus the mean of the prompt's samples. leave_one_out: minus the mean of the other samples.
    # reinforce_pp: returns, whitened over the step. gae: with the values of a critic.
    advantages: Literal["group", "leave_one_out", "reinforce_pp", "gae"]
    std: bool = False  # divide by the standard deviation of a group's rewards
    kl_in_reward: bool = False  # a KL penalty belongs inside of the rewards, not into the loss
    loss: dict[str, Any] = field(default_factory=dict)  # options of PolicyLoss, as published

    @property
    def has_critic(self) -> bool:
        return self.advantages == "gae"

    @property
    def has_groups(self) -> bool:
        return self.advantages in ("group", "leave_one_out")


GSPO = {"norm": "sequence", "ratio": "sequence", "clip": (3e-4, 4e-4)}
CISPO = {"norm": "token", "cispo": True, "clip": (1.0, 4.0)}  # no lower bound, and ratios up to 5
ALGORITHMS = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm("grpo", "group", std=True, loss={"norm": "sequence"}),
        Algorithm("dapo", "group", std=True, loss={"norm": "token", "clip": (0.2, 0.28)}),
        Algorithm("dr_grpo", "group", loss={"norm": "constant"}),
        Algorithm("rloo", "leave_one_out", kl_in_reward=True, loss={"norm": "constant"}),
        Algorithm("reinforce_pp", "reinforce_pp", kl_in_reward=True, loss={"norm": "token"}),
        Algorithm("ppo", "gae", kl_in_reward=True, loss={"norm": "token"}),
        Algorithm("gspo", "group", std=True, loss=GSPO),
        Algorithm("cispo", "group", std=True, loss=CISPO),
    )
}


class RL(Section):
    """The algorithm and the size of a step."""

    algorithm: AlgorithmName = "grpo"
    """How advantages and the policy loss are computed; ppo trains a critic too."""
    prompts_per_step: Count = 32
    """Prompts of one step."""
    num_generations: Count = 8
    """Completions of each prompt."""
    updates: Count = 1
    """Optimizer steps over the completions of one step, each on its share of the prompts."""
    clip: Annotated[list[NonNegative], Field(min_length=2, max_length=2)] | None = None
    """By how much the probability ratio may fall and rise; null: the algorithm's own, [0.2, 0.2] of most, [0.2, 0.28]
    (clip-higher) of dapo, [3e-4, 4e-4] of gspo, [1, 4] of cispo."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """The largest ratio that counts where the advantage is negative, such as 3; null: no such limit."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL divergence from the reference model, which is the model at the start; 0: no reference. It is
    estimated by k3 in the loss, by k1 in rewards (ppo, reinforce_pp, rloo)."""
    entropy: NonNegative = 0.0
    """Weight of the entropy bonus."""
    importance_cap: Positive | None = None
    """Truncated importance sampling: the most that a token counts for p(trainer) / p(sampler); null: 2 with
    async_steps=1, else no such correction."""
    async_steps: Literal[0, 1] = 0
    """1: the rollouts of the next step are generated with the weights before this step's update, so that both can run
    at the same time; they are then off-policy by one step, which importance_cap corrects."""
    dynamic_sampling: Annotated[int, Field(ge=0)] = 0
    """Prompts whose completions all have the same reward are replaced by new prompts, in at most so many more rounds
    of generation; 0: they stay, and give no gradient."""
    gae_lambda: Fraction = 0.95
    """Lambda of generalized advantage estimation (GAE); of ppo."""
    value_clip: Positive | None = 0.2
    """By how much a value may move from the old one in the critic's loss; null: no clipping."""
    critic_lr: Positive | None = None
    """The critic's learning rate; null: optim.lr."""
    critic_warmup: Annotated[int, Field(ge=0)] = 0
    """Steps at the start in which the critic alone is trained."""

    @property
    def preset(self) -> Algorithm:
        return ALGORITHMS[self.algorithm]

    @property
    def clip_range(self) -> tuple[float, float]:
        """By how much the probability ratio may fall and rise."""
        low, high = self.clip or self.preset.loss.get("clip", (0.2, 0.2))
        return low, high

    @property
    def loss_norm(self) -> Literal["token", "sequence", "constant"]:
        """What the policy loss is divided by."""
        norm: Literal["token", "sequence", "constant"] = self.preset.loss["norm"]
        return norm

    @property
    def max_importance(self) -> float | None:
        """The largest importance weight of a token; None: there are no such weights."""
        if self.importance_cap is None and self.async_steps:
            return 2.0
        return self.importance_cap


class GenerationSettings(Section):
    """Who generates, and how."""

    backend: Literal["packed", "vllm", "openai"] = "packed"
    """packed: our own decode in the actor, or in the group `rollout`; vllm, openai: servers at `urls`."""
    max_new_tokens: Count = 64
    """The most tokens of a completion."""
    max_turns: Count = 32
    """The most completions of one episode, of engines that define `episode` or `tools`."""
    temperature: Positive = 1.0
    """Of sampling, and of the log-probs in the loss."""
    max_gap: Positive | None = 0.05
    """The mean absolute difference between log-probs of sampler and trainer that stops the run; null: never."""
    gap_interval: Count = 10
    """With rl.updates=1, steps from one measurement of the gap by modality, before the update, to the next one; step 1
    has one. The steps between need no forward for old log-probs: their update gives the mean gap. With more updates
    every step measures it."""
    urls: list[str] = Field(default_factory=list)
    """Servers, such as http://localhost:8000; of vllm and openai."""
    sync: Annotated[str, Field(pattern="^(file|file:.+|ipc|nccl|none)$")] = "file"
    """How weights reach vLLM servers: files that both sides see (file: in the run folder; file:/dev/shm/weights: in
    another one), CUDA IPC on the same GPUs (ipc), or NCCL to other GPUs (nccl). none: of openai, whose servers take no
    weights."""

    @model_validator(mode="after")
    def _weights_reach_the_sampler(self) -> GenerationSettings:
        if self.backend == "openai" and self.sync != "none":
            raise ValueError(
                "generation.backend=openai: an OpenAI-compatible server takes no weights, so every completion is from "
                "the model that it was started with. Set generation.sync=none if you want that, or "
                "generation.backend=vllm"
            )
        if self.backend == "vllm" and self.sync == "none":
            raise ValueError(
                "generation.sync=none is of generation.backend=openai: set file, ipc or nccl"
            )
        return self


class RewardSettings(Section):
    """How rewards are computed."""

    timeout: Positive = 30.0
    """Seconds after which a reward counts as failed, and an episode that has not asked for the next completion."""
    max_errors: Fraction = 0.05
    """The share of the rewards of a step that may fail, and one in any case unless it is 0: more end the run. A
    completion whose reward failed is left out."""
    workers: Annotated[int, Field(ge=0)] | None = None
    """Processes that compute rewards or play episodes; null: 2 for rewards, up to 256 for episodes of several turns. 0:
    the controller itself computes rewards, without a time-out."""
    model: str | None = None
    """The folder of a reward model of the policy's family, whose score is added to the reward."""


class RLEval(MLLMEval):
    """Completions of held-out prompts in every evaluation."""

    samples: Count = 1
    """Completions of each prompt. 1: by greedy decoding; more, at generation.temperature, give pass@k for k up to this
    number, where a reward of 1 or more counts as right."""


class Workers(Section):
    where: Literal["local", "spawn", "ray"] = "local"
    """local: the models are in the controller's process; spawn: in processes of this machine; ray: in Ray actors."""


class Group(Section):
    """The processes and the layout of one model."""

    ranks: Count | None = None
    """Processes of its own; null: those of the actor, and of the actor: 1."""
    parallel: GroupParallel = GroupParallel()
    """How they share the model."""

    @property
    def shares_actor(self) -> bool:
        """Whether this group, which is not the actor, uses the actor's processes."""
        return self.ranks is None

    def check_layout(self, name: str, actor_ranks: int) -> None:
        """Raise if the sizes of `parallel` do not multiply to the ranks of this group."""
        owner = "actor" if self.shares_actor else name
        ranks = actor_ranks if self.ranks is None else self.ranks
        sizes = self.parallel.model_dump(exclude={"expert", "reshard"})
        each = math.prod(sizes.values())
        if ranks % each:
            keys = [f"{key}={size}" for key, size in sizes.items() if size > 1]
            raise ValueError(
                f"groups.{name}.parallel ({', '.join(keys)}) does not divide groups.{owner}.ranks={ranks}: set "
                f"groups.{owner}.ranks={each * max(1, ranks // each)}, or change the sizes"
            )


class Groups(Section):
    actor: Group = Group()
    """The policy that is trained."""
    critic: Group = Group()
    """The value model of ppo."""
    reference: Group | None = None
    """The frozen reference of rl.kl_coef; null: with LoRA the actor without its adapters, else as {}."""
    reward: Group = Group()
    """The reward model of reward.model."""
    rollout: Group | None = None
    """A group of its own that generates, for generation.backend=packed; null: the actor generates."""


class RLConfig(MLLMConfig):
    """The config of an RLEngine."""

    rl: RL = RL()
    """The algorithm and the size of a step."""
    generation: GenerationSettings = GenerationSettings()
    """Generation of completions."""
    reward: RewardSettings = RewardSettings()
    """Computation of rewards."""
    eval: RLEval
    workers: Workers = Workers()
    """Where the models run."""
    groups: Groups = Groups()
    """Processes and layouts of the models."""

    @model_validator(mode="after")
    def _groups_fit(self) -> RLConfig:
        actor = self.groups.actor
        if self.workers.where == "local":
            for name, group in self.groups:
                if group is not None and (group.ranks or 1) > 1:
                    raise ValueError(
                        f"groups.{name}.ranks={group.ranks}: workers.where=local is one process. Set "
                        "workers.where=spawn"
                    )
        for name, group in self.groups:
            if group is not None:
                group.check_layout(name, actor.ranks or 1)
        if self.groups.rollout is not None and self.generation.backend != "packed":
            raise ValueError("groups.rollout is for generation.backend=packed: servers generate")
        if self.generation.backend != "packed" and not self.generation.urls:
            raise ValueError(f"generation.backend={self.generation.backend} needs generation.urls")
        return self

    @model_validator(mode="after")
    def _algorithm_fits(self) -> RLConfig:
        rl = self.rl
        if rl.preset.has_groups and rl.num_generations == 1:
            raise ValueError(
                f"rl.algorithm={rl.algorithm} compares the completions of a prompt: set rl.num_generations to 2 or more"
            )
        if rl.updates > rl.prompts_per_step:
            raise ValueError(
                f"rl.updates={rl.updates} is more than rl.prompts_per_step={rl.prompts_per_step}"
            )
        if rl.dynamic_sampling and rl.num_generations == 1:
            raise ValueError(
                "rl.dynamic_sampling compares the completions of a prompt: set rl.num_generations"
            )
        return self

    @model_validator(mode="after")
    def _no_keys_of_sft(self) -> RLConfig:
        sizes = self.parallel.model_dump(
            include={"shard", "context", "ulysses", "tensor", "pipeline", "expert"}
        )
        if max(sizes.values()) > 1:
            raise ValueError(
                "parallel: the controller is one process. Set groups.actor.parallel, groups.actor.ranks and "
                "workers.where=spawn"
            )
        if self.eval.generation is not None:
            raise ValueError("eval.generation is of SFT: an RL run has eval.samples")
        if self.optim.ema is not None:
            raise ValueError("optim.ema: workers keep no EMA weights. Leave it out")
        if "auto" in (self.data.pack_tokens, self.model.activation_checkpointing):
            raise ValueError(
                "data.pack_tokens and model.activation_checkpointing: an RL run does not choose them. Set a "
                f"number of tokens, and one of {', '.join(CHECKPOINTING_MODES)}"
            )
        if (self.data.global_batch_size or 1) > 1 or self.data.global_batch_tokens is not None:
            raise ValueError(
                "data.global_batch_size and data.global_batch_tokens are of SFT: a step of RL has "
                "rl.prompts_per_step prompts"
            )
        if self.model.type in ("value_model", "action_model"):
            raise ValueError(
                f"model.type={self.model.type}: a policy writes text. Set model.type=language_model"
            )
        if self.data.pairs:
            raise ValueError("data.pairs: RL needs prompts, not pairs. Set it to false")
        return self

    @property
    def budget(self) -> int:
        """The most tokens of a forward."""
        return self.data.tokens_per_pack

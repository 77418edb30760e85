"""The config of an RLEngine: algorithm, rollouts, rewards, and where the models run. It imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema, model_validator

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

AlgorithmName = Literal[
    "grpo",
    "dapo",
    "dr_grpo",
    "rloo",
    "reinforce_pp",
    "ppo",
    "gspo",
    "gmpo",
    "cispo",
    "sapo",
    "remax",
    "opo",
    "reinforce_source",
    "distil",
    "distil_reverse",
    "distil_forward",
]


@dataclass(frozen=True)
class Algorithm:
    name: str
    # group: the reward minus the mean of the prompt's samples. leave_one_out: minus the mean of the other samples.
    # optimal: minus their mean weighted by length. source: minus the mean of the step's samples of the same source.
    # greedy: returns minus the reward of a greedy completion. reinforce_pp: returns, whitened over the step.
    # gae: with the values of a critic. teacher: the log-prob of a teacher minus that of the policy.
    advantages: Literal[
        "group", "leave_one_out", "optimal", "source", "greedy", "reinforce_pp", "gae", "teacher"
    ]
    std: bool = False  # divide by the standard deviation of a group's rewards
    kl_in_reward: bool = False  # a KL penalty belongs inside of the rewards, not into the loss
    loss: dict[str, Any] = field(default_factory=dict)  # options of PolicyLoss, as published
    # The KL divergence from a teacher over the whole vocabulary, which DistilLoss has in place of advantages.
    divergence: Literal["reverse", "forward"] | None = None

    @property
    def has_critic(self) -> bool:
        return self.advantages == "gae"

    @property
    def has_groups(self) -> bool:
        return self.advantages in ("group", "leave_one_out", "optimal")


GSPO = {"norm": "sequence", "ratio": "sequence", "clip": (3e-4, 4e-4)}
GMPO = {"norm": "sequence", "ratio": "clipped_sequence", "clip": (0.4, 0.4)}
SAPO = {"norm": "sequence", "gate": (1.0, 1.05)}
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
        Algorithm("gmpo", "group", std=True, loss=GMPO),
        Algorithm("cispo", "group", std=True, loss=CISPO),
        Algorithm("sapo", "group", std=True, loss=SAPO),
        Algorithm("remax", "greedy", kl_in_reward=True, loss={"norm": "constant"}),
        Algorithm("opo", "optimal", loss={"norm": "token"}),
        Algorithm("reinforce_source", "source", True, kl_in_reward=True, loss={"norm": "token"}),
        Algorithm("distil", "teacher", loss={"norm": "token"}),
        Algorithm("distil_reverse", "teacher", loss={"norm": "token"}, divergence="reverse"),
        Algorithm("distil_forward", "teacher", loss={"norm": "token"}, divergence="forward"),
    )
}


class Correction(Section):
    """How much samples count whose sampler is not the trainer; see `policy.importance_weights`."""

    weights: Literal["token", "sequence"] | None = "token"
    cap: Positive = 2.0
    mask: Literal["token", "sequence", "geometric"] | None = None
    bounds: list[Positive] = Field(default_factory=lambda: [0.5, 2.0], min_length=2, max_length=2)

    @model_validator(mode="after")
    def _every_word_counts(self) -> Correction:
        if self.weights is None and self.mask is None:
            raise ValueError(
                "rl.correction: weights and mask are both null: set one, or rl.correction=null"
            )
        if self.bounds[0] >= self.bounds[1]:
            raise ValueError(
                f"rl.correction.bounds={self.bounds} must be [low, high] with low < high"
            )
        # The config that a run stores has the defaults, too.
        changed = (
            ("cap", self.cap != 2.0, self.weights),
            ("bounds", self.bounds != [0.5, 2.0], self.mask),
        )
        for key, is_changed, used in changed:
            if is_changed and used is None:
                of = "weights" if key == "cap" else "mask"
                raise ValueError(
                    f"rl.correction.{key} is of {of}, which is null: set {of}, or leave {key} out"
                )
        return self


# One key to a reader: it is written as one mapping.
OneMapping = WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "null"}]})


# With one update, steps from one measurement of the gap by modality to the next one: each is a forward of the actor.
GAP_INTERVAL = 10
# Of a model card.
CARD_KEYS = ["rl.algorithm", "rl.prompts_per_step", "rl.num_generations", "rl.updates", "rl.clip"]
CARD_KEYS += ["rl.kl_coef", "generation.max_new_tokens", "generation.temperature"]


class RL(Section):
    """The algorithm and the size of a step."""

    algorithm: AlgorithmName = "grpo"
    """How advantages and the policy loss are computed; ppo trains a critic too. distil, distil_reverse and
    distil_forward learn from teachers, without a reward."""
    teachers: dict[str, str] = Field(default_factory=dict)
    """Frozen teachers by the source of a row, {math: FOLDER, "*": FOLDER}: folders or models of the Hub with the
    policy's tokenizer; "*" has all other sources. With an algorithm other than distil they take the place of the
    reference of kl_coef."""
    prompts_per_step: Count = 32
    """Prompts of one step."""
    num_generations: Count = 8
    """Completions of each prompt."""
    updates: Count = 1
    """Optimizer steps over the completions of one step, each on its share of the prompts."""
    clip: Annotated[list[NonNegative], Field(min_length=2, max_length=3)] | None = None
    """By how much the probability ratio may fall and rise; null: the algorithm's own, [0.2, 0.2] of most, [0.2, 0.28]
    (clip-higher) of dapo, [3e-4, 4e-4] of gspo, [0.4, 0.4] of gmpo (of the ratio's logarithm), [1, 4] of cispo; sapo
    has no clipping. A third number, as in [0.2, 0.28, 3], is the largest ratio that counts where the advantage is
    negative (dual clip)."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL divergence from the reference model, which is the model at the start; 0: no reference. It is
    estimated by k3 in the loss, by k1 in rewards (ppo, reinforce_pp, reinforce_source, remax, rloo). With teachers it
    is the divergence from the teacher, by k1 in the advantage of each token or in rewards."""
    entropy: NonNegative = 0.0
    """Weight of the entropy bonus."""
    correction: Annotated[Correction | None, OneMapping] = None
    """For a sampler that is not the trainer, such as {weights: token|sequence|null, cap: 2, bounds: [0.5, 2], mask:
    token|sequence|geometric|null}. weights: tokens count for p(trainer) / p(sampler), up to cap. mask: those whose
    ratio is out of bounds count for nothing. null: {weights: token, cap: 2} with async_steps, else no correction."""
    async_steps: Annotated[int, Field(ge=0)] = 0
    """1: the rollouts of the next step are generated with the weights before this step's update, so that both can run
    at the same time; they are then off-policy by one step, which correction is for. 2 or more: episodes run
    freely, also over updates, and what is trained is at most so many steps off-policy; such runs do not repeat bit by
    bit."""
    dynamic_sampling: Annotated[int, Field(ge=0)] = 0
    """Prompts whose completions all have the same reward are replaced by new prompts, in at most so many more rounds
    of generation; 0: they stay, and give no gradient."""
    gae_lambda: Fraction = 0.95
    """Lambda of generalized advantage estimation (GAE); of ppo."""
    critic_lr: Positive | None = None
    """The critic's learning rate; null: optim.lr."""
    critic_warmup: Annotated[int, Field(ge=0)] = 0
    """Steps at the start in which the critic alone is trained."""

    @property
    def preset(self) -> Algorithm:
        return ALGORITHMS[self.algorithm]

    @property
    def teacher_paths(self) -> list[str]:
        """The different teachers: some sources may have the same one."""
        return list(dict.fromkeys(self.teachers.values()))

    def teacher_of(self, source: str) -> int:
        """The number of a source's teacher among `teacher_paths`."""
        return self.teacher_paths.index(self.teachers.get(source) or self.teachers["*"])

    @property
    def has_reference(self) -> bool:
        """Whether kl_coef is the weight of the divergence from the policy at the start."""
        return self.kl_coef > 0 and not self.teachers

    @property
    def clip_range(self) -> tuple[float, float]:
        """By how much the probability ratio may fall and rise."""
        low, high = (self.clip or self.preset.loss.get("clip", (0.2, 0.2)))[:2]
        return low, high

    @property
    def dual_clip(self) -> float | None:
        """The largest ratio that counts where the advantage is negative; None: no such limit."""
        return self.clip[2] if self.clip and len(self.clip) > 2 else None

    @property
    def loss_norm(self) -> Literal["token", "sequence", "constant"]:
        """What the policy loss is divided by."""
        norm: Literal["token", "sequence", "constant"] = self.preset.loss["norm"]
        return norm

    @property
    def corrects(self) -> Correction | None:
        """The correction of samples; None: there is none, as of a divergence, which has no ratio."""
        if self.correction is None and self.async_steps and self.preset.divergence is None:
            return Correction()
        return self.correction


class GenerationSettings(Section):
    """Who generates, and how."""

    backend: Literal["packed", "vllm", "sglang"] = "packed"
    """packed: our own decode in the actor, or in the group `rollout`; vllm, sglang: servers at `urls`."""
    max_new_tokens: Count = 64
    """The most tokens of a completion."""
    max_turns: Count = 32
    """The most completions of one episode, of engines that define `episode` or `tools`."""
    temperature: Positive = 1.0
    """Of sampling, and of the log-probs in the loss."""
    max_gap: Positive | None = 0.05
    """The mean absolute difference between log-probs of sampler and trainer that stops the run; null: never."""
    urls: list[str] = Field(default_factory=list)
    """Servers, such as http://localhost:8000; of vllm and sglang."""
    sync: Annotated[str, Field(pattern="^((file|adapter)(:.+)?|ipc|nccl)$")] = "file"
    """How weights reach servers: files that both sides see (file: in the run folder; file:/dev/shm/weights: in another
    one), only the LoRA adapters as files (adapter, adapter:FOLDER), and with vllm CUDA IPC on the same GPUs (ipc), or
    NCCL to other GPUs (nccl)."""

    @model_validator(mode="before")
    @classmethod
    def _weights_reach_the_sampler(cls, keys: Any) -> Any:
        if isinstance(keys, Mapping) and keys.get("backend") == "openai":
            raise ValueError(
                "generation.backend=openai is gone: such a server has fixed weights, so it samples from another policy "
                "than the one that is trained. Set generation.backend=vllm or sglang, whose servers get weights, and "
                "leave out generation.sync=none. A program that speaks OpenAI's protocol is trained by chat.url"
            )
        return keys


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
    teacher: Group | None = None
    """Each teacher of rl.teachers; null: on the actor's processes and with its layout."""


class RLConfig(MLLMConfig):
    """The config of an RLEngine."""

    step_of: ClassVar[
        Sequence[str]
    ] = ()  # algorithms of a recipe that writes its own step; empty: all

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
        if self.eval_harness is not None:  # the actor may be in other processes
            raise ValueError(
                "eval_harness: RL runs have no tasks of harnesses. Run them on an export: mvp export RUN FOLDER, then "
                "lm_eval --model hf --model_args pretrained=FOLDER (docs/harness.md)"
            )
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
        if self.generation.sync.startswith("adapter") and self.lora is None:
            raise ValueError(
                "generation.sync=adapter sends LoRA adapters: set lora, or generation.sync=file"
            )
        return self

    @model_validator(mode="after")
    def _algorithm_fits(self) -> RLConfig:
        rl = self.rl
        if self.step_of and rl.algorithm not in self.step_of:
            raise ValueError(
                f"rl.algorithm={rl.algorithm}: the step of this recipe is that of {', '.join(self.step_of)}. Change "
                "train_step in its engine, or remove it there to have that of RLEngine"
            )
        if rl.preset.has_groups and rl.num_generations == 1:
            raise ValueError(
                f"rl.algorithm={rl.algorithm} compares the completions of a prompt: set rl.num_generations to 2 or more"
            )
        if "gate" in rl.preset.loss and rl.clip:
            raise ValueError(
                f"rl.algorithm={rl.algorithm} has a soft gate in place of clipping: leave out rl.clip"
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
    def _teachers_fit(self) -> RLConfig:
        rl, name = self.rl, f"rl.algorithm={self.rl.algorithm}"
        is_distil = rl.preset.advantages == "teacher"
        if is_distil and not rl.teachers:
            raise ValueError(f"{name} needs teachers: set rl.teachers={{*: FOLDER}}")
        if is_distil and rl.dynamic_sampling:
            raise ValueError(
                f"rl.dynamic_sampling: {name} learns from every completion, whatever its reward. Leave it out"
            )
        if is_distil and rl.kl_coef:
            raise ValueError(
                f"rl.kl_coef: {name} has teachers in place of a reference. Leave it out; to learn from rewards and "
                "teachers, choose another rl.algorithm, and kl_coef is the weight of the teachers"
            )
        if rl.teachers and not is_distil and not rl.kl_coef:
            raise ValueError(
                f"rl.teachers: {name} would not use them. Set rl.kl_coef, the weight of the divergence from the "
                "teacher next to the rewards, or rl.algorithm=distil"
            )
        if rl.teachers and self.groups.reference is not None:
            raise ValueError(
                "groups.reference: rl.teachers take the place of the reference. Leave one of them out"
            )
        if self.groups.teacher is not None and not rl.teachers:
            raise ValueError("groups.teacher is of rl.teachers, which is empty")
        if rl.preset.divergence:
            for key, is_set in (
                ("groups.teacher", self.groups.teacher is not None),
                ("groups.actor.parallel.pipeline", self.groups.actor.parallel.pipeline > 1),
                ("rl.clip", rl.clip is not None),
                ("rl.correction", rl.correction is not None),
            ):
                if is_set:
                    raise ValueError(
                        f"{key}: {name} compares whole distributions, in the actor's processes and without a ratio. "
                        f"Leave {key} out, or set rl.algorithm=distil, which needs log-probs alone"
                    )
        if rl.preset.advantages == "greedy" and rl.async_steps:
            raise ValueError(
                f"rl.async_steps: the greedy completions of {name} are by the actor. Set it to 0"
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

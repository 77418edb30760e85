"""ModelGroups: actor, critic, reference and sampler of an RL training, as the one model engine that an Engine sees.

The controller holds no weights. A checkpoint has a folder for each model that trains, or that the recipe loaded weights
into, written by its own ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mvp_engine.checkpoint.format import Reader, from_bytes, to_bytes, verify
from mvp_engine.checkpoint.state import SavedState
from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import World
from mvp_engine.errors import UserError
from mvp_engine.hf.weights.hub import local_folder
from mvp_engine.hf.weights.load import WeightFiles
from mvp_engine.kit.data import load_processor
from mvp_engine.kit.loss import last_token_scores
from mvp_engine.kit.rl.prompts import Prompt
from mvp_engine.kit.rl.rollout import Sample
from mvp_engine.kit.rl.settings import Group, RLConfig
from mvp_engine.model_engine import Settings, StepStatus
from mvp_engine.worker.group import WorkerGroup
from mvp_engine.worker.worker import UpdateNumbers, WorkerSpec


class ModelGroups:
    actor: WorkerGroup
    critic: WorkerGroup | None = None
    reference: WorkerGroup | None = None
    rollout: WorkerGroup | None = None  # a group of its own that generates
    reward: WorkerGroup | None = None  # the reward model
    has_reference = False  # a group, or the actor without its adapters

    def __init__(
        self,
        config: RLConfig,
        precision: str,
        total_steps: int | None,
        side_files: Path,
        device: torch.device,
        start_models: Callable[[ModelGroups], None],
    ) -> None:
        """`total_steps`: steps of the controller, of `rl.updates` optimizer steps each. `start_models`: the roles."""
        self.config = config
        self.start_models = start_models
        self.is_training = False
        self.settings = Settings.from_config(config, precision)
        self.total_steps = total_steps
        self.side_files = side_files
        ranks = config.groups.actor.ranks or 1
        self.world = World(0, ranks, 0, ranks, device)  # of the actor, for logs
        # The actor's parameters by learning rate, on the meta device: the workers have the optimizers.
        self.param_groups: list[dict[str, Any]] = []
        self.learning_rates: dict[str, float] = {}
        # The collector's part of a checkpoint, and what of it was restored.
        self.pending_state: Callable[[], dict[str, Any] | None] = lambda: None
        self.restored_pending: dict[str, Any] | None = None
        self._statuses: list[StepStatus] = []
        self._started = ExitStack()

    # ---- Processes ------------------------------------------------------------------------------------------------

    def initialize(self, optimizer: Any = None, scheduler: Any = None) -> None:
        """Start the processes and their models; without an optimizer only those of an evaluation."""
        self.is_training = optimizer is not None
        with self._started:  # ends what was started if a later group fails
            self.start_models(self)
            self._started = self._started.pop_all()

    def start_actor(self) -> None:
        """The policy, with adapters if there is the section `lora`. By default it generates, too."""
        has_critic = self.config.rl.preset.has_critic
        warmup = self.config.rl.critic_warmup if has_critic else 0
        spec = self._trained_spec(warmup) if self.is_training else self._spec(optim=None)
        self.actor = self._start("actor", self.config.groups.actor, spec)

    def start_critic(self, lr: float | None = None) -> None:
        """The value model of a training: the policy at the start with a new head. `lr`: by default the actor's."""
        if self.is_training:
            config = self.config
            model = config.model.model_copy(update={"type": "value_model"})
            optim = config.optim.model_copy(update={"lr": lr or config.optim.lr})
            spec = self._trained_spec(0, model=model, optim=optim)
            self.critic = self._start("critic", config.groups.critic, spec)

    def start_copy(self, role: Literal["reference", "rollout"]) -> WorkerGroup | None:
        """A frozen copy of the policy at the start, for a training: the reference, or the sampler of `groups.rollout`.

        With LoRA the reference is the actor without its adapters, unless there is `groups.reference`: no group, so it
        returns None, as it does in an evaluation and for a sampler without `groups.rollout`.
        """
        self.has_reference = self.has_reference or role == "reference"
        group = getattr(self.config.groups, role)
        if role == "reference" and group is None and self.config.lora is None:
            group = Group(parallel=self.config.groups.actor.parallel)
        if self.is_training and group is not None:
            setattr(self, role, self._start(role, group, self._frozen_spec()))
        found: WorkerGroup | None = getattr(self, role)
        return found

    def start_reward_model(self, path: str) -> None:
        """A value model whose score at the last token is a reward."""
        changes = {"type": "value_model", "path": path, "config": {}}
        model = self.config.model.model_copy(update=changes)
        spec = self._frozen_spec(model=model)
        self.reward = self._start("reward", self.config.groups.reward, spec)

    def _spec(self, **changes: Any) -> WorkerSpec:
        return WorkerSpec.from_config(
            self.config,
            self.settings.precision,
            side_files=str(self.side_files),
            **changes,
        )

    def _frozen_spec(self, **changes: Any) -> WorkerSpec:
        # Weights that a recipe loads are not those of the folder: a checkpoint has all of them.
        settings = dataclasses.replace(self.settings, trainable_only=False)
        return self._spec(optim=None, lora=None, settings=settings, **changes)

    def _trained_spec(self, warmup: int, **changes: Any) -> WorkerSpec:
        """The spec of a model that is trained after `warmup` steps."""
        steps = self.total_steps
        if steps is not None:
            steps = max(1, steps - warmup) * self.config.rl.updates
        return self._spec(total_steps=steps, **changes)

    def _start(self, name: str, group: Group, spec: WorkerSpec) -> WorkerGroup:
        where = self.config.workers.where
        parallel = group.parallel.with_timeout(self.config.parallel.timeout)
        shares = name != "actor" and (group.shares_actor or where == "local")
        started = WorkerGroup.start(
            dataclasses.replace(spec, parallel=parallel),
            name=name,
            ranks=group.ranks or 1,
            where=where,
            on=self.actor if shares else None,
        )
        return self._started.enter_context(started)

    @property
    def samples_apart(self) -> bool:
        """Does a group with processes of its own generate, so that the actor can train meanwhile?"""
        group = self.config.groups.rollout
        return group is not None and not group.shares_actor and self.config.workers.where != "local"

    def close(self) -> None:
        self._started.close()

    # ---- What the models say of a batch, per token and on the CPU --------------------------------------------------

    def log_probs(self, batch: PackedBatch) -> Tensor:
        """Of the labels, by the actor, at the temperature of the sampling."""
        return self._log_probs(self.actor, batch)

    def reference_log_probs(self, batch: PackedBatch) -> Tensor:
        if self.reference is None:
            return self._log_probs(self.actor, batch, adapters=False)
        return self._log_probs(self.reference, batch)

    def _log_probs(self, group: WorkerGroup, batch: PackedBatch, adapters: bool = True) -> Tensor:
        return group.infer(
            batch,
            ["log_probs"],
            budget=self.config.budget,
            temperature=self.config.generation.temperature,
            adapters=adapters,
        )["log_probs"].float()

    # ---- What an Engine calls -------------------------------------------------------------------------------------

    def train_mode(self) -> AbstractContextManager[None]:
        return nullcontext()

    def add_status(self, actor: list[UpdateNumbers], critic: list[UpdateNumbers]) -> None:
        """Record how the updates of a step ended."""
        reasons = [f"actor: {one.skipped}" for one in actor if one.skipped]
        reasons += [f"critic: {one.skipped}" for one in critic if one.skipped]
        if not actor and not critic:
            reasons = ["no sample has a reward and a token"]
        losses = [one.loss for one in actor if one.loss is not None]
        loss = sum(losses) / len(losses) if losses else None
        self._statuses.append(StepStatus("; ".join(reasons) or None, loss=loss))
        self.learning_rates = {"lr": actor[-1].lr} if actor else {}
        if critic:
            self.learning_rates["lr/critic"] = critic[-1].lr

    def step_status(self, wait: bool = True) -> list[StepStatus]:
        statuses = self._statuses
        self._statuses = []
        return statuses

    # ---- Checkpoints ----------------------------------------------------------------------------------------------

    def _trained(self) -> dict[str, WorkerGroup]:
        return _present({"actor": self.actor, "critic": self.critic})

    def _frozen(self) -> dict[str, WorkerGroup]:
        """Those with their first weights, unless the recipe loads others. A sampler gets its own in each step."""
        return _present({"reference": self.reference, "reward": self.reward})

    def collect(self, shared: dict[str, Any], own: dict[str, Any]) -> dict[str, Tensor]:
        """The controller's own state; `write_models` adds the models."""
        shared = {**shared, "pending": self.pending_state()}
        return {"shared": to_bytes(shared), "rank.00000": to_bytes(own)}

    def write_models(self, folder: Path) -> None:
        loaded = {name: group for name, group in self._frozen().items() if group.has_loaded}
        for name, group in {**self._trained(), **loaded}.items():
            group.save(folder / name)

    def restore(self, folder: Path) -> SavedState:
        if not (folder / "actor").is_dir():
            raise UserError(
                f"checkpoint {folder} is of another kind of training: it has no folder actor. Start from an export of "
                "it (model.path)"
            )
        verify(folder)
        reader = Reader(folder)
        for name, group in self._trained().items():
            if not (folder / name).is_dir():
                raise UserError(
                    f"checkpoint {folder} has no {name}: it was saved with another rl.algorithm"
                )
            group.load(folder / name)
        for name, group in self._frozen().items():
            if (folder / name).is_dir():
                group.load(folder / name)
        shared = from_bytes(reader.read("shared"))
        self.restored_pending = shared["pending"]
        return SavedState(shared, [from_bytes(reader.read("rank.00000"))])

    def describe(self, folder: Path) -> None:
        """The folder of each model in a checkpoint describes itself."""

    def export_hf(self, folder: Path) -> None:
        self.actor.export_hf(folder)


def _present(groups: dict[str, WorkerGroup | None]) -> dict[str, WorkerGroup]:
    return {name: group for name, group in groups.items() if group is not None}


# RewardModel: completions scored by a value model in a worker group.


class RewardModel:
    """The score of a sequence is the value at its last token, as reward models are trained (docs/reward_model.md)."""

    def __init__(self, group: WorkerGroup, budget: int) -> None:
        """`budget`: the most tokens of a forward."""
        self.group = group
        self.budget = budget

    def __call__(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[float]:
        """A score for each sample: of the tokens that were drawn, which are not tokenized again."""
        if not samples:
            return []
        batch = PackedBatch.concat([sample.batch(prompts[sample.prompt]) for sample in samples])
        values_T = self.group.infer(batch, ["values"], budget=self.budget)["values"]
        scores: list[float] = last_token_scores(values_T, batch).tolist()
        return scores


def check_reward_model(name: str | Path, tokenizer: Any) -> None:
    """Refuse a folder without the head of a reward model, which would score at random, or with another vocabulary."""
    folder = local_folder(name, weights=True)
    if not (folder / "config.json").is_file():
        exports = "".join(
            f". Its export is {path}" for path in sorted(folder.glob("hf_step_*"))[-1:]
        )
        raise UserError(
            f"reward.model={name} is not the Hugging Face folder of a reward model, nor a model of the Hub{exports}"
        )
    if "score.weight" not in WeightFiles(folder):
        raise UserError(
            f"reward.model={name} has no score.weight, so it is not a reward model: train one (docs/reward_model.md)"
        )
    _check_tokenizer(folder, tokenizer)


def _check_tokenizer(folder: Path, tokenizer: Any) -> None:
    """A reward model reads the policy's token ids."""
    processor = load_processor(folder)
    own = getattr(processor, "tokenizer", processor).get_vocab()
    vocabulary = tokenizer.get_vocab()
    if own == vocabulary:
        return
    other = next(
        token for token in sorted({*own, *vocabulary}) if own.get(token) != vocabulary.get(token)
    )
    raise UserError(
        f"reward.model={folder}: its tokenizer is not the policy's (token {other!r} is {own.get(other)} there and "
        f"{vocabulary.get(other)} here), and it reads the policy's token ids. Use a reward model of the same family, "
        "or call it in the engine's reward(row, answer)"
    )

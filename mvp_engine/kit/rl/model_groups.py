"""ModelGroups: actor, critic, sampler and frozen scorers of an RL training, as the one model engine of an Engine.

Scorers say something of the tokens that were sampled: the reference, a reward model, teachers.

The controller holds no weights. A checkpoint has a folder for each model that trains, or that the recipe loaded weights
into, written by its own ranks.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mvp_engine.checkpoint.format import Reader, from_bytes, to_bytes, verify
from mvp_engine.checkpoint.state import SavedState
from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import World
from mvp_engine.errors import UserError, did_you_mean
from mvp_engine.hf.experts.router_replay import without_routes
from mvp_engine.hf.weights.hub import local_folder
from mvp_engine.hf.weights.load import WeightFiles
from mvp_engine.kit.data import load_processor
from mvp_engine.kit.loss import last_token_scores, per_token
from mvp_engine.kit.preference.distil import Head, TeacherOutput, gathered_head, linear_kl
from mvp_engine.kit.rl.prompts import Prompt
from mvp_engine.kit.rl.rollout import Sample
from mvp_engine.kit.rl.settings import RL, Group, RLConfig
from mvp_engine.model_engine import Settings, StepStatus
from mvp_engine.worker.group import WorkerGroup
from mvp_engine.worker.worker import UpdateNumbers, Worker, WorkerSpec

LOGGER = logging.getLogger("mvp_engine")


class ModelGroups:
    actor: WorkerGroup
    critic: WorkerGroup | None = None
    reference: WorkerGroup | None = None
    rollout: WorkerGroup | None = None  # a group of its own that generates
    reward: WorkerGroup | None = None  # the reward model
    left_out: Sequence[str] = ()  # frozen models of the restored checkpoint that are not started
    teachers: Sequence[WorkerGroup] = ()  # one for each of `rl.teacher_paths`
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
            if self.is_training and self.config.rl.teachers and not self.teachers:
                raise UserError(
                    "rl.teachers: start_models of this engine does not start them. Call models.start_teachers() there"
                )
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
        self.reward = self._start_scorer("reward", self.config.groups.reward, path, "value_model")

    def start_teachers(self) -> None:
        """The teachers of a training, if there is `rl.teachers`."""
        rl, groups = self.config.rl, self.config.groups
        if not self.is_training:
            return
        group = groups.teacher or Group(parallel=groups.actor.parallel)
        for number, path in enumerate(rl.teacher_paths):
            name = f"teacher_{number}"
            teacher = self._start_scorer(name, group, path, self.config.model.type)
            self.teachers = [*self.teachers, teacher]
        if rl.preset.divergence:
            is_reverse = rl.preset.divergence == "reverse"
            self.actor.run(Teachers.open, rl.teacher_paths, is_reverse, self.temperature)

    def _start_scorer(self, name: str, group: Group, path: str, model_type: str) -> WorkerGroup:
        changes = {"type": model_type, "path": path, "config": {}}
        model = self.config.model.model_copy(update=changes)
        return self._start(name, group, self._frozen_spec(model=model))

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

    @property
    def temperature(self) -> float:
        return self.config.generation.temperature

    def score(
        self,
        group: WorkerGroup,
        batch: PackedBatch,
        output: str = "log_probs",
        adapters: bool = True,
    ) -> Tensor:
        """An output per token; log-probs are of the labels, at the temperature of the sampling."""
        options: dict[str, Any] = {"budget": self.config.budget, "temperature": self.temperature}
        if group is not self.actor or not adapters:
            batch = without_routes(batch)
        return group.infer(batch, [output], adapters=adapters, **options)[output].float()

    def log_probs(self, batch: PackedBatch) -> Tensor:
        return self.score(self.actor, batch)

    def reference_log_probs(self, batch: PackedBatch) -> Tensor:
        has_group = self.reference is not None
        return self.score(self.reference or self.actor, batch, adapters=has_group)

    def teacher_log_probs(self, batch: PackedBatch) -> Tensor:
        """Those of each sequence by its teacher, whose number is in the sequence field `teacher`."""
        log_probs_T = torch.zeros(batch.num_tokens)
        for number, group in enumerate(self.teachers):
            is_own_S = batch.sequence_fields["teacher"] == number
            if is_own_S.any():
                own = batch.select(is_own_S.nonzero()[:, 0].tolist())
                log_probs_T[per_token(is_own_S, batch)] = self.score(group, own)
        return log_probs_T

    def reward_scores(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[float]:
        """A score by the reward model for each sample: the value at its last token (docs/reward_model.md).

        It reads the tokens that were drawn, which are not tokenized again.
        """
        if not samples or self.reward is None:
            return []
        batch = PackedBatch.concat([sample.batch(prompts[sample.prompt]) for sample in samples])
        scores: list[float] = last_token_scores(
            self.score(self.reward, batch, "values"), batch
        ).tolist()
        return scores

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
        teachers = {group.name: group for group in self.teachers}
        return _present({"reference": self.reference, "reward": self.reward, **teachers})

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
        self.left_out = self._without_group(folder)
        for name in self.left_out:
            LOGGER.warning("checkpoint %s has a %s, which this config does not start", folder, name)
        shared = from_bytes(reader.read("shared"))
        self.restored_pending = shared["pending"]
        return SavedState(shared, [from_bytes(reader.read("rank.00000"))])

    def _without_group(self, folder: Path) -> list[str]:
        """Frozen models of a checkpoint that a training with this config does not start."""
        names = [name for name in ("reference", "reward") if (folder / name).is_dir()]
        return [name for name in names if name not in self._frozen()] if self.is_training else []

    def describe(self, folder: Path) -> None:
        """The folder of each model in a checkpoint describes itself."""

    def export_hf(self, folder: Path) -> None:
        self.actor.export_hf(folder)


def _present(groups: Mapping[str, WorkerGroup | None]) -> dict[str, WorkerGroup]:
    return {name: group for name, group in groups.items() if group is not None}


# ---- Teachers in the actor's processes ------------------------------------------------------------------------------


class Teachers(TeacherOutput):
    """Teachers next to the actor give its model the output `teacher_kl`, over the whole vocabulary.

    Before an optimizer step each teacher reads the sequences of its sources, so its activations are gone when the
    actor's are kept. A micro-batch has one teacher, whose hidden states are one of its token fields.
    """

    def __init__(
        self, actor: Any, teachers: list[Worker], paths: list[str], **options: Any
    ) -> None:
        """All ranks call it. `options` are those of `linear_kl`."""

        def divergence(
            hidden_TD: Tensor, head: Head, teacher_TD: Tensor, teacher: Head, more: dict[str, Any]
        ) -> Tensor:
            return linear_kl(hidden_TD, head, teacher_TD, teacher, **{**options, **more})

        super().__init__(actor, divergence)
        self.teachers = teachers
        self.heads: list[Head] = []
        for teacher, path in zip(teachers, paths, strict=True):
            self.check_rows(teacher.engine.model, f"rl.teachers: {path}")
            with teacher.engine.eval_mode():
                self.heads.append(gathered_head(teacher.engine.model))

    @staticmethod
    def open(
        workers: Mapping[str, Worker],
        name: str,
        paths: list[str],
        reverse: bool,
        temperature: float,
    ) -> None:
        teachers = [workers[f"teacher_{number}"] for number in range(len(paths))]
        actor: Any = workers[name].engine.model
        actor.teachers = Teachers(actor, teachers, paths, reverse=reverse, temperature=temperature)

    def micro_batches(self, cut: PackedBatch | None, budget: int) -> list[PackedBatch]:
        found = []
        for number, teacher in enumerate(self.teachers):
            own = None
            if cut is not None:
                chosen = (cut.sequence_fields["teacher"] == number).nonzero()[:, 0].tolist()
                own = cut.select(chosen) if chosen else None
            read = None if own is None else without_routes(own)
            outputs = teacher.outputs(read, ["hidden_states"], budget)  # also without sequences
            if own is not None and outputs is not None:
                own.token_fields[f"teacher_{number}"] = outputs["hidden_states"]
                found += own.split(budget).parts
        return found

    @contextmanager
    def reading(self, batch: PackedBatch) -> Iterator[None]:
        """A context for the actor's forward on one of `micro_batches`."""
        numbers = range(len(self.teachers))
        number = next(each for each in numbers if f"teacher_{each}" in batch.token_fields)
        with self.given(batch, batch.token_fields[f"teacher_{number}"], self.heads[number]):
            yield


# ---- Checks of scorers, before anything is started -------------------------------------------------------------------

# Settings of processors that are no features: how many pixels and frames an item has is up to the data kit.
NO_FEATURES = ("_pixels", "_frames", "_class", "_type", "_format", "_tensors", "fps", "device")


def check_scorer(key: str, name: str | Path, processor: Any, *, has_score: bool = False) -> None:
    """Refuse a folder that does not read what the policy reads: its token ids, its features of media.

    `key` is the config key. `has_score`: a reward model; without its head it would score at random.
    """
    folder = local_folder(name, weights=True)
    kind = "a reward model" if has_score else "a language model"
    if not (folder / "config.json").is_file():
        exports = "".join(
            f". Its export is {path}" for path in sorted(folder.glob("hf_step_*"))[-1:]
        )
        raise UserError(
            f"{key}={name} is not the Hugging Face folder of {kind}, nor a model of the Hub{exports}"
        )
    if ("score.weight" in WeightFiles(folder)) != has_score:
        found = "no score.weight, so it is not a reward model: train one (docs/reward_model.md)"
        if not has_score:
            found = "a score.weight, so it is a reward model, and a teacher is a language model"
        raise UserError(f"{key}={name} has {found}")
    other = load_processor(folder)
    own_tokens, tokens = (
        getattr(each, "tokenizer", each).get_vocab() for each in (other, processor)
    )
    if own_tokens != tokens:
        token = next(
            token
            for token in sorted({*own_tokens, *tokens})
            if own_tokens.get(token) != tokens.get(token)
        )
        raise UserError(
            f"{key}={folder}: its tokenizer is not the policy's (token {token!r} is {own_tokens.get(token)} there and "
            f"{tokens.get(token)} here), and it reads the policy's token ids. Use a model of the same family"
            + (", or call it in the engine's reward(row, answer)" if has_score else "")
        )
    for part in ("image_processor", "video_processor", "feature_extractor"):
        settings, wanted = (_features(getattr(each, part, None)) for each in (other, processor))
        if wanted is None:
            continue
        if settings is None:
            raise UserError(
                f"{key}={folder} has no {part}, and the policy has: use a model of the same family"
            )
        for setting in sorted(settings.keys() & wanted.keys()):
            if settings[setting] != wanted[setting]:
                raise UserError(
                    f"{key}={folder}: {setting} of its {part} is {settings[setting]}, the policy's is "
                    f"{wanted[setting]}, and it reads the policy's features. Use a model of the same family"
                )


def _features(part: Any) -> dict[str, Any] | None:
    if part is None:
        return None
    settings = {
        name: value for name, value in part.to_dict().items() if not name.endswith(NO_FEATURES)
    }
    if "longest_edge" in (settings.get("size") or ()):  # limits, not a size
        del settings["size"]
    return settings


def check_teachers(rl: RL, sources: Sequence[str], processor: Any, is_used: bool) -> None:
    """Refuse teachers that read something else than the policy, and sources without one.

    `is_used`: whether the engine's step learns from teachers.
    """
    if not is_used:
        raise UserError(
            "rl.teachers: this engine has a train_step of its own, which does not use them. Add the token field "
            "teacher_log_probs to its advantages and set learns_from_teachers = True, or use an engine without "
            "train_step (docs/rl.md)"
        )
    for name in rl.teachers:
        if name != "*" and name not in sources:
            raise UserError(
                f"rl.teachers.{name}: there is no such source for training, there are {', '.join(sources)}."
                + did_you_mean(name, sources)
            )
    if "*" not in rl.teachers and (
        missing := [name for name in sources if name not in rl.teachers]
    ):
        raise UserError(
            f"rl.teachers has no teacher for the source {missing[0]}. Add rl.teachers.{missing[0]}, or the key '*' "
            "for all other sources"
        )
    for name, path in rl.teachers.items():
        check_scorer(f"rl.teachers.{name}", path, processor)

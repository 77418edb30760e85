"""A recipe's engine under check, and what a check asks it after its steps.

The engine trains a few steps, saves nothing, and looks at every loss. Then: which parameters got no gradient, which
kinds of media did no step have, and does the optimizer come back from a checkpoint bit by bit?
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from mvp_engine.checkpoint.round_trip import changed_attributes, optimizer_round_trip
from mvp_engine.engine import Engine, StepContext
from mvp_engine.errors import UserError, count
from mvp_engine.hf.model.model_parts import names_by_part
from mvp_engine.kit.data.pack.costs import MEDIA_BITS
from mvp_engine.kit.data.pack.packs import PackLoader
from mvp_engine.model_engine.fsdp.base_engine import FSDPBaseEngine
from mvp_engine.model_engine.fsdp.lockstep import media_kinds
from mvp_engine.model_engine.fsdp.step_status import local_grad
from mvp_engine.tools.check.record import CheckRecord
from mvp_engine.tools.check.splits import MAX_MICRO_BATCHES

STEPS = 4  # the first is not timed: it allocates, compiles and starts the loader workers
MAX_IDS = 5  # names that a message lists
LORA_A = (".lora_A.weight", ".lora_A")  # ends of names


class CheckedEngine(Engine):
    """A mixin that comes before a recipe's engine in the method resolution order."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.nonfinite_losses: list[str] = []  # one message per micro-batch
        # Some of the first step, before hooks change them.
        self.first_micro_batches: list[Any] | None = None
        self.media_seen: set[str] = set()  # kinds of media in the micro-batches of this rank
        # Parameters with a gradient other than 0 in some step.
        self._with_gradient: set[str] = set()
        # Losses and weights of the current step's micro-batches.
        self._losses: list[tuple[Tensor, Tensor | float]] = []

    @property
    def done(self) -> bool:
        return super().done or self.step >= STEPS

    def save(self) -> None:
        """A check writes no checkpoint."""

    def train_pre_step(self, ctx: StepContext) -> None:
        if self.first_micro_batches is None:
            self.first_micro_batches = copy.deepcopy(ctx.micro_batches[:MAX_MICRO_BATCHES])
        self.media_seen.update(*map(media_kinds, ctx.micro_batches))
        super().train_pre_step(ctx)

    def forward_step(self, ctx: StepContext, micro_batch: Any) -> tuple[Tensor, Tensor | float]:
        result = super().forward_step(ctx, micro_batch)
        # The model engine reports anything else.
        is_pair = isinstance(result, tuple) and len(result) == 2
        if ctx.split == "train" and not ctx.is_dummy and is_pair:
            self._losses.append((result[0].detach(), result[1]))
        return result

    def train_post_step(self, ctx: StepContext) -> None:
        super().train_post_step(ctx)
        losses = self.take_losses()
        first = self.feed.used - len(losses)
        for number, (loss, _) in enumerate(losses):
            if not np.isfinite(loss):
                micro_batches = [first + number, first + number + 1]
                ids = self.feed.sample_ids({"micro_batches": micro_batches})
                self.nonfinite_losses.append(
                    f"step {ctx.step}, rank {self.world.rank}, micro-batch {number + 1} of {len(losses)}: "
                    f"the loss is {loss}{_listed(ids)}"
                )
        self._note_gradients()

    def take_losses(self) -> list[tuple[float, float]]:
        """Loss sum and weight of each micro-batch of this rank since the last call."""
        taken = [(float(loss), float(weight)) for loss, weight in self._losses]
        self._losses = []
        return taken

    def _note_gradients(self) -> None:
        named = {}
        for name, param in self.model.named_parameters():
            if param.requires_grad and param.grad is not None and name not in self._with_gradient:
                named[name] = local_grad(param)
        if named:
            norms = torch.stack(torch._foreach_norm(list(named.values()))).tolist()
            pairs = zip(named, norms, strict=True)
            self._with_gradient |= {name for name, norm in pairs if norm != 0}

    def without_gradient(self) -> list[str]:
        """Parameters that train, but had no gradient, or one of 0, in all steps. All ranks call it."""
        with_gradient = set().union(*self.world.all_gather(self._with_gradient))
        return [name for name in _trained_names(self.model) if name not in with_gradient]


def skipped_steps(folder: Path) -> list[str]:
    """Messages for the steps of a run that the guard skipped."""
    file = folder / "skipped_steps.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    messages = []
    for entry in map(json.loads, lines):
        ids = _listed(entry["sample_ids"])
        messages.append(f"step {entry['step']} was skipped: {entry['reason']}{ids}")
    return messages


def _listed(ids: list[Any] | None) -> str:
    if not ids:
        return ""
    more = f" and {len(ids) - MAX_IDS} more" if len(ids) > MAX_IDS else ""
    return f"; its samples: {', '.join(map(str, ids[:MAX_IDS]))}{more}"


# ---- Media and gradients -----------------------------------------------------------------------------------------


def check_rare_media(engine: CheckedEngine) -> None:
    """Raise if the model fails on a kind of media that the steps did not have, such as one video in many images.

    The training would find that out in its first step with such a row. All ranks call it.
    """
    loader = engine.feed.loader
    if not isinstance(loader, PackLoader):
        return
    dataset = loader.dataset
    bits = int(np.bitwise_or.reduce(np.concatenate([costs.media for costs in dataset.costs])))
    kinds = dataset.row_encoder.media_names(kind for kind, bit in MEDIA_BITS.items() if bits & bit)
    missing = kinds.difference(*engine.world.all_gather(engine.media_seen))
    for index in range(len(dataset)):
        if not missing:
            return
        if dataset.media_kinds(index) & missing:
            batch, _ = dataset[index]
            engine.model_engine.adapter.preflight_media(engine.model_engine, [batch])  # type: ignore[attr-defined]
            missing -= media_kinds(batch)


def report_unused_parameters(record: CheckRecord, engine: CheckedEngine) -> None:
    # A model may have parameters that some trainings leave as they are.
    optional = getattr(engine.model, "text_parameters", ())
    names = [name for name in engine.without_gradient() if name not in optional]
    if engine.step == 1:  # LoRA begins with B = 0, so that A has no gradient in the first step
        names = [name for name in names if not name.endswith(LORA_A)]
    record.facts.without_gradient = names
    if names:
        where = names_by_part(engine.model, names, MAX_IDS)
        record.warning(
            f"{len(names)} of {len(_trained_names(engine.model))} parameters that train got no gradient in "
            f"{engine.step} steps: {where}. Is the loss computed without them, or do the rows of these steps lack "
            "their data (images, ...)? model.freeze freezes them"
        )


def _trained_names(model: nn.Module) -> list[str]:
    return [name for name, param in model.named_parameters() if param.requires_grad]


def check_optimizer_state(record: CheckRecord, engine: CheckedEngine) -> None:
    """Does the optimizer come back from a checkpoint bit by bit? All ranks call it."""
    model_engine: Any = engine.model_engine
    if not isinstance(model_engine, FSDPBaseEngine):
        return
    trained = model_engine.optimizer
    loaded = engine.prepare_optimizer(engine.model)
    try:
        differences = optimizer_round_trip(
            engine.model,
            trained,
            loaded,
            engine.run.dir / "optimizer",
            engine.world,
            initial_groups=model_engine.initial_groups,
            whole_groups=not isinstance(model_engine.scheduler, LambdaLR),
        )
    except UserError as error:
        record.problem(str(error))
        return
    kind = type(trained).__name__
    if differences:
        record.problem(
            f"{kind} does not come back from a checkpoint as it was: {'; '.join(differences[:MAX_IDS])}. A resume "
            "would not be exact: does its load_state_dict or its state_dict change states? See docs/optim.md, Your own "
            "optimizer"
        )
    if attributes := changed_attributes(trained, loaded):
        record.warning(
            f"{kind} changes its {count(len(attributes), 'attribute')} {', '.join(attributes)} in training, which a "
            "checkpoint does not save: keep this in param_groups"
        )

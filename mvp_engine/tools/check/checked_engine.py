"""A recipe's engine under check: it trains a few steps, saves nothing, and looks at every loss."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mvp_engine.config import Config
from mvp_engine.engine import Engine, StepContext
from mvp_engine.kit import EvalGeneration
from mvp_engine.log.backends import Backend
from mvp_engine.model_engine.fsdp.grad_norm import local_grad
from mvp_engine.model_engine.fsdp.lockstep import media_kinds
from mvp_engine.tools.check.splits import MAX_MICRO_BATCHES

STEPS = 4  # the first is not timed: it allocates, compiles and starts the loader workers
MAX_NEW_TOKENS = 4  # per generated completion: enough to see that generation works
MAX_IDS = 5  # samples that a message lists


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
        self.media_seen.update(*(media_kinds(one) for one in ctx.micro_batches))
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
        count = len(self._losses)
        first = self.feed.used - count
        for number, (loss, _) in enumerate(self._losses):
            if not bool(torch.isfinite(loss)):
                micro_batches = [first + number, first + number + 1]
                ids = self.feed.sample_ids({"micro_batches": micro_batches})
                self.nonfinite_losses.append(
                    f"step {ctx.step}, rank {self.world.rank}, micro-batch {number + 1} of {count}: "
                    f"the loss is {float(loss)}{_listed(ids)}"
                )
        self._losses = []
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
            self._with_gradient |= {
                name for name, norm in zip(named, norms, strict=True) if norm != 0
            }

    def without_gradient(self) -> list[str]:
        """Parameters that train, but had no gradient, or one of 0, in all steps. All ranks call it."""
        found = set().union(*self.world.all_gather(self._with_gradient))
        named = self.model.named_parameters()
        return [name for name, param in named if param.requires_grad and name not in found]


class Recorder(Backend):
    """A logging backend that keeps the records in memory."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def metrics(self, record: dict[str, Any]) -> None:
        self.records.append(record)


class WarningCollector(logging.Handler):
    """A logging handler that appends warnings to a list."""

    def __init__(self, warnings: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.warnings = warnings

    def emit(self, record: logging.LogRecord) -> None:
        self.warnings.append(record.getMessage())


def short_config(config: Config) -> Config:
    """The config without anything that takes long, writes files, or reports to a tracker."""
    sections: dict[str, dict[str, Any]] = {
        "loop": {"eval_interval": None, "eval_batches": 1},
        "guard": {"max_consecutive_skips": STEPS + 1, "max_total_skips": None},
        "log": {"interval": 1, "backends": []},
        "checkpoint": {"interval": None, "patience": None},
    }
    generation = getattr(config, "eval_generation", None)
    if isinstance(generation, EvalGeneration):
        tokens = min(MAX_NEW_TOKENS, generation.max_new_tokens)
        sections["eval_generation"] = {"max_new_tokens": tokens}
    changes: dict[str, Any] = {"workflow": "train", "resume": None}
    for name, values in sections.items():
        changes[name] = getattr(config, name).model_copy(update=values)
    return config.model_copy(update=changes)


def skipped_steps(folder: Path) -> list[str]:
    """Messages for the steps of a run that the guard skipped."""
    file = folder / "skipped_steps.jsonl"
    if not file.is_file():
        return []
    messages = []
    for line in file.read_text().splitlines():
        entry = json.loads(line)
        ids = _listed(entry["sample_ids"])
        messages.append(f"step {entry['step']} was skipped: {entry['reason']}{ids}")
    return messages


def _listed(ids: list[Any] | None) -> str:
    if not ids:
        return ""
    names = ", ".join(str(one) for one in ids[:MAX_IDS])
    more = f" and {len(ids) - MAX_IDS} more" if len(ids) > MAX_IDS else ""
    return f"; its samples: {names}{more}"

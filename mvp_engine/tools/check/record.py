"""The facts of a check, printed as the stages end and saved for the process that started the ranks.

The names of the facts are the keys of `--json`. They are documented in docs/check.md and do not change.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from mvp_engine.errors import UserError
from mvp_engine.files import atomic_write_text
from mvp_engine.log.format import duration, number, rate

Figure = tuple[str, str]  # name and text


@dataclass
class Stage:
    name: str
    ok: bool = False
    seconds: float | None = None
    says: str | None = None


@dataclass
class StepFacts:
    """The training steps; the first one is not timed."""

    seconds: float
    first_seconds: float
    tokens: int | None
    samples: float | None
    tokens_per_s: float | None
    data_wait: float  # share of the step time
    mfu: float | None
    losses: list[float | None]
    grad_norms: list[float | None]

    def figures(self) -> list[Figure]:
        amounts = []
        if self.tokens is not None:
            amounts.append(f"{self.tokens:,} tokens")
        if self.samples is not None:
            amounts.append(f"{self.samples:,.4g} samples")
        text = ", ".join(amounts)
        if self.tokens_per_s:
            text += f"; {rate(self.tokens_per_s)} tokens/s"
        if self.mfu is not None:
            text += f", MFU {self.mfu:.1%}"
        return [
            ("step", f"{number(self.seconds)} s (first step: {number(self.first_seconds)} s)"),
            ("", f"{text}; {self.data_wait:.0%} of the time waiting for data"),
            ("losses", " ".join(number(loss) for loss in self.losses)),
        ]


@dataclass
class MemoryFacts:
    of: str  # device, or process on a CPU
    peak_gib: float
    total_gib: float
    host_gib: float
    host_inputs_gib: float

    def figures(self) -> list[Figure]:
        total = f"{self.total_gib:.1f} GiB"
        owner = f"of the GPU's {total}" if self.of == "device" else f"the machine has {total}"
        figures = [("peak memory", f"{self.peak_gib:.2f} GiB, {owner}")]
        if self.host_gib:
            states = f"{self.host_gib:.2f} GiB of optimizer states per rank (optim.offload)"
            figures.append(("host memory", states))
        if self.host_inputs_gib:
            inputs = f"{self.host_inputs_gib:.2f} GiB of inputs of blocks per rank"
            figures.append(("host memory", f"{inputs} (model.activation_checkpointing=offload)"))
        return figures


@dataclass
class TrainingFacts:
    steps: int | None
    steps_per_epoch: int | None
    eta_s: float | None
    tokens: int | None

    def figures(self) -> list[Figure]:
        text = f"{self.steps:,} steps" if self.steps else "unknown number of steps"
        if self.steps_per_epoch:
            text += f" ({self.steps_per_epoch:,} per epoch)"
        if self.tokens:
            text += f", {rate(self.tokens)} tokens"
        eta = f"about {duration(self.eta_s)}, without evaluations and checkpoints"
        return [("training", text), ("", eta)]


@dataclass
class Facts:
    config: str
    engine: str | None = None
    device: str | None = None
    processes: int = 1
    auto: dict[str, Any] | None = None
    stages: list[Stage] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    bad_rows: list[dict[str, Any]] = field(default_factory=list)
    without_gradient: list[str] = field(default_factory=list)
    data: dict[str, Any] | None = None
    eval_data: dict[str, Any] | None = None
    parts: list[dict[str, Any]] | None = None
    step: StepFacts | None = None
    stores: list[dict[str, Any]] = field(default_factory=list)
    split: dict[str, Any] | None = None
    rollouts: dict[str, Any] | None = None  # of the stage with this name, which an engine may add
    memory: MemoryFacts | None = None
    training: TrainingFacts | None = None
    evaluation: dict[str, Any] | None = None


def read_facts(folder: Path) -> dict[str, Any]:
    """The facts that the ranks of a check left in `folder`."""
    facts = json.loads((folder / "facts.json").read_text())
    error = folder / "error.txt"
    if error.exists():
        facts["problems"].append(error.read_text())
    return {"ok": not facts["problems"], **facts}


class CheckRecord:
    """The facts of one check. Every rank collects them; rank 0 prints and saves them."""

    def __init__(self, config_file: str, folder: Path, quiet: bool) -> None:
        self.folder = folder
        self.facts = Facts(config_file)
        self.figures: list[Figure] = []  # of stages that the engine adds
        self.is_main = os.environ.get("RANK", "0") == "0"
        self.console = Console(highlight=False, quiet=quiet or not self.is_main)

    def problem(self, text: str) -> None:
        self.facts.problems.append(text)

    def warning(self, text: str) -> None:
        self.facts.warnings.append(text)

    def begin_stage(self, name: str) -> None:
        self._started = time.perf_counter()
        self.facts.stages.append(Stage(name))
        self.save()

    def end_stage(self, result: str, ok: bool = True) -> None:
        stage = self.facts.stages[-1]
        stage.ok = ok
        stage.seconds = round(time.perf_counter() - self._started, 2)
        stage.says = result
        self.save()
        text = f"{stage.name:<11}{result}  ({stage.seconds:.1f} s)"
        self._line(*(("ok", "bold green") if ok else ("PROBLEM", "bold red")), text)

    def fail(self, error: BaseException) -> None:
        """Note the error of the first rank that fails; the others fail as a consequence."""
        text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(FileExistsError), open(self.folder / "error.txt", "x") as out:
            out.write(text)
        self._line("FAILED", "bold red", self.facts.stages[-1].name)

    def save(self) -> None:
        if self.is_main:
            facts = json.dumps(vars(self.facts), default=vars)
            atomic_write_text(self.folder / "facts.json", facts)

    # ---- The terminal -------------------------------------------------------------------------------------

    def print_parts(self) -> None:
        """The parts of the model, without the last entry, which is their total."""
        for part in (self.facts.parts or [])[:-1]:
            text = f"{part['trained']:,} of {part['parameters']:,} train"
            if part["rates"]:
                text += f", learning rate {', '.join(f'{value:g}' for value in part['rates'])}"
            if part["adapters"]:
                text += f", LoRA on {part['adapters']} layers"
            frozen = f"{part['parameters']:,} frozen"
            self._figure(part["part"], text if part["trained"] else frozen)

    def print_end(self) -> None:
        facts = self.facts
        self.console.print()
        figures = facts.step.figures() if facts.step else []
        figures += self.figures
        figures += facts.memory.figures() if facts.memory else []
        figures += facts.training.figures() if facts.training else []
        if facts.evaluation:
            values = [f"{name} {number(value)}" for name, value in facts.evaluation.items()]
            text = f"{'  '.join(values)}  (one micro-batch, after these steps)"
            figures.append(("evaluation", text))
        for name, text in figures:
            self._figure(name, text)
        for text in facts.warnings:
            self._line("warning", "yellow", text)
        for text in facts.problems:
            self._line("PROBLEM", "bold red", text)
        if not facts.problems:
            self._line("ok", "bold green", "ready to train")

    def _figure(self, name: str, text: str) -> None:
        self.console.print(Text.assemble((f"  {name:<12}", "dim"), text), soft_wrap=True)

    def _line(self, word: str, style: str, text: str) -> None:
        self.console.print(Text.assemble((f"{word:<8}", style), text), soft_wrap=True)

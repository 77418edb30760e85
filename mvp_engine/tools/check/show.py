"""The facts of `stages.py` on a terminal, as they come."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from mvp_engine.log.format import duration, number, rate
from mvp_engine.tools.inspect_page import show, show_bad


class Printer:
    def __init__(self, quiet: bool) -> None:
        self.console = Console(highlight=False, quiet=quiet)

    def stage(self, stage: dict[str, Any]) -> None:
        self._line(
            "ok", "bold green", f"{stage['name']:<11}{stage['says']}  ({stage['seconds']:.1f} s)"
        )

    def failed(self, name: str) -> None:
        self._line("FAILED", "bold red", name)

    def data(self, facts: dict[str, Any]) -> None:
        self.console.print(Text(f"\n{facts['split']} data", "bold"))
        show(facts, self.console)
        self.console.print()

    def bad(self, facts: dict[str, Any]) -> None:
        show_bad(facts, self.console)

    def parts(self, parts: list[dict[str, Any]]) -> None:
        for one in parts[:-1]:
            rates = ", ".join(f"{value:g}" for value in one["rates"])
            adapters = f", LoRA on {one['adapters']} layers" if one["adapters"] else ""
            what = f"{one['trained']:,} of {one['parameters']:,} train, rate {rates}{adapters}"
            self._figure(one["part"], what if one["trained"] else f"{one['parameters']:,} frozen")

    def end(self, facts: dict[str, Any]) -> None:
        step, training, memory = facts["step"], facts["training"], facts["memory"]
        self.console.print()
        if step:
            amounts = [
                f"{step[key]:,} {key}" for key in ("tokens", "samples") if step[key] is not None
            ]
            speed = f"; {rate(step['tokens_per_s'])} tokens/s" if step["tokens_per_s"] else ""
            mfu = f", mfu {step['mfu']:.1%}" if step["mfu"] is not None else ""
            self._figure(
                "step", f"{number(step['seconds'])} s (the first {number(step['first_seconds'])} s)"
            )
            self._figure(
                "",
                f"{', '.join(amounts)}{speed}{mfu}; {step['data_wait']:.0%} of it waiting for data",
            )
            self._figure("losses", " ".join(number(loss) for loss in step["losses"]))
        if memory:
            whose = (
                "of the GPU's" if memory["of"] == "device" else "of the process; the machine has"
            )
            self._figure(
                "memory",
                f"{memory['peak_gib']:.2f} GiB at its peak, {whose} {memory['total_gib']:.1f} GiB",
            )
        if training:
            epoch = (
                f" ({training['steps_per_epoch']:,} an epoch)"
                if training["steps_per_epoch"]
                else ""
            )
            tokens = f", {rate(training['tokens'])} tokens" if training["tokens"] else ""
            steps = (
                f"{training['steps']:,} steps"
                if training["steps"]
                else "nobody knows how many steps"
            )
            self._figure("training", f"{steps}{epoch}{tokens}")
            self._figure(
                "", f"about {duration(training['eta_s'])}, without evaluations and checkpoints"
            )
        if facts["evaluation"]:
            figures = "  ".join(
                f"{name} {number(value)}" for name, value in facts["evaluation"].items()
            )
            self._figure("evaluation", f"{figures}  (one micro-batch, after these steps)")
        for text in facts["warnings"]:
            self._line("warning", "yellow", text)
        for text in facts["problems"]:
            self._line("PROBLEM", "bold red", text)
        if not facts["problems"]:
            self._line("ok", "bold green", "ready to train")

    def _figure(self, name: str, text: str) -> None:
        self.console.print(Text.assemble((f"  {name:<12}", "dim"), text), soft_wrap=True)

    def _line(self, word: str, style: str, text: str) -> None:
        self.console.print(Text.assemble((f"{word:<8}", style), text), soft_wrap=True)

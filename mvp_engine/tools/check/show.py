"""The facts of a check on a terminal, printed as the stages end."""

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
        text = f"{stage['name']:<11}{stage['says']}  ({stage['seconds']:.1f} s)"
        if stage["ok"]:
            self._line("ok", "bold green", text)
        else:
            self._line("PROBLEM", "bold red", text)

    def failed(self, name: str) -> None:
        self._line("FAILED", "bold red", name)

    def data(self, facts: dict[str, Any]) -> None:
        self.console.print(Text(f"\n{facts['split']} data", "bold"))
        show(facts, self.console)
        self.console.print()

    def bad(self, facts: dict[str, Any]) -> None:
        show_bad(facts, self.console)

    def parts(self, parts: list[dict[str, Any]]) -> None:
        """The parts of a model, without the last entry, which is their total."""
        for part in parts[:-1]:
            if not part["trained"]:
                self._figure(part["part"], f"{part['parameters']:,} frozen")
                continue
            rates = ", ".join(f"{value:g}" for value in part["rates"])
            text = f"{part['trained']:,} of {part['parameters']:,} train"
            if rates:
                text += f", learning rate {rates}"
            if part["adapters"]:
                text += f", LoRA on {part['adapters']} layers"
            self._figure(part["part"], text)

    def end(self, facts: dict[str, Any]) -> None:
        self.console.print()
        if facts["step"]:
            self._step(facts["step"])
        if facts["rollouts"]:
            self._rollouts(facts["rollouts"])
        if facts["memory"]:
            self._memory(facts["memory"])
        if facts["training"]:
            self._training(facts["training"])
        if facts["evaluation"]:
            values = [f"{name} {number(value)}" for name, value in facts["evaluation"].items()]
            self._figure("evaluation", f"{'  '.join(values)}  (one micro-batch, after these steps)")
        for text in facts["warnings"]:
            self._line("warning", "yellow", text)
        for text in facts["problems"]:
            self._line("PROBLEM", "bold red", text)
        if not facts["problems"]:
            self._line("ok", "bold green", "ready to train")

    def _step(self, step: dict[str, Any]) -> None:
        first = number(step["first_seconds"])
        self._figure("step", f"{number(step['seconds'])} s (first step: {first} s)")
        amounts = []
        for key in ("tokens", "samples"):
            if step[key] is not None:
                amounts.append(
                    f"{step[key]:,.4g} {key}" if key == "samples" else f"{step[key]:,} {key}"
                )
        text = ", ".join(amounts)
        if step["tokens_per_s"]:
            text += f"; {rate(step['tokens_per_s'])} tokens/s"
        if step["mfu"] is not None:
            text += f", MFU {step['mfu']:.1%}"
        self._figure("", f"{text}; {step['data_wait']:.0%} of the time waiting for data")
        self._figure("losses", " ".join(number(loss) for loss in step["losses"]))

    def _rollouts(self, rollouts: dict[str, Any]) -> None:
        self._figure("rewards", " ".join(number(value) for value in rollouts["reward"]))
        if rollouts["own_answers"] is not None:
            self._figure("", f"{number(rollouts['own_answers'])} for the rows' own answers")
        seconds = [f"{name} {number(value)} s" for name, value in rollouts["seconds"].items()]
        length = number(rollouts["length"][-1])
        self._figure("rollouts", f"{length} tokens each; {', '.join(seconds)}")
        gaps = [f"{kind} {number(gap)}" for kind, gap in rollouts["gap_by_modality"].items()]
        if gaps:
            self._figure("gap", f"{', '.join(gaps)} between sampler and trainer at most")

    def _memory(self, memory: dict[str, Any]) -> None:
        total = f"{memory['total_gib']:.1f} GiB"
        owner = f"of the GPU's {total}" if memory["of"] == "device" else f"the machine has {total}"
        self._figure("peak memory", f"{memory['peak_gib']:.2f} GiB, {owner}")
        if memory["host_gib"]:
            states = f"{memory['host_gib']:.2f} GiB of optimizer states per rank (optim.offload)"
            self._figure("host memory", states)
        if memory["host_inputs_gib"]:
            inputs = f"{memory['host_inputs_gib']:.2f} GiB of inputs of blocks per rank"
            self._figure("host memory", f"{inputs} (model.activation_checkpointing=offload)")

    def _training(self, training: dict[str, Any]) -> None:
        text = f"{training['steps']:,} steps" if training["steps"] else "unknown number of steps"
        if training["steps_per_epoch"]:
            text += f" ({training['steps_per_epoch']:,} per epoch)"
        if training["tokens"]:
            text += f", {rate(training['tokens'])} tokens"
        self._figure("training", text)
        eta = duration(training["eta_s"])
        self._figure("", f"about {eta}, without evaluations and checkpoints")

    def _figure(self, name: str, text: str) -> None:
        self.console.print(Text.assemble((f"  {name:<12}", "dim"), text), soft_wrap=True)

    def _line(self, word: str, style: str, text: str) -> None:
        self.console.print(Text.assemble((f"{word:<8}", style), text), soft_wrap=True)

"""Finding: one line of `mvp doctor`, ok or with its fix, and how it is printed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mvp_engine.errors import count

OK = "ok"
WARNING = "warning"  # a training runs, but slower or without some kind of data
PROBLEM = "problem"  # a training fails


@dataclass(frozen=True)
class Finding:
    name: str
    status: str
    text: str
    fix: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def ok(name: str, text: str, **facts: Any) -> Finding:
    return Finding(name, OK, text, None, facts)


def warning(name: str, text: str, fix: str, **facts: Any) -> Finding:
    return Finding(name, WARNING, text, fix, facts)


def problem(name: str, text: str, fix: str, **facts: Any) -> Finding:
    return Finding(name, PROBLEM, text, fix, facts)


class Printer:
    """Prints findings as they arrive; imports rich, which takes a tenth of a second, only then."""

    STYLES = {OK: "bold green", WARNING: "bold yellow", PROBLEM: "bold red"}  # noqa: RUF012

    def __init__(self, quiet: bool) -> None:
        from rich.console import Console

        self._console = Console(highlight=False, quiet=quiet)

    def heading(self, text: str) -> None:
        from rich.text import Text

        self._console.print(Text(f"\n{text}", "bold"))

    def finding(self, finding: Finding) -> None:
        from rich.text import Text

        status = (f"{finding.status:<9}", self.STYLES[finding.status])
        line = Text.assemble(status, f"{finding.name:<16}", finding.text)
        self._console.print(line, soft_wrap=True)
        if finding.fix:
            fix = Text.assemble((f"{'':<9}{'fix':<16}", "dim"), finding.fix)
            self._console.print(fix, soft_wrap=True)

    def end(self, findings: list[Finding]) -> None:
        from rich.text import Text

        counts = dict.fromkeys(self.STYLES, 0)
        for finding in findings:
            counts[finding.status] += 1
        status = next((s for s in (PROBLEM, WARNING) if counts[s]), OK)
        text = {
            OK: "this machine is ready to train",
            WARNING: "this machine can train; the fixes above make it faster or more complete",
            PROBLEM: "this machine cannot train as it is; start with the first fix above",
        }[status]
        numbers = f"{counts[OK]} ok, {count(counts[WARNING], WARNING)}, {count(counts[PROBLEM], PROBLEM)}: "
        self._console.print(
            Text.assemble("\n", numbers, (text, self.STYLES[status])), soft_wrap=True
        )

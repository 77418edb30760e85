"""Rows that cannot be trained on: named, counted, listed, and too many of them an error."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mvp_engine.errors import UserError
from mvp_engine.kit.data.settings import MLLMData


@dataclass(frozen=True)
class BadRecord:
    source: str
    where: str  # file and line, or what the file has in the place of lines
    reason: str
    detail: str


class BadRows:
    """Counted by source and reason, each row once; listed in a file, where there is one; too many are an error."""

    def __init__(self, settings: MLLMData, rows: int, file: Path | None = None, least: int = 0) -> None:
        """`rows` may grow, as those of streams do; the fraction is then of at least so many."""
        self.settings, self.rows, self.least, self.file = settings, rows, least, file
        self.counts: Counter[tuple[str, str]] = Counter()
        self._seen: set[tuple[str, str]] = set()

    @property
    def most(self) -> int:
        """How many are allowed."""
        share = int(self.settings.max_bad_fraction * max(self.rows, self.least))
        return share if self.settings.max_bad_rows is None else min(self.settings.max_bad_rows, share)

    def add(self, records: Iterable[BadRecord], list_them: bool = True) -> None:
        new = [record for record in records if (record.source, record.where) not in self._seen]
        self._seen |= {(record.source, record.where) for record in new}
        self.counts.update((record.source, record.reason) for record in new)
        if self.file is not None and list_them and new:
            listed = self._listed()
            fresh = [record for record in new if (record.source, record.where) not in listed]
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with open(self.file, "a", encoding="utf-8") as out:
                out.write("".join(json.dumps(dataclasses.asdict(record)) + "\n" for record in fresh))
        total = self.counts.total()
        if new and total > self.most:
            shown = "; ".join(f"{one.where}: {one.reason}: {one.detail[:200]}" for one in new[:3])
            raise UserError(
                f"data: {total} of {self.rows} rows are bad, and {self.most} are allowed ({self}). Such as {shown}. "
                f"{f'All are in {self.file}. ' if self.file else ''}Mend them, or raise max_bad_fraction, max_bad_rows"
            )

    def _listed(self) -> set[tuple[str, str]]:
        """By all ranks and in all launches: in another epoch another rank has the row."""
        if self.file is None or not self.file.exists():
            return set()
        lines = [json.loads(line) for line in self.file.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
        return {(line["source"], line["where"]) for line in lines}

    def __str__(self) -> str:
        return ", ".join(f"{source}: {n} {reason}" for (source, reason), n in sorted(self.counts.items())) or "none"

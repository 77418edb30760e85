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


class TooManyBad(UserError):
    """`told` is what is wrong, without the file that lists all of them."""

    def __init__(self, told: str, file: Path | None) -> None:
        super().__init__(told + (f". All are in {file}" if file else ""))
        self.told = told


class BadRows:
    """Counted by source and reason, each row once; listed in a file, where there is one; too many are an error.

    Ranks share the file, and it is how they hear of each other's bad rows: a rank that finds one counts those that the
    others have listed since the start. Without a file each rank counts its own.
    """

    def __init__(
        self,
        settings: MLLMData,
        rows: int,
        names: Iterable[str] = (),
        file: Path | None = None,
        least: int = 0,
    ) -> None:
        """`names` are the sources, `rows` are theirs on all ranks that share the file. They may grow, as those of
        streams do; the fraction is then of at least so many."""
        self.settings, self.rows, self.names, self.least, self.file = (
            settings,
            rows,
            {*names},
            least,
            file,
        )
        self.counts: Counter[tuple[str, str]] = Counter()
        self._seen: set[tuple[str, str]] = set()
        self._before = self._listed()  # in earlier launches: they may have been mended since

    @property
    def most(self) -> int:
        """How many are allowed."""
        share = int(self.settings.max_bad_fraction * max(self.rows, self.least))
        return (
            share if self.settings.max_bad_rows is None else min(self.settings.max_bad_rows, share)
        )

    def add(self, records: Iterable[BadRecord], list_them: bool = True) -> None:
        new = [record for record in records if (record.source, record.where) not in self._seen]
        self._seen |= {(record.source, record.where) for record in new}
        self.counts.update((record.source, record.reason) for record in new)
        if self.file is not None and list_them and new:
            listed = self._listed()
            fresh = [record for record in new if (record.source, record.where) not in listed]
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with open(self.file, "a", encoding="utf-8") as out:
                out.write(
                    "".join(json.dumps(dataclasses.asdict(record)) + "\n" for record in fresh)
                )
            others = (
                {row for row in listed if row[0] in self.names} - self._before.keys() - self._seen
            )
            self._seen |= others
            self.counts.update((row[0], listed[row]) for row in others)
        total = self.counts.total()
        if new and total > self.most:
            shown = "; ".join(f"{one.where}: {one.reason}: {one.detail[:200]}" for one in new[:3])
            raise TooManyBad(
                f"data: {total} of {self.rows} rows are bad, and {self.most} are allowed ({self}). Such as {shown}. "
                "Mend them, or raise max_bad_fraction, max_bad_rows",
                self.file,
            )

    def _listed(self) -> dict[tuple[str, str], str]:
        """By all ranks and in all launches, with reasons: in another epoch another rank has the row."""
        if self.file is None or not self.file.exists():
            return {}
        lines = [
            json.loads(line)
            for line in self.file.read_text(encoding="utf-8").splitlines()
            if line.endswith("}")
        ]
        return {(line["source"], line["where"]): line["reason"] for line in lines}

    def __str__(self) -> str:
        return (
            ", ".join(
                f"{source}: {n} {reason}" for (source, reason), n in sorted(self.counts.items())
            )
            or "none"
        )

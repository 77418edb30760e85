"""Bad rows of a run: counted by source and reason, listed in bad_rows.jsonl, and limited in number."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mvp_engine.errors import UserError, count
from mvp_engine.kit.data.settings import MLLMData

LOGGER = logging.getLogger("mvp_engine")
RowKey = tuple[str, str]  # source, where
MAX_WARNINGS = 10  # of a process


@dataclass(frozen=True)
class BadRecord:
    """One line of bad_rows.jsonl."""

    source: str
    where: str  # file and line, or the counterpart of a line in that file format
    reason: str
    detail: str

    @property
    def key(self) -> RowKey:
        return self.source, self.where


class TooManyBadRows(UserError):
    """The run has more bad rows than allowed. `summary` is the message without the path of the list."""

    def __init__(self, summary: str, file: Path | None) -> None:
        super().__init__(summary + (f". All are in {file}" if file else ""))
        self.summary = summary


class BadRows:
    """The bad rows of all ranks, each counted once; too many of them are an error.

    Ranks share the file, and learn of each other's bad rows through it: a rank that finds one counts
    those that the others have listed since the start. Without a file, each rank counts its own.
    """

    def __init__(
        self,
        settings: MLLMData,
        rows: int,
        names: Iterable[str] = (),
        file: Path | None = None,
        min_rows: int = 0,
    ) -> None:
        """`names` are the sources, and `rows` is their size on all ranks that share the file.

        `rows` may grow, as that of streams does; the allowed fraction is of at least `min_rows`.
        """
        self.settings = settings
        self.rows = rows
        self.names = set(names)
        self.min_rows = min_rows
        self.file = file
        self.counts: Counter[tuple[str, str]] = Counter()  # by (source, reason)
        self._seen: set[RowKey] = set()
        self._warned = 0
        self._listed_before = read_reasons(file)  # by earlier launches: fixed since, perhaps

    @property
    def max_allowed(self) -> int:
        """How many bad rows the settings allow."""
        limit = self.settings.max_bad_rows
        if isinstance(limit, float):
            return int(limit * max(self.rows, self.min_rows))
        return limit

    def add(self, records: Iterable[BadRecord], list_them: bool = True) -> None:
        """Count records that are new, append them to the file, and raise if they are too many."""
        new = [record for record in records if record.key not in self._seen]
        self._seen |= {record.key for record in new}
        self.counts.update((record.source, record.reason) for record in new)
        if self.file is not None and list_them and new:
            append_new(self.file, new)
            self._count_other_ranks()
        if new and self.counts.total() > self.max_allowed:
            raise TooManyBadRows(self._message(new), self.file)

    def found_in_training(self, records: list[BadRecord]) -> None:
        """Like `add`, with a warning for each of the first rows: nothing showed before that they are bad."""
        for record in records:
            if record.key in self._seen:
                continue
            self._warned += 1
            if self._warned <= MAX_WARNINGS:
                words = f"{record.reason}: {record.detail[:200]}"
                LOGGER.warning("bad row, left out: %s: %s", record.where, words)
            if self._warned == MAX_WARNINGS:
                LOGGER.warning("further bad rows of this process are only listed in %s", self.file)
        self.add(records)

    def report(self) -> str | None:
        """One line about the bad rows of all ranks since the start; None if there are none."""
        self._count_other_ranks()
        if not self.counts:
            return None
        listed = f". All are in {self.file}" if self.file else ""
        return f"left out {count(self.counts.total(), 'bad row')} ({self}){listed}"

    def _count_other_ranks(self) -> None:
        """Count the rows that other ranks have listed since the start."""
        listed = read_reasons(self.file)
        of_our_sources = {key for key in listed if key[0] in self.names}
        of_other_ranks = of_our_sources - self._listed_before.keys() - self._seen
        self._seen |= of_other_ranks
        self.counts.update((key[0], listed[key]) for key in of_other_ranks)

    def _message(self, new: list[BadRecord]) -> str:
        examples_of: dict[str, BadRecord] = {}  # by reason
        for one in new:
            examples_of.setdefault(one.reason, one)
        firsts = list(examples_of.values())[:3]
        examples = [f"{one.where}: {one.reason}: {one.detail[:400]}" for one in firsts]
        return (
            f"data: {self.counts.total()} of {self.rows} rows are bad, and {self.max_allowed} are "
            f"allowed ({self}). Such as {'; '.join(examples)}. "
            "Fix them, or raise data.max_bad_rows"
        )

    def __str__(self) -> str:
        counts = sorted(self.counts.items())
        return ", ".join(f"{source}: {n} {reason}" for (source, reason), n in counts) or "none"


def append_new(file: Path, records: Iterable[BadRecord]) -> None:
    """Append the records of rows that the file does not list yet."""
    listed = read_reasons(file)
    new = {record.key: record for record in records if record.key not in listed}
    if not new:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(dataclasses.asdict(record)) + "\n" for record in new.values()]
    with open(file, "a", encoding="utf-8") as out:
        out.write("".join(lines))


def read_reasons(file: Path | None) -> dict[RowKey, str]:
    """Reasons by row, of all ranks and all launches: in another epoch another rank has the row."""
    if file is None or not file.exists():
        return {}
    reasons = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.endswith("}"):  # another rank may be in the middle of a line
            record = json.loads(line)
            reasons[record["source"], record["where"]] = record["reason"]
    return reasons

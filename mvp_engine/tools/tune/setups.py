"""Setup and Space: what a trial may change, and which setups are near another one.

The tokens of the global batch and the rows of the data are the same in all setups, so their throughputs compare.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from mvp_engine.config.schema import CHECKPOINTING_MODES


@dataclass(frozen=True)
class Setup:
    """One choice of all settings."""

    tokens: int  # of a micro-batch
    modes: tuple[str, ...]  # of activation checkpointing, for each part of the space
    compile: str | None  # model.compile; None: uncompiled

    def needs_at_least(self, other: Setup) -> bool:
        """Whether this setup surely needs as much memory as the other one."""
        pairs = zip(self.modes, other.modes, strict=True)
        return (
            self.tokens >= other.tokens
            and all(_level(own) <= _level(theirs) for own, theirs in pairs)
            and (self.compile is None or self.compile == other.compile)
        )


@dataclass(frozen=True)
class Space:
    """What all setups share: the facts of the config's own training, which its first trial reports."""

    section: str  # of the data kit in the config
    total: int  # tokens of the global batch
    row_tokens: int  # the most tokens of a row
    least_tokens: int  # of a pack, so that no row is left out
    data_ranks: int
    parts: tuple[str, ...]  # with blocks in backward
    is_in_packs: bool  # data.global_batch_size sets the global batch
    compiles: tuple[str | None, ...]  # values of model.compile; one: it does not change

    @property
    def sizes(self) -> list[int]:
        """Pack sizes, ascending, which divide the global batch into equal micro-batches on each rank."""
        found = set[int]()
        for factor in [2**n for n in range(16)] + [3 * 2**n for n in range(16)]:
            packs = factor * self.data_ranks
            tokens = self.total // packs
            if self.total % packs == 0 and tokens >= self.least_tokens:
                found.add(tokens)
        return sorted(found)

    def values(self, setup: Setup) -> dict[str, Any]:
        """The config keys of a setup."""
        values: dict[str, Any] = {
            f"{self.section}.micro_batch_tokens": setup.tokens,
            f"{self.section}.global_batch_tokens": self.total,
            f"{self.section}.row_tokens": min(self.row_tokens, setup.tokens),
        }
        if self.is_in_packs:
            values["data.global_batch_size"] = None
        if self.parts:
            values["model.activation_checkpointing"] = self._mode(setup)
        if len(self.compiles) > 1:
            values["model.compile"] = setup.compile
        return values

    def _mode(self, setup: Setup) -> str | dict[str, str]:
        """All parts by name where they differ: on the command line a dict is merged into the file's."""
        if len(set(setup.modes)) == 1:
            return setup.modes[0]
        return dict(zip(self.parts, setup.modes, strict=True))

    def text(self, setup: Setup) -> str:
        micro_batches = -(-self.total // setup.tokens // self.data_ranks)
        text = f"{micro_batches} x {setup.tokens:,} tokens"
        if self.parts:
            mode = self._mode(setup)
            by_part = [mode] if isinstance(mode, str) else [f"{p} {m}" for p, m in mode.items()]
            text += f", checkpointing {', '.join(by_part)}"
        if len(self.compiles) > 1 and setup.compile is None:
            text += ", uncompiled"
        return text

    def neighbours(self, setup: Setup, *, fits: bool) -> Iterator[Setup]:
        """Setups one change away, the most promising first; of one that does not fit, those that need less memory."""
        larger, smaller = self._next_sizes(setup.tokens)
        less = list(self._next_modes(setup, -1))
        more = list(self._next_modes(setup, 1))
        if not fits:
            yield from (replace(setup, tokens=tokens) for tokens in smaller)
            yield from more
            return
        yield from (replace(setup, tokens=tokens) for tokens in larger)
        yield from less
        yield from (replace(one, tokens=tokens) for one in less for tokens in smaller)
        yield from (replace(one, tokens=tokens) for one in more for tokens in larger)
        yield from (replace(setup, tokens=tokens) for tokens in smaller)
        yield from (replace(setup, compile=one) for one in self.compiles if one != setup.compile)

    def _next_sizes(self, tokens: int) -> tuple[list[int], list[int]]:
        """The next larger and the next smaller pack size, where there is one: at least 1.3 times as many tokens."""
        larger = [size for size in self.sizes if size >= 1.3 * tokens]
        smaller = [size for size in self.sizes if 1.3 * size <= tokens]
        return larger[:1], smaller[-1:]

    def _next_modes(self, setup: Setup, change: int) -> Iterator[Setup]:
        for i, mode in enumerate(setup.modes):
            level = _level(mode) + change
            if 0 <= level < len(CHECKPOINTING_MODES):
                modes = (*setup.modes[:i], CHECKPOINTING_MODES[level], *setup.modes[i + 1 :])
                yield replace(setup, modes=modes)


def _level(mode: str) -> int:
    return CHECKPOINTING_MODES.index(mode)

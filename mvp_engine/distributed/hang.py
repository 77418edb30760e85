"""HangWatch: names the rank that a step, or a call of a worker group, waits for, with its stack.

A rank that hangs in a loader, a lock or an endless loop makes all others wait in their next collective, and their
time-out says nothing about it. A thread of each rank notices a step that takes too long, and writes where its main
thread is to the store; nothing is written before, so a step costs no communication. The lowest rank prints them all.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
import traceback
from typing import Any

from mvp_engine.distributed.world import World
from mvp_engine.errors import count

LOGGER = logging.getLogger("mvp_engine")
FRAMES = 8  # the innermost ones of each rank are shown
# A rank whose innermost frames are of these files waits for other ranks.
COLLECTIVES = ("torch/distributed/", "mvp_engine/distributed/")


class HangWatch:
    """A context in which a step that takes longer than `seconds` is reported, once; None: no step is."""

    def __init__(self, seconds: float | None, world: World, level: int = logging.WARNING) -> None:
        """`level`: of the report in the log."""
        self.seconds = seconds
        self.world = world
        self._level = level
        self._at: float | None = None  # of the last beat
        self._step = 0
        self._what = "step"
        self._ended = threading.Event()
        self._main = threading.get_ident()

    def __enter__(self) -> HangWatch:
        self._main = threading.get_ident()
        if self.seconds is not None:
            threading.Thread(target=self._watch, name="mvp-hang", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def beat(self, step: int, what: str = "step") -> None:
        """A step begins, or a batch of an evaluation, or another numbered thing."""
        self._step = step
        self._what = what
        self._at = time.monotonic()

    def pause(self) -> None:
        """Nothing runs until the next beat."""
        self._at = None

    def _watch(self) -> None:
        assert self.seconds is not None
        reported: float | None = None
        while not self._ended.wait(min(1.0, self.seconds / 4)):
            began = self._at
            if began is None or time.monotonic() - began <= self.seconds:
                continue
            try:
                if began != reported:
                    self._report(self.seconds)
                reported = began
                self._answer()  # again and again, for ranks that are late after this one
            except RuntimeError as error:  # the store is gone with its host
                LOGGER.warning(
                    "%s %d hangs; the other ranks gave no answer: %s",
                    self._what,
                    self._step,
                    error,
                )
                return

    def _answer(self) -> dict[str, Any]:
        """Where this rank is now, written to the store."""
        own = {
            "time": time.time(),
            "step": self._step,
            "what": self._what,
            "stack": _stack(self._main),
        }
        if self.world.store is not None:
            self.world.store.set(_key(self.world.rank), json.dumps(own))
        return own

    def _report(self, seconds: float) -> None:
        found = {self.world.rank: self._answer()}
        # Other ranks began the step, and so are late, at other times.
        deadline = time.monotonic() + seconds / 2 + 2.0
        while len(found) < self.world.size and not self._ended.wait(0.2):
            self._answer()
            found = self._answers(seconds)
            if time.monotonic() > deadline:
                break
        if self.world.rank == min(found) and not self._ended.is_set():
            LOGGER.log(self._level, "%s", describe(found, self.world.size, seconds))

    def _answers(self, seconds: float) -> dict[int, dict[str, Any]]:
        """What the ranks that are late wrote in the last seconds, by rank."""
        store = self.world.store
        assert store is not None
        found = {}
        for rank in range(self.world.size):
            if store.check([_key(rank)]):
                answer = json.loads(store.get(_key(rank)))
                if answer["time"] > time.time() - seconds:
                    found[rank] = answer
        return found


def describe(found: dict[int, dict[str, Any]], size: int, seconds: float) -> str:
    """Which ranks did not arrive, where they are, and where the others wait for them."""
    waiting = [rank for rank, answer in found.items() if waits(answer["stack"])]
    missing = [rank for rank in found if rank not in waiting]
    silent = [rank for rank in range(size) if rank not in found]
    first = min(found.values(), key=lambda answer: answer["step"])
    lines = [f"{_place(first)} takes longer than guard.hang_seconds={seconds:g}"]
    if size > 1:
        if silent:
            lines[0] += f"; {_ranks(silent)} did not answer: stopped, or without a network"
        if missing:
            lines[0] += f"; {_ranks(missing)} did not arrive where the others wait"
        if not silent and not missing:
            lines[0] += "; all ranks wait in collectives, which differ"
    shown: dict[str, list[int]] = {}  # ranks by what they show
    for rank in [*missing, *waiting]:
        what = "in a collective" if rank in waiting else "at"
        stack = "".join(found[rank]["stack"])
        shown.setdefault(f"in {_place(found[rank])}, {what}:\n{stack}", []).append(rank)
    lines += [f"{_ranks(ranks)} {text.rstrip()}" for text, ranks in shown.items()]
    return "\n".join(lines)


def _place(answer: dict[str, Any]) -> str:
    return f"{answer['what']} {answer['step']}"


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    names = ", ".join(str(rank) for rank in ranks[:8])
    return f"{count(len(ranks), 'rank')} ({names}{', ...' if len(ranks) > 8 else ''})"


def waits(stack: list[str]) -> bool:
    """Whether the innermost frames are those of a collective."""
    return any(place in frame for frame in stack[-2:] for place in COLLECTIVES)


def _stack(thread: int) -> list[str]:
    """The innermost frames of a thread, as a traceback prints them."""
    frame = sys._current_frames().get(thread)
    return traceback.format_stack(frame)[-FRAMES:] if frame else []


def _key(rank: int) -> str:
    return f"hang/{rank}"

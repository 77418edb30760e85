"""Streams on a CPU that run their copies as late as they may: a wait that is missing gives other values.

The current stream runs at once. Copies of a side stream wait in its queue until another stream waits for an event
behind them. Buffers that are read or reused too early then hold other values, as on a device that is slow.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mvp_engine.ops import side_stream


class LazyStream:
    """A queue of work; an event is the number of entries before it."""

    def __init__(self):
        self.queue: deque[Callable[[], Any]] = deque()
        self.entered = 0
        self.done = 0

    def put(self, work):
        self.queue.append(work)
        self.entered += 1

    def event(self):
        return LazyEvent(self, self.entered)


class LazyEvent:
    def __init__(self, stream, place=0):
        self.stream = stream  # None: of the current stream, which is never late
        self.place = place

    def wait(self):
        while self.stream is not None and self.stream.done < self.place:
            self.stream.done += 1
            self.stream.queue.popleft()()


class _Deferred(TorchDispatchMode):
    """Copies inside of this mode go to a stream; views are made at once."""

    def __init__(self, stream):
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            self.stream.put(lambda: self._copy(*args, **(kwargs or {})))
            return args[0]
        return func(*args, **(kwargs or {}))

    def _copy(self, to, *args, **kwargs):
        # Its version was counted when the copy was called.
        with torch.autograd._unsafe_preserve_version_counter(to):
            torch.ops.aten.copy_.default(to, *args, **kwargs)


def use_lazy_streams(monkeypatch):
    """Let every side stream be such a one; returns them as they are made."""
    made = []
    active = []

    def new_stream(device):
        made.append(LazyStream())
        return made[-1]

    @contextlib.contextmanager
    def on(stream, after):
        stream.put(after.wait)
        active.append(stream)
        try:
            with _Deferred(stream):
                yield
        finally:
            active.pop()

    monkeypatch.setattr(side_stream, "new_stream", new_stream)
    monkeypatch.setattr(side_stream, "on", on)
    monkeypatch.setattr(
        side_stream, "event", lambda _: active[-1].event() if active else LazyEvent(None)
    )
    monkeypatch.setattr(side_stream, "wait", lambda event, _: event and event.wait())
    return made

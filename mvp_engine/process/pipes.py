"""Readers that go away, as those of `mvp profile CONFIG | head`: what is told goes nowhere from then on, and the work,
its files and its exit code are what they would have been. A training must not end with whoever looked at it."""

from __future__ import annotations

import io
import os
import sys
from typing import Any


class _Pipe(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())  # for processes that are started from here on, too
            os.close(nowhere)
            return super().write(data)


def outlive_readers() -> None:
    """From now on this process's stdout and stderr raise nothing when nobody reads them any more."""
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):
            continue  # closed, or somebody's own
        stream.flush()
        pipe = _Pipe(stream.fileno(), "wb", closefd=False)
        buffer = (
            pipe if isinstance(stream.buffer, io.RawIOBase) else io.BufferedWriter(pipe)
        )  # python -u has none
        how = {
            what: getattr(stream, what)
            for what in ("encoding", "errors", "line_buffering", "write_through")
        }
        setattr(sys, name, io.TextIOWrapper(buffer, **how))

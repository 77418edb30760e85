"""Broken pipes: output of a process after its reader has exited, as in `mvp profile CONFIG | head`.

A training must not end because its reader does: later output is discarded, while the work, its files and
its exit code stay the same.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any


class _Pipe(io.FileIO):
    """A file descriptor that becomes /dev/null at the first broken pipe."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, self.fileno())  # child processes inherit it too
            os.close(devnull)
            return super().write(data)


def ignore_broken_pipes() -> None:
    """Replace this process's stdout and stderr by streams that never raise BrokenPipeError."""
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):
            continue  # closed, or replaced by the caller
        stream.flush()
        pipe = _Pipe(stream.fileno(), "wb", closefd=False)
        unbuffered = isinstance(stream.buffer, io.RawIOBase)  # python -u
        wrapped = io.TextIOWrapper(
            pipe if unbuffered else io.BufferedWriter(pipe),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, wrapped)

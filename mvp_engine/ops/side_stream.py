"""Copies between host and device on a side stream, which overlap with computation: ordered by events, no host sync.

On a CPU there are no streams and no events: the same code copies at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

Stream = torch.cuda.Stream | None
Event = torch.cuda.Event | None


def new_stream(device: torch.device) -> Stream:
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def current_stream(device: torch.device) -> Stream:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def event(device: torch.device) -> Event:
    """All that the current stream has to do by now."""
    stream = current_stream(device)
    return None if stream is None else stream.record_event()


def wait(until: Event, stream: Stream) -> None:
    """Let a stream wait for an event."""
    if until is not None and stream is not None:
        stream.wait_event(until)


@contextlib.contextmanager
def on(stream: Stream, after: Event) -> Iterator[None]:
    """A context whose work runs on a stream, after an event; on a CPU it runs at once."""
    if stream is None or after is None:
        yield
        return
    stream.wait_event(after)
    with torch.cuda.stream(stream):
        yield

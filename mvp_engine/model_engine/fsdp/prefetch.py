"""Prefetch: the host-to-device copy of the next micro-batch, on a stream of its own, while the GPU computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from mvp_engine.model_engine.fsdp.lockstep import Scheduled


class DevicePrefetcher:
    """Copies one micro-batch ahead. On a CPU nothing is copied."""

    def __init__(self, device: torch.device, move: Callable[[Any], Any]) -> None:
        self.move = move
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, scheduled: list[Scheduled]) -> Iterator[Scheduled]:
        copied = self._copy(scheduled[0].micro_batch) if scheduled else None
        for index, one in enumerate(scheduled):
            current = copied
            copied = None
            if self.stream is not None:
                compute_stream = torch.cuda.current_stream()
                compute_stream.wait_stream(self.stream)
                _record_stream(current, compute_stream)
            if index + 1 < len(scheduled):
                copied = self._copy(scheduled[index + 1].micro_batch)
            yield Scheduled(current, one.is_dummy)

    def _copy(self, batch: Any) -> Any:
        with torch.cuda.stream(self.stream):  # does nothing for None
            return self.move(batch)


def to_device(value: Any, device: torch.device) -> Any:
    """Copy tensors, and anything else with a `to`, inside dicts, lists and tuples; other values stay."""
    if hasattr(value, "to"):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(to_device(item, device) for item in value)
    return value


def _record_stream(value: Any, stream: torch.cuda.Stream) -> None:
    """Keep the allocator from giving this memory to the next copy before `stream` is done with it."""
    if isinstance(value, torch.Tensor):
        if value.is_cuda:
            value.record_stream(stream)
    elif hasattr(value, "record_stream"):
        value.record_stream(stream)
    elif isinstance(value, Mapping):
        for item in value.values():
            _record_stream(item, stream)
    elif isinstance(value, list | tuple):
        for item in value:
            _record_stream(item, stream)

"""Micro-batches on their way to the GPU while it works on others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from mvp_engine.data.batch import PackedBatch
from mvp_engine.model_engine.fsdp.lockstep import Pass


class DevicePrefetcher:
    """Copies on a stream of their own, one micro-batch ahead. On a CPU nothing is copied."""

    def __init__(self, device: torch.device, move: Callable[[Any], Any]) -> None:
        self.move = move
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, passes: list[Pass]) -> Iterator[Pass]:
        moved = self._send(passes[0][0]) if passes else None
        for index, (_, counts) in enumerate(passes):
            now, moved = moved, None
            if self.stream is not None:
                here = torch.cuda.current_stream()
                here.wait_stream(self.stream)
                _used_on(now, here)
            if index + 1 < len(passes):
                moved = self._send(passes[index + 1][0])
            yield now, counts

    def _send(self, batch: Any) -> Any:
        with torch.cuda.stream(self.stream):  # of None: does nothing
            return self.move(batch)


def _used_on(value: Any, stream: torch.cuda.Stream) -> None:
    """Their memory is not given to the next copy before this stream is done with them."""
    if isinstance(value, PackedBatch):
        value.record_stream(stream)
    elif isinstance(value, torch.Tensor):
        if value.is_cuda:
            value.record_stream(stream)
    elif isinstance(value, dict):
        for item in value.values():
            _used_on(item, stream)
    elif isinstance(value, list | tuple):
        for item in value:
            _used_on(item, stream)
    elif hasattr(value, "record_stream"):
        value.record_stream(stream)

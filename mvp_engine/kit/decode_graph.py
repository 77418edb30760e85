"""DecodeGraph: the forward over one new token per sequence as a CUDA graph.

Such a forward computes little, and most of its time is spent on launching kernels from Python. A graph launches all of
them at once. It is for one number of sequences and of cached tokens: if one of them changes, another is captured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from mvp_engine.data.batch import PackedBatch
from mvp_engine.hf.kv_cache import KVCache
from mvp_engine.model_engine import ModelEngine

LOGGER = logging.getLogger("mvp_engine")
_NOT_CAPTURED: WeakSet[nn.Module] = WeakSet()  # models with a forward that cannot be captured


def is_supported(engine: ModelEngine) -> bool:
    """Whether the forward of a new token may become a graph: on one GPU, without collectives or experts.

    Some layers of experts read on the host how many tokens each of them has.
    """
    layout = engine.layout
    model: Any = engine.model
    is_whole = layout.shard_mesh is None and layout.tensor_mesh is None and layout.ulysses == 1
    # Other models compute new rotary positions for long sequences.
    has_fixed_positions = model.packed_length_limit is None
    if engine.world.device.type != "cuda" or not is_whole or not has_fixed_positions:
        return False
    has_experts = any(name.endswith("experts") for name, _ in model.named_modules())
    return not has_experts and model not in _NOT_CAPTURED


class DecodeGraph:
    def __init__(self, engine: ModelEngine, batch: PackedBatch, cache: KVCache) -> None:
        """`batch` holds the next token of each sequence, which `cache` does not have yet."""
        self.cache = cache
        self.batch = batch.to(engine.world.device)
        cache.fix_shapes()

        def forward() -> Tensor:
            with engine.autocast():
                outputs = engine.model(self.batch, ["next_logits"], kv_cache=cache)
            return outputs["next_logits"]

        self._replay = capture(forward)

    def fits(self, batch: PackedBatch) -> bool:
        return batch.num_sequences == self.batch.num_sequences and self.cache.fits_fixed_shapes

    def next_logits(self, batch: PackedBatch) -> Tensor:
        """Logits of the next token of each sequence; the next call overwrites them."""
        self.batch.input_ids.copy_(batch.input_ids)
        self.batch.position_ids.copy_(batch.position_ids)
        logits = self._replay()
        self.cache.count_tokens()
        return logits


def capture(forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A function that replays `forward` as a CUDA graph and returns its output.

    Not by `torch.cuda.graph`, which also collects garbage and empties the allocator's cache: a training fills it again.
    Other threads, such as those of loaders and checkpoints, may call CUDA meanwhile.
    """
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        forward()  # libraries allocate their workspaces outside of the graph
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            output = forward()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)

    def replay() -> Tensor:
        graph.replay()
        return output

    return replay


def try_capture(engine: ModelEngine, batch: PackedBatch, cache: KVCache) -> DecodeGraph | None:
    """A graph for this batch; None, with a warning, if the model waits for values on the host in its forward."""
    try:
        return DecodeGraph(engine, batch, cache)
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        reason = str(error).partition("\n")[0]
        LOGGER.warning("generation runs without a CUDA graph, more slowly: %s", reason)
        _NOT_CAPTURED.add(engine.model)
        cache.free_shapes()
        return None

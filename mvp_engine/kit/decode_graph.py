"""DecodeGraph: a forward over one new token per sequence, and the choice of the next ones, as a CUDA graph.

Such a forward computes little, and most of its time is spent on launching kernels from Python. A graph launches all of
them at once. The tokens that it chooses stay on the device as its next inputs, so the host waits once for several of
them. It is for one number of sequences: if that changes, another is captured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
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
    is_whole = layout.shard_mesh is None and layout.model_parallel_size == 1
    # Other models compute new rotary positions for long sequences.
    has_fixed_positions = model.packed_length_limit is None
    if engine.world.device.type != "cuda" or not is_whole or not has_fixed_positions:
        return False
    has_experts = any(name.endswith("experts") for name, _ in model.named_modules())
    return not has_experts and model not in _NOT_CAPTURED


Choice = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class DecodeGraph:
    def __init__(
        self,
        engine: ModelEngine,
        batch: PackedBatch,
        cache: KVCache,
        choose: Choice,
        position: int,
    ) -> None:
        """`batch` holds the next token of each sequence, which `cache` does not have yet.

        `choose(logits_SV, position)` returns a token of each sequence and its log-prob; `position` counts the tokens
        that each has written, on the device.
        """
        self.cache = cache
        batch = batch.to(engine.world.device)
        position_now = torch.tensor(position, device=engine.world.device)
        cache.fix_shapes()

        def forward() -> tuple[Tensor, Tensor]:
            with engine.autocast():
                outputs = engine.model(batch, ["next_logits"], kv_cache=cache)
            chosen = choose(outputs["next_logits"], position_now)
            # The inputs of the next replay.
            batch.input_ids.copy_(chosen[0])
            batch.position_ids.add_(1)
            position_now.add_(1)
            cache.advance_on_device()
            return chosen

        state = (batch.input_ids, batch.position_ids, position_now, cache.newest)
        self._replay = capture(forward, state)
        # A graph has the addresses of its inputs and does not keep them alive.
        self._inputs = (batch, position_now)

    def write(self, steps: int) -> list[tuple[list[int], list[float]]]:
        """The next `steps` tokens of each sequence and their log-probs, by step; one wait for the device."""
        written = []
        for _ in range(steps):
            tokens_S, log_probs_S = self._replay()
            written.append(
                (tokens_S.clone(), log_probs_S.clone())
            )  # the next replay overwrites them
        self.cache.count_tokens(steps)
        tokens = torch.stack([tokens_S for tokens_S, _ in written]).tolist()
        log_probs = torch.stack([log_probs_S for _, log_probs_S in written]).tolist()
        return list(zip(tokens, log_probs, strict=True))


def capture(
    forward: Callable[[], tuple[Tensor, Tensor]], state: Sequence[Tensor]
) -> Callable[[], tuple[Tensor, Tensor]]:
    """A function that replays `forward` as a CUDA graph and returns its outputs; `state` is what `forward` changes.

    Not by `torch.cuda.graph`, which also collects garbage and empties the allocator's cache: a training fills it again.
    Other threads, such as those of loaders and checkpoints, may call CUDA meanwhile.
    """
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        before = [tensor.clone() for tensor in state]
        forward()  # libraries allocate their workspaces outside of the graph, and kernels are compiled
        for tensor, value in zip(state, before, strict=True):
            tensor.copy_(value)
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            outputs = forward()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)

    def replay() -> tuple[Tensor, Tensor]:
        graph.replay()
        return outputs

    return replay


def try_capture(
    engine: ModelEngine, batch: PackedBatch, cache: KVCache, choose: Choice, position: int
) -> DecodeGraph | None:
    """A graph for this batch; None, with a warning, if the model waits for values on the host in its forward."""
    try:
        return DecodeGraph(engine, batch, cache, choose, position)
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        reason = str(error).partition("\n")[0]
        LOGGER.warning("generation runs without a CUDA graph, more slowly: %s", reason)
        _NOT_CAPTURED.add(engine.model)
        cache.free_shapes()
        return None

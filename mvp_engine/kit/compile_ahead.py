"""What is compiled before the first step, or prepared for it: worker processes of Inductor, attention kernels, and the
blocks of a model on a few rows, while the costs of all rows are measured."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

import torch

from mvp_engine.data import rng_state, set_rng_state
from mvp_engine.data.batch import PackedBatch
from mvp_engine.kit.estimate.auto import smaller_after_out_of_memory
from mvp_engine.kit.estimate.sample import repeated
from mvp_engine.model_engine.fsdp.compile import use_cache
from mvp_engine.ops import flash_attention

if TYPE_CHECKING:
    from mvp_engine.kit.mllm import MLLMEngine

LOGGER = logging.getLogger("mvp_engine")
# Sizes of the two packs, in packs: torch compiles for the first one's size alone, and then for all. The first one is
# enough where its sizes are marked (`model.compile_dynamic`).
SHARES = (1.0, 0.9)


def prepare_kernels(engine: MLLMEngine) -> None:
    start_compile_workers(engine)  # first: it names the folder of the compile cache
    prepare_attention(engine.device)


def start_compile_workers(engine: MLLMEngine) -> None:
    """Start the processes that compile kernels for Inductor, if the config compiles blocks on a GPU.

    They import torch for some seconds. Inductor would start them with its first graph, whose kernels are compiled in
    this process one by one until they are ready.
    """
    setting = engine.config.model.compile
    backends = setting.values() if isinstance(setting, dict) else [setting]
    if engine.device.type != "cuda" or not {"auto", "inductor"}.intersection(backends):
        return
    use_cache(engine.config.model.compile_cache)  # the processes inherit its environment variable
    from torch._inductor.async_compile import AsyncCompile

    AsyncCompile.use_process_pool()


def prepare_attention(device: torch.device) -> None:
    """Import FlashAttention 4 in a thread, which takes a second or two; or log that it would be faster on this GPU."""
    if device.type != "cuda" or not flash_attention.runs_on(device):
        return
    if flash_attention.INSTALLED:
        threading.Thread(target=flash_attention.load, daemon=True).start()
    else:
        LOGGER.info(
            "attention with heads of 64 or 128 would be faster on this GPU with flash-attn-4 %s: "
            "pip install 'mvp-engine[cuda]'",
            flash_attention.VERSION,
        )


def compile_blocks(engine: MLLMEngine) -> None:
    """Run forward and backward on packs of sampled rows, if blocks are compiled. Nothing of it stays but graphs.

    It ends when all rows are measured: then the first steps compile. All ranks must call it: they run the same rows.
    """
    model: Any = engine.model
    is_compiled = any(module._compiled_call_impl is not None for module in model.modules())
    if not is_compiled or engine.layout.pipeline > 1 or engine.data.is_stream():
        return
    random_state = rng_state()
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    sample: PackedBatch | None = None
    with smaller_after_out_of_memory(engine):
        for share in SHARES[:1] if engine.config.model.compile_dynamic else SHARES:
            if not engine.world.any(engine.data.is_measuring)[0]:
                break
            sample = sample or engine.data.sample()
            tokens = int(share * engine.config.mllm.pack_tokens)
            _forward_backward(engine, repeated(sample, tokens))
    for buffer, before in buffers:
        buffer.copy_(before)
    set_rng_state(random_state)


def _forward_backward(engine: MLLMEngine, batch: PackedBatch) -> None:
    model: Any = engine.model
    name = "hidden_states" if "hidden_states" in model.provides else model.provides[0]
    with engine.model_engine.autocast():
        found = model(batch.to(engine.device), [name])[name]
    if found.requires_grad:
        found.float().mean().backward()
    model.zero_grad(set_to_none=True)

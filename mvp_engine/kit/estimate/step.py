"""Memory and time of a training step on a GPU that need not be present.

Time is GEMMs, attention and memory traffic, each at the fraction of the GPU's peak that benchmarks reached.
`tests/kit/test_estimate.py` compares memory and time with measurements.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import log
from typing import Any

from mvp_engine.data.batch import PackedBatch
from mvp_engine.hf.model.packed_model import PackedModel
from mvp_engine.kit.estimate.blocks import BlockCosts
from mvp_engine.kit.estimate.memory import STATE_BYTES, peak_memory, state_bytes
from mvp_engine.kit.estimate.settings import FITS, GIB, EstimateSettings, Gpu, gpu_by_name
from mvp_engine.kit.speech.rows import SPEECH

REST = 1.12  # the whole step, as a multiple of what is counted
# Fractions of the peak, measured on an H200 with compiled blocks (docs/performance.md).
GEMM_EFFICIENCY = 0.745
# By FlashAttention 4; cuDNN takes 6 to 20 % longer.
ATTENTION_EFFICIENCY = 0.38  # of packs of short sequences, and of encoders
# Of sequences of 32k tokens and more (recipe_attention.json: 620 TFLOP/s of 3.5 forwards, of which MFU counts 3).
# `REST` is not for these kernels, which take a tenth of a second each.
LONG_ATTENTION_EFFICIENCY = 0.535 * REST
SHORT = 8192  # tokens; in between, the efficiency grows with the logarithm of the length
LONG = 32768
BANDWIDTH_EFFICIENCY = 0.73

FP8_SPEEDUP = 1.45  # of an FP8 GEMM, including the quantization of its operands
# Of one for a weight gradient, whose operands are transposed: 2.8 and 0.8 ms, instead of 4.2, for a layer of Qwen3-1.7B
# and 32k tokens.
FP8_WEIGHT_GRADIENT_SPEEDUP = 1.2
SAVED_TRANSFERS = 4.1  # how often saved activations cross the memory bus in forward and backward
FP32_SLOWDOWN = 8.0
MICRO_BATCH_BYTES = (
    18  # memory traffic per trained parameter: gradients are added, weights cast to bf16
)
OPTIMIZER_BYTES = 24  # memory traffic per parameter of an optimizer step, in addition to the states


def estimate_step(
    model: PackedModel,
    largest: Iterable[PackedBatch],
    step: Sequence[PackedBatch],
    settings: EstimateSettings,
    accumulates: bool = False,
) -> dict[str, Any]:
    """`largest` are candidates for the micro-batch with most memory; `step` are one rank's micro-batches of a step.

    `accumulates`: steps may have more micro-batches than that, so memory is that of gradient accumulation.
    """
    gpu = gpu_by_name(settings.gpu)
    costs = BlockCosts(model, settings)
    largest = list(largest)
    memory = peak_memory(costs, largest, len(step) + accumulates)
    host = {
        "optimizer states": state_bytes(costs) / GIB if settings.offload_states else 0.0,
        "inputs of blocks": max(sum(costs.offloaded_bytes(batch)[1:]) for batch in largest) / GIB,
    }
    peak = sum(memory.values())
    seconds = _step_seconds(costs, step, gpu)
    total = REST * sum(seconds.values())
    if not settings.half_precision:
        total *= FP32_SLOWDOWN
    tokens = sum(batch.num_tokens for batch in step)
    flops = sum(float(costs.mfu.flops(batch)) for batch in step) / settings.text_ranks
    return {
        "gpu": settings.gpu,
        "memory_gib": {name: size / GIB for name, size in memory.items()},
        "peak_gib": peak / GIB,
        "room_gib": gpu.memory / GIB,
        "usable": FITS,
        "fits": peak < FITS * gpu.memory,
        "host_gib": sum(host.values()),
        "host_memory_gib": host,
        "step_s": total,
        "seconds": seconds,
        "tokens_per_step": tokens,
        "tokens_per_s": tokens / total,
        "mfu": flops / total / gpu.flops_per_s,
    }


def micro_batch_seconds(costs: BlockCosts, batch: PackedBatch, gpu: Gpu) -> float:
    """Seconds of forward and backward of one micro-batch on the GPU, with what each one adds to a step."""
    counted = sum(_batch_seconds(costs, batch, gpu).values())
    moved = costs.dequantized_bytes() + MICRO_BATCH_BYTES * _trained(costs)
    total = REST * (counted + moved / (BANDWIDTH_EFFICIENCY * gpu.bytes_per_s))
    return total if costs.settings.half_precision else total * FP32_SLOWDOWN


def _trained(costs: BlockCosts) -> float:
    """Trained parameters of one rank."""
    return sum(p.numel() for p in costs.trained()) / costs.settings.weight_ranks


def _step_seconds(costs: BlockCosts, step: Sequence[PackedBatch], gpu: Gpu) -> dict[str, float]:
    settings = costs.settings
    seconds = {"GEMM": 0.0, "attention": 0.0, "memory traffic": 0.0}
    for batch in step:
        for name, value in _batch_seconds(costs, batch, gpu).items():
            seconds[name] = seconds.get(name, 0.0) + value
    dequantized = len(step) * costs.dequantized_bytes()
    seconds["memory traffic"] += dequantized / (BANDWIDTH_EFFICIENCY * gpu.bytes_per_s)
    size = _trained(costs) * (OPTIMIZER_BYTES + STATE_BYTES[settings.state_dtype])
    seconds["optimizer"] = size / (BANDWIDTH_EFFICIENCY * gpu.bytes_per_s)
    if (
        settings.offload_states
    ):  # copies in both directions run at the same time, and hide the update
        copied = state_bytes(costs) / gpu.host_bytes_per_s
        seconds["optimizer"] = max(copied, seconds["optimizer"])
    return seconds


def _batch_seconds(costs: BlockCosts, batch: PackedBatch, gpu: Gpu) -> dict[str, float]:
    """Seconds of one micro-batch. Sequence parallel ranks share all of it, tensor parallel ranks the text."""
    speech = {name: media for name, media in batch.media.items() if name == SPEECH}
    text_gemm, text_attention = _flops(costs, replace(batch, media=speech))
    all_gemm, all_attention = _flops(costs, batch)
    encoder_attention = all_attention - text_attention
    saved = costs.saved_bytes(batch, checkpointed=False)
    repeated = costs.repeated_flops(batch)
    repeating = {block.is_text for block in costs.blocks if costs.repeats_attention(block)}
    low = costs.fp8_flops(batch)
    low_gradients = costs.fp8_weight_gradient_flops(batch)
    ranks = costs.settings.text_ranks
    share = costs.encoder_share(batch)
    text_attention *= ATTENTION_EFFICIENCY / attention_efficiency(batch)
    text = _seconds(
        gpu,
        text_gemm / ranks,
        text_attention / ranks,
        repeated.text / ranks,
        _fp8_gain(low.text, low_gradients.text) / ranks,
        saved.text,
        True in repeating,
    )
    encoder = _seconds(
        gpu,
        share * (all_gemm - text_gemm),
        share * encoder_attention,
        share * repeated.encoder,
        share * _fp8_gain(low.encoder, low_gradients.encoder),
        saved.encoder,
        False in repeating,
    )
    seconds = {name: value + encoder[name] for name, value in text.items()}
    moved = sum(costs.offloaded_bytes(batch)[1:])  # inputs of all blocks but the last one
    copied = moved / gpu.host_bytes_per_s
    if copied:
        compute = sum(seconds.values())
        if not costs.settings.half_precision:
            compute *= FP32_SLOWDOWN
        # Copies to the host hide behind the first of four parts of the work, copies back behind the other three.
        exposed = max(0.0, copied - compute / 4) + max(0.0, copied - 3 * compute / 4)
        seconds["exposed copies"] = exposed
    return seconds


def _fp8_gain(flops: float, gradient_flops: float) -> float:
    """The bf16 FLOPs that take as long as FP8 GEMMs are faster."""
    gain = flops * (1 - 1 / FP8_SPEEDUP)
    return gain + gradient_flops * (1 - 1 / FP8_WEIGHT_GRADIENT_SPEEDUP)


def _flops(costs: BlockCosts, batch: PackedBatch) -> tuple[float, float]:
    gemm, attention = costs.mfu.flops_by_kind(batch)
    return float(gemm), float(attention)


def attention_efficiency(batch: PackedBatch) -> float:
    """The fraction of the peak that attention reaches over a batch's text, whose long sequences have most pairs."""
    lengths = batch.cu_seqlens.diff().double()
    length = float(lengths.pow(3).sum() / lengths.square().sum().clamp(min=1))  # of the mean pair
    position = log(max(length, SHORT) / SHORT) / log(LONG / SHORT)
    gain = min(1.0, position) * (LONG_ATTENTION_EFFICIENCY - ATTENTION_EFFICIENCY)
    return ATTENTION_EFFICIENCY + gain


def _seconds(
    gpu: Gpu,
    gemm: float,
    attention: float,
    repeated: float,
    gain: float,
    saved: float,
    repeats_attention: bool,
) -> dict[str, float]:
    """`repeated` are GEMM FLOPs of the second forward of checkpointing, `gain` is FP8's; `saved` is bytes."""
    # Forward and backward are three parts of work; a second forward is a fourth. Backward of attention computes its
    # scores again: it takes 2.5 times as long as forward, and MFU counts 2.
    passes = 4 / 3 if repeated else 1.0
    attention_passes = 4.5 / 3.5 if repeats_attention else 1.0
    gemm += repeated - gain
    traffic = passes * SAVED_TRANSFERS * saved
    return {
        "GEMM": gemm / (GEMM_EFFICIENCY * gpu.flops_per_s),
        "attention": attention_passes * attention / (ATTENTION_EFFICIENCY * gpu.flops_per_s),
        "memory traffic": traffic / (BANDWIDTH_EFFICIENCY * gpu.bytes_per_s),
    }

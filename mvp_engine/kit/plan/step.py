"""Memory and time of a training step on one rank, by formulas over the blocks of its model.

Static memory is weights, gradients and optimizer states; dynamic memory is what backward needs of each block, the
buffers of the loss, and the batch. Time is GEMMs, attention and memory traffic, each at the fraction of the GPU's peak
that benchmarks reached. `tests/kit/test_plan_step.py` compares both with measurements.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from math import log
from typing import Any

from torch import nn

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed.data_parallel import blocks
from mvp_engine.hf.experts import moe_layers
from mvp_engine.hf.model.language_model import LanguageModel
from mvp_engine.hf.model.packed_model import PackedModel
from mvp_engine.kit.optim.settings import STATE_BYTES
from mvp_engine.kit.optim.state_stream import BUCKET_BYTES, SLOTS
from mvp_engine.kit.plan.costs import BlockCosts, PlanSettings
from mvp_engine.kit.plan.hardware import FITS, GIB, Gpu, gpu_by_name
from mvp_engine.model_engine.base import DTYPES
from mvp_engine.ops.nf4 import quantized_layers

DEFAULT_CHUNK = 2048  # tokens per chunk of logits
IN_BACKWARD = "block in backward"  # that is computed a second time; with `offload`, inputs of its neighbours too
DYNAMIC = ("activations", "loss", "batches", IN_BACKWARD)  # kinds that grow with the micro-batch
BYTES_PER_TOKEN = 64.0  # of a packed batch without media: ids, labels and other token fields

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
SAVED_TRANSFERS = 4.1  # how often saved activations cross the memory bus in forward and backward
FP32_SLOWDOWN = 8.0
# Memory traffic per trained parameter of a micro-batch (gradients are added, weights cast to bf16), and of an optimizer
# step in addition to the states.
MICRO_BATCH_BYTES = 18
OPTIMIZER_BYTES = 24


def estimate_step(
    model: PackedModel,
    largest: Iterable[PackedBatch],
    step: Sequence[PackedBatch],
    settings: PlanSettings,
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
    total = _whole(costs, seconds)
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


# ---- Memory --------------------------------------------------------------------------------------------------------


def peak_memory(
    costs: BlockCosts, largest: Iterable[PackedBatch], micro_batches: int
) -> dict[str, float]:
    """Bytes by kind at the peak; `largest` are candidates for the micro-batch that needs most memory.

    The gradients of a step with one micro-batch take the place of the activations that backward frees. From the second
    one on, all gradients exist next to all activations.
    """
    dynamic = max(
        (_dynamic(costs, batch) for batch in largest), key=lambda sizes: sum(sizes.values())
    )
    sizes = _static(costs) | dynamic
    if micro_batches == 1:
        freed = sum(dynamic.values()) - dynamic[IN_BACKWARD]
        sizes["gradients"] = max(0.0, sizes["gradients"] - freed)
    return sizes


@lru_cache(maxsize=1)  # a choice of sizes asks for it with many batches
def _static(costs: BlockCosts) -> dict[str, float]:
    settings = costs.settings
    model = costs.model
    ranks = settings.weight_ranks
    weights = sum(float(p.numel() * p.element_size()) for p in model.parameters())
    states = state_bytes(costs)
    if settings.offload_states:
        states = min(states, float(SLOTS * BUCKET_BYTES))
    sizes = {
        "weights": weights / ranks,
        "gradients": 4.0 * _trained(costs),
        "optimizer states": states,
    }
    if settings.reference_copy:
        base = sum(p.numel() for name, p in model.named_parameters() if ".lora_" not in name)
        sizes["reference model"] = float(_frozen_bytes(model, settings.precision) * base / ranks)
    if settings.teachers:
        sizes["teacher"] = sum(
            _teacher(path, settings.precision, ranks) for path in settings.teachers
        )
    quantized = quantized_layers(model).values()
    if quantized:  # at most two at a time, each as long as its GEMM takes
        largest = max(layer.in_features * layer.out_features for layer in quantized)
        sizes["dequantized weights"] = 2 * settings.compute_bytes * largest
    if settings.fsdp_ranks == 1:
        sizes["bf16 weight copies"] = costs.autocast_bytes() / settings.tensor
    else:
        sizes["all-gathered weights"] = _gathered(costs) / settings.tensor
    return sizes


def _trained(costs: BlockCosts) -> float:
    """Trained parameters of one rank."""
    return sum(p.numel() for p in costs.trained()) / costs.settings.weight_ranks


def state_bytes(costs: BlockCosts) -> float:
    """Bytes of the optimizer states of one rank, on the GPU or on the host."""
    settings = costs.settings
    per_parameter = STATE_BYTES[settings.state_dtype] + 4.0 * (settings.ema is not None)
    return per_parameter * _trained(costs)


def _frozen_bytes(model: PackedModel, precision: str) -> int:
    """Bytes of an element of a frozen copy."""
    dtype = DTYPES[precision]
    return dtype.itemsize if model.export_dtype == dtype else 4


@cache
def _teacher(path: str, precision: str, ranks: int) -> float:
    """Bytes of a teacher's share of the weights, and of its output embedding, which every rank gathers."""
    model: Any = LanguageModel.on_meta(path)
    head = model.hf.get_output_embeddings().weight.numel() if ranks > 1 else 0
    share = sum(p.numel() for p in model.parameters()) / ranks
    return float(_frozen_bytes(model, precision) * (share + head))


def _gathered(costs: BlockCosts) -> float:
    """Bytes of all-gathered weights under FSDP: two blocks at a time with gradients, and all that is in no block.

    Of the experts, an expert-parallel rank gathers its own. Without resharding, all blocks stay gathered. A weight in
    FP8 is one byte per element, and a float32 scale per row.
    """
    model = costs.model
    settings = costs.settings
    size = settings.compute_bytes
    low = costs.gathered_in_fp8()
    stacked = [set(module.parameters()) for module in moe_layers.modules(model).values()]
    ranks = dict.fromkeys(set[nn.Parameter]().union(*stacked), settings.expert)
    in_blocks = set[nn.Parameter]()
    largest = 0.0
    kept = 0.0
    for block in blocks(model):
        params = list(block.parameters())
        held = {p: p.numel() / ranks.get(p, 1) for p in params}
        weights = {p: p.numel() + 4.0 * len(p) if p in low else size * held[p] for p in params}
        gradients = sum(4.0 * held[p] for p in params if p.requires_grad)
        if settings.reshard:
            largest = max(largest, gradients + sum(weights.values()))
        else:
            largest = max(largest, gradients)
            kept += sum(weights[p] for p in params if p not in in_blocks)
        in_blocks.update(params)
    outside = sum(p.numel() for p in set(model.parameters()) - in_blocks)
    return 2 * largest + kept + size * outside


def _dynamic(costs: BlockCosts, batch: PackedBatch) -> dict[str, float]:
    settings = costs.settings
    saved = costs.saved_bytes(batch)
    media = sum(item.values.numel() * item.values.element_size() for item in batch.media.values())
    other_losses = costs.facts.loss_bytes(batch, DTYPES[settings.precision].itemsize)
    text_loss = _text_loss_bytes(costs, batch) / settings.tensor
    return {
        "activations": saved.text + saved.encoder,
        "loss": text_loss + other_losses / settings.sequence_ranks,
        "batches": 2.0 * media + BYTES_PER_TOKEN * batch.num_tokens,
        IN_BACKWARD: costs.block_bytes(batch),
    }


def _text_loss_bytes(costs: BlockCosts, batch: PackedBatch) -> float:
    """One chunk of logits, the gradient of the hidden states, and the head's gradient or its bf16 copy."""
    head = costs.facts.head(batch)
    if head is None:
        return 0.0
    vocabulary, width = head.shape
    chunk = min(getattr(costs.model, "chunk", DEFAULT_CHUNK), batch.num_tokens)
    size = chunk * vocabulary * 4.0 + 4.0 * batch.num_tokens * width
    if head.requires_grad:
        size += 4.0 * vocabulary * width
    elif costs.settings.half_precision and head.element_size() > 2:
        size += 2.0 * vocabulary * width
    return size


# ---- Time ----------------------------------------------------------------------------------------------------------


def micro_batch_seconds(costs: BlockCosts, batch: PackedBatch, gpu: Gpu) -> float:
    """Seconds of forward and backward of one micro-batch on the GPU."""
    return _whole(costs, _batch_seconds(costs, batch, gpu))


def _whole(costs: BlockCosts, seconds: dict[str, float]) -> float:
    slower = 1.0 if costs.settings.half_precision else FP32_SLOWDOWN
    return REST * sum(seconds.values()) * slower


def _step_seconds(costs: BlockCosts, step: Sequence[PackedBatch], gpu: Gpu) -> dict[str, float]:
    settings = costs.settings
    seconds = dict[str, float]()
    for batch in step:
        for name, value in _batch_seconds(costs, batch, gpu).items():
            seconds[name] = seconds.get(name, 0.0) + value
    moved = _trained(costs) * (OPTIMIZER_BYTES + STATE_BYTES[settings.state_dtype])
    seconds["optimizer"] = moved / (BANDWIDTH_EFFICIENCY * gpu.bytes_per_s)
    if settings.offload_states:  # copies in both directions run at the same time, hiding the update
        copied = state_bytes(costs) / gpu.host_bytes_per_s
        seconds["optimizer"] = max(copied, seconds["optimizer"])
    return seconds


def _batch_seconds(costs: BlockCosts, batch: PackedBatch, gpu: Gpu) -> dict[str, float]:
    """Seconds of one micro-batch. Sequence parallel ranks share all of it, tensor parallel ranks the text."""
    encoded = costs.facts.encoder_media(batch)
    others = {name: media for name, media in batch.media.items() if name not in encoded}
    text_gemm, text_attention = map(float, costs.mfu.flops_by_kind(replace(batch, media=others)))
    gemm, attention = map(float, costs.mfu.flops_by_kind(batch))
    long_sequences = attention_efficiency(batch) / ATTENTION_EFFICIENCY
    attention_repeats = {block.is_text for block in costs.blocks if costs.repeats_attention(block)}
    bandwidth = BANDWIDTH_EFFICIENCY * gpu.bytes_per_s
    moved = costs.dequantized_bytes() + MICRO_BATCH_BYTES * _trained(costs)
    seconds = {"GEMM": 0.0, "attention": 0.0, "memory traffic": moved / bandwidth}
    of_text_and_encoders = zip(
        (True, False),
        (1 / costs.settings.text_ranks, costs.encoder_share(batch)),
        (text_gemm, gemm - text_gemm),
        (text_attention / long_sequences, attention - text_attention),
        costs.repeated_flops(batch),
        costs.fp8_gain(batch),
        costs.saved_bytes(batch, checkpointed=False),
        strict=True,
    )
    for is_text, share, gemm, attention, again, faster, saved in of_text_and_encoders:
        # Forward and backward are three parts of work; a second forward is a fourth. Backward of attention computes
        # its scores again: it takes 2.5 times as long as forward, and MFU counts 2.
        passes = 4 / 3 if again else 1.0
        attention *= share * (4.5 / 3.5 if is_text in attention_repeats else 1.0)
        seconds["GEMM"] += share * (gemm + again - faster) / (GEMM_EFFICIENCY * gpu.flops_per_s)
        seconds["attention"] += attention / (ATTENTION_EFFICIENCY * gpu.flops_per_s)
        seconds["memory traffic"] += passes * SAVED_TRANSFERS * saved / bandwidth
    # Inputs of all blocks but the last one are copied to the host behind the first of four parts of the work, and
    # back behind the other three.
    copied = sum(costs.offloaded_bytes(batch)[1:]) / gpu.host_bytes_per_s
    if copied:
        compute = sum(seconds.values())
        if not costs.settings.half_precision:
            compute *= FP32_SLOWDOWN
        exposed = max(0.0, copied - compute / 4) + max(0.0, copied - 3 * compute / 4)
        seconds["exposed copies"] = exposed
    return seconds


def attention_efficiency(batch: PackedBatch) -> float:
    """The fraction of the peak that attention reaches over a batch's text, whose long sequences have most pairs."""
    lengths = batch.cu_seqlens.diff().double()
    length = float(lengths.pow(3).sum() / lengths.square().sum().clamp(min=1))  # of the mean pair
    position = log(max(length, SHORT) / SHORT) / log(LONG / SHORT)
    gain = min(1.0, position) * (LONG_ATTENTION_EFFICIENCY - ATTENTION_EFFICIENCY)
    return ATTENTION_EFFICIENCY + gain

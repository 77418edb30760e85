"""GPU memory of a training step on one rank, counted on the meta device.

Static memory is weights, gradients and optimizer states. Dynamic memory is what backward needs of each block,
the buffers of the loss, and the batch itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, lru_cache
from typing import Any

from torch import nn

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed.fsdp import blocks
from mvp_engine.hf.actions.action_model import ActionModel
from mvp_engine.hf.actions.pi0 import Pi0Policy
from mvp_engine.hf.experts import moe_layers
from mvp_engine.hf.model.language_model import LanguageModel
from mvp_engine.kit.action_flops import language_backbone
from mvp_engine.kit.estimate.blocks import BlockCosts
from mvp_engine.kit.optim.state_stream import BUCKET_BYTES, SLOTS
from mvp_engine.kit.speech.csm import CsmModel
from mvp_engine.kit.speech.flops import speech_loss_bytes, thinker_share
from mvp_engine.model_engine.base import DTYPES
from mvp_engine.ops.nf4 import quantized_layers

STATE_BYTES = {"float32": 8.0, "bfloat16": 4.0, "int8": 2.06}  # of Adam's two states, per parameter
DEFAULT_CHUNK = 2048  # tokens per chunk of logits
IN_BACKWARD = "block in backward"  # that is computed a second time; with `offload`, inputs of its neighbours too
DYNAMIC = ("activations", "loss", "batches", IN_BACKWARD)  # kinds that grow with the micro-batch
BYTES_PER_TOKEN = 64.0  # of a packed batch without media: ids, labels and other token fields


def peak_memory(
    costs: BlockCosts, largest: Iterable[PackedBatch], micro_batches: int
) -> dict[str, float]:
    """Bytes by kind at the peak; `largest` are candidates for the micro-batch that needs most memory.

    The gradients of a step with one micro-batch take the place of the activations that backward frees. From the second
    one on, all gradients exist next to all activations.
    """
    dynamic = max((_dynamic(costs, batch) for batch in largest), key=lambda one: sum(one.values()))
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
    trained = sum(p.numel() for p in costs.trained())
    weights = sum(float(p.numel() * p.element_size()) for p in model.parameters())
    states = state_bytes(costs)
    if settings.offload_states:
        states = min(states, float(SLOTS * BUCKET_BYTES))
    sizes = {
        "weights": weights / ranks,
        "gradients": 4.0 * trained / ranks,
        "optimizer states": states,
    }
    if settings.reference_copy:
        dtype = DTYPES[settings.precision]
        size = dtype.itemsize if model.export_dtype == dtype else 4
        base = sum(p.numel() for name, p in model.named_parameters() if ".lora_" not in name)
        sizes["reference model"] = float(size * base / ranks)
    if settings.teacher is not None:
        sizes["teacher"] = _teacher(settings.teacher, settings.precision, ranks)
    quantized = quantized_layers(model).values()
    if quantized:  # at most two at a time, each as long as its GEMM takes
        largest = max(layer.in_features * layer.out_features for layer in quantized)
        sizes["dequantized weights"] = 2 * settings.compute_bytes * largest
    if settings.fsdp_ranks == 1:
        sizes["bf16 weight copies"] = costs.autocast_bytes() / settings.tensor
    else:
        sizes["all-gathered weights"] = _gathered(costs) / settings.tensor
    return sizes


def state_bytes(costs: BlockCosts) -> float:
    """Bytes of the optimizer states of one rank, on the GPU or on the host."""
    settings = costs.settings
    trained = sum(p.numel() for p in costs.trained())
    per_parameter = STATE_BYTES[settings.state_dtype] + 4.0 * (settings.ema is not None)
    return per_parameter * trained / settings.weight_ranks


@cache
def _teacher(path: str, precision: str, ranks: int) -> float:
    """Bytes of a teacher's share of the weights, and of its output embedding, which every rank gathers."""
    model: Any = LanguageModel.on_meta(path)
    dtype = DTYPES[precision]
    size = dtype.itemsize if model.export_dtype == dtype else 4
    head = model.hf.get_output_embeddings().weight.numel() if ranks > 1 else 0
    return float(size * (sum(p.numel() for p in model.parameters()) / ranks + head))


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
    saved = costs.saved_bytes(batch)
    media = 0
    for item in batch.media.values():
        media += item.values.numel() * item.values.element_size()
    return {
        "activations": saved.text + saved.encoder,
        "loss": _loss_bytes(costs, batch) / costs.settings.tensor
        + speech_loss_bytes(costs.model, batch, DTYPES[costs.settings.precision].itemsize)
        / costs.settings.sequence_ranks,
        "batches": 2.0 * media + BYTES_PER_TOKEN * batch.num_tokens,
        IN_BACKWARD: costs.block_bytes(batch),
    }


def _loss_bytes(costs: BlockCosts, batch: PackedBatch) -> float:
    """One chunk of logits, the gradient of the hidden states, and the head's gradient or its bf16 copy."""
    if isinstance(costs.model, ActionModel) and not costs.settings.text_loss:
        return 0.0
    head: Any = costs.model.hf.get_output_embeddings()  # type: ignore[operator]
    if isinstance(costs.model, Pi0Policy):
        head = language_backbone(costs.model).get_input_embeddings()
    if head is None or isinstance(costs.model, CsmModel) or thinker_share(costs.model, batch) < 1.0:
        return 0.0
    vocabulary, width = head.weight.shape
    chunk = min(getattr(costs.model, "chunk", DEFAULT_CHUNK), batch.num_tokens)
    size = chunk * vocabulary * 4.0 + 4.0 * batch.num_tokens * width
    if head.weight.requires_grad:
        size += 4.0 * vocabulary * width
    elif costs.settings.half_precision and head.weight.element_size() > 2:
        size += 2.0 * vocabulary * width
    return size

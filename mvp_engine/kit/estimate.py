"""How much memory and time a step will take on a GPU that is not there: by counting, on the meta device.

Memory is what stays (weights, gradients, moments), what backward needs of each block, by its layers and the rows that
meet them, and the buffers of the loss. Time is matrix products, attention and memory traffic, each at the share of the
card's peak that was seen in benchmarks. `tests/kit/test_estimate.py` compares both with what was measured.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from mvp_engine.batch import PackedBatch
from mvp_engine.distributed.sharding import blocks
from mvp_engine.errors import UserError
from mvp_engine.kit.mfu import MFUKit
from mvp_engine.log.peaks import peak_of
from mvp_engine.model_engine.packed import PackedModel
from mvp_engine.model_engine.parts import blocks_by_part, by_part

# Memory in GiB, as the driver tells, and bandwidth in TB/s, by a pattern in the name.
MEMORY = {
    r"G?B[23]00": (178, 7.7), r"H200": (139.8, 4.8), r"H20": (95, 4.0), r"H100|H800": (79.1, 3.35),
    r"A100|A800": (79.1, 2.0), r"L40S?": (44.4, 0.86), r"A10G?": (22, 0.6), r"L4": (22, 0.3),
    r"RTX PRO 6000": (95, 1.79), r"RTX 5090": (31.3, 1.79), r"RTX 4090": (23.5, 1.0), r"RTX 3090": (23.5, 0.94),
    r"MI3[02]": (191, 5.3),
}  # fmt: skip
MOMENTS = {"float32": 8.0, "bfloat16": 4.0, "int8": 2.06}  # bytes a parameter
# Shares of a card's peaks, seen on an H200 with compiled blocks (docs/performance.md), and the rest of a step.
PRODUCTS, ATTENTION, TRAFFIC, REST = 0.745, 0.36, 0.73, 1.12
FP8 = 1.5  # how much quicker 8-bit products are, with what it takes to make their factors
PASSES = 4.1  # how often what backward needs goes through memory, forward and backward
EAGER = 1.7  # how much more is kept where blocks are not compiled
GIB = 2**30


@dataclass(frozen=True)
class Setting:
    """What an estimate depends on beside the model and its batches."""

    gpu: str = "H200"
    half: bool = True  # computed in bf16
    compile: Any = "auto"
    recompute: Any = "none"
    fp8: Any = False
    moments: str = "float32"
    ema: bool = False
    shard: int = 1
    sequence: int = 1
    tensor: int = 1

    def card(self) -> tuple[float, float, float]:
        """FLOP/s, bytes of memory, bytes/s."""
        peak = peak_of(self.gpu)
        found = next((sizes for pattern, sizes in MEMORY.items() if re.search(pattern, self.gpu, re.IGNORECASE)), None)
        if peak is None or found is None:
            raise UserError(f"--gpu {self.gpu}: unknown. Some that are known: H200, H100, A100, B200, L40S, RTX 4090")
        return peak, found[0] * GIB, found[1] * 1e12


def estimate(
    model: PackedModel, largest: Iterable[PackedBatch], step: Sequence[PackedBatch], setting: Setting
) -> dict[str, Any]:
    """`largest` are candidates for the micro-batch that needs most memory; `step` is what one rank does in a step."""
    flops_s, room, bytes_s = setting.card()
    kit = MFUKit(model)
    moving = [_moving(model, kit, batch, setting) for batch in largest]
    memory = _static(model, setting) | max(moving, key=lambda one: sum(one.values()))
    peak = sum(memory.values())
    products = attention = kept = saved = 0.0
    for batch in step:
        done, paired = kit.kinds(batch)
        products, attention = products + float(done), attention + float(paired)
        kept += _kept(model, kit, batch, setting, recomputed=False)
        saved += _in_fp8(model, kit, batch, setting) * (1 - 1 / FP8)
    share = setting.sequence * setting.tensor
    weights = sum(p.numel() for p in model.parameters() if p.requires_grad) / (setting.shard * setting.tensor)
    seconds = {
        "matrix products": (products - saved) / share / (PRODUCTS * flops_s),
        "attention": attention / share / (ATTENTION * flops_s),
        "memory traffic": PASSES * kept / (TRAFFIC * bytes_s),
        "optimizer": weights * (24 + MOMENTS[setting.moments]) / (TRAFFIC * bytes_s),
    }
    total = REST * sum(seconds.values()) * (1.0 if setting.half else 8.0)
    tokens = sum(batch.num_tokens for batch in step)
    return {
        "gpu": setting.gpu,
        "memory_gib": {name: size / GIB for name, size in memory.items()},
        "peak_gib": peak / GIB,
        "room_gib": room / GIB,
        "fits": peak < 0.95 * room,
        "step_s": total,
        "seconds": seconds,
        "tokens_per_step": tokens,
        "tokens_per_s": tokens / total,
        "mfu": (products + attention) / share / total / flops_s,
    }


def _static(model: PackedModel, setting: Setting) -> dict[str, float]:
    """Bytes that stay, on one rank."""
    ranks = setting.shard * setting.tensor
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters()) - trained
    low = 2 if setting.half and model.lora is not None else 4  # a frozen base stays as its folder has it
    # For backward every block keeps its weights in bf16; sharded, those of two blocks are gathered at a time.
    largest = max(sum(p.numel() for p in block.parameters()) for block in blocks(model))
    copies = _copied(model, setting) if setting.shard == 1 else 2 * (2.0 + 4.0) * largest
    return {
        "weights": (4.0 * trained + low * frozen) / ranks,
        "gradients": 4.0 * trained / ranks,
        "moments": (MOMENTS[setting.moments] + 4.0 * setting.ema) * trained / ranks,
        "weights in bf16": copies / setting.tensor if setting.half else 0.0,
    }


def _copied(model: PackedModel, setting: Setting) -> float:
    """Bytes of weights in bf16, of all blocks that keep them: those that recompute make them again, those with 8-bit
    products have other copies, for as long as a product takes."""
    how, low = by_part(model, setting.recompute, "model.recompute"), by_part(model, setting.fp8, "model.fp8")
    kept = [
        block for block, part in blocks_by_part(model) if how.get(part, "none") == "none" and not low.get(part, False)
    ]
    return 2.0 * sum(p.numel() for block in kept for p in block.parameters())


def _moving(model: PackedModel, kit: MFUKit, batch: PackedBatch, setting: Setting) -> dict[str, float]:
    """Bytes that come and go with a micro-batch."""
    head: Any = model.hf.get_output_embeddings()  # type: ignore[operator]
    loss = 0.0
    if head is not None:
        vocabulary, width = head.weight.shape
        chunk = min(getattr(model, "chunk", 2048), batch.num_tokens)
        loss = chunk * vocabulary * 4.0 + 4.0 * vocabulary * width + 4.0 * batch.num_tokens * width
    media = sum(one.values.numel() * one.values.element_size() for one in batch.media.values())
    return {
        "activations": _kept(model, kit, batch, setting),
        "loss": loss / setting.tensor,
        "batches": 2.0 * media + 64.0 * batch.num_tokens,
    }


def _kept(model: PackedModel, kit: MFUKit, batch: PackedBatch, setting: Setting, recomputed: bool = True) -> float:
    """Bytes that backward needs of all blocks."""
    rows = _rows(kit, batch)
    rows["text"] /= setting.sequence
    size = 2.0 if setting.half else 4.0
    how = by_part(model, setting.recompute, "model.recompute")
    compiled = by_part(model, setting.compile, "model.compile")
    total, flowing = 0.0, False
    for block, part in sorted(blocks_by_part(model), key=lambda one: one[1] == "llm"):
        flowing = flowing or any(p.requires_grad for p in block.parameters())
        if not flowing:  # nothing behind it asks for a gradient
            continue
        kind = _KIND.get(part, "encoder")
        whole, products, width = _elements(block)
        way = how.get(part, "none") if recomputed else "none"
        elements = {"none": whole * (1.0 if compiled.get(part) else EAGER), "selective": products, "full": width}[way]
        total += size * elements * rows.get(kind, 0.0) / (setting.tensor if kind == "text" and way != "full" else 1)
    return total


def _in_fp8(model: PackedModel, kit: MFUKit, batch: PackedBatch, setting: Setting) -> float:
    """FLOPs of 8-bit products: what linear layers of blocks give, and the gradients of what they are given."""
    low, rows, total = by_part(model, setting.fp8, "model.fp8"), _rows(kit, batch), 0.0
    for block, part in blocks_by_part(model):
        if low.get(part, False):
            weights = sum(m.weight.numel() for m in block.modules() if isinstance(m, nn.Linear))
            total += 4.0 * weights * rows.get(_KIND.get(part, "encoder"), 0.0)
    return total


_KIND = {"llm": "text", "projector": "projector"}  # of the rows that a part meets; encoders have their own


def _rows(kit: MFUKit, batch: PackedBatch) -> dict[str, float]:
    """How many rows meet the layers of each kind."""
    rows = {"text": float(batch.num_tokens)}
    for name, media in batch.media.items():
        if len(media.rows):
            for kind, count, pair in kit._seen_by_encoder(name, media, batch.input_ids):
                if pair is None:
                    rows[kind] = rows.get(kind, 0.0) + float(count)
    return rows


def _elements(block: nn.Module) -> tuple[float, float, float]:
    """Numbers of one row that backward of a block needs: all; only what products and attention gave; the input alone.

    A group of linear layers, such as attention or an MLP, keeps what its first layers are given, what they give, and
    what its last is given. Rotary positions make new queries and keys. A norm keeps what it is given.
    """
    whole = products = width = 0.0
    for group in block.children():
        linear = [module for module in group.modules() if isinstance(module, nn.Linear)]
        stacks = [p for p in group.parameters() if p.ndim == 3]  # experts: a token visits some of them
        if linear:
            *first, last = linear
            given, made = float(last.in_features), float(sum(layer.out_features for layer in first))
            whole += given + made + (max(layer.in_features for layer in first) if first else 0.0)
            products += made + last.out_features
            width = max(width, float(last.out_features))
            if hasattr(group, "is_causal") and first:  # queries are as wide as what attention gives
                whole += given + (made - given) / 2
                products += given
        if stacks:
            visited = _visited(group)
            whole += visited * sum(float(stack.shape[1] + stack.shape[2]) for stack in stacks)
            products += visited * sum(float(stack.shape[1]) for stack in stacks)
        if not linear and not stacks:
            whole += sum(p.numel() for name, p in group.named_parameters() if name.endswith("weight") and p.ndim == 1)
    return whole, products + width, width


def _visited(group: nn.Module) -> int:
    for module in group.modules():
        for name in ("top_k", "num_experts_per_tok"):
            if isinstance(found := getattr(module, name, None), int):
                return found
    return 1

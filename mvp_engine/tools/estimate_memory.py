"""How much memory and time a step will take on a GPU that is not there: by counting, on the meta device.

Memory is what stays (weights, gradients, moments), what backward needs of each block, by its layers and the rows that
meet them, and the buffers of the loss. Time is matrix products, attention and memory traffic, each at the share of the
card's peak that was seen in benchmarks. `tests/kit/test_estimate.py` compares both with what was measured.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed.fsdp import blocks
from mvp_engine.errors import UserError
from mvp_engine.hf.packed_model import PackedModel
from mvp_engine.hf.parts import blocks_by_part, by_part
from mvp_engine.kit.flop_costs import matmul_flops, modules_in_forward_order
from mvp_engine.kit.mfu import MFUKit
from mvp_engine.log.peaks import peak_of
from mvp_engine.ops import fp8

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
FP8 = 1.4  # how much quicker 8-bit products are, with what it takes to make their factors
PASSES = 4.1  # how often what backward needs goes through memory, forward and backward
EAGER = 1.7  # how much more is kept where blocks are not compiled
GIB = 2**30


@dataclass(frozen=True)
class Setting:
    """What an estimate depends on beside the model and its batches."""

    gpu: str = "H200"
    half: bool = True  # computed in bf16
    compile: Any = "auto"
    activation_checkpointing: Any = "none"
    fp8: Any = False
    state_dtype: str = "float32"
    ema: bool = False
    shard: int = 1
    ulysses: int = 1
    tensor: int = 1

    @property
    def shards(self) -> int:
        """Ranks that share parameters: those that share sequences do, too."""
        return self.shard * self.ulysses

    def card(self) -> tuple[float, float, float]:
        """FLOP/s, bytes of memory, bytes/s."""
        peak = peak_of(self.gpu)
        found = next(
            (
                sizes
                for pattern, sizes in MEMORY.items()
                if re.search(pattern, self.gpu, re.IGNORECASE)
            ),
            None,
        )
        if peak is None or found is None:
            raise UserError(
                f"--gpu {self.gpu}: unknown. Some that are known: H200, H100, A100, B200, L40S, RTX 4090"
            )
        return peak, found[0] * GIB, found[1] * 1e12


def estimate(
    model: PackedModel,
    largest: Iterable[PackedBatch],
    step: Sequence[PackedBatch],
    setting: Setting,
) -> dict[str, Any]:
    """`largest` are candidates for the micro-batch that needs most memory; `step` is what one rank does in a step."""
    flops_s, room, bytes_s = setting.card()
    kit = MFUKit(model)
    moving = [_moving(model, kit, batch, setting) for batch in largest]
    memory = _static(model, setting) | max(moving, key=lambda one: sum(one.values()))
    peak = sum(memory.values())
    weights = sum(p.numel() for p in model.parameters() if p.requires_grad) / (
        setting.shards * setting.tensor
    )
    seconds = dict.fromkeys(("matrix products", "attention", "memory traffic"), 0.0)
    for batch in step:
        for name, spent in _spent(model, kit, batch, setting).items():
            seconds[name] += spent
    seconds["optimizer"] = weights * (24 + MOMENTS[setting.state_dtype]) / (TRAFFIC * bytes_s)
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
        "mfu": sum(float(kit.flops(batch)) for batch in step)
        / (setting.ulysses * setting.tensor)
        / total
        / flops_s,
    }


def _spent(
    model: PackedModel, kit: MFUKit, batch: PackedBatch, setting: Setting
) -> dict[str, float]:
    """Seconds of a micro-batch on one rank. Ranks that share tokens or matrices of the text run encoders whole."""
    flops_s, _, bytes_s = setting.card()
    text, every = (
        [float(flops) for flops in kit.flops_by_kind(one)]
        for one in (replace(batch, media={}), batch)
    )
    kept, again = (
        _kept(model, kit, batch, setting, recomputed=False),
        _again(model, kit, batch, setting),
    )
    low = _in_fp8(model, kit, batch, setting)
    spent = dict.fromkeys(("matrix products", "attention", "memory traffic"), 0.0)
    for kind, (products, attention) in {
        True: text,
        False: [a - b for a, b in zip(every, text, strict=True)],
    }.items():
        share = setting.ulysses * setting.tensor if kind else 1
        more = 4 / 3 if again[kind] else 1.0  # forward, and twice as much backward
        products += again[kind] - low[kind] * (1 - 1 / FP8)
        spent["matrix products"] += products / share / (PRODUCTS * flops_s)
        spent["attention"] += more * attention / share / (ATTENTION * flops_s)
        spent["memory traffic"] += more * PASSES * kept[kind] / (TRAFFIC * bytes_s)
    return spent


def _static(model: PackedModel, setting: Setting) -> dict[str, float]:
    """Bytes that stay, on one rank."""
    ranks = setting.shards * setting.tensor
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    copies = (
        {"weights in bf16": _copied(model, setting)}
        if setting.shards == 1
        else {"gathered weights": _gathered(model, setting)}
    )
    return {
        "weights": sum(float(p.numel() * p.element_size()) for p in model.parameters()) / ranks,
        "gradients": 4.0 * trained / ranks,
        "moments": (MOMENTS[setting.state_dtype] + 4.0 * setting.ema) * trained / ranks,
        **{name: size / setting.tensor for name, size in copies.items()},
    }


def _copied(model: PackedModel, setting: Setting) -> float:
    """Bytes of weights in bf16, of all blocks that keep them for backward: those that recompute make them again, those
    with 8-bit products have other copies, for as long as a product takes, and what is bf16 needs none."""
    how, low = (
        by_part(model, setting.activation_checkpointing, "model.activation_checkpointing"),
        by_part(model, setting.fp8, "model.fp8"),
    )
    kept = [
        b
        for b, part, flows in _flows(model)
        if flows and how.get(part, "none") == "none" and not low.get(part)
    ]
    return 2.0 * sum(
        p.numel() for b in kept for p in b.parameters() if setting.half and p.element_size() > 2
    )


def _gathered(model: PackedModel, setting: Setting) -> float:
    """Bytes of whole weights on a rank that holds shards: of two blocks at a time, with their gradients, and of all
    that is in no block."""
    size, inside = 2.0 if setting.half else 4.0, [[*block.parameters()] for block in blocks(model)]
    largest = max(
        sum(p.numel() * (size + 4.0 * p.requires_grad) for p in block) for block in inside
    )
    outside = {*model.parameters()} - {p for block in inside for p in block}
    return 2 * largest + size * sum(p.numel() for p in outside)


def _flows(model: PackedModel) -> list[tuple[nn.Module, str, bool]]:
    """Each block, its part, and whether backward goes through it: it trains, or something before it does."""
    before, flowing = set(), False
    for module, _, _ in modules_in_forward_order(model.hf):
        if flowing:
            before.add(module)
        flowing = flowing or any(p.requires_grad for p in module.parameters(recurse=False))
    return [
        (block, part, block in before or any(p.requires_grad for p in block.parameters()))
        for block, part in blocks_by_part(model)
    ]


def _moving(
    model: PackedModel, kit: MFUKit, batch: PackedBatch, setting: Setting
) -> dict[str, float]:
    """Bytes that come and go with a micro-batch."""
    head: Any = model.hf.get_output_embeddings()  # type: ignore[operator]
    loss = 0.0
    if head is not None:
        vocabulary, width = head.weight.shape
        chunk = min(getattr(model, "chunk", 2048), batch.num_tokens)
        loss = chunk * vocabulary * 4.0 + 4.0 * batch.num_tokens * width
        if head.weight.requires_grad or (
            setting.half and head.weight.element_size() > 2
        ):  # its gradient, or a copy
            loss += (4.0 if head.weight.requires_grad else 2.0) * vocabulary * width
    media = sum(one.values.numel() * one.values.element_size() for one in batch.media.values())
    return {
        "activations": sum(_kept(model, kit, batch, setting).values()),
        "loss": loss / setting.tensor,
        "batches": 2.0 * media + 64.0 * batch.num_tokens,
    }


def _kept(
    model: PackedModel, kit: MFUKit, batch: PackedBatch, setting: Setting, recomputed: bool = True
) -> dict[bool, float]:
    """Bytes that backward needs of all blocks: of those of text, and of the others."""
    rows = _rows(kit, batch)
    rows["text"] /= setting.ulysses
    size = 2.0 if setting.half else 4.0
    how = by_part(model, setting.activation_checkpointing, "model.activation_checkpointing")
    compiled = by_part(model, setting.compile, "model.compile")
    found = {True: 0.0, False: 0.0}
    for block, part, flows in _flows(model):
        if not flows:
            continue
        kind = _KIND.get(part, "encoder")
        whole, products, width = _elements(block)
        way = how.get(part, "none") if recomputed else "none"
        elements = {
            "none": whole * (1.0 if compiled.get(part) else EAGER),
            "selective": products,
            "full": width,
        }[way]
        ranks = setting.tensor if kind == "text" and way != "full" else 1
        found[kind == "text"] += size * elements * rows.get(kind, 0.0) / ranks
    return found


def _again(
    model: PackedModel, kit: MFUKit, batch: PackedBatch, setting: Setting
) -> dict[bool, float]:
    """FLOPs of products in blocks that are recomputed whole: of those of text, and of the others."""
    how, rows = (
        by_part(model, setting.activation_checkpointing, "model.activation_checkpointing"),
        _rows(kit, batch),
    )
    text: Any = model.hf.config.get_text_config()  # type: ignore[union-attr, operator]
    found = {True: 0.0, False: 0.0}
    for block, part, flows in _flows(model):
        if flows and how.get(part) == "full":
            kind = _KIND.get(part, "encoder")
            config = text if kind == "text" else None
            each = (
                matmul_flops(m, n, p, config)
                for m in block.modules()
                for n, p in m.named_parameters(recurse=False)
            )
            found[kind == "text"] += sum(each) * rows.get(kind, 0.0)
    return found


def _in_fp8(
    model: PackedModel, kit: MFUKit, batch: PackedBatch, setting: Setting
) -> dict[bool, float]:
    """FLOPs of 8-bit products, what linear layers of blocks give and the gradients of what they are given: of blocks
    of text, and of the others."""
    low, how = (
        by_part(model, setting.fp8, "model.fp8"),
        by_part(model, setting.activation_checkpointing, "model.activation_checkpointing"),
    )
    rows, found = _rows(kit, batch), {True: 0.0, False: 0.0}
    for block, part, flows in _flows(model):
        if low.get(part, False):
            kind, times = (
                _KIND.get(part, "encoder"),
                1 + flows * (2 if how.get(part) == "full" else 1),
            )
            weights = sum(
                p.numel()
                for m in block.modules()
                if fp8.fits(m)
                for p in m.parameters(recurse=False)
            )
            found[kind == "text"] += 2.0 * times * weights * rows.get(kind, 0.0)
    return found


_KIND = {
    "llm": "text",
    "projector": "projector",
}  # of the rows that a part meets; encoders have their own


def _rows(kit: MFUKit, batch: PackedBatch) -> dict[str, float]:
    """How many rows meet the layers of each kind."""
    rows = {"text": float(batch.num_tokens)}
    for name, media in batch.media.items():
        if len(media.row_counts):
            for kind, count, pair in kit.encoder_work(name, media, batch.input_ids):
                if pair is None:
                    rows[kind] = rows.get(kind, 0.0) + float(count)
    return rows


def _elements(block: nn.Module) -> tuple[float, float, float]:
    """Numbers of one row that backward of a block needs: all; only what products and attention gave; the input alone.

    A group of linear layers, such as attention or an MLP, keeps what its first layers are given, what they give, and
    what its last is given. Rotary positions make new queries and keys. A norm keeps what it is given. Adapters keep
    what their layer is given, and little else.
    """
    whole = products = width = 0.0
    for group in block.children():
        linear = [
            m
            for name, m in group.named_modules()
            if isinstance(m, nn.Linear) and "lora_" not in name
        ]
        stacks = [
            p for p in group.parameters() if p.ndim == 3
        ]  # experts: a token visits some of them
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
            whole += sum(
                p.numel()
                for name, p in group.named_parameters()
                if name.endswith("weight") and p.ndim == 1
            )
    return whole, products + width, width


def _visited(group: nn.Module) -> int:
    for module in group.modules():
        for name in ("top_k", "num_experts_per_tok"):
            if isinstance(found := getattr(module, name, None), int):
                return found
    return 1

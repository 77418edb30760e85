"""MFUKit: how many floating-point operations a batch takes, by formula, and so how much of the GPU a training uses.

Legend: T tokens, L tokens of one sequence, H heads, d head size.

    self.mfu = MFUKit(self.model)        # after super().before_train()
    self.mfu.count(ctx)                  # in train_pre_step; MFU is then in every line of the log

Counted is what a step must compute, once: 2 operations for each weight of a matrix and row that meets it, the pairs of
tokens that attend to each other (causal, windows, packed sequences apart), the experts that a token really visits.
Backward costs the same again for each gradient that is needed: of a weight if it trains, of an input if something
before it does. So frozen parts and adapters count for what they cost. Not counted: what is computed twice (recomputed
blocks), norms, activations, the optimizer. Nothing here waits for the GPU.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from mvp_engine.data.batch import Media, PackedBatch
from mvp_engine.engine.context import StepContext
from mvp_engine.errors import UserError
from mvp_engine.hf.packed_model import PackedModel

LOGGER = logging.getLogger("mvp_engine")
_PROJECTOR = re.compile(r"merger|projector|connector|multi_modal|mm_|embed_vision|embed_audio")
_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # how configs call their number

# Of what an encoder sees: the kind of rows, how many, and the cost of one where it is a pair.
Share = tuple[str, Tensor | float, float | None]


@dataclass
class _Costs:
    """FLOPs of forward and backward: for each row of each kind, and for each pair of tokens that attend."""

    rows: dict[str, float] = field(default_factory=dict)
    pairs: dict[tuple[str, int | None], float] = field(default_factory=dict)  # by kind and window

    def add(self, kind: str, amount: float) -> None:
        self.rows[kind] = self.rows.get(kind, 0.0) + amount

    def add_pairs(self, kind: str, window: int | None, amount: float) -> None:
        self.pairs[kind, window] = self.pairs.get((kind, window), 0.0) + amount


class MFUKit:
    def __init__(self, model: PackedModel) -> None:
        """What trains is looked up when the first batch is counted: by then the engine has frozen what it should."""
        self.model = model
        self.config: Any = model.hf.config
        self._unknown = False

    @cached_property
    def costs(self) -> _Costs:
        return _costs_of(self.model)

    def count(self, ctx: StepContext) -> None:
        """Add the step's FLOPs to the totals; the log makes `mfu` of them. (Tokens are counted with the loss.)

        Ranks that share sequences all count them; the metrics take one rank of them, so they are in the sum once.
        """
        if self._unknown:
            return
        try:
            amounts = [self.flops(batch) for batch in ctx.micro_batches]
        except UserError as error:  # a training is worth more than a figure about it
            self._unknown = True
            LOGGER.warning("no MFU: %s", error)
            return
        for amount in amounts:
            ctx.count("flops", amount)

    def flops(self, batch: PackedBatch, *, masked: bool = True) -> Tensor:
        """Forward and backward of a batch, as a float64 scalar on its device. With `masked=False` every token of a
        sequence is counted as seeing every other, as torch's FLOP counter does."""
        products, attention = self.kinds(batch, masked=masked)
        return products + attention

    def kinds(self, batch: PackedBatch, *, masked: bool = True) -> tuple[Tensor, Tensor]:
        """The same, of matrix products and of attention."""
        costs = self.costs
        lengths = batch.cu_seqlens.diff().double()
        products = torch.full(
            (), costs.rows["text"] * batch.num_tokens, dtype=torch.float64, device=lengths.device
        )
        attention = torch.zeros_like(products)
        for (kind, window), cost in costs.pairs.items():
            if kind == "text":
                attention += cost * (_seen(lengths, window) if masked else lengths.square()).sum()
        for name, media in batch.media.items():
            if len(media.row_counts):
                for kind, rows, pair in self._seen_by_encoder(name, media, batch.input_ids):
                    if pair is None:
                        products += rows * costs.rows.get(kind, 0.0)
                    else:
                        attention += rows * pair
        return products, attention

    def _seen_by_encoder(self, name: str, media: Media, ids: Tensor) -> Iterator[Share]:
        pairs = {
            window: cost for (kind, window), cost in self.costs.pairs.items() if kind == "encoder"
        }
        grids = [
            grid for field_name, grid in media.fields.items() if field_name.endswith("grid_thw")
        ]
        if grids:
            yield from self._patches(grids[0].double(), pairs)
        elif name == "input_features":
            yield from self._sounds(media.values, sum(pairs.values()))
        elif name == "pixel_values" and media.values.ndim >= 4:
            yield from self._images(media.values, ids, sum(pairs.values()))
        else:
            raise UserError(
                f"MFUKit does not know how the encoder of {self.config.model_type} sees {name!r}"
            )

    def _patches(self, grid_N3: Tensor, pairs: dict[int | None, float]) -> Iterator[Share]:
        """Any number of patches in each image, frames apart from each other; some layers have square windows."""
        frames_N, high_N, wide_N = grid_N3.unbind(1)
        patches = grid_N3.prod(1).sum()
        yield "encoder", patches, None
        yield "projector", patches / self.config.vision_config.spatial_merge_size**2, None
        for window, cost in pairs.items():
            if window is None:
                yield "pair", (frames_N * (high_N * wide_N).square()).sum(), cost
            else:  # those at the edges are smaller
                high, wide = (
                    n // window * window**2 + (n % window).square() for n in (high_N, wide_N)
                )
                yield "pair", (frames_N * high * wide).sum(), cost

    def _images(self, values: Tensor, ids: Tensor, pair: float) -> Iterator[Share]:
        """Images (or tiles) of one size."""
        size = self.config.vision_config.patch_size
        patch = size if isinstance(size, int) else size[0]
        images, tokens = (
            values.shape[:-3].numel(),
            (values.shape[-2] // patch) * (values.shape[-1] // patch),
        )
        first = any(
            "class_embedding" in name or "cls_token" in name
            for name, _ in self.model.named_parameters()
        )
        yield "patch", images * tokens, None
        yield "encoder", images * (tokens + first), None
        yield "projector", (ids == self.config.image_token_id).sum(), None
        yield "pair", images * (tokens + first) ** 2, pair

    def _sounds(self, values: Tensor, pair: float) -> Iterator[Share]:
        """Spectrograms of one length: two convolutions, of which the second halves it; pooled by two at the end."""
        sounds, frames = len(values), values.shape[-1]
        half = (frames + 1) // 2
        yield "frame", sounds * frames, None
        yield "encoder", sounds * half, None
        yield "projector", sounds * (half // 2), None
        yield "pair", sounds * half**2, pair


def _seen(lengths_S: Tensor, window: int | None) -> Tensor:
    """How many pairs attend in causal sequences: each token sees itself and those before it, at most `window`."""
    if window is None:
        return lengths_S * (lengths_S + 1) / 2
    full = (lengths_S - window).clamp(min=0)  # tokens that see a whole window
    rest = lengths_S - full
    return rest * (rest + 1) / 2 + full * window


def in_order(hf: Any) -> list[tuple[nn.Module, str, bool]]:
    """The modules in the order in which they run: encoders, projector, text, head. With name, and whether of text."""
    inside, head = set(hf.get_decoder().modules()), hf.get_output_embeddings()
    every = [
        (module, name, module in inside or module is head) for name, module in hf.named_modules()
    ]
    return sorted(every, key=lambda one: one[2])


def _costs_of(model: PackedModel) -> _Costs:
    """One walk through the modules."""
    hf: Any = model.hf
    config = hf.config.get_text_config()
    costs, flowing = _Costs(), False
    for module, name, is_text in in_order(hf):
        if hasattr(module, "is_causal") and any(True for _ in module.parameters()):
            window = (
                getattr(module, "sliding_window", None) if is_text else _window(hf.config, name)
            )
            flows = (flowing or _trains(module.parameters())) and (
                is_text or _block(name) < _blocks_used(hf.config)
            )
            costs.add_pairs(
                "text" if is_text else "encoder", window, _pair(module, config) * (1 + 2 * flows)
            )
        for label, weight in module.named_parameters(recurse=False):
            forward = matrix(module, label, weight, config if is_text else None)
            if forward:
                kind = "text" if is_text else _kind(module, name)
                used = is_text or _block(name) < _blocks_used(hf.config)
                costs.add(kind, forward * (1 + (weight.requires_grad + flowing) * used))
        flowing = flowing or _trains(module.parameters(recurse=False))
    return costs


def _trains(parameters: Iterator[nn.Parameter]) -> bool:
    return any(p.requires_grad for p in parameters)


def matrix(module: nn.Module, label: str, weight: Tensor, text: Any) -> float:
    """Forward FLOPs of one row that meets this weight; 0 if it is no matrix."""
    if isinstance(module, nn.Embedding) or "bias" in label:
        return 0.0
    if isinstance(module, _CONVS) or weight.ndim == 2:
        return 2.0 * weight.numel()
    experts = next((n for key in _EXPERTS if (n := getattr(text, key, None))), 0)
    if weight.ndim == 3 and len(weight) == experts:
        return 2.0 * weight.numel() / experts * text.num_experts_per_tok
    return 0.0


def _kind(module: nn.Module, name: str) -> str:
    """Which rows an encoder's module sees."""
    if isinstance(module, nn.Conv1d):
        return "frame" if module.stride[0] == 1 else "encoder"
    if isinstance(module, nn.Conv2d):
        return "patch"
    return "projector" if _PROJECTOR.search(name) else "encoder"


def _pair(module: Any, config: Any) -> float:
    """Forward FLOPs of one pair of tokens that attend."""
    heads = getattr(module, "num_heads", None) or config.num_attention_heads
    size = getattr(module, "head_dim", None)
    return 2.0 * heads * (2 * size if size else module.qk_head_dim + module.v_head_dim)


def _block(name: str) -> int:
    """The number of the block that a module is part of; -1 for none."""
    found = re.search(r"\.(\d+)\.", f"{name}.")
    return int(found[1]) if found else -1


def _blocks_used(config: Any) -> float:
    """Some take the features of an earlier block: those after it run forward, and nothing comes back."""
    layer = getattr(config, "vision_feature_layer", -1)
    return (
        config.vision_config.num_hidden_layers + layer + 1
        if isinstance(layer, int) and layer < -1
        else math.inf
    )


def _window(config: Any, name: str) -> int | None:
    """The windows of an encoder's block, in patches along each side, if it has them."""
    vision: Any = getattr(config, "vision_config", None)
    whole = getattr(vision, "fullatt_block_indexes", None)
    if whole is None or _block(name) in whole:
        return None
    return vision.window_size // vision.patch_size

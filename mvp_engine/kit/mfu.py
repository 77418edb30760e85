"""MFUKit: the model FLOPs of a batch by formula, and from them the MFU (model FLOPs utilization) of a training.

Legend: S sequences, N images, 3 the axes (time, height, width) of a grid of patches.

    self.mfu = MFUKit(self.model)        # after super().before_train()
    self.mfu.count(ctx)                  # in train_pre_step; MFU is then in every line of the log

The formula counts what a step must compute, once: matmuls, the head at tokens with a label, attention pairs that the
mask allows (causal, windows, packed sequences), and the experts that a token visits. Frozen parts and adapters count
with the gradients that they need. Activation checkpointing, norms, activations and the optimizer do not count. Nothing
here syncs with the GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from mvp_engine.data.batch import Media, PackedBatch
from mvp_engine.engine.hooks import StepContext
from mvp_engine.errors import UserError
from mvp_engine.hf.model.flop_costs import FlopCosts, Work
from mvp_engine.hf.model.packed_model import PackedModel

LOGGER = logging.getLogger("mvp_engine")


class MFUKit:
    """Counts the FLOPs of batches for one model."""

    def __init__(self, model: nn.Module) -> None:
        """The costs of a module of your own are not known: `count` then counts nothing."""
        self.model: Any = model
        self.config: Any = None
        self._unsupported = not isinstance(model, PackedModel)
        if isinstance(model, PackedModel):
            self.model = model if model.stage is None else model.stage.whole
            self.config = self.model.backbone.config

    @cached_property
    def costs(self) -> FlopCosts:
        """Computed with the first batch, when the engine has frozen what it should."""
        return self.model.flop_costs()

    def count(self, ctx: StepContext) -> None:
        """Add the FLOPs of the step to the totals; the log derives `mfu` from them.

        All ranks of a model-parallel group count the same sequences; the metrics take one rank of each group.
        """
        if self._unsupported:
            return
        try:
            flops = [torch.add(*self.flops_by_kind(batch)) for batch in ctx.micro_batches]
        except UserError as error:  # a missing figure does not stop a training
            self._unsupported = True
            LOGGER.warning("no MFU: %s", error)
            return
        for amount in flops:
            # Of a batch on the host: as a tensor it would be copied, and added by kernels.
            ctx.count("flops", amount if amount.is_cuda else float(amount))

    def flops(self, batch: PackedBatch, *, masked: bool = True) -> Tensor:
        """FLOPs of forward and backward, as a float64 scalar on the batch's device.

        With `masked=False` every token has logits and attends to every other of its sequence, as torch's FLOP counter
        assumes.
        """
        matmul, attention = self.flops_by_kind(batch, masked=masked)
        return matmul + attention

    def flops_by_kind(self, batch: PackedBatch, *, masked: bool = True) -> tuple[Tensor, Tensor]:
        """The FLOPs of matmuls and of attention."""
        costs = self.costs
        lengths_S = batch.cu_seqlens.diff().double()
        # The head computes logits where there is a label.
        num_logits = batch.num_loss_tokens if masked else batch.num_tokens
        share = self.model.text_share(batch)
        matmul = lengths_S.new_zeros(()) + costs.rows["text"] * batch.num_tokens * share
        matmul += costs.rows.get("head", 0.0) * num_logits * (share == 1.0)
        attention = torch.zeros_like(matmul)
        for (kind, window), cost in costs.pairs.items():
            if kind == "text":
                is_causal = masked and self.model.has_causal_text
                pairs_S = causal_pairs(lengths_S, window) if is_causal else lengths_S.square()
                attention += cost * pairs_S.sum() * share
        works = [self.model.other_work(costs, batch)]
        for name, media in batch.media.items():
            if len(media.row_counts):
                works.append(self.encoder_work(name, media, batch))
        for kind, amount, pair_cost in chain.from_iterable(works):
            if pair_cost is None:
                matmul += amount * costs.rows.get(kind, 0.0)
            else:
                attention += amount * pair_cost
        return matmul, attention

    def encoder_work(self, name: str, media: Media, batch: PackedBatch) -> Iterator[Work]:
        """The rows and attention pairs of the encoder that reads `media`, which is `batch.media[name]`."""
        if media.is_target:
            yield from self.model.target_work(self.costs, media)
            return
        pair_costs = {}
        for (kind, window), cost in self.costs.pairs.items():
            if kind == "encoder":
                pair_costs[window] = cost
        total_pair_cost = sum(pair_costs.values())
        for field_name, grid in media.fields.items():
            if field_name.endswith("grid_thw"):
                yield from self._patch_grids(grid.double(), pair_costs)
                return
        if name == "input_features":
            yield from self._spectrograms(media.values, total_pair_cost)
        elif name == "pixel_values" and media.values.ndim >= 4:
            ids = _ids_with_own_media(batch, media)
            yield from self._images(media.values, ids, total_pair_cost)
        else:
            raise UserError(
                f"MFUKit does not support how the encoder of {self.config.model_type} reads {name!r}"
            )

    def _patch_grids(self, grid_N3: Tensor, pair_costs: dict[int | None, float]) -> Iterator[Work]:
        """Images and videos of any size. Frames do not attend to each other; some layers have square windows."""
        frames_N, height_N, width_N = grid_N3.unbind(1)
        patches = grid_N3.prod(1).sum()
        yield "encoder", patches, None
        yield "projector", patches / self.config.vision_config.spatial_merge_size**2, None
        for window, cost in pair_costs.items():
            if window is None:
                yield "pair", (frames_N * (height_N * width_N).square()).sum(), cost
            else:
                rows_N = _window_pairs(height_N, window)
                columns_N = _window_pairs(width_N, window)
                yield "pair", (frames_N * rows_N * columns_N).sum(), cost

    def _images(self, values: Tensor, ids: Tensor, pair_cost: float) -> Iterator[Work]:
        """Images (or tiles) of one size."""
        patch_size = self.config.vision_config.patch_size
        if not isinstance(patch_size, int):
            patch_size = patch_size[0]
        num_images = values.shape[:-3].numel()
        num_patches = (values.shape[-2] // patch_size) * (values.shape[-1] // patch_size)
        num_tokens = num_patches + self._has_class_token
        yield "patch", num_images * num_patches, None
        yield "encoder", num_images * num_tokens, None
        yield "projector", (ids == self.config.image_token_id).sum(), None
        yield "pair", num_images * num_tokens**2, pair_cost

    @cached_property
    def _has_class_token(self) -> bool:
        names = [name for name, _ in self.model.named_parameters()]
        return any("class_embedding" in name or "cls_token" in name for name in names)

    def _spectrograms(self, values: Tensor, pair_cost: float) -> Iterator[Work]:
        """Spectrograms of one length. Of two convolutions the second halves it, a pooling halves it again."""
        num_clips = len(values)
        num_frames = values.shape[-1]
        half = (num_frames + 1) // 2
        yield "frame", num_clips * num_frames, None
        yield "encoder", num_clips * half, None
        yield "projector", num_clips * (half // 2), None
        yield "pair", num_clips * half**2, pair_cost


def _ids_with_own_media(batch: PackedBatch, media: Media) -> Tensor:
    """The token ids, with -1 in sequences that use the items of another one: an encoder reads those once."""
    if media.shared_with is None:
        return batch.input_ids
    owns_S = media.shared_with == torch.arange(batch.num_sequences)
    owns_T = owns_S.to(batch.input_ids.device).repeat_interleave(
        batch.lengths, output_size=batch.num_tokens
    )
    return torch.where(owns_T, batch.input_ids, -1)


def causal_pairs(lengths_S: Tensor, window: int | None) -> Tensor:
    """Pairs that attend in causal sequences: a token sees itself and those before it, `window` tokens at most."""
    if window is None:
        return lengths_S * (lengths_S + 1) / 2
    with_full_window = (lengths_S - window).clamp(min=0)
    others = lengths_S - with_full_window
    return others * (others + 1) / 2 + with_full_window * window


def _window_pairs(size_N: Tensor, window: int) -> Tensor:
    """Pairs along one axis that is cut into windows, of which the last may be smaller."""
    return size_N // window * window**2 + (size_N % window).square()

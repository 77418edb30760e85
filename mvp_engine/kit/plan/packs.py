"""The packs (micro-batches) that a plan counts: those of a config's data, samples of its rows, or assumed ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, cached_property
from math import isqrt
from typing import Any

import numpy as np
import torch

from mvp_engine.data.batch import Media, PackedBatch
from mvp_engine.errors import count
from mvp_engine.hf.model.flop_costs import PlanFacts
from mvp_engine.kit.data.kit import MLLMDataKit
from mvp_engine.kit.data.measured_sources import repeated
from mvp_engine.kit.data.pack.packer import make_packs
from mvp_engine.kit.data.settings import MLLMData

SAMPLED_PACKS = 8  # micro-batches that are loaded for the time of a step
IMAGE_TOKENS = 1024  # the most tokens of an assumed image, without data.limits.max_pixels
MEDIA_SHARE = 0.75  # the share of image or audio tokens in assumed packs
ENCODERS = ("vision_config", "audio_config")
FULL = 0.9  # of the tokens of a pack that counts as full


class Packs:
    """Full packs, assumed without data; all are equal."""

    steps_per_epoch: int | None = None  # None: not known

    def __init__(self, batch: PackedBatch, longest_row: int | None, text: str) -> None:
        self.largest = [batch]  # candidates for the micro-batch that needs most memory
        self.sampled = [batch]  # micro-batches for the time of a step
        self.longest_row = longest_row  # tokens; None: not known
        self.text = text


class DataPacks(Packs):
    """The packs of a config's data. They are loaded, with their media, when they are needed."""

    def __init__(self, kit: MLLMDataKit, packs_per_step: int) -> None:
        # The loader also raises for data and batch sizes that cannot be trained on.
        self.dataset: Any = kit.loader("train", global_batch_size=packs_per_step).dataset
        self.steps_per_epoch = self.dataset.plan.steps
        packs = [self.dataset.plan.pack(index) for index in range(len(self.dataset.plan))]
        self.tokens = [int(lengths.sum()) for _, lengths in packs]
        self.longest_row = max(int(lengths.max()) for _, lengths in packs)
        encoder_costs = np.concatenate([cost.encoder for cost in self.dataset.costs])
        self.encoder_work = [
            int(encoder_costs[self.dataset.first[rows[:, 0]] + rows[:, 1]].sum())
            for rows, _ in packs
        ]
        self.text = f"packs of the data, with up to {count(max(self.tokens), 'token')}"

    @cached_property
    def largest(self) -> list[PackedBatch]:  # type: ignore[override]
        """The pack with most tokens and the one with most encoder work: the peak is in one of them."""
        chosen = {int(np.argmax(self.tokens)), int(np.argmax(self.encoder_work))}
        return [self.dataset[index][0] for index in sorted(chosen)]

    @cached_property
    def sampled(self) -> list[PackedBatch]:  # type: ignore[override]
        """Packs that are spread evenly over the epoch."""
        number = min(SAMPLED_PACKS, len(self.dataset))
        places = np.linspace(0, len(self.dataset) - 1, number).astype(int).tolist()
        return [self.dataset[index][0] for index in places]


class SampledBatches:
    """Micro-batches of any size that are like those of a data kit, made from a few of its rows without a packing plan.

    These rows may have less media than most. The encoder work of more rows is measured.
    """

    def __init__(self, kit: MLLMDataKit, split: str = "train") -> None:
        sample = kit.sample(split)
        media = {}  # on the meta device: their shapes are enough
        for name, item in sample.media.items():
            media[name] = replace(item, values=item.values.to("meta"))
        self.sample = replace(sample, media=media)
        self.costs = cache(lambda: kit.sample_costs(split))  # of no use without media
        # A choice asks for each size with many modes.
        self._batch = cache(lambda size: repeated(self.sample, size))
        self.heaviest = cache(self._heaviest)

    def __call__(self, size: int) -> PackedBatch:
        return self._batch(size)

    def _heaviest(self, size: int) -> float:
        """The encoder work of the heaviest of many packs of this size, as a multiple of that of `self(size)`."""
        costs = self.costs()
        tokens, encoder = costs[costs[:, 0] <= size].T
        of_batch = _media_share(self(size)) / (_media_share(self.sample) or 1.0)
        in_sample = int(np.searchsorted(np.cumsum(tokens), self.sample.num_tokens)) + 1
        density = of_batch * encoder[:in_sample].sum() / max(1, tokens[:in_sample].sum())
        if not density:
            return 1.0  # text
        shares = [float(encoder.sum() / tokens.sum())]
        for pack in make_packs(tokens, encoder, size):
            if tokens[pack].sum() >= FULL * size:  # not the last one
                shares.append(float(encoder[pack].sum() / tokens[pack].sum()))
        return max(shares) / density


def _media_share(batch: PackedBatch) -> float:
    """Values of media for each token."""
    return sum(media.values.numel() for media in batch.media.values()) / batch.num_tokens


# ---- Without data --------------------------------------------------------------------------------------------------


def assumed_packs(
    facts: PlanFacts, data: MLLMData, tokens: int, media_share: float = MEDIA_SHARE
) -> Packs:
    """Full packs of so many tokens, in rows as long as the settings allow, with media for the encoder."""
    of_model = facts.assumed_batch(tokens)
    if of_model is not None:
        return Packs(*of_model)
    config = facts.backbone.config
    max_length = min(tokens, data.max_length or tokens)
    ids = torch.zeros(tokens, dtype=torch.long)
    media = dict[str, Media]()
    text = (
        f"full packs of {tokens:,} tokens, assumed; rows of {max_length:,} tokens (data.max_length)"
    )
    items = assumed_media(config, int(tokens * media_share), data.limits.max_pixels)
    if items is not None:
        name, item_tokens, values = items
        number = len(values.row_counts)
        media[name] = values
        placeholder = getattr(config, "image_token_id", None)
        if placeholder is not None:
            ids[: number * item_tokens] = placeholder
        kind = "audio clip" if name == "input_features" else "image"
        text += f", {count(number, kind)} of {item_tokens:,} tokens per pack (--media-share)"
    elif media_share and any(getattr(config, name, None) for name in ENCODERS):
        text += "; the encoder is not counted"
    batch = PackedBatch.from_sequences(list(ids.split(max_length)), media=media)
    return Packs(batch, data.max_length, text)


def assumed_batches(
    facts: PlanFacts, data: MLLMData, media_share: float = MEDIA_SHARE
) -> Callable[[int], PackedBatch]:
    """Micro-batches by their number of tokens, of whole rows."""
    max_length = data.max_length or data.tokens_per_pack

    @cache
    def batch(tokens: int) -> PackedBatch:
        of_model = facts.assumed_batch(tokens)
        whole = tokens - tokens % min(max_length, tokens)
        return (
            of_model[0] if of_model else assumed_packs(facts, data, whole, media_share).sampled[0]
        )

    return batch


def assumed_media(
    config: Any, tokens: int, max_pixels: int | None
) -> tuple[str, int, Media] | None:
    """The name in the batch, the tokens of an item, and items that fill `tokens`; None if there are none."""
    vision = getattr(config, "vision_config", None)
    audio = getattr(config, "audio_config", None)
    if tokens == 0:
        return None
    if vision is not None and getattr(vision, "spatial_merge_size", None):
        return _patches(vision, tokens, max_pixels)
    if vision is not None and getattr(vision, "image_size", None):
        return _images(config, vision, tokens)
    if audio is not None and getattr(audio, "max_source_positions", None):
        # Clips of one length: the convolution and pooling of Whisper encoders halve the frames twice.
        positions = audio.max_source_positions
        shape = (audio.num_mel_bins, 2 * positions)
        return _items("input_features", tokens, positions // 2, shape)
    return None


def _patches(vision: Any, tokens: int, max_pixels: int | None) -> tuple[str, int, Media] | None:
    """Square images of any size, as flat patches: the Qwen-VL families."""
    merge = vision.spatial_merge_size
    token_pixels = (vision.patch_size * merge) ** 2
    limit = IMAGE_TOKENS if max_pixels is None else max_pixels // token_pixels
    side = isqrt(min(limit, tokens))  # in tokens
    if side == 0:
        return None
    items = tokens // side**2
    patches = (side * merge) ** 2
    colours = getattr(vision, "in_channels", 3) * getattr(vision, "temporal_patch_size", 1)
    values = _empty(items * patches, colours * vision.patch_size**2)
    grids = torch.tensor([[1, side * merge, side * merge]] * items)
    first_row = torch.zeros(items, dtype=torch.long)
    media = Media(values, torch.full((items,), patches), first_row, {"image_grid_thw": grids})
    return "pixel_values", side**2, media


def _images(config: Any, vision: Any, tokens: int) -> tuple[str, int, Media]:
    """Images of one size: CLIP and SigLIP encoders."""
    height, width = _pair(vision.image_size)
    patch_height, patch_width = _pair(vision.patch_size)
    item_tokens = (height // patch_height) * (width // patch_width)
    poolings = [(config, "scale_factor"), (config, "spatial_merge_size")]
    for part, name in [*poolings, (vision, "pooling_kernel_size")]:
        item_tokens //= (getattr(part, name, None) or 1) ** 2
    for name in ("mm_tokens_per_image", "image_seq_length"):
        item_tokens = getattr(config, name, None) or item_tokens
    return _items("pixel_values", tokens, item_tokens, (3, height, width))


def _items(
    name: str, tokens: int, item_tokens: int, shape: tuple[int, ...]
) -> tuple[str, int, Media]:
    """Items of one shape, at least one: a short clip is padded to the full shape, too."""
    items = max(1, tokens // item_tokens)
    first_row = torch.zeros(items, dtype=torch.long)
    media = Media(_empty(items, *shape), torch.ones(items, dtype=torch.long), first_row)
    return name, min(tokens, item_tokens), media


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")

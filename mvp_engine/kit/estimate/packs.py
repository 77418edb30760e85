"""The packs (micro-batches) of an estimate: those of a config's data, or assumed ones without data."""

from __future__ import annotations

from functools import cached_property
from math import isqrt
from typing import Any

import numpy as np
import torch

from mvp_engine.data.batch import Media, PackedBatch
from mvp_engine.errors import UserError, count
from mvp_engine.hf.actions.action_model import NOISE, ActionModel
from mvp_engine.kit import MLLMData, MLLMDataKit
from mvp_engine.kit.action_flops import language_backbone
from mvp_engine.kit.speech.flops import SpeakingModel, assumed_speech
from mvp_engine.kit.speech.protocol import HEADER
from mvp_engine.kit.speech.rows import SPEECH

SAMPLED_PACKS = 8  # micro-batches that are loaded for the time of a step
IMAGE_TOKENS = 1024  # the most tokens of an assumed image, without mllm.limits.max_pixels
ROW_TOKENS = 128  # text of an assumed row with speech
FRAMES = 125  # of its answer
CAMERAS = 3  # of an assumed row of an action model
PROMPT_TOKENS = 32  # of its prompt
MEDIA_SHARE = 0.75  # the share of image or audio tokens in assumed packs


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
        self.encoder_work = list[int]()
        for rows, _ in packs:
            row_numbers = self.dataset.first[rows[:, 0]] + rows[:, 1]
            self.encoder_work.append(int(encoder_costs[row_numbers].sum()))
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


def assumed_packs(model_config: Any, data: MLLMData, media_share: float) -> Packs:
    """Full packs of `micro_batch_tokens`, in rows as long as the settings allow, with media for the encoder."""
    tokens = data.pack_tokens
    row_tokens = min(tokens, data.row_tokens or tokens)
    ids = torch.zeros(tokens, dtype=torch.long)
    media = dict[str, Media]()
    text = (
        f"full packs of {tokens:,} tokens, assumed; rows of {row_tokens:,} tokens (mllm.row_tokens)"
    )
    found = _media(model_config, int(tokens * media_share), data.limits.max_pixels)
    if found is not None:
        name, item_tokens, values = found
        items = len(values.row_counts)
        media[name] = values
        placeholder = getattr(model_config, "image_token_id", None)
        if placeholder is not None:
            ids[: items * item_tokens] = placeholder
        kind = "audio clip" if name == "input_features" else "image"
        text += f", {count(items, kind)} of {item_tokens:,} tokens per pack (--media-share)"
    elif media_share and _has_encoder(model_config):
        text += "; the encoder is not counted"
    batch = PackedBatch.from_sequences(list(ids.split(row_tokens)), media=media)
    return Packs(batch, data.row_tokens, text)


def assumed_action_packs(model: ActionModel, tokens: int, draws: int) -> Packs:
    """Full packs of rows with three cameras and a prompt, each with `draws` of noise."""
    config = language_backbone(model).config
    spec = model.action_spec
    one = _media(config, tokens, None)
    if one is None:
        raise UserError(f"an estimate does not know the images of {config.model_type}")
    item_tokens = one[1]
    row_tokens = CAMERAS * item_tokens + PROMPT_TOKENS
    rows = max(1, tokens // row_tokens)
    images = _media(config, CAMERAS * rows * item_tokens, None)
    assert images is not None
    media = {images[0]: images[2]}
    ids = torch.zeros(rows, row_tokens, dtype=torch.long)
    ids[:, : CAMERAS * item_tokens] = config.image_token_id
    shape = (rows, draws, spec.chunk, spec.action_dim)
    fields = {NOISE: torch.empty(shape, device="meta")}
    no_loss = list(torch.zeros_like(ids, dtype=torch.bool))
    batch = PackedBatch.from_sequences(list(ids), no_loss, sequence_fields=fields, media=media)
    text = (
        f"packs of {count(rows, 'row')}, assumed: {CAMERAS} cameras of {item_tokens:,} tokens and a prompt of "
        f"{PROMPT_TOKENS}, {count(draws, 'draw')} of noise each"
    )
    return Packs(batch, row_tokens, text)


def assumed_speech_packs(model: SpeakingModel, tokens: int) -> Packs:
    """Full packs of spoken answers: talker positions count as tokens, as the data kit counts them."""
    user_tokens = ROW_TOKENS // 2
    talker_rows = user_tokens + HEADER + FRAMES
    rows = max(1, tokens // (ROW_TOKENS + talker_rows))
    ids = torch.zeros(rows, ROW_TOKENS, dtype=torch.long)
    media = {SPEECH: assumed_speech(model, rows, user_tokens, FRAMES)}
    batch = PackedBatch.from_sequences(list(ids), media=media)
    text = (
        f"packs of {count(rows, 'row')}, assumed: {ROW_TOKENS} tokens of text and an answer of {FRAMES} frames, which "
        f"is 10 seconds"
    )
    return Packs(batch, ROW_TOKENS + talker_rows, text)


def _has_encoder(config: Any) -> bool:
    return any(getattr(config, f"{kind}_config", None) is not None for kind in ("vision", "audio"))


def _media(config: Any, tokens: int, max_pixels: int | None) -> tuple[str, int, Media] | None:
    """The name in the batch, the tokens of an item, and items that fill `tokens`; None if there are none."""
    if tokens == 0:
        return None
    vision = getattr(config, "vision_config", None)
    audio = getattr(config, "audio_config", None)
    if vision is not None and getattr(vision, "spatial_merge_size", None):
        return _patches(vision, tokens, max_pixels)
    if vision is not None and getattr(vision, "image_size", None):
        return _images(config, vision, tokens)
    if audio is not None and getattr(audio, "max_source_positions", None):
        return _clips(audio, tokens)
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
    media = Media(values, torch.full((items,), patches), _first_row(items))
    media.fields["image_grid_thw"] = grids
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


def _clips(audio: Any, tokens: int) -> tuple[str, int, Media]:
    """Audio clips of one length: the convolution and pooling of Whisper encoders halve the frames twice."""
    item_tokens = audio.max_source_positions // 2
    frames = 2 * audio.max_source_positions
    return _items("input_features", tokens, item_tokens, (audio.num_mel_bins, frames))


def _items(
    name: str, tokens: int, item_tokens: int, shape: tuple[int, ...]
) -> tuple[str, int, Media]:
    """Items of one shape, at least one: a short clip is padded to the full shape, too."""
    items = max(1, tokens // item_tokens)
    rows = torch.ones(items, dtype=torch.long)
    media = Media(_empty(items, *shape), rows, _first_row(items))
    return name, min(tokens, item_tokens), media


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def _first_row(items: int) -> torch.Tensor:
    return torch.zeros(items, dtype=torch.long)

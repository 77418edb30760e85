"""Calls of a Hugging Face processor for media alone, without a conversation.

The processor gets the placeholders of some items as its text. What it passes on to its tokenizer is
the expansion of these placeholders in any conversation; what it returns are the model's inputs.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mvp_engine.kit.data.encode.processor_limits import audio_extractor
from mvp_engine.kit.data.encode.tokenization import fast_encode
from mvp_engine.kit.data.read.media_info import MediaInfo

TOKEN_TYPE_NAMES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
ITEM_SEPARATOR = "\ufdd3"  # between two placeholders; a noncharacter, which no text may hold

# Items with the same number of tokens have the same expansion, so most calls are repeated.
_cached_encode = lru_cache(maxsize=512)(fast_encode)


class _RecordingTokenizer:
    """Stands in for a processor's tokenizer, and keeps the text that the processor made."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.texts: list[str] = []

    def __call__(self, text: list[str], **options: Any) -> Any:
        from transformers import BatchEncoding

        self.texts = list(text)
        if len(text) > 1:
            return self.tokenizer(text, **{**options, "padding": True})
        encoding = _cached_encode(self.tokenizer, text[0])
        ids = torch.tensor([encoding.ids], dtype=torch.long)
        tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return BatchEncoding(tensors, encoding=encoding)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


def call_processor(
    processor: Any,
    items: Sequence[tuple[MediaInfo, Any]],
    placeholder: str,
    sampling_rate: int,
    short_audio: bool = False,
    separator: str | None = ITEM_SEPARATOR,
) -> tuple[list[str], dict[str, Any]]:
    """The expansion of each item's placeholder, and the model's inputs, for items of one kind.

    With `short_audio`, audio is not padded to the processor's full length, which may be minutes.
    `separator`: between placeholders in one text; None: each item has a text of its own.
    """
    copied = copy.copy(processor)
    recorder = _RecordingTokenizer(processor.tokenizer)
    copied.tokenizer = recorder
    arguments = _arguments(processor, items, placeholder, sampling_rate, short_audio)
    placeholders = [placeholder] * len(items)
    arguments["text"] = placeholders if separator is None else [separator.join(placeholders)]
    arguments["return_mm_token_type_ids"] = False  # would be computed for nothing
    outputs = dict(copied(**arguments))
    for name in ("input_ids", "attention_mask", "video_metadata", *TOKEN_TYPE_NAMES):
        outputs.pop(name, None)
    texts = recorder.texts if separator is None else recorder.texts[0].split(ITEM_SEPARATOR)
    return texts, outputs


def default_outputs(
    processor: Any, items: Sequence[tuple[MediaInfo, Any]], placeholder: str, sampling_rate: int
) -> dict[str, Any]:
    """All outputs of a processor for some items, with its own defaults for the text."""
    return dict(processor(**_arguments(processor, items, placeholder, sampling_rate, True)))


def _arguments(
    processor: Any,
    items: Sequence[tuple[MediaInfo, Any]],
    placeholder: str,
    sampling_rate: int,
    short_audio: bool,
) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "text": [ITEM_SEPARATOR.join([placeholder] * len(items))],
        "return_tensors": "pt",
        "text_kwargs": {"add_special_tokens": False},
    }
    infos = [info for info, _ in items]
    values = [value for _, value in items]
    if infos[0].kind == "image":
        arguments["images"] = values
    elif infos[0].kind == "video":
        arguments |= _video_arguments(infos, values)
    else:
        arguments |= _audio_arguments(processor, values, sampling_rate, short_audio)
    return arguments


def _video_arguments(infos: Sequence[MediaInfo], values: Sequence[Any]) -> dict[str, Any]:
    metadata = []
    for info in infos:
        metadata.append(
            {
                "total_num_frames": info.total_frames,
                "frames_indices": info.frame_indices(),
                "fps": info.fps,
                "duration": info.seconds,
            }
        )
    options = {
        "video_metadata": [metadata],
        "do_sample_frames": False,
        "return_metadata": True,  # most need it for the times in their expansions
        # Qwen2.5-Omni takes this for the frame rate of the given frames.
        "fps": infos[0].num_frames / infos[0].seconds,
    }
    videos = [_channels_first(value) for value in values]
    return {"videos": [videos], "videos_kwargs": options}


def _channels_first(frames: Any) -> Tensor:
    """(frames, 3, H, W): processors guess the other layout wrong where a frame is 3 pixels high."""
    if isinstance(frames, Tensor):
        return frames
    return torch.from_numpy(frames).permute(0, 3, 1, 2)


def _audio_arguments(
    processor: Any,
    values: Sequence[Any],
    sampling_rate: int,
    short_audio: bool,
) -> dict[str, Any]:
    defaults = getattr(processor.valid_processor_kwargs, "_defaults", {}).get("audio_kwargs", {})
    options: dict[str, Any] = {"sampling_rate": sampling_rate, "padding": "max_length"}
    if getattr(audio_extractor(processor), "n_samples", None) is None:
        options["padding"] = True  # to the longest: it has no length of its own
    # Encoders see the padding at the end of audio, so it is that of the processor.
    options["padding"] = defaults.get("padding", options["padding"])
    hop_length = getattr(audio_extractor(processor), "hop_length", None)
    if short_audio and hop_length is not None and options["padding"] == "max_length":
        options["max_length"] = max(map(len, values)) + 8 * hop_length
    return {"audio": values, "audio_kwargs": options}


def blank_item(info: MediaInfo, device: str) -> Any:
    """An item of zeros with the size of `info`; on the meta device it has no data, on "pil" it is a PIL image."""
    if info.kind == "audio":
        return np.zeros(info.num_samples, dtype=np.float32)
    if device == "pil":
        return Image.new("RGB", (info.width, info.height))
    shape = [3, info.height, info.width]
    if info.kind == "video":
        shape = [info.num_frames, *shape]
    return torch.zeros(shape, dtype=torch.uint8, device=device)

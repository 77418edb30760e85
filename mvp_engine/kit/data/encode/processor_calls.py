"""A processor asked, one kind of media at a time, what it makes of items; and what it answers, as `Media`."""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mvp_engine.data.batch import Media
from mvp_engine.errors import UserError
from mvp_engine.kit.data.encode.limits import Info

VALUES = (
    "pixel_values",
    "pixel_values_videos",
    "input_features",
)  # what forwards call the items themselves
TYPES = ("token_type_ids", "mm_token_type_ids")
SEAM = "\ufdd3"  # between what stands for two items; no character
Span = tuple[int, int]


def expand(
    text: str, places: Sequence[Span], expansions: Sequence[str]
) -> tuple[str, Callable[[int], int]]:
    """The text with each placeholder expanded, and where a character that was before or behind one has gone."""
    starts, shifts, pieces, done = [], [0], [], 0
    for (start, end), expansion in zip(places, expansions, strict=True):
        pieces += [text[done:start], expansion]
        starts.append(start)
        shifts.append(shifts[-1] + len(expansion) - (end - start))
        done = end

    def moved(at: int) -> int:
        return at + shifts[bisect_right(starts, at - 1)]

    return "".join([*pieces, text[done:]]), moved


def encoded(tokenizer: Any, text: str) -> Any:
    """The tokens of a text and their places, by a fast tokenizer's backend: its own call takes far longer."""
    backend = tokenizer.backend_tokenizer
    if backend.truncation is not None:
        backend.no_truncation()
    if backend.padding is not None:
        backend.no_padding()
    return backend.encode(text, add_special_tokens=False)


_known = lru_cache(maxsize=512)(encoded)  # items of the same number of tokens become the same text


class _Listener:
    """In a tokenizer's place: it notes the text that a processor made."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.text = tokenizer, ""

    def __call__(self, text: list[str], **_: Any) -> Any:
        from transformers import BatchEncoding

        self.text, found = text[0], _known(self.tokenizer, text[0])
        ids = torch.tensor([found.ids], dtype=torch.long)
        return BatchEncoding(
            {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, encoding=found
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


def ask(
    processor: Any,
    asked: Sequence[tuple[Info, Any]],
    placeholder: str,
    rate: int,
    short: bool = False,
) -> tuple[list[str], dict[str, Any]]:
    """What a processor makes of items of one kind: the text in place of each's placeholder, and the model's inputs."""
    copied = copy.copy(processor)
    listener = copied.tokenizer = _Listener(processor.tokenizer)
    infos, items = [info for info, _ in asked], [item for _, item in asked]
    given: dict[str, Any] = {
        "text": [SEAM.join([placeholder] * len(asked))],
        "return_tensors": "pt",
    }
    given["text_kwargs"] = {
        "add_special_tokens": False,
        "return_mm_token_type_ids": False,
    }  # which is but wasted here
    if infos[0].kind == "image":
        given["images"] = items
    elif infos[0].kind == "video":
        about = [
            {"total_num_frames": info.frames, "frames_indices": info.picks(), "fps": info.fps}
            for info in infos
        ]
        about = [{**one, "duration": info.seconds} for one, info in zip(about, infos, strict=True)]
        # Colours before height and width: the other way round is taken for it where a frame is 3 high.
        frames = [
            one if isinstance(one, Tensor) else torch.from_numpy(one).permute(0, 3, 1, 2)
            for one in items
        ]
        given["videos"], given["videos_kwargs"] = (
            [frames],
            {"video_metadata": [about], "do_sample_frames": False},
        )
        given["videos_kwargs"]["fps"] = (
            infos[0].take / infos[0].seconds
        )  # Qwen2.5-Omni takes it for that of `frames`
    else:
        given["audio"], given["audio_kwargs"] = (
            items,
            {"sampling_rate": rate, "padding": "max_length"},
        )
        if short and hasattr(processor.feature_extractor, "hop_length"):  # not padded to minutes
            longest = max(len(item) for item in items)
            given["audio_kwargs"]["max_length"] = (
                longest + 8 * processor.feature_extractor.hop_length
            )
    answer = dict(copied(**given))
    for name in ("input_ids", "attention_mask", *TYPES):
        answer.pop(name, None)
    return listener.text.split(SEAM), answer


def blank(info: Info, device: str) -> Any:
    if info.kind == "image":
        return torch.zeros(3, info.height, info.width, dtype=torch.uint8, device=device)
    if info.kind == "video":
        return torch.zeros(info.take, 3, info.height, info.width, dtype=torch.uint8, device=device)
    return np.zeros(info.samples, dtype=np.float32)


def as_media(answer: dict[str, Any]) -> tuple[str, Media]:
    """One item, or as many as it has tiles where each has a field of its own, such as a mask."""
    name, values, fields = _taken_apart(answer)
    rows = [len(values)]
    if values.ndim == 5:  # a batch of one, its tiles, colours, height, width
        if fields and all(value.shape[:2] == values.shape[:2] for value in fields.values()):
            values, fields = (
                values.transpose(0, 1),
                {name: value.transpose(0, 1) for name, value in fields.items()},
            )
            rows = [1] * len(values)
        else:
            values = values.flatten(0, 1)
            rows = [len(values)]
    return name, _of_one_sequence(values, rows, fields)


def as_several(answer: dict[str, Any], items: int) -> tuple[str, Media] | None:
    """So many items, if it can be told which rows are whose: by grids, or since each has but one."""
    name, values, fields = _taken_apart(answer)
    rows = next(
        (grid.prod(-1).tolist() for field, grid in fields.items() if field.endswith("_grid_thw")),
        [1] * items,
    )
    if (
        values.ndim == 5
        or sum(rows) != len(values)
        or any(len(one) != items for one in (rows, *fields.values()))
    ):
        return None
    return name, _of_one_sequence(values, rows, fields)


def _taken_apart(answer: dict[str, Any]) -> tuple[str, Tensor, dict[str, Tensor]]:
    names = [name for name in VALUES if name in answer]
    if len(names) != 1 or not all(isinstance(value, Tensor) for value in answer.values()):
        raise UserError(
            f"this processor gives {sorted(answer)}: one of {', '.join(VALUES)} is wanted, and its fields"
        )
    return (
        names[0],
        answer[names[0]],
        {name: value for name, value in answer.items() if name != names[0]},
    )


def _of_one_sequence(values: Tensor, rows: list[int], fields: dict[str, Tensor]) -> Media:
    return Media(values, torch.tensor(rows), torch.zeros(len(rows), dtype=torch.long), fields)


def joined(ones: list[Media]) -> Media:
    """The first is empty, and gives the shapes."""
    full = ones[1:] or ones
    if len(full) == 1:
        return full[0]
    return Media(
        torch.cat([one.values for one in full]),
        torch.cat([one.row_counts for one in full]),
        torch.cat([one.sequence_ids for one in full]),
        {name: torch.cat([one.fields[name] for one in full]) for name in full[0].fields},
    )

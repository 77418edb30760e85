"""Answers of a model beside the rows that they belong to, with what can be seen and heard of their media."""

from __future__ import annotations

import io
import wave
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from PIL import Image

from mvp_engine.kit.data import MLLMDataKit
from mvp_engine.kit.data.read.row_types import MEDIA, BadRow, Message
from mvp_engine.kit.data.read.rows import read_row
from mvp_engine.kit.generate import Answer
from mvp_engine.log.report import Example

SIDE, FRAMES, SECONDS = (
    320,
    4,
    30,
)  # of what is shown: pixels of a picture, pictures of a video, length of a sound


def examples_of(kit: MLLMDataKit, split: str, answers: Sequence[Answer]) -> list[Example]:
    """One for each answer. Media are read only for a page. Rows of a stream are gone: of those, the prompt is left."""
    found, gone = [], kit.is_stream(split)
    for one in answers:
        messages, source = ((), None) if gone else _asked(kit, split, one)
        media, right = partial(_media, kit, source, messages), None if one.open else one.right
        question = (
            _question(messages) if messages else one.prompt
        )  # a caption is asked for by its media alone
        found.append(Example(media, question, one.expected, one.written, right))
    return found


def _question(messages: Sequence[Message]) -> str:
    """A single question as it is; a longer conversation with who said what."""
    if len(messages) == 1:
        return messages[0].text
    return "\n".join(f"{message.role}: {message.text}" for message in messages)


def _asked(kit: MLLMDataKit, split: str, one: Answer) -> tuple[Sequence[Message], Any]:
    """The row's messages up to its last answer, and the source it is from."""
    source, row, format = kit.row(split, one.sample)
    messages = read_row(row, format).messages
    last = max((i for i, message in enumerate(messages) if message.role == "assistant"), default=0)
    return messages[:last], source


def _media(kit: MLLMDataKit, source: Any, messages: Sequence[Message]) -> list[bytes]:
    """Pictures as PNG files, some frames of videos too, sounds as WAV files."""
    handler, shown = kit.row_encoder.media, list[bytes]()
    for part in (part for message in messages for part in message.parts if part.kind in MEDIA):
        try:
            _, item = handler.probe_and_decode(part, source.root)
        except BadRow:  # it was there when it was asked about; the page says [?]
            shown.append(b"")
            continue
        if part.kind == "audio":
            shown.append(_wav(item, handler.sampling_rate))
        else:
            frames = [item] if part.kind == "image" else item[:: max(1, -(-len(item) // FRAMES))]
            shown += [
                _png(frame if isinstance(frame, Image.Image) else Image.fromarray(frame))
                for frame in frames
            ]
    return shown


def _png(picture: Image.Image) -> bytes:
    small, file = picture.copy(), io.BytesIO()
    small.thumbnail((SIDE, SIDE))
    small.save(file, "png")
    return file.getvalue()


def _wav(sound: np.ndarray, rate: int) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, rate, 0, "NONE", ""))
        out.writeframes((np.clip(sound[: SECONDS * rate], -1, 1) * 32767).astype("<i2").tobytes())
    return file.getvalue()

"""SpeechPart: the sounds of assistant turns, read from rows as codes, and as the talker positions of a batch.

How a model's talker reads text and codes is the model's own matter (`protocol.py`); which codes a row has, and which
rows are bad, is decided here. The chat template never sees the sounds: the thinker reads and learns the text alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mvp_engine.data.batch import Media
from mvp_engine.errors import UserError, count
from mvp_engine.kit.data.encode.sequences import EncodedSequence, RowPart
from mvp_engine.kit.data.read.limits import Limits
from mvp_engine.kit.data.read.media_source import decoder_errors, open_media
from mvp_engine.kit.data.read.row_format import RowFormat
from mvp_engine.kit.data.read.row_types import BadRow, Codes, Message, Part, Row
from mvp_engine.kit.data.read.sources import Source
from mvp_engine.kit.speech.codes import CodeStore, make_codes
from mvp_engine.kit.speech.protocol import SpeechError, SpeechProtocol, SpokenTurn
from mvp_engine.kit.speech.rows import SPEECH
from mvp_engine.kit.speech.settings import SpeechData

MOST_BOOKS = 32  # of Mimi: the first ones of more than a talker speaks are used


class SpeechPart(RowPart):
    """Reads the spoken turns of rows for one model."""

    name = SPEECH
    positions = "positions of the talker"

    def __init__(
        self, settings: SpeechData, model_config: Any, cache: Path, limits: Limits
    ) -> None:
        protocol = None if model_config is None else SpeechProtocol.for_config(model_config)
        if protocol is None:
            name = getattr(model_config, "model_type", None)
            raise UserError(
                f"mllm.speech: a model of type {name} has no talker, which would speak: remove the key, or set "
                "model.path to a model that speaks (docs/omni.md)"
            )
        if settings.books != protocol.books:
            raise UserError(
                f"mllm.speech.books={settings.books}, but the model's talker speaks {protocol.books} codebooks: "
                f"set mllm.speech.books={protocol.books}"
            )
        self.settings = settings
        self.protocol = protocol
        self.limits = limits
        self.store: CodeStore | None = None
        if settings.codec is not None:
            rate = settings.min_rate
            self.store = CodeStore(settings.codec, settings.books, cache, limits, min_rate=rate)
            self._check_codec(self.store)

    def _check_codec(self, store: CodeStore) -> None:
        size = store.codec.codebook_size
        if size != self.protocol.codec_size:
            raise UserError(
                f"mllm.speech.codec={store.spec} has {size} entries in a codebook; the model's talker speaks "
                f"{self.protocol.codec_size}: use the codec that the model was trained with. Of a model from random "
                f"weights, set model.config.talker_config.code_predictor_config.vocab_size={size}"
            )
        rate = self.protocol.frame_rate
        if rate is not None and abs(rate - store.codec.frame_rate) > 1e-3:
            raise UserError(
                f"mllm.speech.codec={store.spec} has {store.codec.frame_rate:g} frames per second; the model's "
                f"vocoder plays {rate:g}: use the codec that the model was trained with"
            )

    @property
    def fingerprint(self) -> str:
        """What the cost of a row depends on."""
        codec = "" if self.store is None else self.store.fingerprint
        return f"{self.settings.books} {self.settings.require} {self.settings.min_rate} {codec}"

    @property
    def frame_rate(self) -> float | None:
        """Frames per second, where the codec or the model says it."""
        return self.protocol.frame_rate if self.store is None else self.store.codec.frame_rate

    def prepare(self, name: str, source: Source, row_format: RowFormat) -> None:
        make_codes(name, source, row_format, self)

    def num_positions(self, ids: list[int], targets: Sequence[SpokenTurn]) -> int:
        frames = [(turn.turn, len(turn.codes)) for turn in targets]
        try:
            return self.protocol.num_rows(torch.tensor(ids), frames)
        except SpeechError as error:
            raise BadRow(error.reason, error.detail) from None

    def media(self, ids_T: Tensor, positions: Tensor, targets: Sequence[SpokenTurn]) -> Media:
        """The talker positions of one sequence."""
        if not targets:
            return self.protocol.empty()
        try:
            return self.protocol.plan(ids_T, positions, list(targets))
        except SpeechError as error:
            raise BadRow(error.reason, error.detail) from None

    def facts(self, sequence: EncodedSequence) -> dict[str, Any]:
        """The sounds that the model learns to speak, by the answer that they belong to, and their positions."""
        spoken = []
        for turn in sequence.targets:
            rate = self.frame_rate
            seconds = None if rate is None else round(len(turn.codes) / rate, 3)
            spoken.append(
                {
                    "answer": turn.turn,
                    "frames": len(turn.codes),
                    "seconds": seconds,
                    "speaker": turn.speaker,
                }
            )
        return {"spoken": spoken, "talker": sequence.target_positions}

    def read(self, row: Row, root: Path) -> list[SpokenTurn]:
        turns = []
        answers = [message for message in row.messages if message.role == "assistant"]
        if self.protocol.reads_answers and len(answers) < len(row.messages):
            raise BadRow(
                "speech_role",
                "CSM speaks every turn of a dialogue: give all messages the role assistant, and loss: false to those "
                "that are context",
            )
        for turn, message in enumerate(answers):
            sound = self.sound(message)
            if sound is None:
                self._check_silent(message, turn)
                continue
            codes = torch.from_numpy(self._codes(sound, root).astype(np.int64))
            speaker = sound.options.get("speaker")
            if speaker is not None and not isinstance(speaker, str):
                raise BadRow(
                    "wrong_type",
                    f"speaker of answer {turn} is {type(speaker).__name__}, wanted a name",
                )
            if speaker is not None and speaker.lower() not in self.protocol.speakers:
                names = ", ".join(self.protocol.speakers)
                raise BadRow(
                    "speech_speaker",
                    f"the model has no speaker {speaker!r}; it has {names} (talker_config.speaker_id)",
                )
            turns.append(SpokenTurn(turn, codes, speaker, learnt=message.loss is not False))
        return turns

    def sound(self, message: Message) -> Part | None:
        """The sound of a message; without loss only for a talker that reads earlier answers."""
        is_read = message.loss is not False or self.protocol.reads_answers
        return message.target if is_read else None

    def _check_silent(self, message: Message, turn: int) -> None:
        if self.settings.require and message.loss is not False:
            raise BadRow(
                "speech_missing",
                f"answer {turn} has text, but no sound, and mllm.speech.require wants one: add it, or give the turn "
                "loss: false",
            )

    def _codes(self, part: Part, root: Path) -> np.ndarray:
        """(frames, books) of a sound, valid for the model."""
        if isinstance(part.value, Codes):
            codes = self._given_codes(part.value.codes, root)
        elif self.store is None:
            raise BadRow(
                "speech_codec",
                "the row has a sound, not codes: set mllm.speech.codec to the codec that encodes it",
            )
        else:
            codes = self.store.codes(part, root)
        if not len(codes):
            raise BadRow("speech_empty", "the sound is shorter than one frame of the codec")
        return codes

    def _given_codes(self, value: Any, root: Path) -> np.ndarray:
        if isinstance(value, str):
            opened = open_media(value, self.limits, root, "codes")
            with decoder_errors("codes"):
                value = np.load(opened, allow_pickle=False)
        try:
            codes = np.asarray(value)
        except ValueError:  # rows of different lengths
            raise BadRow(
                "speech_codes", "the frames of codes have different numbers of books"
            ) from None
        books = self.settings.books
        if codes.size == 0:
            return np.zeros((0, books), np.int64)
        if codes.ndim != 2 or codes.dtype.kind not in "iu":
            raise BadRow(
                "speech_codes",
                f"codes are {codes.dtype} of shape {codes.shape}, wanted integers (frames, {books})",
            )
        if codes.shape[1] < books:
            raise BadRow(
                "speech_books",
                f"codes have {codes.shape[1]} books; the model speaks {books} (frames by books)",
            )
        frames, found = codes.shape
        if found > max(books, MOST_BOOKS) or (frames == books and found not in (books, MOST_BOOKS)):
            raise BadRow(
                "speech_codes",
                f"codes of shape {codes.shape} seem to be books by frames; wanted (frames, {books})",
            )
        codes = codes[:, :books]
        low, high = int(codes.min()), int(codes.max())
        if low < 0 or high >= self.protocol.codebook_size:
            raise BadRow(
                "speech_codes",
                f"codes are {low} to {high}; the model's codebooks have 0 to {self.protocol.codebook_size - 1}",
            )
        return codes


def take_speech(message: Message, index: int, is_target: bool) -> Message:
    """The assistant turn with its audio as the `target`; a bad row unless the model predicts audio."""
    audio = [part for part in message.parts if part.kind == "audio"]
    if not is_target:
        raise BadRow(
            "speech_target",
            f"message {index} (assistant) has audio, which the model would have to speak: train with "
            "model.type=omni_model and set mllm.speech; or remove the audio; or, if it is an input, move it into "
            "a user's turn",
        )
    if len(audio) > 1:
        raise BadRow(
            "speech_count",
            f"message {index} (assistant) has {count(len(audio), 'sound')}; a turn speaks one: join them, or split "
            "the turn",
        )
    if not message.text.strip():
        raise BadRow(
            "speech_text",
            f"message {index} (assistant) has a sound, but no text: the talker reads the text that it speaks",
        )
    others = tuple(part for part in message.parts if part.kind != "audio")
    return replace(message, parts=others, target=audio[0])

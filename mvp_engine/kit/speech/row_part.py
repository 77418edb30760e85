"""SpeechPart: the sounds of assistant turns, read from rows as codes, and as the talker positions of a batch.

How a model's talker reads text and codes is the model's own matter (`protocol.py`); which codes a row has, and which
rows are bad, is decided here. The chat template never sees the sounds: the thinker reads and learns the text alone.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mvp_engine.data.batch import Media
from mvp_engine.errors import UserError, count
from mvp_engine.files import atomic_path, atomic_write_text
from mvp_engine.kit.data.encode.row_encoder import EncodedSequence, RowPart
from mvp_engine.kit.data.pack.costs import RecordFile, locked
from mvp_engine.kit.data.read.decoders import decode_audio
from mvp_engine.kit.data.read.media_source import decoder_errors, file_of, open_media
from mvp_engine.kit.data.read.probe import probe_now
from mvp_engine.kit.data.read.row_types import BadRow, Codes, Limits, Message, Part, Row, RowFormat
from mvp_engine.kit.data.read.rows import read_row
from mvp_engine.kit.data.read.sources import Source
from mvp_engine.kit.speech.codec import Codec, open_codec
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
                f"data.speech: a model of type {name} has no talker, which would speak: remove the key, or set "
                "model.path to a model that speaks (docs/omni.md)"
            )
        if settings.books != protocol.books:
            raise UserError(
                f"data.speech.books={settings.books}, but the model's talker speaks {protocol.books} codebooks: "
                f"set data.speech.books={protocol.books}"
            )
        self.settings = settings
        self.protocol = protocol
        self.limits = limits
        self.store: CodeStore | None = None
        if settings.codec is not None:
            self.store = CodeStore(settings.codec, settings.books, cache, limits)
            self._check_codec(self.store)

    def _check_codec(self, store: CodeStore) -> None:
        size = store.codec.codebook_size
        if size != self.protocol.codec_size:
            raise UserError(
                f"data.speech.codec={store.spec} has {size} entries in a codebook; the model's talker speaks "
                f"{self.protocol.codec_size}: use the codec that the model was trained with. Of a model from random "
                f"weights, set model.config.talker_config.code_predictor_config.vocab_size={size}"
            )
        rate = self.protocol.frame_rate
        if rate is not None and abs(rate - store.codec.frame_rate) > 1e-3:
            raise UserError(
                f"data.speech.codec={store.spec} has {store.codec.frame_rate:g} frames per second; the model's "
                f"vocoder plays {rate:g}: use the codec that the model was trained with"
            )

    @property
    def fingerprint(self) -> str:
        """What the cost of a row depends on."""
        codec = "" if self.store is None else self.store.fingerprint
        return f"{self.settings.books} {self.settings.require} {codec}"

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
                f"answer {turn} has text, but no sound, and data.speech.require wants one: add it, or give the turn "
                "loss: false",
            )

    def _codes(self, part: Part, root: Path) -> np.ndarray:
        """(frames, books) of a sound, valid for the model."""
        if isinstance(part.value, Codes):
            codes = self._given_codes(part.value.codes, root)
        elif self.store is None:
            raise BadRow(
                "speech_codec",
                "the row has a sound, not codes: set data.speech.codec to the codec that encodes it",
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
            "model.type=omni_model and set data.speech; or remove the audio; or, if it is an input, move it into "
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


# Codes of all sounds of a source, made ahead: batched, on a GPU if there is one, by one process of a job.
#
# Loader workers find them on disk then. A sound that cannot be read is left out here; its row is bad when it is
# measured.

LOGGER = logging.getLogger("mvp_engine")
PROGRESS_SECONDS = 10.0
READERS = 8  # threads that decode sounds while the codec encodes
BATCH_SECONDS = 600.0  # of sounds that are encoded together


@dataclass
class MadeCodes:
    """What was found and made."""

    sounds: int = 0  # different ones, in assistant turns
    made: int = 0  # of these, encoded now
    bad: int = 0  # of these, not readable
    audio_seconds: float = 0.0  # of what was encoded now
    seconds: float = 0.0

    @property
    def speed(self) -> float:
        """A multiple of real time."""
        return self.audio_seconds / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        text = f"{self.sounds:,} sounds: {self.made:,} encoded now"
        if self.made:
            text += f" ({self.audio_seconds / 60:,.1f} minutes in {self.seconds:.1f} s, {self.speed:,.0f}x real time)"
        text += f", {self.sounds - self.made - self.bad:,} on disk already"
        return text + (
            f", {self.bad:,} not readable (mvp data inspect names them)" if self.bad else ""
        )


class _Sound(NamedTuple):
    content: bytes
    waveform: np.ndarray


def make_codes(
    name: str,
    source: Source,
    row_format: RowFormat,
    speech: SpeechPart,
    *,
    again: bool = False,
) -> MadeCodes | None:
    """Encode the sounds of a source that are not on disk yet. None where that was done before, unless `again`."""
    if speech.store is None:
        return None
    folder = speech.store.folder
    folder.mkdir(parents=True, exist_ok=True)
    key = f"{source.fingerprint} {source.root} {row_format}"
    done = folder / f"{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.done"
    with locked(done.with_suffix(".lock"), f"{name}: codes of its sounds"):
        if done.is_file() and not again:
            return None
        made = _make(name, source, row_format, speech)
        if not made.bad:  # files may be repaired
            atomic_write_text(done, f"{made}\n")
    if made.sounds:
        LOGGER.info("%s: %s; kept in %s", name, made, folder)
    return made


def _make(name: str, source: Source, row_format: RowFormat, speech: SpeechPart) -> MadeCodes:
    settings = speech.settings
    assert settings.codec is not None
    assert speech.store is not None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cache = speech.store.folder.parents[1]
    store = CodeStore(
        settings.codec,
        settings.books,
        cache,
        speech.limits,
        device=device,
    )
    made = MadeCodes()
    started = reported = time.monotonic()
    for batch in _batches(_missing(source, row_format, speech, store, made), store):
        codes = store.codec.encode_many([sound.waveform for sound in batch])
        for sound, one in zip(batch, codes, strict=True):
            store.put(sound.content, one)
        made.made += len(batch)
        made.audio_seconds += sum(len(one.waveform) for one in batch) / store.codec.sampling_rate
        made.seconds = time.monotonic() - started
        if time.monotonic() - reported > PROGRESS_SECONDS:
            reported = time.monotonic()
            LOGGER.info(
                "%s: encoded %d sounds on the %s, %.0fx real time",
                name,
                made.made,
                device,
                made.speed,
            )
    return made


def _missing(
    source: Source,
    row_format: RowFormat,
    speech: SpeechPart,
    store: CodeStore,
    made: MadeCodes,
) -> Iterator[_Sound]:
    """The sounds that have no codes yet, each once, decoded by threads."""
    seen: set[bytes] = set()
    with ThreadPoolExecutor(READERS) as threads:
        for first in range(0, len(source), 8 * READERS):
            rows = range(first, min(first + 8 * READERS, len(source)))
            wanted = []
            for part in _targets(source, row_format, rows, speech):
                try:
                    content = store.content(part, source.root)
                except BadRow:
                    made.sounds += 1
                    made.bad += 1
                    continue
                if content not in seen:
                    seen.add(content)
                    made.sounds += 1
                    if store.get(content) is None:
                        wanted.append((part, content))
            parts = [part for part, _ in wanted]
            waveforms = threads.map(lambda part: _waveform(store, part, source.root), parts)
            for (_, content), waveform in zip(wanted, waveforms, strict=True):
                if waveform is None:
                    made.bad += 1
                else:
                    yield _Sound(content, waveform)


def _targets(
    source: Source, row_format: RowFormat, rows: Sequence[int], speech: SpeechPart
) -> Iterator[Part]:
    for row in rows:
        try:
            messages = read_row(source[row], row_format).messages
        except BadRow:
            continue
        for message in messages:
            sound = speech.sound(message)
            if sound is not None and not isinstance(sound.value, Codes):
                yield sound


def _waveform(store: CodeStore, part: Part, root: Path) -> np.ndarray | None:
    try:
        return store.waveform(part, root)
    except BadRow:
        return None


def _batches(sounds: Iterator[_Sound], store: CodeStore) -> Iterator[list[_Sound]]:
    batch: list[_Sound] = []
    seconds = 0.0
    for sound in sounds:
        batch.append(sound)
        seconds += len(sound.waveform) / store.codec.sampling_rate
        if seconds >= BATCH_SECONDS:
            yield batch
            batch = []
            seconds = 0.0
    if batch:
        yield batch


# CodeStore: the codes of sounds on disk, by the sounds' content and the codec, so that each is encoded once.
#
# A sound's codes are one .npy file. Which content a file had, by its path, length and modification time, is in an
# index, so that later starts open no sound. All processes of a job share the folder: files appear whole, and the index
# grows.

# One entry of the index: never change it, take another file name instead.
INDEX_RECORD = np.dtype([("file", "V16"), ("content", "V16")])


class CodeStore:
    """The codes of one codec. The codec is opened at the first sound that is not on disk, on the CPU by default."""

    def __init__(
        self,
        spec: str,
        books: int,
        cache: Path,
        limits: Limits | None = None,
        *,
        device: str = "cpu",
    ) -> None:
        self.spec = spec
        self.books = books
        self.limits = limits or Limits()
        self.device = device
        self.fingerprint = self.codec.fingerprint
        self.folder = cache / "codes" / _hash(self.fingerprint.encode()).hex()
        self._contents: dict[bytes, bytes] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without the codec: worker processes open their own, on the CPU, if they need it."""
        state = {**self.__dict__, "device": "cpu", "_contents": None}
        state.pop("codec", None)
        return state

    @cached_property
    def codec(self) -> Codec:
        return open_codec(self.spec, self.books, self.device)

    def codes(self, part: Part, root: Path) -> np.ndarray:
        """(frames, books) of a sound, from disk or encoded now. Raises BadRow."""
        content = self.content(part, root)
        codes = self.get(content)
        if codes is None:
            waveform = self.waveform(part, root)
            codes = self.put(content, self.codec.encode(waveform))
        return codes

    def content(self, part: Part, root: Path) -> bytes:
        """A hash of the sound's bytes, from the index where its file is unchanged. Raises BadRow."""
        if file_of(part.value) is None:
            return _hash(_inline_bytes(part, self.limits, root))
        opened = open_media(part.value, self.limits, root, "audio")
        assert isinstance(opened, Path)
        stat = opened.stat()
        key = _hash(f"{opened} {stat.st_size} {stat.st_mtime_ns}".encode())
        known = self._index()
        if key not in known:
            content = _hash(opened.read_bytes())
            known[key] = content
            self.folder.mkdir(parents=True, exist_ok=True)
            self._index_file.append(np.array([(key, content)], INDEX_RECORD))
        return known[key]

    def get(self, content: bytes) -> np.ndarray | None:
        """The codes of a sound that is on disk."""
        file = self._file(content)
        return np.load(file, allow_pickle=False) if file.is_file() else None

    def put(self, content: bytes, codes: np.ndarray) -> np.ndarray:
        """Check codes of the codec and write them. Returns their first `books`."""
        codes = np.asarray(codes)
        is_valid = codes.ndim == 2 and codes.dtype.kind in "iu" and codes.shape[1] >= self.books
        if not is_valid:
            raise UserError(
                f"data.speech.codec={self.spec}: encode gave {codes.dtype} of shape {codes.shape}, wanted integers "
                f"(frames, {self.books} or more books)"
            )
        kept = codes[:, : self.books]
        if len(kept) and not 0 <= int(kept.min()) <= int(kept.max()) < self.codec.codebook_size:
            raise UserError(
                f"data.speech.codec={self.spec}: encode gave codes from {kept.min()} to {kept.max()}, but its "
                f"codebook_size is {self.codec.codebook_size}"
            )
        file = self._file(content)
        file.parent.mkdir(parents=True, exist_ok=True)
        kept = kept.astype(np.uint16 if self.codec.codebook_size <= 2**16 else np.int32)
        with atomic_path(file) as temporary, open(temporary, "wb") as out:
            np.save(out, kept)
        return kept

    def waveform(self, part: Part, root: Path) -> np.ndarray:
        """The sound at the codec's sampling rate. Raises BadRow, also for a rate that is too low for the codec."""
        info = probe_now(part, self.limits, root)
        lowest = self.codec.sampling_rate // 2
        if info.sampling_rate < lowest:
            raise BadRow(
                "speech_rate",
                f"a sound of {info.sampling_rate} Hz for a codec of {self.codec.sampling_rate} Hz would teach a "
                f"muffled voice; at least {lowest} Hz are needed",
            )
        return decode_audio(part, info, self.limits, root, self.codec.sampling_rate)

    def _file(self, content: bytes) -> Path:
        name = content.hex()
        return self.folder / name[:2] / f"{name[2:]}.npy"

    @property
    def _index_file(self) -> RecordFile:
        return RecordFile(self.folder / "contents.index", INDEX_RECORD)

    def _index(self) -> dict[bytes, bytes]:
        if self._contents is None:
            entries = self._index_file.read().tolist()
            self._contents = {bytes(file): bytes(content) for file, content in entries}
        return self._contents


def _inline_bytes(part: Part, limits: Limits, root: Path) -> bytes:
    """The bytes of a sound that the row itself holds."""
    value = part.value
    rate = part.options.get("sampling_rate")
    if isinstance(value, Mapping) and value.get("array") is not None:
        rate = value.get("sampling_rate")
        value = np.asarray(value["array"], np.float32)
    if isinstance(value, np.ndarray):
        return f"{rate} {value.dtype} ".encode() + value.tobytes()
    if isinstance(value, str | bytes | bytearray | memoryview | Mapping | os.PathLike):
        opened = open_media(value, limits, root, "audio")
        return opened.read_bytes() if isinstance(opened, Path) else opened.getvalue()
    raise BadRow("wrong_type", f"audio cannot be read from {type(value).__name__}")


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()

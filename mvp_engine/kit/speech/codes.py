"""Codes of all sounds of a source, made ahead: batched, on a GPU if there is one, by one process of a job.

Loader workers find them on disk then. A sound that cannot be read is left out here; its row is bad when it is measured.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from mvp_engine.errors import UserError
from mvp_engine.files import atomic_path, atomic_write_text
from mvp_engine.kit.data.pack.cost_cache import RecordFile, locked
from mvp_engine.kit.data.read.decode_audio import decode_audio
from mvp_engine.kit.data.read.limits import Limits
from mvp_engine.kit.data.read.media_source import file_of, open_media
from mvp_engine.kit.data.read.probe import probe_now
from mvp_engine.kit.data.read.row_format import RowFormat
from mvp_engine.kit.data.read.row_types import BadRow, Codes, Part
from mvp_engine.kit.data.read.rows import read_row
from mvp_engine.kit.data.read.sources import Source
from mvp_engine.kit.speech.codec import Codec, open_codec

if TYPE_CHECKING:
    from mvp_engine.kit.speech.row_part import SpeechPart

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
        min_rate=settings.min_rate,
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
        min_rate: int | None = None,
        device: str = "cpu",
    ) -> None:
        """`min_rate`: sounds with a lower sampling rate are bad rows; None: half of the codec's."""
        self.spec = spec
        self.books = books
        self.limits = limits or Limits()
        self.min_rate = min_rate
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
                f"mllm.speech.codec={self.spec}: encode gave {codes.dtype} of shape {codes.shape}, wanted integers "
                f"(frames, {self.books} or more books)"
            )
        kept = codes[:, : self.books]
        if len(kept) and not 0 <= int(kept.min()) <= int(kept.max()) < self.codec.codebook_size:
            raise UserError(
                f"mllm.speech.codec={self.spec}: encode gave codes from {kept.min()} to {kept.max()}, but its "
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
        lowest = self.codec.sampling_rate // 2 if self.min_rate is None else self.min_rate
        if info.sampling_rate < lowest:
            raise BadRow(
                "speech_rate",
                f"a sound of {info.sampling_rate} Hz for a codec of {self.codec.sampling_rate} Hz would teach a "
                f"muffled voice; at least {lowest} Hz are wanted (mllm.speech.min_rate)",
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

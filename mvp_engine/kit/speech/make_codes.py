"""Codes of all sounds of a source, made ahead: batched, on a GPU if there is one, by one process of a job.

Loader workers find them on disk then. A sound that cannot be read is left out here; its row is bad when it is measured.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from mvp_engine.files import atomic_write_text
from mvp_engine.kit.data.pack.cost_cache import locked
from mvp_engine.kit.data.read.row_format import RowFormat
from mvp_engine.kit.data.read.row_types import BadRow, Codes, Part
from mvp_engine.kit.data.read.rows import read_row
from mvp_engine.kit.data.read.sources import Source
from mvp_engine.kit.speech.code_store import CodeStore

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

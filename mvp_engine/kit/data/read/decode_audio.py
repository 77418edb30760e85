"""Audio: its length from the header, and the mono waveform at the model's sampling rate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mvp_engine.kit.data.read.limits import Limits
from mvp_engine.kit.data.read.media_info import MediaInfo
from mvp_engine.kit.data.read.media_source import decoder_errors, open_media, require_package
from mvp_engine.kit.data.read.row_types import BadRow, Part


def audio_size(part: Part, limits: Limits, root: Path) -> tuple[int, int]:
    """Samples per channel, and the sampling rate."""
    waveform, sampling_rate = _inline_waveform(part)
    if waveform is not None:
        return len(waveform), sampling_rate
    soundfile = require_package("soundfile", "audio")
    source = open_media(part.value, limits, root, "audio")
    with decoder_errors("audio"):
        header = soundfile.info(source)
    return header.frames, header.samplerate


def decode_audio(
    part: Part,
    info: MediaInfo,
    limits: Limits,
    root: Path,
    sampling_rate: int,
) -> np.ndarray:
    """The waveform, float32, resampled to `sampling_rate`; of several channels, their mean."""
    samples, _ = _inline_waveform(part)
    if samples is None:
        samples = _read_file(part, info, limits, root)
    waveform = samples.astype(np.float32)
    if not np.isfinite(waveform).all():
        raise BadRow("corrupt", "audio with non-finite samples")
    if sampling_rate != info.sampling_rate:
        soxr = require_package("soxr", "audio")
        with decoder_errors("audio"):
            waveform = soxr.resample(waveform, info.sampling_rate, sampling_rate)
    length = info.num_samples_at(sampling_rate)
    # Resampling may be off by a few samples; a header that lies is off by more.
    if abs(len(waveform) - length) > max(0.1 * sampling_rate, 0.01 * length):
        raise BadRow(
            "corrupt",
            f"audio has {len(waveform)} samples at {sampling_rate} Hz; its header promised {length}",
        )
    return np.pad(waveform[:length], (0, max(0, length - len(waveform))))


def _read_file(
    part: Part,
    info: MediaInfo,
    limits: Limits,
    root: Path,
) -> np.ndarray:
    soundfile = require_package("soundfile", "audio")
    source = open_media(part.value, limits, root, "audio")
    with decoder_errors("audio"):
        samples, sampling_rate = soundfile.read(
            source, frames=info.num_samples, dtype="float32", always_2d=True
        )
    if sampling_rate != info.sampling_rate:
        raise BadRow(
            "changed",
            f"the audio has {sampling_rate} Hz now, but had {info.sampling_rate} "
            "when it was planned",
        )
    return samples.mean(axis=1)


def _inline_waveform(part: Part) -> tuple[Any, int]:
    """A waveform that the row itself holds, and its sampling rate; (None, 0) if it holds none.

    It is an array with the option sampling_rate, or {"array", "sampling_rate"} as `datasets` has it.
    """
    array = part.value
    sampling_rate = part.options.get("sampling_rate")
    if isinstance(part.value, Mapping):
        array = part.value.get("array")
        sampling_rate = part.value.get("sampling_rate")
        if isinstance(array, list | tuple):
            array = _array_from_list(array)
    if not isinstance(array, np.ndarray):
        return None, 0
    is_mono = array.dtype.kind == "f" and array.ndim == 1
    if not is_mono or not isinstance(sampling_rate, int):
        raise BadRow(
            "wrong_type", "a waveform must be floats of one channel, with an int as sampling_rate"
        )
    return array, sampling_rate


def _array_from_list(values: list[Any] | tuple[Any, ...]) -> np.ndarray:
    try:
        return np.array(values, dtype=np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadRow("wrong_type", f"audio array: {error}") from None

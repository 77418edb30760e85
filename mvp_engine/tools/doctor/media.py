"""One decode of each kind of media: files that come with the package, through the readers of the data kit."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from mvp_engine.errors import UserError
from mvp_engine.kit.data.read.decode import decode
from mvp_engine.kit.data.read.limits import Limits
from mvp_engine.kit.data.read.probe import probe
from mvp_engine.kit.data.read.row_types import BadRow, Part
from mvp_engine.tools.doctor.finding import Finding, ok, problem, warning

FOLDER = Path(__file__).parent / "media"
FILES = {"image": "red.png", "video": "red_to_blue.mp4", "audio": "tone.flac"}
SAMPLING_RATE = 16_000  # the file has another one, so that it is resampled
TONE_HZ = 440
FIX = "reinstall the decoders: pip install --force-reinstall pillow av soundfile soxr"


def check_media(kind: str, folder: Path = FOLDER) -> Finding:
    """Decode the image, video or audio file of the package, and compare it with what it shows."""
    part = Part(kind, FILES[kind])
    start = time.perf_counter()
    try:
        info = probe(part, Limits(), folder)
        item = decode(part, info, Limits(), folder, SAMPLING_RATE)
    except UserError as error:
        text, _, fix = str(error).partition(": ")
        return warning(kind, f"{text}; rows with it cannot be read", fix)
    except BadRow as error:
        return problem(kind, f"the file of the package cannot be decoded: {error}", FIX)
    milliseconds = 1e3 * (time.perf_counter() - start)
    text, right = SEEN[kind](item)
    if not right:
        return problem(kind, f"decoded wrong: {text}", FIX)
    return ok(
        kind, f"{text}, decoded in {milliseconds:.0f} ms", milliseconds=round(milliseconds, 1)
    )


def _seen_image(image: Any) -> tuple[str, bool]:
    red, _, blue = np.asarray(image).reshape(-1, 3).mean(0)
    return f"{image.width}x{image.height} pixels", bool(red > 200 and blue < 60)


def _seen_video(frames: np.ndarray) -> tuple[str, bool]:
    first = frames[0].reshape(-1, 3).mean(0)
    last = frames[-1].reshape(-1, 3).mean(0)
    right = first[0] > 200 > 60 > first[2] and last[2] > 200 > 60 > last[0]
    return f"{len(frames)} frames of {frames.shape[2]}x{frames.shape[1]} (H.264)", bool(right)


def _seen_audio(waveform: np.ndarray) -> tuple[str, bool]:
    spectrum = np.abs(np.fft.rfft(waveform))
    hertz = float(spectrum.argmax()) * SAMPLING_RATE / len(waveform)
    text = f"{len(waveform) / SAMPLING_RATE:g} s at {SAMPLING_RATE:,} Hz, resampled"
    return text, abs(hertz - TONE_HZ) < 10


SEEN = {"image": _seen_image, "video": _seen_video, "audio": _seen_audio}

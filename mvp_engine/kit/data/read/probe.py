"""Probing of media: the MediaInfo of an item from its header, without decoding it.

Only the first frame of a video is decoded. Items past a guard of `Limits` are bad rows.

SizeCache: the sizes of media files that were read before, so that these files are not opened again.

A size does not depend on the model, its processor or any pixel budget. An entry is valid as long as the file has the
same length and modification time.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mvp_engine.kit.data.read import decoders
from mvp_engine.kit.data.read.decoders import (
    MediaInfo,
    image_info,
    number_option,
    pixel_options,
    run_with_timeout,
)
from mvp_engine.kit.data.read.media_source import describe, file_of, open_media
from mvp_engine.kit.data.read.row_types import CLIP_PIXELS, MAX_FILE_PIXELS, BadRow, Limits, Part

# One entry of a cache file: never change it, take another file name instead.
SIZE_RECORD = np.dtype(
    [
        ("file", "V16"),  # a hash of kind, path, length and modification time
        ("width", "<i8"),
        ("height", "<i8"),
        ("length", "<i8"),
        ("rate", "<f8"),
    ]
)


class MediaSize(NamedTuple):
    """Width and height; frames and frames per second of a video; samples and sampling rate of audio."""

    width: int
    height: int
    length: int = 0
    rate: float = 0.0


class SizeCache:
    """Sizes by file. `take_new` returns those that were found since, for the cache file."""

    def __init__(self, known: np.ndarray | None = None) -> None:
        """`known` has the dtype SIZE_RECORD."""
        self._known: dict[bytes, MediaSize] = {}
        self._new: list[tuple[Any, ...]] = []
        self._keys: dict[tuple[str, str], bytes] = {}  # by kind and path: a file is looked up once
        if known is not None:
            for file, *size in known.tolist():
                self._known[bytes(file)] = MediaSize(*size)

    def file_key(self, kind: str, value: Any, limits: Limits, root: Path) -> bytes | None:
        """A hash of an item's file and its stamp; None for an item without a file. Raises what `open_media` raises."""
        path = file_of(value)
        if path is None:
            return None
        if (kind, path) not in self._keys:
            opened = open_media(path, limits, root, kind)
            assert isinstance(opened, Path)
            found = opened.stat()
            stamp = f"{found.st_size} {found.st_mtime_ns}"  # changes when the file is replaced
            self._keys[kind, path] = _hash(f"{kind} {opened} {stamp}")
        return self._keys[kind, path]

    def knows(self, kind: str, value: Any, limits: Limits, root: Path) -> bool:
        return self.file_key(kind, value, limits, root) in self._known

    def find(
        self, kind: str, value: Any, limits: Limits, root: Path, read: Callable[[], MediaSize]
    ) -> MediaSize:
        """The size of an item, by `read` if it is not known."""
        key = self.file_key(kind, value, limits, root)
        if key is None:
            return read()
        size = self._known.get(key)
        if size is None:
            size = read()
            self._known[key] = size
            self._new.append((key, *size))
        return size

    def take_new(self) -> np.ndarray:
        found = np.array(self._new, SIZE_RECORD)
        self._new = []
        return found


def row_key(raw: Any, parts: Iterable[Part], sizes: SizeCache, limits: Limits, root: Path) -> bytes:
    """A hash of a row and of its media files. Raises BadRow for a missing file."""
    text = [repr(raw)]
    for part in parts:
        values = part.value if isinstance(part.value, list | tuple) else [part.value]
        text += [repr(sizes.file_key(part.kind, value, limits, root)) for value in values]
    return _hash("\0".join(text))


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


DEFAULT_FPS = 2.0
MIN_FRAMES = 2  # no video encoder takes a single frame
# Sampling rates outside of these are errors of a header, and resampling from them would not end.
MIN_SAMPLING_RATE = 100
MAX_SAMPLING_RATE = 1_000_000


def probe(part: Part, limits: Limits, root: Path, sizes: SizeCache | None = None) -> MediaInfo:
    """The item's size and length; BadRow after `limits.timeout` seconds."""

    def work() -> MediaInfo:
        return probe_now(part, limits, root, sizes)

    return run_with_timeout(limits.timeout, work, f"probing {describe(part)}")


def probe_now(part: Part, limits: Limits, root: Path, sizes: SizeCache | None = None) -> MediaInfo:
    """`probe` in the calling thread, without a timeout. An item that `sizes` has is not opened."""
    if part.kind == "image":
        return image_info(part, *_image_size(part.value, limits, root, sizes))
    if part.kind == "video":
        return _probe_video(part, limits, root, sizes)
    return _probe_audio(part, limits, root, sizes)


def _image_size(value: Any, limits: Limits, root: Path, sizes: SizeCache | None) -> tuple[int, int]:
    def find() -> MediaSize:
        return MediaSize(*decoders.image_size(value, limits, root))

    size = find() if sizes is None else sizes.find("image", value, limits, root, find)
    return size.width, size.height


def _probe_video(part: Part, limits: Limits, root: Path, sizes: SizeCache | None) -> MediaInfo:
    sampled_fps = number_option(part, "fps") or limits.fps or DEFAULT_FPS

    def find() -> MediaSize:
        video = decoders.video_size(part.value, limits, root, sampled_fps)
        return MediaSize(*video.frame, video.num_frames, video.fps)

    video = find() if sizes is None else sizes.find("video", part.value, limits, root, find)
    seconds = video.length / video.rate
    _check_seconds("video", seconds, limits.max_seconds or 3600.0)
    width = video.width
    height = video.height
    if width * height > MAX_FILE_PIXELS:
        raise BadRow(
            "too_large",
            f"video of {width}x{height}; {MAX_FILE_PIXELS} pixels are allowed",
        )
    num_frames = _num_sampled_frames(part, limits, video.length, seconds * sampled_fps)
    if not isinstance(part.value, np.ndarray | list | tuple):
        # Frames of a file are decoded smaller if all of them would not fit in memory.
        scale = min(1.0, math.sqrt(CLIP_PIXELS / (num_frames * width * height)))
        width = max(1, int(width * scale))
        height = max(1, int(height * scale))
    return MediaInfo(
        "video",
        width,
        height,
        total_frames=video.length,
        fps=video.rate,
        num_frames=num_frames,
        **pixel_options(part),
    )


def _check_seconds(kind: str, seconds: float, longest: float) -> None:
    if seconds > longest:
        text = f"{kind} of {seconds:.0f} seconds; {longest:g} are allowed (data.limits.max_seconds)"
        raise BadRow("too_long", text)


def _num_sampled_frames(
    part: Part,
    limits: Limits,
    total_frames: int,
    frames_at_fps: float,
) -> int:
    """How many frames the model sees, under the row's options and the limits."""
    wanted = int(number_option(part, "num_frames", "nframes") or frames_at_fps)
    row_limit = int(number_option(part, "max_frames") or total_frames)
    most = min(row_limit, limits.max_frames or total_frames, total_frames)
    return max(MIN_FRAMES, min(max(wanted, limits.min_frames or 1), most))


def _probe_audio(part: Part, limits: Limits, root: Path, sizes: SizeCache | None) -> MediaInfo:
    def find() -> MediaSize:
        return MediaSize(0, 0, *decoders.audio_size(part, limits, root))

    audio = find() if sizes is None else sizes.find("audio", part.value, limits, root, find)
    num_samples = audio.length
    sampling_rate = int(audio.rate)
    if num_samples < 1 or not MIN_SAMPLING_RATE <= sampling_rate <= MAX_SAMPLING_RATE:
        raise BadRow("corrupt", f"audio with {num_samples} samples at {sampling_rate} Hz")
    seconds = num_samples / sampling_rate
    _check_seconds("audio", seconds, limits.max_seconds or 600.0)
    return MediaInfo("audio", num_samples=num_samples, sampling_rate=sampling_rate)

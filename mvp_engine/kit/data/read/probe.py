"""Probing of media: the MediaInfo of an item from its header, without decoding it.

Only the first frame of a video is decoded. Items past a guard of `Limits` are bad rows.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from mvp_engine.kit.data.read import decode_audio, decode_image, decode_video
from mvp_engine.kit.data.read.limits import CLIP_PIXELS, Limits
from mvp_engine.kit.data.read.media_info import MediaInfo, number_option, pixel_options
from mvp_engine.kit.data.read.media_source import describe
from mvp_engine.kit.data.read.row_types import BadRow, Part
from mvp_engine.kit.data.read.size_cache import MediaSize, SizeCache
from mvp_engine.kit.data.read.timeout import run_with_timeout

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


def image_info(part: Part, width: int, height: int) -> MediaInfo:
    """The MediaInfo of an image of this size, with the pixel budget of its row."""
    if width == height == 1:
        raise BadRow("too_small", "image of 1x1 pixel, which stands for one that is missing")
    return MediaInfo("image", width, height, **pixel_options(part))


def _image_size(value: Any, limits: Limits, root: Path, sizes: SizeCache | None) -> tuple[int, int]:
    def find() -> MediaSize:
        return MediaSize(*decode_image.image_size(value, limits, root))

    size = find() if sizes is None else sizes.find("image", value, limits, root, find)
    return size.width, size.height


def _probe_video(part: Part, limits: Limits, root: Path, sizes: SizeCache | None) -> MediaInfo:
    sampled_fps = number_option(part, "fps") or limits.fps or DEFAULT_FPS

    def find() -> MediaSize:
        video = decode_video.video_size(part.value, limits, root, sampled_fps)
        return MediaSize(*video.frame, video.num_frames, video.fps)

    video = find() if sizes is None else sizes.find("video", part.value, limits, root, find)
    seconds = video.length / video.rate
    if seconds > limits.video_seconds:
        raise BadRow(
            "too_long", f"video of {seconds:.0f} seconds; {limits.video_seconds:g} are allowed"
        )
    width = video.width
    height = video.height
    if width * height > limits.image_pixels:
        raise BadRow(
            "too_large", f"video of {width}x{height}; {limits.image_pixels} pixels are allowed"
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
        return MediaSize(0, 0, *decode_audio.audio_size(part, limits, root))

    audio = find() if sizes is None else sizes.find("audio", part.value, limits, root, find)
    num_samples = audio.length
    sampling_rate = int(audio.rate)
    if num_samples < 1 or not MIN_SAMPLING_RATE <= sampling_rate <= MAX_SAMPLING_RATE:
        raise BadRow("corrupt", f"audio with {num_samples} samples at {sampling_rate} Hz")
    seconds = num_samples / sampling_rate
    if seconds > limits.audio_seconds:
        raise BadRow(
            "too_long", f"audio of {seconds:.0f} seconds; {limits.audio_seconds:g} are allowed"
        )
    return MediaInfo("audio", num_samples=num_samples, sampling_rate=sampling_rate)

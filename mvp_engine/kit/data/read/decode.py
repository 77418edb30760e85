"""Decoding of media parts: images, frames of videos and waveforms, checked against their MediaInfo.

A packing plan was made from the sizes that `probe.py` found, so an item that has another size now is a
bad row. Nothing here knows a model: `encode/` passes decoded items to the model's processor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mvp_engine.kit.data.read import decode_audio, decode_image, decode_video
from mvp_engine.kit.data.read.limits import Limits
from mvp_engine.kit.data.read.media_info import MediaInfo
from mvp_engine.kit.data.read.media_source import describe
from mvp_engine.kit.data.read.row_types import BadRow, Part
from mvp_engine.kit.data.read.timeout import run_with_timeout


def decode(
    part: Part,
    info: MediaInfo,
    limits: Limits,
    root: Path,
    sampling_rate: int = 0,
) -> Any:
    """The decoded item, as `decode_now` gives it; BadRow after `limits.timeout` seconds."""

    def work() -> Any:
        return decode_now(part, info, limits, root, sampling_rate)

    return run_with_timeout(limits.timeout, work, f"decoding {describe(part)}")


def decode_now(
    part: Part,
    info: MediaInfo,
    limits: Limits,
    root: Path,
    sampling_rate: int = 0,
) -> Any:
    """A PIL image (RGB), video frames (num_frames, H, W, 3) of uint8, or a mono float32 waveform."""
    if part.kind == "image":
        image = decode_image.decode_image(part.value, limits, root)
        _check_size(image.size, info)
        return image
    if part.kind == "video":
        frames = decode_video.decode_video(part.value, info, limits, root)
        _check_size((frames.shape[2], frames.shape[1]), info)
        return frames
    return decode_audio.decode_audio(part, info, limits, root, sampling_rate)


def _check_size(size: tuple[int, int], info: MediaInfo) -> None:
    if size == (info.width, info.height):
        return
    raise BadRow(
        "changed",
        f"the {info.kind} is {size[0]}x{size[1]} now, but was {info.width}x{info.height} "
        "when it was planned",
    )

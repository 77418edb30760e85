"""Videos: their size and length from the container, and the sampled frames.

A video is a file or bytes that PyAV decodes, or frames: an array (T, H, W, 3), or a list of images.
"""

from __future__ import annotations

import io
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mvp_engine.kit.data.read.decode_image import decode_image, image_size
from mvp_engine.kit.data.read.limits import Limits
from mvp_engine.kit.data.read.media_info import MediaInfo
from mvp_engine.kit.data.read.media_source import decoder_errors, open_media, require_package
from mvp_engine.kit.data.read.row_types import BadRow

# Containers that hold their own data. Playlists are left out: they name other files and addresses.
CONTAINERS = "mov,mp4,matroska,webm,avi,mpegts,mpeg,flv,ogg,asf,gif,apng"
# Seconds between two sampled frames from which a seek to a key frame is faster than decoding all
# frames between them.
SEEK_SECONDS = 4.0


class VideoSize(NamedTuple):
    """Size of a frame (width, height), number of frames, and frames per second of a video."""

    frame: tuple[int, int]
    num_frames: int
    fps: float


def video_size(
    value: Any,
    limits: Limits,
    root: Path,
    fps: float,
) -> VideoSize:
    """The size of a video; `fps` is the rate of one that is given as frames."""
    if isinstance(value, np.ndarray):
        _check_frame_array(value)
        return VideoSize((value.shape[2], value.shape[1]), len(value), fps)
    if isinstance(value, list | tuple):
        return VideoSize(_frame_list_size(value, limits, root), len(value), fps)
    return _container_size(value, limits, root)


def _check_frame_array(frames: np.ndarray) -> None:
    is_video = frames.ndim == 4 and frames.shape[3] == 3 and frames.size > 0
    if frames.dtype != np.uint8 or not is_video:
        shape = "x".join(map(str, frames.shape))
        raise BadRow(
            "wrong_type", f"frames must be TxHxWx3 of uint8, not {shape} of {frames.dtype}"
        )


def _frame_list_size(
    frames: Sequence[Any],
    limits: Limits,
    root: Path,
) -> tuple[int, int]:
    """The size of the first frame; of the others, only their files are looked for."""
    if not frames:
        raise BadRow("wrong_type", "video without frames")
    for frame in frames[1:]:
        if isinstance(frame, str | os.PathLike | Mapping):
            open_media(frame, limits, root, "frame")
    return image_size(frames[0], limits, root)


def open_container(source: Path | io.BytesIO) -> Any:
    """A video file, open. Tags need not be UTF-8; av takes them since version 19, without the option."""
    av = require_package("av", "video")
    tags = {"metadata_errors": "ignore"} if int(av.__version__.split(".")[0]) < 19 else {}
    options = {"format_whitelist": CONTAINERS, "protocol_whitelist": "file"}
    return av.open(str(source) if isinstance(source, Path) else source, options=options, **tags)


def _container_size(
    value: Any,
    limits: Limits,
    root: Path,
) -> VideoSize:
    source = open_media(value, limits, root, "video")
    require_package("av", "video")
    with decoder_errors("video"), open_container(source) as container:
        stream = container.streams.video[0]
        first = next(container.decode(stream))
        size = (first.width, first.height)
        if first.rotation % 180:
            size = (first.height, first.width)
        fps = float(stream.average_rate or stream.guessed_rate or 0)
        frames = stream.frames or round(_stream_seconds(container, stream) * fps)
    if not frames:  # recorded live: the header has no duration, so the packets are counted
        frames = _count_packets(source)
    if frames < 1 or not fps > 0:
        raise BadRow("corrupt", "video: the container has no number of frames or no frame rate")
    return VideoSize(size, frames, fps)


def _stream_seconds(container: Any, stream: Any) -> float:
    if stream.duration:
        return float(stream.duration * stream.time_base)
    return (container.duration or 0) / 1e6  # in microseconds


def _count_packets(source: Path | io.BytesIO) -> int:
    if isinstance(source, io.BytesIO):
        source.seek(0)
    with decoder_errors("video"), open_container(source) as container:
        packets = container.demux(container.streams.video[0])
        return sum(1 for packet in packets if packet.size)


def decode_video(
    value: Any,
    info: MediaInfo,
    limits: Limits,
    root: Path,
) -> np.ndarray:
    """The sampled frames (num_frames, H, W, 3), uint8."""
    if isinstance(value, np.ndarray):
        return value[info.frame_indices()]
    if not isinstance(value, list | tuple):
        source = open_media(value, limits, root, "video")
        deadline = time.monotonic() + limits.timeout
        return _decode_frames(source, info, deadline)
    frames = []
    for index in info.frame_indices():
        frames.append(np.asarray(decode_image(value[index], limits, root)))
    shapes = {frame.shape for frame in frames}
    if len(shapes) > 1:
        raise BadRow("corrupt", f"the frames of a video have different sizes: {sorted(shapes)[:4]}")
    return np.stack(frames)


def _decode_frames(
    source: Path | io.BytesIO,
    info: MediaInfo,
    deadline: float,
) -> np.ndarray:
    """The sampled frames of a container."""
    require_package("av", "video")
    frames = []
    with decoder_errors("video"), open_container(source) as container:
        reader = _FrameReader(container, info, deadline)
        for index in info.frame_indices():
            frames.append(reader.frame_at(index / info.fps))
    return np.stack(frames)


class _FrameReader:
    """Reads frames of a container by their time, in increasing order.

    Frames are found by time because the frame numbers of containers are often wrong. Past the last
    frame, it is repeated, if the end is not too far away.
    """

    def __init__(self, container: Any, info: MediaInfo, deadline: float) -> None:
        self.container = container
        self.info = info
        self.deadline = deadline
        self.stream = container.streams.video[0]
        self.start = float((self.stream.start_time or 0) * self.stream.time_base)
        self.frames = container.decode(self.stream)
        self.decoded = 0
        self.frame: Any = None  # the last one that was decoded
        self.time = -math.inf  # its time, from the start
        self.pixels: np.ndarray | None = None  # its pixels, once they were asked for

    def frame_at(self, seconds: float) -> np.ndarray:
        """The pixels of the frame that is shown at this time."""
        self._seek_if_far(seconds)
        half_a_frame = 0.5 / self.info.fps
        while self.time < seconds - half_a_frame:
            if not self._decode_next():
                break
        if self.frame is None or seconds - self.time > max(1.0, 0.1 * self.info.seconds):
            end = max(self.time, 0.0)
            raise BadRow("corrupt", f"video of {self.info.seconds:.1f} seconds ends at {end:.1f}")
        if self.pixels is None:
            self.pixels = _upright_pixels(self.frame, self.info)
        return self.pixels

    def _seek_if_far(self, seconds: float) -> None:
        has_times = self.frame is not None and self.frame.time is not None
        if has_times and seconds - self.time > SEEK_SECONDS:
            timestamp = int((seconds + self.start) / self.stream.time_base)
            self.container.seek(timestamp, stream=self.stream)
            self.frames = self.container.decode(self.stream)

    def _decode_next(self) -> bool:
        frame = next(self.frames, None)
        if frame is None:
            return False
        if time.monotonic() > self.deadline:
            raise BadRow("timeout", "decoding a video")
        self.frame = frame
        self.pixels = None
        if frame.time is not None:
            self.time = frame.time - self.start
        else:
            self.time = self.decoded / self.info.fps
        self.decoded += 1
        return True


def _upright_pixels(frame: Any, info: MediaInfo) -> np.ndarray:
    """The frame's pixels in the size of `info`, rotated as the container's metadata demand."""
    size = {"width": info.width, "height": info.height}
    if frame.rotation % 180:
        size = {"width": info.height, "height": info.width}
    return np.rot90(frame.to_ndarray(format="rgb24", **size), round(frame.rotation / 90))

"""Decoding of images, videos and audio, within a timeout: decoders may hang in C code.

Videos: their size and length from the container, and the sampled frames.

A video is a file or bytes that PyAV decodes, or frames: an array (T, H, W, 3), or a list of images.
"""

from __future__ import annotations

import io
import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import numpy as np
from PIL import Image

from mvp_engine.kit.data.read.media_source import (
    decoder_errors,
    describe,
    open_media,
    require_package,
)
from mvp_engine.kit.data.read.row_types import MAX_FILE_PIXELS, BadRow, Limits, Part


@dataclass(frozen=True)
class MediaInfo:
    """What a packing plan must know of an item. It is found without decoding the item (`probe.py`)."""

    kind: str
    width: int = 0  # as decoded
    height: int = 0
    total_frames: int = 0  # in the file
    fps: float = 0.0  # in the file
    num_frames: int = 0  # frames that the model sees, evenly spread
    num_samples: int = 0  # in the file, per channel
    sampling_rate: int = 0  # in the file
    min_pixels: int | None = None  # of this item alone; None: the budget of all items
    max_pixels: int | None = None

    @property
    def seconds(self) -> float:
        if self.kind == "video":
            return self.total_frames / self.fps
        return self.num_samples / max(self.sampling_rate, 1)

    def num_samples_at(self, sampling_rate: int) -> int:
        """Samples after resampling, rounded up."""
        return -(-self.num_samples * sampling_rate // self.sampling_rate)

    def frame_indices(self) -> list[int]:
        """Indices of the sampled frames. A short video has some of them twice."""
        evenly_spread = np.linspace(0, self.total_frames - 1, self.num_frames)
        return [round(index) for index in evenly_spread.tolist()]


def number_option(part: Part, *names: str) -> float | None:
    """The first of the named options that the row sets for this item. Unknown options are ignored."""
    for name in names:
        value = part.options.get(name)
        if value is not None:
            return _positive_number(value, f"{part.kind} option {name}")
    return None


def _positive_number(value: Any, where: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 < number < 1e12:
        raise BadRow("wrong_type", f"{where} is {str(value)[:80]!r}, not a number above 0")
    return number


def pixel_options(part: Part) -> dict[str, Any]:
    """The pixel budget that the row sets for this item, as arguments of MediaInfo."""
    budget: dict[str, Any] = {}
    for name in ("min_pixels", "max_pixels"):
        pixels = number_option(part, name)
        budget[name] = None if pixels is None else math.ceil(pixels)
    return budget


def image_info(part: Part, width: int, height: int) -> MediaInfo:
    """The MediaInfo of an image of this size, with the pixel budget of its row."""
    if width == height == 1:
        raise BadRow("too_small", "image of 1x1 pixel, which stands for one that is missing")
    return MediaInfo("image", width, height, **pixel_options(part))


T = TypeVar("T")
TaskQueue = SimpleQueue[tuple[Callable[[], Any], Future[Any]]]

_idle_threads: list[TaskQueue] = []  # the queues of threads that wait for work
os.register_at_fork(after_in_child=_idle_threads.clear)  # a fork copies no threads


def run_with_timeout(seconds: float, work: Callable[[], T], what: str) -> T:
    """The result of `work`, or BadRow("timeout").

    `work` runs in a daemon thread, which is abandoned when the time is over: no signal interrupts a
    decoder that hangs in C, and a decoder process per worker would copy every image once more.
    """
    future = run_in_thread(work)
    wait([future], seconds)
    if not future.done():
        raise BadRow("timeout", f"{what} took more than {seconds:g} seconds")
    return future.result()


def run_in_thread(work: Callable[[], T]) -> Future[T]:
    """The future result of `work`, which starts at once in a daemon thread."""
    future: Future[T] = Future()
    queue = _idle_threads.pop() if _idle_threads else _start_thread()
    queue.put((work, future))
    return future


def _start_thread() -> TaskQueue:
    queue: TaskQueue = SimpleQueue()

    def serve() -> None:
        while True:
            work, future = queue.get()
            result = None
            error = None
            try:
                result = work()
            except BaseException as raised:  # noqa: BLE001 - raised again by future.result()
                error = raised
            # Idle before the result is set: the waiting caller may need this thread at once.
            _idle_threads.append(queue)
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
            # Otherwise the last image would stay in memory until the next one.
            del work, future, result, error

    threading.Thread(target=serve, daemon=True, name="media").start()
    return queue


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
            try:
                array = np.array(array, dtype=np.float32)
            except (TypeError, ValueError, OverflowError) as error:
                raise BadRow("wrong_type", f"audio array: {error}") from None
    if not isinstance(array, np.ndarray):
        return None, 0
    is_mono = array.dtype.kind == "f" and array.ndim == 1
    if not is_mono or not isinstance(sampling_rate, int):
        raise BadRow(
            "wrong_type", "a waveform must be floats of one channel, with an int as sampling_rate"
        )
    return array, sampling_rate


# Formats that PIL decodes itself. EPS is left out: PIL would start ghostscript.
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TGA", "TIFF", "WEBP")
EXIF_ORIENTATION = 0x0112
# EXIF orientation -> the transpose that undoes it; those of SWAPS_SIDES exchange width and height.
UNDO_ORIENTATION = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
SWAPS_SIDES = (5, 6, 7, 8)
_ALPHA_MODES = ("RGBA", "LA", "PA", "La", "RGBa")
Image.init()  # loads all formats once, before workers fork


def image_size(value: Any, limits: Limits, root: Path) -> tuple[int, int]:
    """Width and height of the upright image, without decoding it."""
    image = open_image(value, limits, root)
    orientation = _orientation(image)
    if image is not value:
        image.close()
    width, height = image.size
    return (height, width) if orientation in SWAPS_SIDES else (width, height)


def decode_image(value: Any, limits: Limits, root: Path) -> Image.Image:
    """The upright image in RGB; of an animation, its first frame."""
    image = open_image(value, limits, root)
    orientation = _orientation(image)
    with decoder_errors("image"):
        image.load()
        upright = _to_rgb(image)
        if orientation in UNDO_ORIENTATION:
            upright = upright.transpose(UNDO_ORIENTATION[orientation])
    if image is not value:
        image.close()
    return upright


def open_image(value: Any, limits: Limits, root: Path) -> Image.Image:
    """The image with its header read, not decoded yet."""
    if isinstance(value, np.ndarray):
        image = _image_from_array(value)
    elif isinstance(value, Image.Image):
        image = value
    else:
        source = open_media(value, limits, root, "image")
        formats = [name for name in FORMATS if name in Image.OPEN]
        with decoder_errors("image"), warnings.catch_warnings():
            # PIL warns of large sizes, which are checked below, and of broken EXIF.
            warnings.simplefilter("ignore")
            image = Image.open(source, formats=formats)
    width, height = image.size
    if min(width, height) < 1 or width * height > MAX_FILE_PIXELS:
        raise BadRow(
            "too_large",
            f"image of {width}x{height}; {MAX_FILE_PIXELS} pixels are allowed",
        )
    return image


def _image_from_array(array: np.ndarray) -> Image.Image:
    channels = array.shape[2] if array.ndim == 3 else 1
    is_image = array.ndim in (2, 3) and channels in (1, 3, 4) and array.size > 0
    if array.dtype != np.uint8 or not is_image:
        shape = "x".join(map(str, array.shape))
        raise BadRow(
            "wrong_type", f"an image must be HxW or HxWx3 of uint8, not {shape} of {array.dtype}"
        )
    if array.ndim == 3 and channels == 1:
        array = array[:, :, 0]
    return Image.fromarray(array)


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation; 1 is upright."""
    # PIL transposes TIFF files itself. To find EXIF at the end of a PNG, it would decode all of it.
    if image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info):
        return 1
    try:
        return int(image.getexif().get(EXIF_ORIENTATION, 1))
    except Exception:  # noqa: BLE001 - EXIF can be broken in many ways while the image is good
        return 1


def _to_rgb(image: Image.Image) -> Image.Image:
    """RGB, with transparent pixels on white."""
    if image.mode.startswith("I") or image.mode == "F":
        return _scale_to_8_bits(image)
    if image.mode in _ALPHA_MODES or "transparency" in image.info:
        front = image.convert("RGBA")
        white = Image.new("RGBA", front.size, "white")
        return Image.alpha_composite(white, front).convert("RGB")
    return image.convert("RGB")


def _scale_to_8_bits(image: Image.Image) -> Image.Image:
    """Scale integers of 16 or 32 bits and floats to 8 bits; PIL's own conversion would clip them."""
    values = np.nan_to_num(np.asarray(image).astype(np.float64))
    largest = values.max()
    white = 255.0 if largest > 1 else 1.0
    if image.mode.startswith("I;16") or largest > 255:
        white = 65535.0
    scaled = values.clip(0, white) * (255.0 / white)
    return Image.fromarray(scaled.astype(np.uint8)).convert("RGB")


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
        image = decode_image(part.value, limits, root)
        _check_size(image.size, info)
        return image
    if part.kind == "video":
        frames = decode_video(part.value, info, limits, root)
        _check_size((frames.shape[2], frames.shape[1]), info)
        return frames
    return decode_audio(part, info, limits, root, sampling_rate)


def _check_size(size: tuple[int, int], info: MediaInfo) -> None:
    if size == (info.width, info.height):
        return
    raise BadRow(
        "changed",
        f"the {info.kind} is {size[0]}x{size[1]} now, but was {info.width}x{info.height} "
        "when it was planned",
    )

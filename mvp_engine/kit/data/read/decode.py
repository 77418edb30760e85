"""From what a row holds (a path, bytes, a data URI, a picture, frames, a wave) to pixels and waves, safely.

The sizes come from headers, with nothing decoded but the first frame of a video. `decode` then reads exactly what the
sizes promised, since a plan was made of them. Whatever is wrong with the media is a `BadRow`. Nothing here knows a
model: what its processor makes of pixels is in `media.py`.
"""

from __future__ import annotations

import base64
import binascii
import importlib
import io
import math
import os
import stat
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import numpy as np
from PIL import Image

from mvp_engine.errors import UserError
from mvp_engine.kit.data.encode.limits import Info, Limits
from mvp_engine.kit.data.read.rows import BadRow, Part

T = TypeVar("T")

PICTURES = (
    "AVIF",
    "BMP",
    "GIF",
    "JPEG",
    "JPEG2000",
    "MPO",
    "PNG",
    "PPM",
    "TGA",
    "TIFF",
    "WEBP",
)  # EPS would start gs
# Not playlists, which name other files and addresses.
FILMS = "mov,mp4,matroska,webm,avi,mpegts,mpeg,flv,ogg,asf,gif,apng"
TURNS = {  # EXIF orientation -> how to undo it
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
Image.init()  # all formats now, so that no worker has to load them
SEEK = 4.0  # seconds between frames from which jumping to a key frame beats decoding all between


def decode(part: Part, info: Info, limits: Limits, root: Path, rate: int = 0) -> Any:
    """`read`, given up after a while."""
    return within(
        limits.timeout, lambda: read(part, info, limits, root, rate), f"decoding {name_of(part)}"
    )


def read(part: Part, info: Info, limits: Limits, root: Path, rate: int = 0) -> Any:
    """A picture (PIL, RGB), frames (take, H, W, 3) of uint8, or a wave of float32 at `rate`, mono."""
    if part.kind == "image":
        picture = _picture(part.value, limits, root)
        return _as_planned(picture, picture.size, info)
    if part.kind == "video":
        frames = _clip(part.value, info, limits, root)
        return _as_planned(frames, (frames.shape[2], frames.shape[1]), info)
    return _wave(part, info, limits, root, rate)


def within(seconds: float, work: Callable[[], T], what: str) -> T:
    """The result of `work`, or BadRow("timeout").

    It runs in a thread, which is left behind when it does not come back: a decoder that hangs in C cannot be
    interrupted by a signal, and a process per worker would copy every picture once more.
    """
    future: Future[T] = Future()
    (_idle.pop() if _idle else _new_thread()).put((work, future))
    wait([future], seconds)
    if not future.done():
        raise BadRow("timeout", f"{what} took more than {seconds:g} seconds")
    return future.result()


_idle: list[SimpleQueue[Any]] = []  # where threads that have nothing to do wait for work
os.register_at_fork(after_in_child=_idle.clear)  # threads do not go along


def _new_thread() -> SimpleQueue[Any]:
    tasks: SimpleQueue[Any] = SimpleQueue()

    def serve() -> None:
        while True:
            work, future = tasks.get()
            try:
                result, error = work(), None
            except BaseException as raised:  # noqa: BLE001 - raised again by result()
                result, error = None, raised
            _idle.append(tasks)
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
            del work, future, result, error  # a picture would live until the next comes

    threading.Thread(target=serve, daemon=True, name="media").start()
    return tasks


def need(package: str, what: str) -> Any:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError:
        raise UserError(
            f"{what} needs the package {package}: pip install 'mvp-engine[data]'"
        ) from None


@contextmanager
def _corrupt_if_it_fails(what: str) -> Iterator[None]:
    """Around calls into a decoder, and nothing else: broken bytes make them raise nearly anything."""
    try:
        yield
    except BadRow:
        raise
    except Image.DecompressionBombError as error:
        raise BadRow("too_large", f"{what}: {error}") from None
    except Exception as error:  # noqa: BLE001
        raise BadRow("corrupt", f"{what}: {type(error).__name__}: {error}"[:500]) from None


def _as_planned(value: T, size: tuple[int, int], info: Info) -> T:
    if size != (info.width, info.height):
        now = f"{size[0]}x{size[1]}"
        raise BadRow(
            "changed",
            f"the {info.kind} is {now} now, but was {info.width}x{info.height} when it was planned",
        )
    return value


def name_of(part: Part) -> str:
    value = part.value.get("path") if isinstance(part.value, Mapping) else part.value
    shown = str(value) if isinstance(value, str | os.PathLike) else type(part.value).__name__
    return f"{part.kind} {shown[:200]}"


def _source(value: Any, limits: Limits, root: Path, what: str) -> Path | io.BytesIO:
    """The file or the bytes that a value stands for."""
    if isinstance(value, Mapping):
        value = value["bytes"] if value.get("bytes") is not None else value.get("path")
    if isinstance(value, bytes | bytearray | memoryview):
        if not len(value):
            raise BadRow("corrupt", f"{what}: no bytes")
        return io.BytesIO(value)
    if not isinstance(value, str | os.PathLike) or not str(value):
        raise BadRow(
            "wrong_type", f"{what} cannot be read from {type(value).__name__} {str(value)[:80]!r}"
        )
    text = os.fspath(value)
    if text.startswith("data:"):
        head, _, body = text.partition(",")
        try:
            return io.BytesIO(
                base64.b64decode("".join(body.split()), validate=True)
                if head.endswith(";base64")
                else b""
            )
        except (binascii.Error, ValueError) as error:
            raise BadRow("corrupt", f"{what}: data URI: {error}") from None
    if text.startswith("file://"):
        text = unquote(urlsplit(text).path)
    elif "://" in text[:16]:
        raise BadRow("unsupported", f"{what}: nothing is fetched from the network: {text[:200]}")
    return _file(text, limits, root, what)


def _file(text: str, limits: Limits, root: Path, what: str) -> Path:
    try:
        path, home = (root / text).resolve(), root.resolve()
        if not limits.allow_outside and not path.is_relative_to(home):
            raise BadRow("path_escape", f"{what}: {text[:200]} is not in {home}")
        mode = path.stat().st_mode
    except (
        OSError,
        ValueError,
        RuntimeError,
    ) as error:  # not there, too long, a NUL in it, a loop of links
        raise BadRow("missing_file", f"{what}: {str(error)[:300]}") from None
    if not stat.S_ISREG(mode):  # a pipe or a device might never end
        raise BadRow("unsupported", f"{what}: {path} is not a plain file")
    return path


# Pictures


def image_size(value: Any, limits: Limits, root: Path) -> tuple[int, int]:
    """Width and height, as they will be when the picture is upright."""
    image, turn = _opened(value, limits, root)
    if image is not value:
        image.close()
    return _turned(image.size, turn)


def _picture(value: Any, limits: Limits, root: Path) -> Image.Image:
    """Upright, in RGB; of an animation the first picture."""
    image, turn = _opened(value, limits, root)
    with _corrupt_if_it_fails("image"):
        image.load()
        upright = _rgb(image).transpose(TURNS[turn]) if turn in TURNS else _rgb(image)
    if image is not value:
        image.close()
    return upright


def _opened(value: Any, limits: Limits, root: Path) -> tuple[Image.Image, int]:
    """The picture, not decoded yet, and its EXIF orientation."""
    if isinstance(value, np.ndarray):
        colours = value.shape[2] if value.ndim == 3 else 1
        if (
            value.dtype != np.uint8
            or value.ndim not in (2, 3)
            or colours not in (1, 3, 4)
            or not value.size
        ):
            shape = "x".join(map(str, value.shape))
            raise BadRow(
                "wrong_type",
                f"an image must be HxW or HxWx3 of uint8, not {shape} of {value.dtype}",
            )
        value = Image.fromarray(value[:, :, 0] if colours == 1 and value.ndim == 3 else value)
    if isinstance(value, Image.Image):
        image = value
    else:
        source = _source(value, limits, root, "image")
        with _corrupt_if_it_fails("image"), warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # of sizes, which are looked at below, and of broken EXIF
            image = Image.open(source, formats=[name for name in PICTURES if name in Image.OPEN])
    if min(image.size) < 1 or image.width * image.height > limits.image_pixels:
        raise BadRow(
            "too_large",
            f"image of {image.width}x{image.height}; {limits.image_pixels} pixels are allowed",
        )
    return image, _orientation(image)


def _orientation(image: Image.Image) -> int:
    if image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info):
        return 1  # PIL turns TIFF files itself, and would have to decode all of a PNG to look for what comes last
    try:
        return int(image.getexif().get(0x0112, 1))
    except Exception:  # noqa: BLE001 - EXIF can be broken in many ways, and the picture good
        return 1


def _turned(size: tuple[int, int], turn: int) -> tuple[int, int]:
    return size[::-1] if turn in (5, 6, 7, 8) else size


def _rgb(image: Image.Image) -> Image.Image:
    if (
        image.mode.startswith("I") or image.mode == "F"
    ):  # 16 bits; PIL's own conversion would clip them
        values = np.nan_to_num(np.asarray(image).astype(np.float64))
        top = (
            65535.0
            if image.mode.startswith("I;16") or values.max() > 255
            else 255.0
            if values.max() > 1
            else 1.0
        )
        return Image.fromarray((values.clip(0, top) * (255.0 / top)).astype(np.uint8)).convert(
            "RGB"
        )
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        front = image.convert("RGBA")
        white = Image.new("RGBA", front.size, "white")
        return Image.alpha_composite(white, front).convert("RGB")
    return image.convert("RGB")


# Videos


def video_size(
    value: Any, limits: Limits, root: Path, fps: float
) -> tuple[tuple[int, int], int, float]:
    """Width and height of a frame, the number of frames, and frames per second: `fps` where frames are given."""
    if isinstance(value, np.ndarray):
        if value.dtype != np.uint8 or value.ndim != 4 or value.shape[3] != 3 or not value.size:
            shape = "x".join(map(str, value.shape))
            raise BadRow(
                "wrong_type", f"frames must be TxHxWx3 of uint8, not {shape} of {value.dtype}"
            )
        return (value.shape[2], value.shape[1]), len(value), fps
    if not isinstance(value, list | tuple):
        return _film_size(value, limits, root)
    if not value:
        raise BadRow("wrong_type", "video without frames")
    for frame in value[1:]:
        if isinstance(frame, str | os.PathLike | Mapping):
            _source(frame, limits, root, "frame")
    return image_size(value[0], limits, root), len(value), fps


def _film(source: Path | io.BytesIO) -> Any:
    return need("av", "video").open(
        str(source) if isinstance(source, Path) else source,
        options={"format_whitelist": FILMS, "protocol_whitelist": "file"},
        metadata_errors="ignore",
    )


def _film_size(value: Any, limits: Limits, root: Path) -> tuple[tuple[int, int], int, float]:
    source = _source(value, limits, root, "video")
    need("av", "video")
    with _corrupt_if_it_fails("video"), _film(source) as film:
        stream = film.streams.video[0]
        first = next(film.decode(stream))
        size = _turned((first.width, first.height), 6 if first.rotation % 180 else 1)
        fps = float(stream.average_rate or stream.guessed_rate or 0)
        seconds = (
            float(stream.duration * stream.time_base)
            if stream.duration
            else (film.duration or 0) / 1e6
        )
        frames = stream.frames or round(seconds * fps)
    if not frames:  # recorded live, and never told
        if isinstance(source, io.BytesIO):
            source.seek(0)
        with _corrupt_if_it_fails("video"), _film(source) as film:
            frames = sum(1 for packet in film.demux(film.streams.video[0]) if packet.size)
    if frames < 1 or not fps > 0:
        raise BadRow("corrupt", "video: neither its frames nor their rate can be found")
    return size, frames, fps


def _clip(value: Any, info: Info, limits: Limits, root: Path) -> np.ndarray:
    if isinstance(value, np.ndarray):
        return value[info.picks()]
    if not isinstance(value, list | tuple):
        return _read_film(
            _source(value, limits, root, "video"), info, time.monotonic() + limits.timeout
        )
    frames = [np.asarray(_picture(value[i], limits, root)) for i in info.picks()]
    shapes = {frame.shape for frame in frames}
    if len(shapes) > 1:
        raise BadRow("corrupt", f"the frames of a video have different sizes: {sorted(shapes)[:4]}")
    return np.stack(frames)


def _read_film(source: Path | io.BytesIO, info: Info, deadline: float) -> np.ndarray:
    """The picked frames, by their time: numbers of frames in containers are often wrong. A missing end is repeated."""
    need("av", "video")
    pictures: list[np.ndarray] = []
    with _corrupt_if_it_fails("video"), _film(source) as film:
        stream = film.streams.video[0]
        begin, half = float((stream.start_time or 0) * stream.time_base), 0.5 / info.fps
        flow, now, picture, count, frame = film.decode(stream), -math.inf, None, 0, None
        for wanted in (number / info.fps for number in info.picks()):
            if frame is not None and frame.time is not None and wanted - now > SEEK:
                film.seek(int((wanted + begin) / stream.time_base), stream=stream)
                flow = film.decode(stream)
            while now < wanted - half and (ahead := next(flow, None)) is not None:
                if time.monotonic() > deadline:
                    raise BadRow("timeout", "decoding a video")
                frame, picture = ahead, None
                now = frame.time - begin if frame.time is not None else count / info.fps
                count += 1
            if frame is None or wanted - now > max(1.0, 0.1 * info.seconds):
                raise BadRow(
                    "corrupt", f"video of {info.seconds:.1f} seconds ends at {max(now, 0.0):.1f}"
                )
            if picture is None:
                picture = _upright(frame, info)
            pictures.append(picture)
    return np.stack(pictures)


def _upright(frame: Any, info: Info) -> np.ndarray:
    across = frame.rotation % 180 != 0
    width, height = (info.height, info.width) if across else (info.width, info.height)
    return np.rot90(
        frame.to_ndarray(format="rgb24", width=width, height=height), round(frame.rotation / 90)
    )


# Sounds


def audio_size(part: Part, limits: Limits, root: Path) -> tuple[int, int]:
    """Samples per channel, and their rate."""
    wave, rate = _given_wave(part)
    if wave is not None:
        return len(wave), rate
    sounds, source = need("soundfile", "audio"), _source(part.value, limits, root, "audio")
    with _corrupt_if_it_fails("audio"):
        found = sounds.info(source)
    return found.frames, found.samplerate


def _given_wave(part: Part) -> tuple[Any, int]:
    """A wave that is in the row itself: an array with the option sampling_rate, or {"array", "sampling_rate"}."""
    given, rate = part.value, part.options.get("sampling_rate")
    if isinstance(part.value, Mapping):
        given, rate = part.value.get("array"), part.value.get("sampling_rate")
        try:
            given = np.array(given, dtype=np.float32) if isinstance(given, list | tuple) else given
        except (TypeError, ValueError, OverflowError) as error:
            raise BadRow("wrong_type", f"audio array: {error}") from None
    if not isinstance(given, np.ndarray):
        return None, 0
    if given.dtype.kind != "f" or given.ndim != 1 or not isinstance(rate, int):
        raise BadRow(
            "wrong_type", "a wave must be floats of one channel, with an int as its sampling_rate"
        )
    return given, rate


def _wave(part: Part, info: Info, limits: Limits, root: Path, rate: int) -> np.ndarray:
    given, _ = _given_wave(part)
    if given is None:
        sounds, source = need("soundfile", "audio"), _source(part.value, limits, root, "audio")
        with _corrupt_if_it_fails("audio"):
            given, own = sounds.read(source, frames=info.samples, dtype="float32", always_2d=True)
        if own != info.rate:
            raise BadRow(
                "changed", f"the audio has {own} Hz now, but had {info.rate} when it was planned"
            )
        given = given.mean(axis=1)
    wave = given.astype(np.float32)
    if not np.isfinite(wave).all():
        raise BadRow("corrupt", "audio with samples that are not finite")
    if rate != info.rate:
        soxr = need("soxr", "audio")
        with _corrupt_if_it_fails("audio"):
            wave = soxr.resample(wave, info.rate, rate)
    length = info.length(rate)
    if abs(len(wave) - length) > max(0.1 * rate, 0.01 * length):
        raise BadRow(
            "corrupt", f"audio has {len(wave)} samples at {rate} Hz; its header promised {length}"
        )
    return np.pad(wave[:length], (0, max(0, length - len(wave))))

"""Probing and decoding of media: equal results for every form; broken, huge or endless media are a BadRow."""

from __future__ import annotations

import base64
import ctypes
import io
import os
import struct
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from mvp_engine.kit.data.read import decode_image, decode_video
from mvp_engine.kit.data.read.decode import decode
from mvp_engine.kit.data.read.limits import Limits
from mvp_engine.kit.data.read.media_info import MediaInfo
from mvp_engine.kit.data.read.probe import probe
from mvp_engine.kit.data.read.row_types import BadRow, Part

LIMITS = Limits(fps=2.0, max_frames=8, timeout=20.0, allow_outside=False)
HERE = Path(".")


@pytest.fixture(scope="module")
def photo() -> np.ndarray:
    from sklearn.datasets import load_sample_image

    return np.ascontiguousarray(
        load_sample_image("flower.jpg")[::5, ::5]
    )  # 86 x 128 pixels of a photo


def encoded(image: Image.Image, format: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def read(
    part: Part, limits: Limits = LIMITS, root: Path = HERE, rate: int = 16000
) -> tuple[MediaInfo, Any]:
    info = probe(part, limits, root)
    return info, decode(part, info, limits, root, rate)


def reason(part: Part, limits: Limits = LIMITS, root: Path = HERE) -> str:
    with pytest.raises(BadRow) as bad:
        read(part, limits, root)
    return bad.value.reason


def test_decode_image_every_form_of_value_gives_the_same_pixels(
    photo: np.ndarray, tmp_path: Path
) -> None:
    raw = encoded(Image.fromarray(photo), "PNG")
    (tmp_path / "a photo.png").write_bytes(raw)
    (tmp_path / "link.png").symlink_to(tmp_path / "a photo.png")
    forms = [
        "a photo.png",
        str(tmp_path / "a photo.png"),
        Path("a photo.png"),
        (tmp_path / "a photo.png").as_uri(),
    ]
    forms += [
        "./sub/../a photo.png",
        "link.png",
        raw,
        bytearray(raw),
        {"bytes": raw, "path": "gone.png"},
    ]
    forms += [
        {"bytes": None, "path": "a photo.png"},
        "data:image/png;base64," + base64.b64encode(raw).decode(),
    ]
    for form in [*forms, Image.fromarray(photo), photo]:
        info, image = read(Part("image", form), root=tmp_path)
        assert (info.width, info.height) == image.size == (128, 86)
        assert image.mode == "RGB"
        assert np.array_equal(np.asarray(image), photo), form


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_decode_image_exif_orientation_is_applied_to_pixels_and_probed_size(
    photo: np.ndarray, format: str, orientation: int
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    raw = encoded(Image.fromarray(photo), format, exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(raw)))
    info, image = read(Part("image", raw))
    assert (info.width, info.height) == image.size == ((86, 128) if orientation > 4 else (128, 86))
    assert np.array_equal(np.asarray(image), np.asarray(expected.convert("RGB")))


def test_decode_image_every_color_mode_becomes_rgb() -> None:
    def first(image: Image.Image, format: str = "PNG", **options: Any) -> tuple[int, ...]:
        decoded = read(Part("image", encoded(image, format, **options)))[1]
        assert decoded.mode == "RGB"
        return decoded.getpixel((0, 0))

    assert first(Image.new("RGBA", (4, 4), (200, 0, 0, 0))) == (
        255,
        255,
        255,
    )  # transparent pixels are white
    assert first(Image.new("RGBA", (4, 4), (0, 0, 0, 128))) == pytest.approx((127, 127, 127), abs=1)
    assert first(Image.new("LA", (4, 4), (0, 0))) == (255, 255, 255)
    assert first(Image.new("L", (4, 4), 77)) == (77, 77, 77)
    assert first(Image.new("1", (4, 4), 1)) == (255, 255, 255)
    palette = Image.new("RGB", (4, 4), (9, 200, 30)).quantize(2)
    assert first(palette) == (9, 200, 30)
    assert first(palette, transparency=palette.getpixel((0, 0))) == (255, 255, 255)
    assert first(Image.fromarray(np.full((4, 4), 40000, np.uint16))) == (155, 155, 155)
    assert first(Image.new("CMYK", (4, 4), (0, 255, 255, 0)), "JPEG") == pytest.approx(
        (255, 0, 0), abs=3
    )
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    assert first(frames[0], "GIF", save_all=True, append_images=frames[1:]) == (255, 0, 0)


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes with a huge size in its header."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"IDAT" + zlib.compress(b"\0" * 100)
    chunks = [
        struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c))
        for c in (head, data, b"IEND")
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def test_decode_image_each_bad_value_has_its_reason_code(photo: np.ndarray, tmp_path: Path) -> None:
    raw = encoded(Image.fromarray(photo), "JPEG")
    (tmp_path / "in").mkdir()
    (tmp_path / "secret.png").write_bytes(encoded(Image.fromarray(photo), "PNG"))
    (tmp_path / "in" / "link.png").symlink_to(tmp_path / "secret.png")
    (tmp_path / "in" / "loop.png").symlink_to(tmp_path / "in" / "loop.png")
    (tmp_path / "in" / "text.png").write_text("no image")
    os.mkfifo(tmp_path / "in" / "pipe.png")
    expected: list[tuple[Any, str]] = [
        ("gone.png", "missing_file"),
        ("x" * 5000, "missing_file"),
        ("a\0b.png", "missing_file"),
        ("loop.png", "missing_file"),
        ("text.png", "corrupt"),
        (raw[: len(raw) // 2], "corrupt"),
        (b"", "corrupt"),
        (
            b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
            "corrupt",
        ),  # PIL would start ghostscript
        ("data:image/png;base64,@@@", "corrupt"),
        ("data:image/png,abc", "corrupt"),
        (bomb(60000, 60000), "too_large"),
        (bomb(10000, 9500), "too_large"),  # PIL only warns
        (bomb(6000, 6000), "corrupt"),
        ("../secret.png", "path_escape"),
        ("/etc/hostname", "path_escape"),
        ("file:///etc/hostname", "path_escape"),
        ("link.png", "path_escape"),
        ("https://example.com/a.png", "unsupported"),
        ("s3://bucket/a.png", "unsupported"),
        (".", "unsupported"),
        ("pipe.png", "unsupported"),  # opening it would block forever
        (None, "wrong_type"),
        ("", "wrong_type"),
        (7, "wrong_type"),
        ({}, "wrong_type"),
        ({"path": ["a.png"]}, "wrong_type"),
        (np.zeros((4, 4, 3), np.float32), "wrong_type"),
        (np.zeros((3, 4, 7), np.uint8), "wrong_type"),
        (np.zeros((0, 4, 3), np.uint8), "wrong_type"),
    ]
    for value, word in expected:
        assert reason(Part("image", value), root=tmp_path / "in") == word, value
    assert reason(Part("image", photo), Limits(image_pixels=128 * 86 - 1)) == "too_large"
    for word in (-1, "many", float("nan"), [2]):
        assert reason(Part("image", photo, {"max_pixels": word})) == "wrong_type"
    anywhere = Limits(allow_outside=True)
    for value in ("../secret.png", "link.png", str(tmp_path / "secret.png")):
        assert read(Part("image", value), anywhere, tmp_path / "in")[1].size == (128, 86)
    assert reason(Part("image", "/dev/zero"), anywhere) == "unsupported"


def test_decode_image_size_changed_since_probe_is_a_bad_row(photo: np.ndarray) -> None:
    info = probe(Part("image", photo), LIMITS, HERE)
    with pytest.raises(BadRow, match="changed: the image is 86x128 now, but was 128x86"):
        decode(Part("image", photo.transpose(1, 0, 2).copy()), info, LIMITS, HERE)


def video_file(
    codec: str = "mpeg4", format: str = "mp4", frames: int = 30, fps: int = 10, size: int = 32
) -> bytes:
    """Frame i has the gray value 8 i; every 15th is a key frame."""
    import av

    out = io.BytesIO()
    with av.open(
        out, "w", format=format.removesuffix("-live"), options={"live": str(int("-" in format))}
    ) as container:
        stream = container.add_stream(codec, rate=fps)
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = size, size, "yuv420p", 15
        stream.options = {"qscale": "1"} if codec == "mpeg4" else {"crf": "5"}
        for i in range(frames):
            pixels = np.full((size, size, 3), 8 * i % 256, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return out.getvalue()


def test_decode_video_with_tags_that_are_not_utf8() -> None:
    raw = video_file()
    broken = raw.replace(b"Lavf", b"\xff\xfe\xff ")
    assert broken != raw
    assert read(Part("video", broken))[0].total_frames == 30


def gray_values(frames: np.ndarray) -> list[int]:
    return [round(float(frame.mean()) / 8) for frame in frames]


@pytest.mark.parametrize(
    "kind", ["mpeg4 mp4", "libx264 mp4", "mpeg4 avi", "libvpx-vp9 webm", "libx264 matroska-live"]
)
def test_decode_video_returns_the_sampled_frames_of_every_container(
    kind: str, tmp_path: Path
) -> None:
    raw = video_file(*kind.split())
    (tmp_path / "video").write_bytes(raw)
    for value in (raw, "video", {"bytes": None, "path": "video"}):
        info, frames = read(Part("video", value), root=tmp_path)
        assert (info.total_frames, info.fps, info.seconds, info.num_frames) == (30, 10.0, 3.0, 6)
        assert frames.shape == (6, 32, 32, 3)
        assert gray_values(frames) == info.frame_indices() == [0, 6, 12, 17, 23, 29]
    info, frames = read(Part("video", raw, {"fps": 1, "min_pixels": 5, "max_pixels": 99.5}))
    assert (info.num_frames, info.min_pixels, info.max_pixels) == (3, 5, 100)
    assert read(Part("video", raw, {"nframes": 5}))[0].num_frames == 5
    assert read(Part("video", raw, {"fps": 10}))[0].num_frames == LIMITS.max_frames
    assert read(Part("video", raw, {"fps": 10, "max_frames": 3}))[0].num_frames == 3


def test_decode_video_seeking_gives_the_same_frames_as_decoding_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = video_file(frames=32 * 12, fps=4, size=16)  # gray values repeat every 32 frames
    info, seeked = read(Part("video", raw))
    monkeypatch.setattr(decode_video, "SEEK_SECONDS", 1e9)
    assert np.array_equal(seeked, read(Part("video", raw))[1])
    assert gray_values(seeked) == [i % 32 for i in info.frame_indices()]


def test_decode_video_arrays_and_frame_lists_are_videos(photo: np.ndarray, tmp_path: Path) -> None:
    frames = np.stack([np.full((6, 4, 3), i, np.uint8) for i in range(12)])
    (tmp_path / "f.png").write_bytes(encoded(Image.fromarray(frames[3]), "PNG"))
    info, found = read(Part("video", frames))
    assert (info.width, info.height, info.total_frames, info.fps, info.num_frames) == (
        4,
        6,
        12,
        2.0,
        8,
    )
    assert found[:, 0, 0, 0].tolist() == info.frame_indices() == [0, 2, 3, 5, 6, 8, 9, 11]
    listed = [
        Image.fromarray(frames[0]),
        frames[1],
        encoded(Image.fromarray(frames[2]), "PNG"),
        "f.png",
    ]
    info, found = read(Part("video", listed, {"fps": 1}), root=tmp_path)
    assert (info.seconds, found[:, 0, 0, 0].tolist()) == (4.0, [0, 1, 2, 3])
    assert read(Part("video", [frames[7]]))[1][:, 0, 0, 0].tolist() == [
        7,
        7,
    ]  # no encoder takes a single frame
    assert reason(Part("video", [frames[0], photo])) == "corrupt"
    assert reason(Part("video", [])) == "wrong_type"
    assert reason(Part("video", ["f.png", "gone.png"]), root=tmp_path) == "missing_file"
    assert reason(Part("video", ["f.png", "../f.png"]), root=tmp_path) == "path_escape"
    assert reason(Part("video", frames.astype(np.float32))) == "wrong_type"


def test_decode_video_rotation_metadata_is_applied() -> None:
    import av

    out, pixels = io.BytesIO(), np.zeros((32, 64, 3), np.uint8)
    pixels[:, :32] = 255  # the left half is white
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = 64, 32, "yuv420p"
        for _ in range(8):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    plain = struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    turned = struct.pack(
        ">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30
    )  # displayed rotated by 90 degrees clockwise
    track = out.getvalue().index(b"tkhd")
    raw = out.getvalue()[:track] + out.getvalue()[track:].replace(plain, turned, 1)
    info, frames = read(Part("video", raw))
    assert (info.width, info.height) == (32, 64)
    assert (frames[0, :30].mean() > 240, frames[0, 34:].mean() < 15) == (
        True,
        True,
    )  # the left half is now on top


def test_decode_video_each_bad_value_has_its_reason_code(tmp_path: Path) -> None:
    raw = video_file()
    (tmp_path / "list.m3u8").write_text(
        "#EXTM3U\n#EXT-X-TARGETDURATION:3\n#EXTINF:3,\nvideo.ts\n#EXT-X-ENDLIST\n"
    )
    (tmp_path / "list.ffconcat").write_text("ffconcat version 1.0\nfile video.ts\n")
    (tmp_path / "video.ts").write_bytes(video_file(format="mpegts"))
    expected: list[tuple[Any, str]] = [
        ("gone.mp4", "missing_file"),
        ("list.m3u8", "corrupt"),  # playlists could name any file
        ("list.ffconcat", "corrupt"),
        (raw[:200], "corrupt"),
        (b"nothing" * 50, "corrupt"),
        (video_file(format="mpegts")[:1500], "corrupt"),
        (3.0, "wrong_type"),
    ]
    for value, word in expected:
        assert reason(Part("video", value), root=tmp_path) == word, value
    assert reason(Part("video", raw), Limits(video_seconds=2.0)) == "too_long"
    assert reason(Part("video", raw), Limits(image_pixels=1000)) == "too_large"
    info, frames = read(
        Part("video", raw), Limits(fps=2.0, clip_pixels=6 * 16 * 16)
    )  # decoded smaller, to fit in memory
    assert (info.width, frames.shape) == (16, (6, 16, 16, 3))


def audio_file(
    rate: int = 44100, seconds: float = 1.0, format: str = "WAV", channels: int = 2
) -> bytes:
    import soundfile

    t = np.arange(int(rate * seconds)) / rate
    wave = np.stack([np.sin(2 * np.pi * 440 * t), 0 * t][:channels], axis=1)
    out = io.BytesIO()
    soundfile.write(out, wave * 0.8, rate, format=format)
    return out.getvalue()


@pytest.mark.parametrize("format", ["WAV", "FLAC", "OGG", "MP3"])
def test_decode_audio_every_format_becomes_mono_at_the_models_sampling_rate(
    format: str, tmp_path: Path
) -> None:
    raw = audio_file(format=format)
    (tmp_path / "a.audio").write_bytes(raw)
    for value in (
        raw,
        "a.audio",
        {"bytes": raw, "path": None},
        "data:audio/x;base64," + base64.b64encode(raw).decode(),
    ):
        info, waveform = read(Part("audio", value), root=tmp_path)
        assert (info.sampling_rate, waveform.dtype, waveform.ndim) == (44100, np.float32, 1)
        assert len(waveform) == info.num_samples_at(16000) == -(-info.num_samples * 16000 // 44100)
        spectrum = np.abs(np.fft.rfft(waveform[:16000]))
        assert int(spectrum.argmax()) == 440
        assert np.abs(waveform).max() == pytest.approx(0.4, abs=0.05)  # the mean of both channels
    waveform = np.sin(np.arange(8000))
    for part in (
        Part("audio", {"array": waveform, "sampling_rate": 16000}),
        Part("audio", waveform, {"sampling_rate": 16000}),
    ):
        assert np.array_equal(read(part)[1], waveform.astype(np.float32))


def test_decode_audio_each_bad_value_has_its_reason_code(tmp_path: Path) -> None:
    raw = audio_file()
    expected: list[tuple[Any, str]] = [
        ("gone.wav", "missing_file"),
        (raw[:20], "corrupt"),
        (b"noise" * 99, "corrupt"),
        (audio_file(seconds=0), "corrupt"),
        ({"array": np.full(99, np.nan), "sampling_rate": 16000}, "corrupt"),
        (np.zeros(9), "wrong_type"),  # without a sampling rate
        ({"array": np.zeros((9, 2)), "sampling_rate": 16000}, "wrong_type"),
        ({"array": "loud", "sampling_rate": 16000}, "wrong_type"),
        (5, "wrong_type"),
    ]
    for value, word in expected:
        assert reason(Part("audio", value), root=tmp_path) == word, value
    assert reason(Part("audio", raw), Limits(audio_seconds=0.5)) == "too_long"


def test_decode_hanging_decoder_is_a_timeout_bad_row(
    monkeypatch: pytest.MonkeyPatch, photo: np.ndarray
) -> None:
    def hang(*args: Any) -> None:
        ctypes.CDLL(None).sleep(60)  # in C, which no Python signal interrupts

    info = probe(Part("image", photo), LIMITS, HERE)
    monkeypatch.setattr(decode_image, "decode_image", hang)
    monkeypatch.setattr(decode_image, "open_image", lambda *args: time.sleep(60))
    started = time.monotonic()
    with pytest.raises(
        BadRow, match=r"timeout: decoding image ndarray took more than 0\.2 seconds"
    ):
        decode(Part("image", photo), info, Limits(timeout=0.2), HERE)
    assert reason(Part("image", "a.png"), Limits(timeout=0.2)) == "timeout"
    assert time.monotonic() - started < 20


def test_probe_internal_errors_are_raised_not_bad_rows(
    monkeypatch: pytest.MonkeyPatch, photo: np.ndarray
) -> None:
    def broken(*args: Any) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(decode_image, "image_size", broken)
    with pytest.raises(KeyError):
        probe(Part("image", photo), LIMITS, HERE)


def test_decode_mutated_bytes_give_media_or_a_bad_row(photo: np.ndarray) -> None:
    image, rng = Image.fromarray(photo), np.random.default_rng(0)
    whole = [
        ("image", encoded(image, name)) for name in ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP")
    ]
    whole += [
        ("video", video_file(frames=8)),
        ("video", video_file(frames=8, format="matroska")),
        ("audio", audio_file(seconds=0.2)),
    ]
    whole += [
        ("audio", audio_file(seconds=0.2, format="FLAC")),
        ("audio", audio_file(seconds=0.2, format="OGG")),
    ]
    outcomes = set()
    for kind, raw in whole:
        for _ in range(25):
            broken = bytearray(
                raw[: int(rng.integers(1, len(raw) + 1))] if rng.random() < 0.4 else raw
            )
            for at in rng.integers(0, min(len(broken), 400), int(rng.integers(0, 9))):
                broken[at] = rng.integers(0, 256)
            try:
                read(Part(kind, bytes(broken)))
                outcomes.add("good")
            except BadRow as bad:
                outcomes.add(bad.reason)
    assert {"good", "corrupt"} <= outcomes

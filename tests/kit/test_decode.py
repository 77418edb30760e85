"""Probing and decoding of media: equal results for every form; broken, huge or endless media are a BadRow."""

import base64
import ctypes
import io
import os
import struct
import time
from pathlib import Path

import numpy as np
import pytest
from media_files import audio_file, bomb, image_file, video_file
from PIL import Image, ImageOps

from mvp_engine.kit.data.read import decoders
from mvp_engine.kit.data.read.decoders import decode
from mvp_engine.kit.data.read.probe import probe
from mvp_engine.kit.data.read.row_types import BadRow, Limits, Part

LIMITS = Limits(fps=2.0, max_frames=8, timeout=20.0, allow_outside=False)
HERE = Path(".")


@pytest.fixture(scope="module")
def photo():
    from sklearn.datasets import load_sample_image

    # 86 x 128 pixels of a photo.
    return np.ascontiguousarray(load_sample_image("flower.jpg")[::5, ::5])


def read(part, limits=LIMITS, root=HERE, rate=16000):
    info = probe(part, limits, root)
    return info, decode(part, info, limits, root, rate)


def refused(kind, reasons, limits=LIMITS, root=HERE, **options):
    """Each value of a kind is a bad row with its reason."""
    for reason, values in reasons.items():
        for value in values:
            with pytest.raises(BadRow) as bad:
                read(Part(kind, value, options), limits, root)
            assert bad.value.reason == reason, value


def test_decode_image_every_form_of_value_gives_the_same_pixels(photo, tmp_path):
    raw = image_file(Image.fromarray(photo))
    file = tmp_path / "a photo.png"
    file.write_bytes(raw)
    (tmp_path / "link.png").symlink_to(file)
    forms = [file.name, str(file), Path(file.name), file.as_uri(), "./sub/../a photo.png"]
    forms += ["link.png", raw, bytearray(raw), Image.fromarray(photo), photo]
    forms += [{"bytes": raw, "path": "gone.png"}, {"bytes": None, "path": file.name}]
    forms.append("data:image/png;base64," + base64.b64encode(raw).decode())
    for form in forms:
        info, image = read(Part("image", form), root=tmp_path)
        assert (info.width, info.height) == image.size == (128, 86)
        assert image.mode == "RGB"
        assert np.array_equal(np.asarray(image), photo), form


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_decode_image_exif_orientation_is_applied_to_pixels_and_probed_size(photo, format):
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        raw = image_file(Image.fromarray(photo), format, exif=exif)
        expected = ImageOps.exif_transpose(Image.open(io.BytesIO(raw))).convert("RGB")
        info, image = read(Part("image", raw))
        size = (86, 128) if orientation > 4 else (128, 86)
        assert (info.width, info.height) == image.size == size
        assert np.array_equal(np.asarray(image), np.asarray(expected))


def test_decode_image_every_color_mode_becomes_rgb():
    def first(image, format="PNG", **options):
        decoded = read(Part("image", image_file(image, format, **options)))[1]
        assert decoded.mode == "RGB"
        return decoded.getpixel((0, 0))

    def plain(mode, color):
        return Image.new(mode, (4, 4), color)

    white = (255, 255, 255)
    assert first(plain("RGBA", (200, 0, 0, 0))) == white  # transparent pixels are white
    assert first(plain("RGBA", (0, 0, 0, 128))) == pytest.approx((127, 127, 127), abs=1)
    assert first(plain("LA", (0, 0))) == white
    assert first(plain("L", 77)) == (77, 77, 77)
    assert first(plain("1", 1)) == white
    palette = plain("RGB", (9, 200, 30)).quantize(2)
    assert first(palette) == (9, 200, 30)
    assert first(palette, transparency=palette.getpixel((0, 0))) == white
    assert first(Image.fromarray(np.full((4, 4), 40000, np.uint16))) == (155, 155, 155)
    assert first(plain("CMYK", (0, 255, 255, 0)), "JPEG") == pytest.approx((255, 0, 0), abs=3)
    frames = [plain("RGB", color) for color in ("red", "blue")]
    assert first(frames[0], "GIF", save_all=True, append_images=frames[1:]) == (255, 0, 0)


def test_decode_image_each_bad_value_has_its_reason_code(photo, tmp_path):
    raw = image_file(Image.fromarray(photo), "JPEG")
    folder, secret = tmp_path / "in", tmp_path / "secret.png"
    folder.mkdir()
    secret.write_bytes(image_file(Image.fromarray(photo)))
    (folder / "link.png").symlink_to(secret)
    (folder / "loop.png").symlink_to(folder / "loop.png")
    (folder / "text.png").write_text("no image")
    os.mkfifo(folder / "pipe.png")
    reasons = {
        "missing_file": ["gone.png", "x" * 5000, "a\0b.png", "loop.png"],
        "corrupt": [
            "text.png",
            raw[: len(raw) // 2],
            b"",
            b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",  # PIL would start ghostscript
            "data:image/png;base64,@@@",
            "data:image/png,abc",
            bomb(6000, 6000),
        ],
        "too_large": [bomb(60000, 60000), bomb(10000, 9500)],  # of the latter PIL only warns
        "path_escape": ["../secret.png", "/etc/hostname", "file:///etc/hostname", "link.png"],
        # Opening the pipe would block forever.
        "unsupported": ["https://example.com/a.png", "s3://bucket/a.png", ".", "pipe.png"],
        "wrong_type": [
            None,
            "",
            7,
            {},
            {"path": ["a.png"]},
            np.zeros((4, 4, 3), np.float32),
            np.zeros((3, 4, 7), np.uint8),
            np.zeros((0, 4, 3), np.uint8),
        ],
    }
    refused("image", reasons, root=folder)
    for size in (-1, "many", float("nan"), [2]):
        refused("image", {"wrong_type": [photo]}, max_pixels=size)
    anywhere = Limits(allow_outside=True)
    for value in ("../secret.png", "link.png", str(secret)):
        assert read(Part("image", value), anywhere, folder)[1].size == (128, 86)
    refused("image", {"unsupported": ["/dev/zero"]}, anywhere)


def test_decode_image_size_changed_since_probe_is_a_bad_row(photo):
    info = probe(Part("image", photo), LIMITS, HERE)
    with pytest.raises(BadRow, match="changed: the image is 86x128 now, but was 128x86"):
        decode(Part("image", photo.transpose(1, 0, 2).copy()), info, LIMITS, HERE)


def test_decode_video_with_tags_that_are_not_utf8():
    raw = video_file()
    broken = raw.replace(b"Lavf", b"\xff\xfe\xff ")
    assert broken != raw
    assert read(Part("video", broken))[0].total_frames == 30


def gray_values(frames):
    return [round(float(frame.mean()) / 8) for frame in frames]


@pytest.mark.parametrize(
    "kind", ["mpeg4 mp4", "libx264 mp4", "mpeg4 avi", "libvpx-vp9 webm", "libx264 matroska-live"]
)
def test_decode_video_returns_the_sampled_frames_of_every_container(kind, tmp_path):
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
    monkeypatch,
):
    raw = video_file(frames=32 * 12, fps=4, size=16)  # gray values repeat every 32 frames
    info, seeked = read(Part("video", raw))
    monkeypatch.setattr(decoders, "SEEK_SECONDS", 1e9)
    assert np.array_equal(seeked, read(Part("video", raw))[1])
    assert gray_values(seeked) == [i % 32 for i in info.frame_indices()]


def test_decode_video_arrays_and_frame_lists_are_videos(photo, tmp_path):
    def first_values(video):
        return video[:, 0, 0, 0].tolist()

    frames = np.stack([np.full((6, 4, 3), i, np.uint8) for i in range(12)])
    (tmp_path / "f.png").write_bytes(image_file(Image.fromarray(frames[3])))
    info, video = read(Part("video", frames))
    assert (info.width, info.height, info.total_frames) == (4, 6, 12)
    assert (info.fps, info.num_frames) == (2.0, 8)
    assert first_values(video) == info.frame_indices() == [0, 2, 3, 5, 6, 8, 9, 11]
    images = [Image.fromarray(frame) for frame in frames[:3]]
    listed = [images[0], frames[1], image_file(images[2]), "f.png"]
    info, video = read(Part("video", listed, {"fps": 1}), root=tmp_path)
    assert (info.seconds, first_values(video)) == (4.0, [0, 1, 2, 3])
    single = read(Part("video", [frames[7]]))[1]
    assert first_values(single) == [7, 7]  # no encoder takes a single frame
    reasons = {
        "corrupt": [[frames[0], photo]],
        "wrong_type": [[], frames.astype(np.float32)],
        "missing_file": [["f.png", "gone.png"]],
        "path_escape": [["f.png", "../f.png"]],
    }
    refused("video", reasons, root=tmp_path)


def test_decode_video_rotation_metadata_is_applied():
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
    # Displayed rotated by 90 degrees clockwise.
    turned = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30)
    track = out.getvalue().index(b"tkhd")
    raw = out.getvalue()[:track] + out.getvalue()[track:].replace(plain, turned, 1)
    info, frames = read(Part("video", raw))
    assert (info.width, info.height) == (32, 64)
    # The left half is now on top.
    assert (frames[0, :30].mean() > 240, frames[0, 34:].mean() < 15) == (
        True,
        True,
    )


def test_decode_video_each_bad_value_has_its_reason_code(tmp_path, monkeypatch):
    raw = video_file()
    playlist = "#EXTM3U\n#EXT-X-TARGETDURATION:3\n#EXTINF:3,\nvideo.ts\n#EXT-X-ENDLIST\n"
    (tmp_path / "list.m3u8").write_text(playlist)
    (tmp_path / "list.ffconcat").write_text("ffconcat version 1.0\nfile video.ts\n")
    stream = video_file(format="mpegts")
    (tmp_path / "video.ts").write_bytes(stream)
    # Playlists could name any file.
    corrupt = ["list.m3u8", "list.ffconcat", raw[:200], b"nothing" * 50, stream[:1500]]
    reasons = {"missing_file": ["gone.mp4"], "corrupt": corrupt, "wrong_type": [3.0]}
    refused("video", reasons, root=tmp_path)
    refused("video", {"too_long": [raw]}, Limits(max_seconds=2.0))
    with monkeypatch.context() as patched:
        patched.setattr("mvp_engine.kit.data.read.probe.MAX_FILE_PIXELS", 1000)
        refused("video", {"too_large": [raw]})
    # Decoded smaller, to fit in memory.
    monkeypatch.setattr("mvp_engine.kit.data.read.probe.CLIP_PIXELS", 6 * 16 * 16)
    info, frames = read(Part("video", raw), Limits(fps=2.0))
    assert (info.width, frames.shape) == (16, (6, 16, 16, 3))


@pytest.mark.parametrize("format", ["WAV", "FLAC", "OGG", "MP3"])
def test_decode_audio_every_format_becomes_mono_at_the_models_sampling_rate(format, tmp_path):
    raw = audio_file(format=format)
    (tmp_path / "a.audio").write_bytes(raw)
    url = "data:audio/x;base64," + base64.b64encode(raw).decode()
    for value in (raw, "a.audio", {"bytes": raw, "path": None}, url):
        info, waveform = read(Part("audio", value), root=tmp_path)
        assert (info.sampling_rate, waveform.dtype, waveform.ndim) == (44100, np.float32, 1)
        assert len(waveform) == info.num_samples_at(16000) == -(-info.num_samples * 16000 // 44100)
        spectrum = np.abs(np.fft.rfft(waveform[:16000]))
        assert int(spectrum.argmax()) == 440
        assert np.abs(waveform).max() == pytest.approx(0.4, abs=0.05)  # the mean of both channels
    waveform, rate = np.sin(np.arange(8000)), {"sampling_rate": 16000}
    for part in (Part("audio", {"array": waveform, **rate}), Part("audio", waveform, rate)):
        assert np.array_equal(read(part)[1], waveform.astype(np.float32))


def test_decode_audio_each_bad_value_has_its_reason_code(tmp_path):
    raw = audio_file()

    def array(values):
        return {"array": values, "sampling_rate": 16000}

    corrupt = [raw[:20], b"noise" * 99, audio_file(seconds=0), array(np.full(99, np.nan))]
    wrong = [np.zeros(9), array(np.zeros((9, 2))), array("loud"), 5]  # the first without a rate
    reasons = {"missing_file": ["gone.wav"], "corrupt": corrupt, "wrong_type": wrong}
    refused("audio", reasons, root=tmp_path)
    refused("audio", {"too_long": [raw]}, Limits(max_seconds=0.5))


def test_decode_hanging_decoder_is_a_timeout_bad_row(monkeypatch, photo):
    def hang(*args):
        ctypes.CDLL(None).sleep(60)  # in C, which no Python signal interrupts

    info = probe(Part("image", photo), LIMITS, HERE)
    monkeypatch.setattr(decoders, "decode_image", hang)
    monkeypatch.setattr(decoders, "open_image", lambda *args: time.sleep(60))
    started = time.monotonic()
    limits = Limits(timeout=0.2)
    with pytest.raises(BadRow, match=r"timeout: decoding image ndarray took more than 0\.2 sec"):
        decode(Part("image", photo), info, limits, HERE)
    refused("image", {"timeout": ["a.png"]}, limits)
    assert time.monotonic() - started < 20


def test_probe_internal_errors_are_raised_not_bad_rows(monkeypatch, photo):
    def broken(*args):
        raise KeyError("a bug")

    monkeypatch.setattr(decoders, "image_size", broken)
    with pytest.raises(KeyError):
        probe(Part("image", photo), LIMITS, HERE)


def test_decode_mutated_bytes_give_media_or_a_bad_row(photo):
    image, rng = Image.fromarray(photo), np.random.default_rng(0)
    formats = ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP")
    whole = [("image", image_file(image, name)) for name in formats]
    whole += [("video", video_file(format=name, frames=8)) for name in ("mp4", "matroska")]
    whole += [("audio", audio_file(0.2, format=name)) for name in ("WAV", "FLAC", "OGG")]
    outcomes = set()
    for kind, raw in whole:
        for _ in range(25):
            size = int(rng.integers(1, len(raw) + 1)) if rng.random() < 0.4 else len(raw)
            broken = bytearray(raw[:size])
            for at in rng.integers(0, min(size, 400), int(rng.integers(0, 9))):
                broken[at] = rng.integers(0, 256)
            try:
                read(Part(kind, bytes(broken)))
                outcomes.add("good")
            except BadRow as bad:
                outcomes.add(bad.reason)
    assert {"good", "corrupt"} <= outcomes

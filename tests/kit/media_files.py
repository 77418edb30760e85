"""Bytes of media files in any format, and of a file that lies about its size."""

import io
import struct
import zlib

import numpy as np


def image_file(image, format="PNG", **options):
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def png_chunk(content):
    return struct.pack(">I", len(content) - 4) + content + struct.pack(">I", zlib.crc32(content))


def bomb(width, height):
    """A PNG of a few bytes with a huge size in its header."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"IDAT" + zlib.compress(b"\0" * 100)
    return b"\x89PNG\r\n\x1a\n" + b"".join(map(png_chunk, (head, data, b"IEND")))


def video_file(codec="mpeg4", format="mp4", frames=30, fps=10, size=32):
    """Frame i has the gray value 8 i; every 15th is a key frame."""
    import av

    out = io.BytesIO()
    live = {"live": str(int("-" in format))}
    with av.open(out, "w", format=format.removesuffix("-live"), options=live) as container:
        stream = container.add_stream(codec, rate=fps)
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = size, size, "yuv420p", 15
        stream.options = {"qscale": "1"} if codec == "mpeg4" else {"crf": "5"}
        for i in range(frames):
            pixels = np.full((size, size, 3), 8 * i % 256, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return out.getvalue()


def audio_file(seconds=1.0, rate=44100, format="WAV", channels=2):
    """A tone of 440 Hz; the second channel is silent."""
    import soundfile

    t = np.arange(int(rate * seconds)) / rate
    wave = np.stack([np.sin(2 * np.pi * 440 * t), 0 * t][:channels], axis=1)
    out = io.BytesIO()
    soundfile.write(out, wave * 0.8, rate, format=format)
    return out.getvalue()

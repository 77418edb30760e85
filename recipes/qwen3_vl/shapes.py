"""Drawings of coloured shapes: images, and videos in which a shape moves."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from mvp_engine.kit.data.read.media_source import require_package

COLOURS = {"red": (215, 40, 40), "green": (40, 160, 60), "blue": (50, 80, 220), "yellow": (235, 200, 30)}
FORMS = ("circle", "cross", "triangle")
MOVES = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
IMAGE_SIDE = 48  # pixels
VIDEO_SIDE = 32

Shape = tuple[str, str]  # colour and form


def draw_image(folder: Path, name: str, shapes: list[Shape], random: np.random.Generator) -> str:
    """Write a PNG file of shapes from left to right, each in its own column; returns the file's name."""
    image = _background(IMAGE_SIDE, random)
    width = IMAGE_SIDE / len(shapes)
    for i, shape in enumerate(shapes):
        size = random.uniform(0.7, 0.95) * min(width, IMAGE_SIDE / 2) / 2
        x = random.uniform(i * width + size, (i + 1) * width - size)
        y = random.uniform(size, IMAGE_SIDE - size)
        _draw(image, shape, x, y, size, _shade(shape, random))
    image.save(folder / f"{name}.png")
    return f"{name}.png"


def draw_video(folder: Path, name: str, shape: Shape, move: str, random: np.random.Generator) -> str | list[str]:
    """Write an MP4 file of eight frames, or, for odd numbers, four PNG files; returns their name or names."""
    is_file = int(name.rpartition("/")[2]) % 2 == 0
    num_frames = 8 if is_file else 4
    size = random.uniform(5, 7)
    shade = _shade(shape, random)
    distance = random.uniform(11, VIDEO_SIDE - 2 * size - 1)
    path = np.array(MOVES[move]) * distance
    room = VIDEO_SIDE - 2 * size - np.abs(MOVES[move]) * distance
    start = size + random.uniform(0, 1, 2) * room - np.minimum(path, 0)
    background = _background(VIDEO_SIDE, random)
    frames = []
    for i in range(num_frames):
        x, y = start + path * i / (num_frames - 1)
        frame = background.copy()
        _draw(frame, shape, x, y, size, shade)
        frames.append(frame)
    if is_file:
        _write_mp4(folder / f"{name}.mp4", frames)
        return f"{name}.mp4"
    names = [f"{name}_{i}.png" for i in range(num_frames)]
    for frame, frame_name in zip(frames, names, strict=True):
        frame.save(folder / frame_name)
    return names


def _write_mp4(file: Path, frames: list[Image.Image]) -> None:
    av = require_package("av", "making this recipe's videos")
    with av.open(str(file), "w") as video:
        # Without lookahead, which reads uninitialized memory for frames of this size: the same frames give other bytes.
        options = {"crf": "8", "threads": "1", "x264-params": "rc-lookahead=0:mbtree=0"}
        stream = video.add_stream("libx264", rate=4, options=options)
        stream.width = stream.height = VIDEO_SIDE
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            video.mux(stream.encode(av.VideoFrame.from_image(frame)))
        video.mux(stream.encode())


def _background(side: int, random: np.random.Generator) -> Image.Image:
    return Image.new("RGB", (side, side), tuple(random.integers(225, 256, 3).tolist()))


def _shade(shape: Shape, random: np.random.Generator) -> tuple[int, ...]:
    colour = np.array(COLOURS[shape[0]]) + random.integers(-25, 26, 3)
    return tuple(np.clip(colour, 0, 255).tolist())


def _draw(image: Image.Image, shape: Shape, x: float, y: float, size: float, shade: tuple[int, ...]) -> None:
    """Draw a shape around (x, y); `size` is half its width."""
    pen = ImageDraw.Draw(image)
    left, top = x - size, y - size
    right, bottom = x + size, y + size
    if shape[1] == "circle":
        pen.ellipse((left, top, right, bottom), fill=shade)
    elif shape[1] == "cross":
        pen.rectangle((x - size / 3, top, x + size / 3, bottom), fill=shade)
        pen.rectangle((left, y - size / 3, right, y + size / 3), fill=shade)
    else:
        pen.polygon([(x, top), (left, bottom), (right, bottom)], fill=shade)

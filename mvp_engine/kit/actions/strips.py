"""Strips of frames of an episode, for reports."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image

MIN_SIDE = 96  # pixels: smaller frames are enlarged
GAP = 2


def strip_image(frames: Sequence[np.ndarray]) -> list[bytes]:
    """One PNG file with the frames in a row."""
    height, width = frames[0].shape[:2]
    scale = max(1, -(-MIN_SIDE // height))
    canvas = np.full((height * scale, (width * scale + GAP) * len(frames) - GAP, 3), 255, np.uint8)
    for number, frame in enumerate(frames):
        left = number * (width * scale + GAP)
        enlarged = frame.repeat(scale, axis=0).repeat(scale, axis=1)
        canvas[:, left : left + width * scale] = enlarged
    file = io.BytesIO()
    Image.fromarray(canvas).save(file, "png")
    return [file.getvalue()]

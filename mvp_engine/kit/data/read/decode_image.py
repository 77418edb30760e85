"""Images: their size from the header, and their pixels, upright and in RGB."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mvp_engine.kit.data.read.limits import Limits
from mvp_engine.kit.data.read.media_source import decoder_errors, open_media
from mvp_engine.kit.data.read.row_types import BadRow

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
    if min(width, height) < 1 or width * height > limits.image_pixels:
        raise BadRow(
            "too_large", f"image of {width}x{height}; {limits.image_pixels} pixels are allowed"
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

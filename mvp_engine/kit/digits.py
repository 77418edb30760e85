"""Handwritten digits of scikit-learn as small images, for recipes with synthetic data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mvp_engine.kit.data.read.media_source import require_package

SIDE = 24  # of an image, in pixels


def write_digits(folder: Path, count: int) -> list[tuple[str, int]]:
    """Write the first `count` of the 1,797 digits to `pictures/`: the name of each file, and its digit."""
    from PIL import Image

    digits: Any = require_package("sklearn.datasets", "this recipe's images", "demo").load_digits()
    (folder / "pictures").mkdir()
    written = []
    for i, (image, label) in enumerate(
        zip(digits.images[:count], digits.target[:count], strict=True)
    ):
        name = f"pictures/{i:04d}.png"
        ink = Image.fromarray((255 - image * 255 / 16).astype("uint8"))
        ink.resize((SIDE, SIDE), Image.Resampling.BICUBIC).convert("RGB").save(folder / name)
        written.append((name, int(label)))
    return written


def is_held_out(index: int) -> bool:
    """Every fifth digit."""
    return index % 5 == 4

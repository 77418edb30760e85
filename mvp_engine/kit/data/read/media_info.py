"""MediaInfo: size and length of one media item, and how much of it the model will see."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from mvp_engine.kit.data.read.row_types import BadRow, Part


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

"""How much of its media a model sees, what is too much for a row, and how both are written into a processor.

A processor that was limited here is the one to save with the model: serving then sees what training saw.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mvp_engine.errors import UserError
from mvp_engine.kit.data.read.rows import BadRow, Part

PARTS = {"image": "image_processor", "video": "video_processor", "audio": "feature_extractor"}


@dataclass(frozen=True)
class Limits:
    """How much of the media a model sees, and what is too much for a row.

    Budgets go into the exported processor; None leaves what the processor has. Past a guard, the row is bad.
    """

    min_pixels: int | None = None  # budgets: of an image, as the model sees it
    max_pixels: int | None = None
    video_min_pixels: int | None = (
        None  # as the family counts: of one frame, or (Qwen3-VL) of all frames together
    )
    video_max_pixels: int | None = None
    fps: float | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    chunk_seconds: int | None = (
        None  # what sounds are padded to, where the encoder takes any length (Qwen2.5-Omni)
    )

    image_pixels: int = 89_478_485  # guards: of an image or frame as it is in the file; PIL itself stops at twice this
    video_seconds: float = 3600.0
    audio_seconds: float = 600.0
    clip_pixels: int = (
        2**28
    )  # frames of a clip that would be more together, in memory, are read smaller
    timeout: float = 30.0  # seconds for one look at an item, or for decoding it
    allow_outside: bool = False  # whether paths may leave the folder of the dataset


@dataclass(frozen=True)
class Info:
    """What a plan needs to know of an item, and what of it the model will see."""

    kind: str
    width: int = 0  # as decoded
    height: int = 0
    frames: int = 0  # in the file
    fps: float = 0.0
    take: int = 0  # frames that the model sees, evenly spread
    samples: int = 0  # in the file, per channel
    rate: int = 0
    min_pixels: int | None = None  # of this item alone; None: those of all
    max_pixels: int | None = None

    @property
    def seconds(self) -> float:
        return self.frames / self.fps if self.kind == "video" else self.samples / max(self.rate, 1)

    def length(self, rate: int) -> int:
        """Samples at another rate."""
        return -(-self.samples * rate // self.rate)

    def picks(self) -> list[int]:
        """The numbers of the frames that are taken. Of a short video some are taken twice."""
        return [round(i) for i in np.linspace(0, self.frames - 1, self.take).tolist()]


def asked_for(part: Part, *names: str) -> float | None:
    """A number that the row gives beside an item. Options that are not known are left alone."""
    for name in names:
        value = part.options.get(name)
        if value is not None:
            try:
                number = float(value)
            except (TypeError, ValueError, OverflowError):
                number = math.nan
            if not 0 < number < 1e12:
                raise BadRow(
                    "wrong_type",
                    f"{part.kind} option {name} is {str(value)[:80]!r}, not a number above 0",
                )
            return number
    return None


def pixels_asked_for(part: Part) -> dict[str, Any]:
    low, high = asked_for(part, "min_pixels"), asked_for(part, "max_pixels")
    return {"min_pixels": low and math.ceil(low), "max_pixels": high and math.ceil(high)}


def full_limits(processor: Any, limits: Limits) -> Limits:
    """With the budgets for frames that the processor has where none are given."""
    video = getattr(processor, "video_processor", None)
    return replace(
        limits,
        fps=limits.fps or getattr(video, "fps", None) or 2.0,
        min_frames=limits.min_frames or getattr(video, "min_frames", None) or 1,
        max_frames=limits.max_frames
        or getattr(video, "max_frames", None)
        or getattr(video, "num_frames", None)
        or 64,
    )


def limited_processor(processor: Any, limits: Limits) -> Any:
    """A copy that keeps to the budgets, as far as the family has fields for them: save this one with the model."""
    new = copy.copy(processor)
    for name in PARTS.values():
        if hasattr(processor, name):
            setattr(new, name, copy.deepcopy(getattr(processor, name)))
    image, video, sound = (getattr(new, name, None) for name in PARTS.values())
    for part, low, high in (
        (image, limits.min_pixels, limits.max_pixels),
        (video, limits.video_min_pixels, limits.video_max_pixels),
    ):
        if part is None or (low is None and high is None):
            continue
        if part is video and "size" in _defaults(processor, "videos_kwargs"):
            raise UserError(
                f"{type(processor).__name__} fixes the size of videos in its code: limit max_frames instead"
            )
        set_pixels(part, low, high)
        fixed = part.crop_size if getattr(part, "do_center_crop", False) else part.size
        if (
            high is not None
            and most_pixels(part) is None
            and (fixed.height or 0) * (fixed.width or 0) > high
        ):
            size = f"{fixed.height}x{fixed.width}"
            raise UserError(
                f"{type(part).__name__} makes all pictures {size}, more than the {high} pixels allowed"
            )
    if video is not None and (limits.fps is not None or limits.max_frames is not None):
        most = "max_frames" if hasattr(video, "max_frames") else "num_frames"
        video.do_sample_frames = True
        for name, value in (
            ("fps", limits.fps),
            (most, limits.max_frames),
            ("min_frames", limits.min_frames),
        ):
            if value is not None and hasattr(video, name):
                setattr(video, name, value)
    if sound is not None and limits.chunk_seconds is not None:
        if not hasattr(sound, "chunk_length"):
            raise UserError(f"{type(sound).__name__} has no chunk_length: leave chunk_seconds out")
        sound.chunk_length = limits.chunk_seconds
        sound.n_samples = sound.chunk_length * sound.sampling_rate
        sound.nb_max_frames = sound.n_samples // sound.hop_length
    return new


def _defaults(processor: Any, of: str) -> dict[str, Any]:
    return getattr(processor.valid_processor_kwargs, "_defaults", {}).get(of, {})


def most_pixels(part: Any) -> int | None:
    """The largest picture that a part of a processor makes; None where all have one size."""
    if hasattr(part, "max_patches"):
        return part.max_patches * part.size.height * part.size.width
    if hasattr(part, "image_grid_pinpoints"):
        return max(height * width for height, width in part.image_grid_pinpoints)
    if part.size.longest_edge is None:
        return None
    return part.size.longest_edge if hasattr(part, "merge_size") else part.size.longest_edge**2


def set_pixels(part: Any, low: int | None, high: int | None) -> None:
    """Where there is a `merge_size`, the "edges" of the size are areas, as Qwen2-VL began it."""
    most = most_pixels(part)
    if most is None:
        return
    if hasattr(part, "merge_size"):
        high = most if high is None else high
        low = min(part.size.shortest_edge if low is None else low, high)
        part.size = type(part.size)(shortest_edge=low, longest_edge=high)
    elif high is None:
        return
    elif hasattr(part, "max_patches"):
        part.max_patches = max(1, high // (part.size.height * part.size.width))
        part.min_patches = min(part.min_patches, part.max_patches)
    elif hasattr(part, "image_grid_pinpoints"):
        grids = part.image_grid_pinpoints
        part.image_grid_pinpoints = [g for g in grids if math.prod(g) <= high] or [
            min(grids, key=math.prod)
        ]
    else:
        tile = part.max_image_size["longest_edge"] if hasattr(part, "max_image_size") else 1
        edge = max(tile, math.isqrt(high) // tile * tile)
        edge = min(edge, part.size.longest_edge)
        short = part.size.shortest_edge and min(edge, part.size.shortest_edge)
        part.size = type(part.size)(shortest_edge=short, longest_edge=edge)

"""Limits of media: how much of them the model sees, and what is too much for a row.

`encode/processor_limits.py` writes the budgets into a processor.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Budgets for what the model sees, and guards against media that are too large.

    Budgets go into the exported processor; None keeps what the processor has. Past a guard, the row is
    bad.
    """

    # Budgets: pixels of an image, as the model sees it.
    min_pixels: int | None = None
    max_pixels: int | None = None
    # As the family counts: pixels of one frame, or (Qwen3-VL) of all frames of a video.
    video_min_pixels: int | None = None
    video_max_pixels: int | None = None
    fps: float | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    # Audio is padded to this, where the encoder takes any length (Qwen2.5-Omni).
    chunk_seconds: int | None = None

    # Guards: pixels of an image or frame in the file; PIL itself stops at twice this default.
    image_pixels: int = 89_478_485
    video_seconds: float = 3600.0
    audio_seconds: float = 600.0
    # Pixels of all decoded frames of a video in memory; above this, frames are scaled down.
    clip_pixels: int = 2**28
    timeout: float = 30.0  # seconds to probe one item, and to decode it
    allow_outside: bool = False  # whether paths may leave the dataset's folder

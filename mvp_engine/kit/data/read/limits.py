"""Limits of media and text: how much of media the model sees, and what is too much for a row.

`encode/processor_limits.py` writes the budgets into a processor.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import ConfigDict

CLIP_PIXELS = (
    2**28
)  # of all decoded frames of a video in memory; above this, frames are scaled down


@dataclass(frozen=True)
class Limits:
    """Budgets for what the model sees, and guards against media and texts that are too large.

    Budgets go into the exported processor; None keeps what the processor has. Past a guard, the row is
    bad.
    """

    __pydantic_config__ = ConfigDict(use_attribute_docstrings=True)

    # Budgets

    min_pixels: int | None = None
    """The fewest pixels of an image, as the model sees it."""
    max_pixels: int | None = None
    """The most pixels of an image, as the model sees it."""
    video_min_pixels: int | None = None
    """The fewest pixels of a video, as the family counts: of one frame, or (Qwen3-VL) of all frames."""
    video_max_pixels: int | None = None
    """The most pixels of a video, counted alike."""
    fps: float | None = None
    """Frames per second of video that the model sees."""
    min_frames: int | None = None
    """The fewest frames of a video."""
    max_frames: int | None = None
    """The most frames of a video."""
    chunk_seconds: int | None = None
    """Audio is padded to this, where the encoder takes any length (Qwen2.5-Omni)."""

    # Guards

    image_pixels: int = 89_478_485
    """The most pixels of an image or frame in the file; PIL itself stops at twice this default."""
    video_seconds: float = 3600.0
    """The longest video."""
    audio_seconds: float = 600.0
    """The longest audio."""
    text_characters: int = 4_000_000
    """The most characters of text of a row, before it is tokenized: about a million tokens."""
    timeout: float = 30.0
    """Seconds to probe one item, and to decode it. Workers that stay at the same rows for twenty times as long, and for
    at least 600 s, stop the run."""
    allow_outside: bool | None = None
    """Whether paths of media may lead out of the folder of their rows, or of the source's `root`; null: in local files
    they may, in a dataset of the Hub they may not."""

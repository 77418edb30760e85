"""Budgets of `Limits`, written into a copy of a processor.

The limited processor is the one to save with the model: serving then sees what training saw.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

from mvp_engine.errors import UserError
from mvp_engine.kit.data.read.probe import DEFAULT_FPS
from mvp_engine.kit.data.read.row_types import Limits

# Media kind -> the attribute of a processor that handles it.
SUB_PROCESSORS = {
    "image": "image_processor",
    "video": "video_processor",
    "audio": "feature_extractor",
}
DEFAULT_MAX_FRAMES = 64


def audio_extractor(processor: Any) -> Any:
    """The part of a processor that handles audio; it has two names in transformers."""
    return getattr(processor, "feature_extractor", None) or getattr(
        processor, "audio_processor", None
    )


def limits_with_defaults(processor: Any, limits: Limits) -> Limits:
    """The limits, with the processor's own frame budgets where they set none."""
    video = getattr(processor, "video_processor", None)
    own_max_frames = getattr(video, "max_frames", None) or getattr(video, "num_frames", None)
    return replace(
        limits,
        fps=limits.fps or getattr(video, "fps", None) or DEFAULT_FPS,
        min_frames=limits.min_frames or getattr(video, "min_frames", None) or 1,
        max_frames=limits.max_frames or own_max_frames or DEFAULT_MAX_FRAMES,
    )


def limited_processor(processor: Any, limits: Limits) -> Any:
    """A copy of the processor with the budgets, as far as its family has fields for them."""
    limited = copy.copy(processor)
    for name in (*SUB_PROCESSORS.values(), "audio_processor"):
        if hasattr(processor, name):
            setattr(limited, name, copy.deepcopy(getattr(processor, name)))
    image = getattr(limited, "image_processor", None)
    video = getattr(limited, "video_processor", None)
    audio = audio_extractor(limited)
    if image is not None:
        _limit_pixels(image, limits.min_pixels, limits.max_pixels)
    if video is not None:
        _limit_video_pixels(processor, video, limits)
        _limit_frames(video, limits)
    if audio is not None and limits.chunk_seconds is not None:
        _limit_audio(audio, limits.chunk_seconds)
    return limited


def _limit_pixels(
    part: Any,
    min_pixels: int | None,
    max_pixels: int | None,
) -> None:
    if min_pixels is None and max_pixels is None:
        return
    set_pixel_budget(part, min_pixels, max_pixels)
    if max_pixels is None or pixel_budget(part) is not None:
        return
    fixed = part.crop_size if getattr(part, "do_center_crop", False) else part.size
    if (fixed.height or 0) * (fixed.width or 0) > max_pixels:
        raise UserError(
            f"{type(part).__name__} resizes all images to {fixed.height}x{fixed.width}, "
            f"more than the {max_pixels} pixels allowed"
        )


def _limit_video_pixels(processor: Any, video: Any, limits: Limits) -> None:
    has_limit = limits.video_min_pixels is not None or limits.video_max_pixels is not None
    if has_limit and "size" in _default_video_options(processor):
        raise UserError(
            f"{type(processor).__name__} fixes the size of videos in its code: "
            "limit max_frames instead"
        )
    _limit_pixels(video, limits.video_min_pixels, limits.video_max_pixels)


def _default_video_options(processor: Any) -> dict[str, Any]:
    defaults = getattr(processor.valid_processor_kwargs, "_defaults", {})
    return defaults.get("videos_kwargs", {})


def _limit_frames(video: Any, limits: Limits) -> None:
    if limits.fps is None and limits.max_frames is None:
        return
    video.do_sample_frames = True
    max_frames_name = "max_frames" if hasattr(video, "max_frames") else "num_frames"
    budgets = {
        "fps": limits.fps,
        max_frames_name: limits.max_frames,
        "min_frames": limits.min_frames,
    }
    for name, value in budgets.items():
        if value is not None and hasattr(video, name):
            setattr(video, name, value)


def _limit_audio(extractor: Any, chunk_seconds: int) -> None:
    if not hasattr(extractor, "chunk_length"):
        raise UserError(f"{type(extractor).__name__} has no chunk_length: leave chunk_seconds out")
    extractor.chunk_length = chunk_seconds
    extractor.n_samples = chunk_seconds * extractor.sampling_rate
    extractor.nb_max_frames = extractor.n_samples // extractor.hop_length


def pixel_budget(part: Any) -> int | None:
    """The largest image that a sub-processor makes, in pixels; None where all have one size."""
    if hasattr(part, "max_patches"):
        return part.max_patches * part.size.height * part.size.width
    if hasattr(part, "image_grid_pinpoints"):
        return max(height * width for height, width in part.image_grid_pinpoints)
    if part.size.longest_edge is None:
        return None
    return part.size.longest_edge if _edges_are_areas(part) else part.size.longest_edge**2


def _edges_are_areas(part: Any) -> bool:
    """Since Qwen2-VL, processors with a `merge_size` have areas in the "edges" of their size."""
    return hasattr(part, "merge_size")


def set_pixel_budget(
    part: Any,
    min_pixels: int | None,
    max_pixels: int | None,
) -> None:
    """Set a sub-processor's budget in the fields of its family; a no-op where all images have one size."""
    budget = pixel_budget(part)
    if budget is None:
        return
    if _edges_are_areas(part):
        high = budget if max_pixels is None else max_pixels
        low = part.size.shortest_edge if min_pixels is None else min_pixels
        part.size = type(part.size)(shortest_edge=min(low, high), longest_edge=high)
    elif max_pixels is None:
        return
    elif hasattr(part, "max_patches"):
        patch_pixels = part.size.height * part.size.width
        part.max_patches = max(1, max_pixels // patch_pixels)
        part.min_patches = min(part.min_patches, part.max_patches)
    elif hasattr(part, "image_grid_pinpoints"):
        grids = part.image_grid_pinpoints
        allowed = [grid for grid in grids if math.prod(grid) <= max_pixels]
        part.image_grid_pinpoints = allowed or [min(grids, key=math.prod)]
    else:
        _set_longest_edge(part, max_pixels)


def _set_longest_edge(part: Any, max_pixels: int) -> None:
    """A whole number of tiles, at least one."""
    tile = part.max_image_size["longest_edge"] if hasattr(part, "max_image_size") else 1
    edge = max(tile, math.isqrt(max_pixels) // tile * tile)
    edge = min(edge, part.size.longest_edge)
    shortest = part.size.shortest_edge and min(edge, part.size.shortest_edge)
    part.size = type(part.size)(shortest_edge=shortest, longest_edge=edge)

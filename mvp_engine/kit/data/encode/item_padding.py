"""Items of different sizes in one batch: whether a processor pads the smaller ones as a pack does."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mvp_engine.data.batch import Media
from mvp_engine.errors import UserError
from mvp_engine.kit.data.encode.processor_outputs import concat_media


def shapes_of(media: Media) -> dict[str, tuple[int, ...]]:
    """The shapes of rows and of the fields of items."""
    shapes = {name: tuple(value.shape[1:]) for name, value in media.fields.items()}
    return {**shapes, "": tuple(media.values.shape[1:])}


def has_bare_frames(first: Media, second: Media) -> bool:
    """Whether audio, (1, frames, features), is as long as it takes, and has no mask of frames."""
    values = first.values
    if values.ndim != 3 or len(values) != 1 or values.shape[2] != second.values.shape[2]:
        return False
    masks = [mask for field, mask in first.fields.items() if field.endswith("_mask")]
    has_mask = any(mask.shape[1:2] == values.shape[1:2] for mask in masks)
    return not has_mask and values.shape[1] != second.values.shape[1]


def check_padding(name: str, first: Media, second: Media, both: dict[str, Any] | None) -> None:
    """Raise unless the processor itself pads the smaller of two items when it gets both: with zeros, or masked.

    A processor may pad waveforms: the spectrogram of silence is not zero, and masked. Of the frames at the end of a
    waveform some see the padding, and only then are valid. Encoders must not see what is masked, which the start of a
    training tests.
    """
    together = {**(both or {})}
    padded = concat_media([first, first, second])
    expected = {**padded.fields, name: padded.values}
    if len(first.values) > 1:  # a row for each frame: values are not padded
        together[name] = expected[name]
    if more := sorted(together.keys() - expected.keys()):
        raise UserError(f"it returns {more} for items of different sizes, not for one alone")
    masks = {field: mask for field, mask in padded.fields.items() if field.endswith("_mask")}
    for mask in masks.values():
        for values in (together, expected):
            values[name] = _masked(values.get(name), mask)
    for field, value in expected.items():
        given = together.get(field)
        if field in masks and isinstance(given, Tensor) and given.shape == value.shape:
            given = given.logical_and(value)
            value = value.bool()
        if not _equal(value, given):
            shapes = [list(shapes_of(media).values()) for media in (first, second)]
            raise UserError(f"items of different sizes have shapes that cannot be packed: {shapes}")


def _masked(values: Any, mask_IF: Tensor) -> Any:
    """The values of items with zeros for frames that are masked; all of them if the mask is not one of frames."""
    if not isinstance(values, Tensor) or values.ndim != 3 or mask_IF.ndim != 2:
        return values
    if mask_IF.shape == values.shape[:2]:
        return values * mask_IF[..., None].to(values)
    return values * mask_IF[:, None].to(values) if mask_IF.shape[1] == values.shape[2] else values


def _equal(one: Any, other: Any) -> bool:
    """Whether two tensors hold the same values; the processor may return them with a batch dimension."""
    if not isinstance(other, Tensor):
        return False
    return one.numel() == other.numel() and bool((one.flatten() == other.flatten()).all())

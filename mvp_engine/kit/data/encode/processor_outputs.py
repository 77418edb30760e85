"""Outputs of a processor as `Media`: the items' values with their row counts and fields."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import Tensor

from mvp_engine.data.batch import Media
from mvp_engine.data.media import cat_padded
from mvp_engine.errors import UserError

# Names that model forwards use for the values of items.
VALUE_NAMES = (
    "pixel_values",
    "pixel_values_videos",
    "input_features",
    "input_values",
    "pixel_values_images",
    "image_pixel_values",
    "audio_input_features",
)

FRAMES = "a row for each frame"
TILES = "a row for all tiles"


def has_mixed_fields(outputs: dict[str, Any]) -> bool:
    """Whether an item in tiles, (1, tiles, ...), has fields of its tiles and fields of the whole."""
    fields = dict(outputs)
    values = fields.pop(_value_name(outputs))
    of_tiles = {value.shape[:2] == values.shape[:2] for value in fields.values()}
    return values.ndim == 5 and len(of_tiles) == 2


def to_media(outputs: dict[str, Any], layout: str = "") -> tuple[str, Media]:
    """The name of the values, and one item; or one item per tile, where each tile has its own fields.

    `layout`: FRAMES, each frame of audio is a row, since its encoder must not get padding; TILES, all tiles of an image
    are one row, padded to the most tiles.
    """
    name = _value_name(outputs)
    fields = dict(outputs)
    values = fields.pop(name)
    if layout == TILES:
        return name, _single_sequence(values, [1], _fields_of_one(fields))
    if layout == FRAMES:
        return name, _single_sequence(values[0], [values.shape[1]], _fields_of_one(fields))
    if "target_sizes" in fields:
        return name, _from_strip(values, fields)
    if values.ndim != 5:
        if (
            len(values) > 1
            and all(len(value) == len(values) for value in fields.values())
            and fields
        ):
            return name, _single_sequence(values, [1] * len(values), fields)  # an item per tile
        return name, _single_sequence(values, [len(values)], _fields_of_one(fields))
    # (batch of one, tiles, channels, height, width)
    has_tile_fields = bool(fields)
    for value in fields.values():
        has_tile_fields &= value.shape[:2] == values.shape[:2]  # such as a pixel mask
    if has_tile_fields:
        tiles = values.transpose(0, 1)
        tile_fields = {key: value.transpose(0, 1) for key, value in fields.items()}
        return name, _single_sequence(tiles, [1] * len(tiles), tile_fields)
    tiles = values.flatten(0, 1)
    return name, _single_sequence(tiles, [len(tiles)], _fields_of_one(fields))


def extra_names(outputs: dict[str, Any]) -> set[str]:
    """Outputs for one item with another number of entries than one, such as the tiles besides a whole image."""
    name = _value_name(outputs)
    if "target_sizes" in outputs or outputs[name].ndim == 5:
        return set()
    rows = len(outputs[name])
    lengths = {field: len(value) for field, value in outputs.items() if field != name}
    if rows > 1 and lengths and set(lengths.values()) == {rows}:
        return set()  # an item per tile
    return {field for field, length in lengths.items() if length != 1}


def split_extra(
    outputs: dict[str, Any], names: Set[str]
) -> tuple[dict[str, Any], dict[str, Media]]:
    """The other outputs, and those of `names` as media of their own with one item each."""
    rest = {name: value for name, value in outputs.items() if name not in names}
    extra = {}
    for name in names & outputs.keys():
        extra[name] = _single_sequence(outputs[name], [len(outputs[name])], {})
    return rest, extra


def _from_strip(values: Tensor, fields: dict[str, Tensor]) -> Media:
    """Tiles of any size that lie side by side as one row of patches, (1, channels, p, p * patches); a row per patch."""
    row_counts = fields["target_sizes"].prod(-1).tolist()
    patch_size = values.shape[-2]
    if values.shape[-1] != sum(row_counts) * patch_size:
        raise UserError("the patches of an item are not those of its target_sizes")
    patches = values[0].unflatten(-1, (-1, patch_size)).permute(2, 0, 1, 3)
    return _single_sequence(patches.contiguous(), row_counts, fields)


def _fields_of_one(fields: dict[str, Tensor]) -> dict[str, Tensor]:
    """The fields of one item, each with one entry."""
    lengths = {name: len(value) for name, value in fields.items() if len(value) != 1}
    if lengths:
        raise UserError(
            f"this processor returns {lengths} entries for one item: supported is one entry per item"
        )
    return fields


def to_media_of_items(outputs: dict[str, Any], num_items: int) -> tuple[str, Media] | None:
    """Several items of one call; None if the rows of each item cannot be determined.

    They are given by a grid, or each item has one row.
    """
    name = _value_name(outputs)
    fields = dict(outputs)
    values = fields.pop(name)
    row_counts = [1] * num_items
    for field, value in fields.items():
        if field.endswith("_grid_thw"):
            row_counts = value.prod(-1).tolist()
            break
    counts_match = len(row_counts) == num_items and sum(row_counts) == len(values)
    fields_match = all(len(value) == num_items for value in fields.values())
    if values.ndim == 5 or not counts_match or not fields_match:
        return None
    return name, _single_sequence(values, row_counts, fields)


def _value_name(outputs: dict[str, Any]) -> str:
    """The name of the values among the outputs, which must all be tensors."""
    names = [name for name in VALUE_NAMES if name in outputs]
    if len(names) != 1 or not all(isinstance(value, Tensor) for value in outputs.values()):
        kinds = {name: type(value).__name__ for name, value in sorted(outputs.items())}
        raise UserError(
            f"this processor returns {kinds} for one item: supported are tensors, one of them "
            f"{' or '.join(VALUE_NAMES)}"
        )
    return names[0]


def _single_sequence(
    values: Tensor,
    row_counts: list[int],
    fields: dict[str, Tensor],
) -> Media:
    sequence_ids = torch.zeros(len(row_counts), dtype=torch.long)
    return Media(values, torch.tensor(row_counts), sequence_ids, fields)


def concat_media(items: Sequence[Media]) -> Media:
    """All items in one. The first is empty, and gives the shapes where no other follows."""
    filled = items[1:] or items
    if len(filled) == 1:
        return filled[0]
    fields = {}
    for name in filled[0].fields:
        fields[name] = cat_padded([item.fields[name] for item in filled])
    return Media(
        cat_padded([item.values for item in filled]),
        torch.cat([item.row_counts for item in filled]),
        torch.cat([item.sequence_ids for item in filled]),
        fields,
    )

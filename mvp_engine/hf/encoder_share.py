"""Encoders on a sequence parallel group: each rank encodes a part of the images of a batch, and all get all features.

The ranks of a group have the same batch and slice its tokens after the features are inserted. So they share the items
of a micro-batch, the largest first, and exchange the features in one all-to-all. Its gradient is a reduce-scatter: the
rank that encoded an item gets the gradients of all tokens of its features.

Items are shared where their number of features is known before they are encoded: patches with a grid, whose encoder
merges a fixed number of them into one feature. Other items are encoded on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mvp_engine.data.batch import Media
from mvp_engine.distributed.ulysses import UlyssesShard, all_to_all_rows
from mvp_engine.errors import UserError


def items_by_rank(row_counts: list[int], ranks: int) -> list[list[int]]:
    """The items that each rank encodes: the largest first, each to the rank with the fewest rows."""
    items: list[list[int]] = [[] for _ in range(ranks)]
    rows = [0] * ranks
    for item in sorted(range(len(row_counts)), key=lambda i: -row_counts[i]):
        rank = rows.index(min(rows))
        items[rank].append(item)
        rows[rank] += row_counts[item]
    return [sorted(of_rank) for of_rank in items]


def can_share(media: Media) -> bool:
    grids = [name for name in media.fields if name.endswith("grid_thw")]
    return len(media.row_counts) > 1 and len(grids) == len(media.fields) == 1


def largest_share(media: Media, ranks: int) -> float:
    """The part of the rows that the rank with most of them encodes."""
    if ranks == 1 or not can_share(media):
        return 1.0
    row_counts = media.row_counts.tolist()
    items = items_by_rank(row_counts, ranks)
    return max(sum(row_counts[item] for item in of_rank) for of_rank in items) / sum(row_counts)


@dataclass(frozen=True, eq=False)
class EncoderShare:
    """How the ranks of a group share the items of one kind of media."""

    shard: UlyssesShard
    grid: Tensor
    row_counts: list[int]
    items: list[list[int]]  # of each rank

    @classmethod
    def of(cls, media: Media, shard: UlyssesShard | None) -> EncoderShare | None:
        """None: every rank encodes all items."""
        if shard is None or not can_share(media):
            return None
        row_counts = media.row_counts.tolist()
        (grid,) = media.fields.values()
        return cls(shard, grid, row_counts, items_by_rank(row_counts, len(shard.sizes)))

    def cut(self, values: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The arguments of a call that encodes the `values` of all items, with this rank's items in their place."""
        # A rank without an item encodes the smallest one: FSDP ranks run every encoder together.
        encoded = self._own or [self.row_counts.index(min(self.row_counts))]
        rows = values.split(self.row_counts)
        replaced = {
            id(values): torch.cat([rows[item] for item in encoded]),
            id(self.grid): self.grid[torch.tensor(encoded)],
        }
        part = [replaced.get(id(value), value) for value in args]
        return part, {key: replaced.get(id(value), value) for key, value in kwargs.items()}

    def gather(self, outputs: Any) -> None:
        """Replace the features of this rank's items by those of all items, in place."""
        features = [outputs.pooler_output, *(getattr(outputs, "deepstack_features", None) or [])]
        flat = [one if isinstance(one, Tensor) else torch.cat(tuple(one)) for one in features]
        counts = self._feature_counts(flat)
        sizes = tuple(sum(counts[item] for item in of_rank) for of_rank in self.items)
        own = [one[: sizes[self.shard.rank]] for one in flat]
        gathered = all_to_all_rows(own, sizes, self.shard.group)
        order = [item for of_rank in self.items for item in of_rank]
        joined = []
        for one, all_rows in zip(features, gathered, strict=True):
            parts = all_rows.split([counts[item] for item in order])
            by_item = dict(zip(order, parts, strict=True))
            in_order = [by_item[item] for item in range(len(counts))]
            joined.append(torch.cat(in_order) if isinstance(one, Tensor) else tuple(in_order))
        outputs.pooler_output = joined[0]
        if len(joined) > 1:
            outputs.deepstack_features = joined[1:]

    @property
    def _own(self) -> list[int]:
        return self.items[self.shard.rank]

    def _feature_counts(self, flat: list[Tensor]) -> list[int]:
        """The number of features of each item: the encoder merges as many rows in all of them."""
        encoded = sum(self.row_counts[item] for item in self._own) or min(self.row_counts)
        found = len(flat[0])
        merged = encoded // max(found, 1)
        is_fixed = merged * found == encoded and not any(rows % merged for rows in self.row_counts)
        if not is_fixed or any(one.ndim != 2 or len(one) != found for one in flat):
            shapes = [tuple(one.shape) for one in flat]
            raise UserError(
                f"sequence parallel: an encoder returned features of shapes {shapes} for {encoded} patches; it is not "
                "known how many each item has. Set parallel.context=1 and parallel.ulysses=1 for this model"
            )
        return [rows // merged for rows in self.row_counts]

"""PackedBatch: the data format of training. Sequences are concatenated without padding, with explicit boundaries.

Legend: T tokens, S sequences, N media items, A axes of the positions (mRoPE has 3).

Labels are shifted when a batch is built: `labels[t]` is the token that position t predicts, inside its own sequence, or
IGNORE. No later code rolls or slices them, so no label can leak across a boundary. Per-token outputs such as log-probs
are aligned in the same way: entry t is about `labels[t]`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from mvp_engine.errors import UserError

IGNORE = -100  # the label of what carries no loss
WEIGHT = "weight"  # of `token_fields`: the weight of each label in the loss; without it, 1


@dataclass(eq=False)
class Media:
    """Items of one kind, such as the images of a batch: item i has `row_counts[i]` rows of `values`.

    Sequences with the same prompt share its items: they are held once, by the first of these sequences.
    """

    values: Tensor  # (sum of row counts, ...), such as flattened patches
    row_counts: Tensor  # (N,) int64
    sequence_ids: Tensor  # (N,) int64: the sequence that each item belongs to, never decreasing
    fields: dict[str, Tensor] = field(default_factory=dict)  # (N, ...) each, such as grids
    # (S,) int64: the sequence whose items each sequence uses, an earlier one or itself. None: all use their own.
    shared_with: Tensor | None = None
    # The column of integer `values` with labels, of items that a model predicts; None: inputs of an encoder.
    label_column: int | None = None

    def __post_init__(self) -> None:
        total = int(self.row_counts.sum())
        if total != len(self.values):
            raise ValueError(
                f"media row_counts add up to {total}, but values has {len(self.values)} rows"
            )
        items = len(self.row_counts)
        wrong = [name for name, value in self.fields.items() if len(value) != items]
        if len(self.sequence_ids) != items or wrong:
            raise ValueError(
                f"media has {items} items, but {wrong or 'sequence_ids'} has another length"
            )
        if bool((self.sequence_ids.diff() < 0).any()):
            raise ValueError("media items must be in the order of their sequences")
        shared = self.shared_with
        if shared is not None and not torch.equal(shared[self.sequence_ids], self.sequence_ids):
            raise ValueError("media items belong to a sequence that uses those of another one")

    @property
    def is_target(self) -> bool:
        """Whether a model predicts the items: no encoder reads them, and a prompt has none."""
        return self.label_column is not None

    def without_labels(self) -> Media:
        """The same items without loss, for dummy sequences."""
        if self.label_column is None:
            return self
        values = self.values.clone()
        values[:, self.label_column] = IGNORE
        return dataclasses.replace(self, values=values)

    def items_of(self, sequence: int) -> list[int]:
        """The items that a sequence uses."""
        if self.shared_with is not None:
            sequence = int(self.shared_with[sequence])
        return (self.sequence_ids == sequence).nonzero()[:, 0].tolist()

    def select(self, sequences: list[int], *, share: bool = True) -> Media:
        """The items of these sequences, which are numbered from 0 in the given order.

        With `share`, items that several of them use are held once.
        """
        items: list[int] = []
        sequence_ids: list[int] = []
        shared_with: list[int] = []
        first: dict[int, int] = {}  # item -> the first of the sequences that uses it
        for new, old in enumerate(sequences):
            found = self.items_of(old)
            user = first.setdefault(found[0], new) if share and found else new
            shared_with.append(user)
            if user == new:
                items += found
                sequence_ids += [new] * len(found)
        index = torch.tensor(items, dtype=torch.long)
        rows = self.values.split(self.row_counts.tolist())
        return Media(
            torch.cat([rows[item] for item in items]) if items else self.values[:0],
            self.row_counts[index],
            torch.tensor(sequence_ids, dtype=torch.long),
            {name: value[index] for name, value in self.fields.items()},
            _unless_own(torch.tensor(shared_with)),
            self.label_column,
        )


def concat_media(kind: str, parts: list[Media], num_sequences: list[int]) -> Media:
    """The items of several batches; `num_sequences` are the numbers of sequences of those batches.

    Batches that hold the same Media object share its items.
    """
    names = [sorted(media.fields) for media in parts]
    if any(other != names[0] for other in names):
        raise ValueError(f"cannot concatenate {kind} with different fields: {names}")
    offset = 0
    first: dict[int, int] = {}  # id of a Media -> the offset of the first batch with it
    kept: list[Media] = []
    sequence_ids: list[Tensor] = []
    shared_with: list[Tensor] = []
    for media, count in zip(parts, num_sequences, strict=True):
        start = first.setdefault(id(media), offset) if len(media.row_counts) else offset
        own = torch.arange(count) if media.shared_with is None else media.shared_with
        shared_with.append(own + start)
        if start == offset:
            kept.append(media)
            sequence_ids.append(media.sequence_ids + offset)
        offset += count
    return Media(
        cat_padded([media.values for media in kept], shared=True),
        torch.cat([media.row_counts for media in kept]),
        torch.cat(sequence_ids),
        {name: cat_padded([media.fields[name] for media in kept]) for name in parts[0].fields},
        _unless_own(torch.cat(shared_with)),
        parts[0].label_column,
    )


def _unless_own(shared_with: Tensor) -> Tensor | None:
    own = torch.arange(len(shared_with))
    return None if torch.equal(shared_with, own) else shared_with


def cat_padded(parts: list[Tensor], shared: bool = False) -> Tensor:
    """`torch.cat` of items; where their sizes differ, zeros follow the smaller ones, as in image processors.

    With `shared`, a DataLoader worker concatenates into shared memory: torch would copy the result there anyway.
    """
    filled = [part for part in parts if len(part)] or parts[:1]
    row = tuple(max(sizes) for sizes in zip(*(part.shape[1:] for part in filled), strict=True))
    padded = []
    for part in filled:
        if part.shape[1:] != row:
            larger = part.new_zeros((len(part), *row))
            larger[(slice(None), *map(slice, part.shape[1:]))] = part
            part = larger
        padded.append(part)
    if not shared or get_worker_info() is None:
        return torch.cat(padded)
    shape = (sum(map(len, padded)), *row)
    storage = parts[0]._typed_storage()._new_shared(math.prod(shape), device=parts[0].device)
    return torch.cat(padded, out=parts[0].new(storage).resize_(shape))


__all__ = ["IGNORE", "WEIGHT", "Media", "PackedBatch", "Split", "tensor_versions"]

# Of media; what names end with.
HOST_FIELDS = ("grid_thw", "merge_sizes", "_counts", "feature_attention_mask")


class _HostCopy(NamedTuple):
    """A tensor of a batch that was moved to a GPU, and its copy on the host; valid while both are unchanged."""

    on_device: Tensor
    on_host: Tensor
    versions: list[int]


@dataclass(eq=False)
class PackedBatch:
    input_ids: Tensor  # (T,)
    labels: Tensor  # (T,)
    position_ids: Tensor  # (T,) or (A, T)
    cu_seqlens: Tensor  # (S + 1,) int32: sequence s is tokens cu_seqlens[s] to cu_seqlens[s + 1]
    token_fields: dict[str, Tensor] = field(default_factory=dict)  # (T, ...) each: advantages, ...
    # (S, ...) each: numbers of a row, ...
    sequence_fields: dict[str, Tensor] = field(default_factory=dict)
    media: dict[str, Media] = field(default_factory=dict)
    max_seqlen: int = field(init=False)
    host_lengths: list[int] = field(init=False, repr=False)  # of the sequences, in host memory
    _host_copies: dict[str, _HostCopy] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.host_lengths = self.cu_seqlens.diff().tolist()
        self.max_seqlen = max(self.host_lengths, default=0)
        self._check()

    @classmethod
    def from_sequences(
        cls,
        input_ids: list[Tensor],
        loss_masks: list[Tensor] | None = None,
        *,
        position_ids: list[Tensor] | None = None,
        token_fields: dict[str, list[Tensor]] | None = None,
        sequence_fields: dict[str, Tensor] | None = None,
        media: dict[str, Media] | None = None,
    ) -> PackedBatch:
        """Pack sequences. `loss_masks` mark the tokens to learn; by default, all but the first of each sequence."""
        masks = loss_masks or [torch.ones_like(ids, dtype=torch.bool) for ids in input_ids]
        positions = position_ids or [torch.arange(len(ids)) for ids in input_ids]
        fields = token_fields or {}
        for name, values in {"loss_masks": masks, "position_ids": positions, **fields}.items():
            _check_lengths(name, values, input_ids, -1 if name == "position_ids" else 0)
        labels = [torch.full_like(ids, IGNORE) for ids in input_ids]
        for ids, mask, label in zip(input_ids, masks, labels, strict=True):
            label[:-1] = torch.where(mask[1:].bool(), ids[1:], IGNORE)
        return cls(
            torch.cat(input_ids),
            torch.cat(labels),
            torch.cat(positions, dim=-1),
            torch.tensor([0, *map(len, input_ids)]).cumsum(0).int(),
            {name: torch.cat(values) for name, values in fields.items()},
            dict(sequence_fields or {}),
            dict(media or {}),
        )

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def lengths(self) -> Tensor:
        return self.cu_seqlens.diff().long()

    @property
    def num_loss_tokens(self) -> Tensor:
        """The number of tokens that carry loss, as a scalar on the batch's device."""
        return (self.labels != IGNORE).sum()

    def select(self, sequences: list[int]) -> PackedBatch:
        """A batch of these sequences, in this order."""
        starts = self.cu_seqlens.tolist()
        tokens = [torch.arange(starts[s], starts[s + 1]) for s in sequences]
        index = torch.cat(tokens).to(self.input_ids.device)
        chosen = torch.tensor(sequences, device=self.input_ids.device)
        boundaries = torch.tensor([0, *map(len, tokens)]).cumsum(0)
        return PackedBatch(
            self.input_ids[index],
            self.labels[index],
            self.position_ids[..., index],
            boundaries.int().to(self.cu_seqlens.device),
            {name: value[index] for name, value in self.token_fields.items()},
            {name: value[chosen] for name, value in self.sequence_fields.items()},
            {kind: media.select(sequences) for kind, media in self.media.items()},
        )

    def without_targets(self) -> PackedBatch:
        """The batch without the media that a model predicts, as a prompt of generation."""
        if not any(items.is_target for items in self.media.values()):
            return self
        media = {
            kind: items.select([]) if items.is_target else items
            for kind, items in self.media.items()
        }
        return dataclasses.replace(self, media=media)

    @staticmethod
    def concat(batches: list[PackedBatch]) -> PackedBatch:
        """One batch after the other. All must have the same fields; weights are 1 where a batch has none."""
        first = batches[0]
        for batch in batches:
            if WEIGHT in batch.token_fields:
                for other in batches:
                    ones = torch.ones(other.num_tokens, device=other.labels.device)
                    other.token_fields.setdefault(WEIGHT, ones)
                break
        fields: dict[str, dict[str, Tensor]] = {}
        for kind in ("token_fields", "sequence_fields", "media"):
            each = [getattr(batch, kind) for batch in batches]
            names = [sorted(one) for one in each]
            if any(other != names[0] for other in names):
                raise ValueError(f"cannot concatenate batches with different {kind}: {names}")
            if kind != "media":
                fields[kind] = {name: torch.cat([one[name] for one in each]) for name in each[0]}
        offsets = torch.tensor([0, *(batch.num_tokens for batch in batches)]).cumsum(0).tolist()
        pairs = zip(batches, offsets, strict=False)
        ends = [batch.cu_seqlens[1:] + offset for batch, offset in pairs]
        sizes = [batch.num_sequences for batch in batches]
        return PackedBatch(
            torch.cat([batch.input_ids for batch in batches]),
            torch.cat([batch.labels for batch in batches]),
            torch.cat([batch.position_ids for batch in batches], dim=-1),
            torch.cat([first.cu_seqlens[:1], *ends]).int(),
            **fields,
            media={
                kind: concat_media(kind, [batch.media[kind] for batch in batches], sizes)
                for kind in first.media
            },
        )

    def split(
        self,
        budget: int,
        *,
        costs: list[int] | None = None,
        together: Tensor | list[int] | None = None,
    ) -> Split:
        """Micro-batches that never cost more than `budget` tokens, as few as best-fit packing finds.

        `costs` are the costs of the sequences in tokens, by default their lengths (a caller that counts encoder work
        gives its own). Sequences with equal ids in `together`, such as the sides of a pair, stay in one micro-batch; by
        default those that share media, up to a quarter of the budget.
        """
        sizes = self.host_lengths if costs is None else costs
        if together is None:
            together = self.media_units(budget // 4, sizes)
        ids = torch.as_tensor(together).tolist()
        if len(sizes) != self.num_sequences or len(ids) != self.num_sequences:
            raise ValueError(
                f"{len(sizes)} costs and {len(ids)} ids were given for {self.num_sequences} sequences"
            )
        members = fit_groups(sizes, ids, budget)
        return Split([self.select(sequences) for sequences in members], members)

    def media_units(self, limit: int, costs: list[int] | None = None) -> list[int]:
        """An id for each sequence: those with equal ids share media, and cost at most `limit` tokens together."""
        sizes = self.host_lengths if costs is None else costs
        maps = [media.shared_with for media in self.media.values() if media.shared_with is not None]
        return sharing_units(maps[0].tolist() if maps else list(range(len(sizes))), sizes, limit)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        moved = self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))
        for name, host in (("input_ids", self.host_input_ids), ("labels", self.host_labels)):
            if host is not None:
                tensors = (getattr(moved, name), host)
                moved._host_copies[name] = _HostCopy(*tensors, tensor_versions(*tensors))
        return moved

    @property
    def host_input_ids(self) -> Tensor | None:
        """The token ids in host memory, so that reading them is no host sync.

        A batch that was moved to a GPU has them as long as its token ids are the tensor that was copied.
        """
        return self._on_host("input_ids")

    @property
    def host_labels(self) -> Tensor | None:
        """The labels in host memory, as `host_input_ids`."""
        return self._on_host("labels")

    def _on_host(self, name: str) -> Tensor | None:
        tensor = getattr(self, name)
        if tensor.is_cpu:
            return tensor
        copy = self._host_copies.get(name)
        if copy is None or copy.on_device is not tensor:
            return None
        unchanged = tensor_versions(copy.on_device, copy.on_host) == copy.versions
        return copy.on_host if unchanged else None

    def pin_memory(self) -> Self:
        """A copy in pinned host memory, from where `to(device, non_blocking=True)` is asynchronous."""
        return self._map(lambda tensor: tensor.pin_memory())

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Mark the tensors as used by `stream` for the CUDA allocator, as `Tensor.record_stream` does."""
        for tensor in self.tensors().values():
            if tensor.is_cuda:
                tensor.record_stream(stream)

    def equals(self, other: PackedBatch) -> bool:
        """Are the fields the same, with the same bits?"""
        mine = self.tensors()
        theirs = other.tensors()
        if mine.keys() != theirs.keys():
            return False
        return all(_same_bits(mine[name], theirs[name]) for name in mine)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the batch under flat names."""
        names = ("input_ids", "labels", "position_ids", "cu_seqlens")
        flat = {name: getattr(self, name) for name in names}
        flat |= {f"token_fields.{name}": value for name, value in self.token_fields.items()}
        flat |= {f"sequence_fields.{name}": value for name, value in self.sequence_fields.items()}
        for kind, media in self.media.items():
            flat[f"{kind}.values"] = media.values
            flat[f"{kind}.row_counts"] = media.row_counts
            flat[f"{kind}.sequence_ids"] = media.sequence_ids
            if media.shared_with is not None:
                flat[f"{kind}.shared_with"] = media.shared_with
            flat |= {f"{kind}.{name}": value for name, value in media.fields.items()}
        return flat

    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """A copy with `change` applied to every tensor that a model computes with.

        HOST_FIELDS, row counts, sequence ids and `shared_with` of media stay on the host, which plans encoder calls by
        them.
        The copy is not checked again: reading its values would be a host sync.
        """

        def change_media(media: Media) -> Media:
            fields = {
                name: value if name.endswith(HOST_FIELDS) else change(value)
                for name, value in media.fields.items()
            }
            return dataclasses.replace(media, values=change(media.values), fields=fields)

        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new.__dict__.update(
            input_ids=change(self.input_ids),
            labels=change(self.labels),
            position_ids=change(self.position_ids),
            cu_seqlens=change(self.cu_seqlens),
            token_fields={name: change(value) for name, value in self.token_fields.items()},
            sequence_fields={name: change(value) for name, value in self.sequence_fields.items()},
            media={kind: change_media(media) for kind, media in self.media.items()},
            _host_copies={},
        )
        return new

    def _check(self) -> None:
        lengths = self.cu_seqlens.diff()
        is_int32 = self.cu_seqlens.dtype == torch.int32
        if not is_int32 or len(lengths) == 0 or int(self.cu_seqlens[0]) != 0:
            raise ValueError(
                "cu_seqlens must be int32, begin with 0 and have at least one sequence"
            )
        if bool((lengths <= 0).any()):
            empty = int((lengths <= 0).nonzero()[0])
            raise ValueError(f"sequence {empty} is empty; leave it out of the batch")

        total = int(self.cu_seqlens[-1])
        integers = {"input_ids": self.input_ids, "labels": self.labels}
        for name, value in {**integers, **self.token_fields}.items():
            if len(value) != total:
                raise ValueError(f"{name} has {len(value)} entries for {total} tokens")
        for name, value in integers.items():
            if value.ndim != 1 or value.dtype not in (torch.int64, torch.int32):
                shape = tuple(value.shape)
                raise ValueError(f"{name} must be (T,) of integers, not {shape} of {value.dtype}")
        shape = tuple(self.position_ids.shape)
        if len(shape) not in (1, 2):
            raise ValueError(f"position_ids must be (T,) or (A, T), not {shape}")
        if shape[-1] != total:
            raise ValueError(f"position_ids has {shape[-1]} entries for {total} tokens")

        count = self.num_sequences
        for name, value in self.sequence_fields.items():
            if len(value) != count:
                raise ValueError(f"{name} has {len(value)} entries for {count} sequences")
        for kind, media in self.media.items():
            ids = media.sequence_ids
            if ids.is_cpu and len(ids) and not 0 <= ids[0] <= ids[-1] < count:
                raise ValueError(
                    f"{kind} belong to sequences {int(ids[0])} to {int(ids[-1])}; there are {count}"
                )
            if media.shared_with is not None and len(media.shared_with) != count:
                raise ValueError(
                    f"{kind}: shared_with has {len(media.shared_with)} entries for {count} sequences"
                )


def tensor_versions(*tensors: Tensor) -> list[int]:
    """Counters that in-place changes raise; tensors made in inference mode have none."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _check_lengths(name: str, values: list[Tensor], input_ids: list[Tensor], dim: int) -> None:
    """Check each sequence: fields of the right total length could still cross sequence boundaries."""
    if len(values) != len(input_ids):
        raise ValueError(f"{name} has {len(values)} entries for {len(input_ids)} sequences")
    for sequence, (value, ids) in enumerate(zip(values, input_ids, strict=True)):
        if value.ndim == 0 or value.shape[dim] != len(ids):
            found = "none" if value.ndim == 0 else value.shape[dim]
            raise ValueError(
                f"{name} of sequence {sequence} has {found} entries for {len(ids)} tokens"
            )


def _same_bits(one: Tensor, two: Tensor) -> bool:
    if one.dtype != two.dtype or one.shape != two.shape:
        return False
    return torch.equal(_as_bytes(one), _as_bytes(two))


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


# Splitting a packed batch into micro-batches under a hard token budget, and merging what they computed.


@dataclass(frozen=True)
class Split:
    """Micro-batches of one batch, and the sequences of it that each holds."""

    parts: list[PackedBatch]
    members: list[list[int]]

    def merge_tokens(self, outputs: list[Tensor]) -> Tensor:
        """One (T_part, ...) tensor for each part -> (T, ...) in the order of the batch."""
        by_sequence: dict[int, Tensor] = {}
        for members, part, output in zip(self.members, self.parts, outputs, strict=True):
            by_sequence |= zip(members, output.split(part.host_lengths), strict=True)
        return torch.cat([by_sequence[sequence] for sequence in sorted(by_sequence)])


def fit_groups(sizes: list[int], ids: list[int], budget: int) -> list[list[int]]:
    """The sequences of each micro-batch; those with equal ids stay together."""
    groups: dict[int, list[int]] = {}
    for sequence, group in enumerate(ids):
        groups.setdefault(group, []).append(sequence)
    members = list(groups.values())
    totals = [sum(sizes[sequence] for sequence in group) for group in members]
    total, largest = max(zip(totals, members, strict=True), key=lambda one: one[0])
    if total > budget:
        what = f"sequence {largest[0]} costs"
        if len(largest) > 1:
            what = f"sequences {largest}, which stay together, cost"
        raise UserError(
            f"{what} {total} tokens, more than the budget of {budget}: raise the budget or shorten the sequence"
        )
    bins = best_fit(totals, budget)
    return [sorted(sequence for group in part for sequence in members[group]) for part in bins]


def sharing_units(shared_with: list[int], sizes: list[int], limit: int) -> list[int]:
    """Ids of sequences: equal for those that share media, as long as these cost at most `limit` together."""
    ids: list[int] = []
    open_units: dict[int, tuple[int, int]] = {}  # by the sequence with the items: an id, and a cost
    for sequence, source in enumerate(shared_with):
        unit, cost = open_units.get(source, (sequence, 0))
        if cost + sizes[sequence] > limit:
            unit, cost = sequence, 0
        open_units[source] = unit, cost + sizes[sequence]
        ids.append(unit)
    return ids


def best_fit(sizes: list[int], budget: int) -> list[list[int]]:
    """Best-fit decreasing bin packing: each item goes into the fullest bin that has room for it."""
    bins: list[list[int]] = []
    room: list[int] = []
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        fits = [b for b in range(len(bins)) if room[b] >= sizes[item]]
        if fits:
            best = min(fits, key=room.__getitem__)
            bins[best].append(item)
            room[best] -= sizes[item]
        else:
            bins.append([item])
            room.append(budget - sizes[item])
    return [sorted(members) for members in bins]

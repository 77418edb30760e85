"""PackedBatch: the one data format of training. Sequences lie one after the other, with explicit boundaries.

Legend: T tokens, S sequences, N media items, A axes of the positions (mRoPE has 3).

Labels are shifted when a batch is built: `labels[t]` is the token that position t has to predict, inside its own
sequence, or IGNORE. Nothing later rolls or slices them, so nothing can leak over a boundary. Per-token outputs such as
log-probs are aligned in the same way: entry t is about `labels[t]`. There is no padding; `padded.py` converts.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from mvp_engine.errors import UserError
from mvp_engine.renamed import raise_renamed

IGNORE = -100

RENAMED_BATCH = {
    "tokens": "token_fields",
    "sequences": "sequence_fields",
    "weight": "num_loss_tokens",
}
RENAMED_MEDIA = {"rows": "row_counts", "owner": "sequence_ids"}


@dataclass(eq=False)
class Media:
    """Items of one kind, such as the images of a batch: item i has `row_counts[i]` rows of `values`."""

    values: Tensor  # (sum of rows, ...), such as flattened patches
    row_counts: Tensor  # (N,) int64
    sequence_ids: Tensor  # (N,) int64: the sequence that each item belongs to, never decreasing
    fields: dict[str, Tensor] = field(default_factory=dict)  # (N, ...) each, such as grids

    def __post_init__(self) -> None:
        if int(self.row_counts.sum()) != len(self.values):
            raise ValueError(
                f"media rows add up to {int(self.row_counts.sum())}, but values has {len(self.values)} rows"
            )
        bad = [name for name, value in self.fields.items() if len(value) != len(self.row_counts)]
        if len(self.sequence_ids) != len(self.row_counts) or bad:
            raise ValueError(
                f"media has {len(self.row_counts)} items, but {bad or 'sequence_ids'} has another length"
            )
        if bool((self.sequence_ids.diff() < 0).any()):
            raise ValueError("media items must be in the order of their sequences")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> None:
            raise_renamed(self, name, RENAMED_MEDIA)

    def select(self, sequences: list[int]) -> Media:
        """The items of these sequences, which are numbered anew."""
        items = [
            (new, i)
            for new, old in enumerate(sequences)
            for i in (self.sequence_ids == old).nonzero()[:, 0].tolist()
        ]
        index = torch.tensor([i for _, i in items], dtype=torch.long)
        parts = self.values.split(self.row_counts.tolist())
        values = torch.cat([parts[i] for _, i in items]) if items else self.values[:0]
        owner = torch.tensor([new for new, _ in items], dtype=torch.long)
        return Media(
            values,
            self.row_counts[index],
            owner,
            {name: value[index] for name, value in self.fields.items()},
        )


@dataclass(eq=False)
class PackedBatch:
    input_ids: Tensor  # (T,)
    labels: Tensor  # (T,)
    position_ids: Tensor  # (T,) or (A, T)
    cu_seqlens: Tensor  # (S + 1,) int32: sequence s is tokens cu_seqlens[s] to cu_seqlens[s + 1]
    token_fields: dict[str, Tensor] = field(
        default_factory=dict
    )  # (T, ...) each: advantages, old log-probs, ...
    sequence_fields: dict[str, Tensor] = field(
        default_factory=dict
    )  # (S, ...) each: rewards, sample ids, ...
    media: dict[str, Media] = field(default_factory=dict)
    beside: list[PackedBatch] = field(
        default_factory=list
    )  # run along by the model, their outputs dropped
    max_seqlen: int = field(init=False)
    _moved: tuple[Tensor, Tensor, list[int]] | None = field(
        init=False, default=None, repr=False
    )  # see `host_input_ids`
    _joined: tuple[PackedBatch, list[Tensor], list[int]] | None = field(
        init=False, default=None, repr=False
    )

    def __post_init__(self) -> None:
        lengths = self.cu_seqlens.diff()
        if (
            self.cu_seqlens.dtype != torch.int32
            or len(lengths) == 0
            or int(self.cu_seqlens[0]) != 0
        ):
            raise ValueError(
                "cu_seqlens must be int32, begin with 0 and have at least one sequence"
            )
        if bool((lengths <= 0).any()):
            raise ValueError(
                f"sequence {int((lengths <= 0).nonzero()[0])} is empty; leave it out of the batch"
            )
        total = int(self.cu_seqlens[-1])
        for name, value in {
            "input_ids": self.input_ids,
            "labels": self.labels,
            **self.token_fields,
        }.items():
            if len(value) != total:
                raise ValueError(f"{name} has {len(value)} entries for {total} tokens")
        for name, value in {"input_ids": self.input_ids, "labels": self.labels}.items():
            if value.ndim != 1 or value.dtype not in (torch.int64, torch.int32):
                raise ValueError(
                    f"{name} must be (T,) of integers, not {tuple(value.shape)} of {value.dtype}"
                )
        if self.position_ids.ndim not in (1, 2):
            raise ValueError(
                f"position_ids must be (T,) or (A, T), not {tuple(self.position_ids.shape)}"
            )
        if self.position_ids.shape[-1] != total:
            raise ValueError(
                f"position_ids has {self.position_ids.shape[-1]} entries for {total} tokens"
            )
        for name, value in self.sequence_fields.items():
            if len(value) != len(lengths):
                raise ValueError(f"{name} has {len(value)} entries for {len(lengths)} sequences")
        for kind, media in self.media.items():
            if (
                media.sequence_ids.is_cpu
                and len(media.sequence_ids)
                and not 0 <= media.sequence_ids[0] <= media.sequence_ids[-1] < len(lengths)
            ):
                owners = media.sequence_ids[[0, -1]].tolist()
                raise ValueError(
                    f"{kind} belong to sequences {owners[0]} to {owners[1]}; there are {len(lengths)}"
                )
        self.max_seqlen = int(lengths.max())

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
        """Pack sequences. `loss_masks` mark the tokens to be learned; without them, all but each first one."""
        masks = loss_masks or [torch.ones_like(ids, dtype=torch.bool) for ids in input_ids]
        positions = position_ids or [torch.arange(len(ids)) for ids in input_ids]
        for name, values in {
            "loss_masks": masks,
            "position_ids": positions,
            **(token_fields or {}),
        }.items():
            _fit(name, values, input_ids, -1 if name == "position_ids" else 0)
        lengths = torch.tensor([0, *map(len, input_ids)])
        return cls(
            torch.cat(input_ids),
            torch.cat([_labels(ids, mask) for ids, mask in zip(input_ids, masks, strict=True)]),
            torch.cat(positions, dim=-1),
            lengths.cumsum(0).int(),
            {name: torch.cat(values) for name, values in (token_fields or {}).items()},
            dict(sequence_fields or {}),
            dict(media or {}),
        )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> None:
            raise_renamed(self, name, RENAMED_BATCH)

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
        """How many tokens carry loss, as a scalar on the batch's device."""
        return (self.labels != IGNORE).sum()

    def select(self, sequences: list[int]) -> PackedBatch:
        """A batch of these sequences, in this order."""
        starts, lengths = self.cu_seqlens.tolist(), self.lengths.tolist()
        index = torch.cat([torch.arange(starts[s], starts[s] + lengths[s]) for s in sequences]).to(
            self.input_ids.device
        )
        chosen = torch.tensor(sequences, device=self.input_ids.device)
        return PackedBatch(
            self.input_ids[index],
            self.labels[index],
            self.position_ids[..., index],
            torch.tensor([0, *(lengths[s] for s in sequences)])
            .cumsum(0)
            .int()
            .to(self.cu_seqlens.device),
            {name: value[index] for name, value in self.token_fields.items()},
            {name: value[chosen] for name, value in self.sequence_fields.items()},
            {kind: media.select(sequences) for kind, media in self.media.items()},
            self.beside,
        )

    @staticmethod
    def concat(batches: list[PackedBatch]) -> PackedBatch:
        """One batch after the other. All must have the same fields."""
        first = batches[0]
        for kind in ("token_fields", "sequence_fields", "media"):
            names = [sorted(getattr(batch, kind)) for batch in batches]
            if any(other != names[0] for other in names):
                raise ValueError(f"cannot concatenate batches with different {kind}: {names}")
        shift = torch.tensor([0, *(batch.num_tokens for batch in batches)]).cumsum(0).tolist()
        ends = [
            batch.cu_seqlens[1:] + offset for batch, offset in zip(batches, shift, strict=False)
        ]
        return PackedBatch(
            torch.cat([batch.input_ids for batch in batches]),
            torch.cat([batch.labels for batch in batches]),
            torch.cat([batch.position_ids for batch in batches], dim=-1),
            torch.cat([first.cu_seqlens[:1], *ends]).int(),
            {
                name: torch.cat([batch.token_fields[name] for batch in batches])
                for name in first.token_fields
            },
            {
                name: torch.cat([batch.sequence_fields[name] for batch in batches])
                for name in first.sequence_fields
            },
            {
                kind: _concat_media(kind, [(b.media[kind], b.num_sequences) for b in batches])
                for kind in first.media
            },
            [other for batch in batches for other in batch.beside],
        )

    def with_beside(self) -> PackedBatch:
        """One batch with what is to run along at its end: nothing but what a model's forward takes. Of a batch that was
        moved it is there already, as long as the batch has the tensors that it had then."""
        if not self.beside:
            return self
        joined, then, versions = self._joined or (None, [], [])
        same = (
            joined
            and [*map(id, now := self._every())] == [*map(id, then)]
            and _versions(*now) == versions
        )
        if joined and same:
            return joined
        every = [self, *self.beside]
        axes = next(
            (batch.position_ids.shape[:-1] for batch in every if batch.position_ids.ndim == 2), ()
        )
        kinds = {kind: media for batch in every for kind, media in batch.media.items()}
        types = {
            name
            for batch in every
            for name in batch.token_fields
            if name.endswith("token_type_ids")
        }
        alike = []
        for batch in every:
            if missing := sorted(types - set(batch.token_fields)):
                raise ValueError(
                    f"some batches have token_fields[{missing[0]!r}] and some do not; give them in every batch"
                )
            positions = batch.position_ids.expand(*axes, -1)
            media = {kind: batch.media.get(kind) or kinds[kind].select([]) for kind in kinds}
            tokens = {name: batch.token_fields[name] for name in types}
            alike.append(
                PackedBatch(
                    batch.input_ids, batch.labels, positions, batch.cu_seqlens, tokens, media=media
                )
            )
        return PackedBatch.concat(alike)

    def filler(self) -> PackedBatch:
        """The smallest batch of this kind that trains nothing: one token without a label, no media items.

        It is the last token of a sequence: the first may stand for an image, which is not there.
        """
        one = self.select([0])
        return PackedBatch(
            one.input_ids[-1:],
            torch.full_like(one.labels[:1], IGNORE),
            one.position_ids[..., :1],
            torch.tensor([0, 1], dtype=torch.int32, device=self.cu_seqlens.device),
            {name: torch.zeros_like(value[:1]) for name, value in one.token_fields.items()},
            {name: torch.zeros_like(value) for name, value in one.sequence_fields.items()},
            {kind: media.select([]) for kind, media in self.media.items()},
        )

    def split(self, budget: int, *, costs: list[int] | None = None, at_least: int = 1) -> Split:
        """Micro-batches that never cost more than `budget`, as few as best-fit packing finds.

        `costs` are the sequences' costs in tokens; without them, their lengths (a caller that counts encoders gives its
        own). Where there are fewer micro-batches than `at_least`, fillers follow, so that ranks can agree on a number.
        """
        sizes = self.lengths.tolist() if costs is None else costs
        if len(sizes) != self.num_sequences:
            raise ValueError(f"{len(sizes)} costs were given for {self.num_sequences} sequences")
        largest = max(range(len(sizes)), key=sizes.__getitem__)
        if sizes[largest] > budget:
            raise UserError(
                f"sequence {largest} costs {sizes[largest]} tokens, more than the budget of {budget}: raise the budget "
                "or shorten the sequence"
            )
        bins = best_fit(sizes, budget)
        parts = [self.select(members) for members in bins]
        parts += [self.filler() for _ in range(at_least - len(parts))]
        return Split(parts, bins)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedBatch:
        new = self._map(lambda t: t.to(device, non_blocking=non_blocking))
        if (here := self.host_input_ids) is not None:
            new._moved = (new.input_ids, here, _versions(new.input_ids, here))
        if self.beside:  # here, where values can be looked at without waiting for them
            joined, tensors = self.with_beside(), new._every()
            joined = joined.pin_memory() if self.input_ids.is_pinned() else joined
            new._joined = (joined.to(device, non_blocking), tensors, _versions(*tensors))
        return new

    @property
    def host_input_ids(self) -> Tensor | None:
        """The tokens on the CPU, where nobody has to wait for them: of a batch that was moved to a GPU with the tokens
        that it still has."""
        if self.input_ids.is_cpu:
            return self.input_ids
        there, here, versions = self._moved or (None, None, None)
        same = here is not None and there is self.input_ids and _versions(there, here) == versions
        return here if same else None

    def pin_memory(self) -> PackedBatch:
        """In pinned host memory, from where `to(device, non_blocking=True)` copies while the GPU works."""
        return self._map(lambda t: t.pin_memory())

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """As of a tensor: what is on the GPU is in use by this stream, too."""

        def record(tensor: Tensor) -> Tensor:
            if tensor.is_cuda:
                tensor.record_stream(stream)
            return tensor

        self._map(record)
        if self._joined:
            self._joined[0].record_stream(stream)

    def equals(self, other: PackedBatch) -> bool:
        """The same fields with the same bits."""
        mine, theirs = self._tensors(), other._tensors()
        return (
            mine.keys() == theirs.keys()
            and all(_same_bits(mine[name], theirs[name]) for name in mine)
            and len(self.beside) == len(other.beside)
            and all(one.equals(two) for one, two in zip(self.beside, other.beside, strict=True))
        )

    def _map(self, change: Any) -> PackedBatch:
        def moved(media: Media) -> Media:  # grids are sizes, which the host goes by
            fields = {
                n: value if n.endswith("grid_thw") else change(value)
                for n, value in media.fields.items()
            }
            return dataclasses.replace(media, values=change(media.values), fields=fields)

        new = object.__new__(
            PackedBatch
        )  # checked already; checking again would wait for the device
        new.__dict__.update(
            input_ids=change(self.input_ids),
            labels=change(self.labels),
            position_ids=change(self.position_ids),
            cu_seqlens=change(self.cu_seqlens),
            token_fields={name: change(value) for name, value in self.token_fields.items()},
            sequence_fields={name: change(value) for name, value in self.sequence_fields.items()},
            media={kind: moved(media) for kind, media in self.media.items()},
            beside=[batch._map(change) for batch in self.beside],
            max_seqlen=self.max_seqlen,
        )
        return new

    def _every(self) -> list[Tensor]:
        return [tensor for batch in (self, *self.beside) for tensor in batch._tensors().values()]

    def _tensors(self) -> dict[str, Tensor]:
        flat = {
            name: getattr(self, name)
            for name in ("input_ids", "labels", "position_ids", "cu_seqlens")
        }
        flat |= {f"token_fields.{name}": value for name, value in self.token_fields.items()}
        flat |= {f"sequence_fields.{name}": value for name, value in self.sequence_fields.items()}
        for kind, media in self.media.items():
            flat |= {
                f"{kind}.values": media.values,
                f"{kind}.row_counts": media.row_counts,
                f"{kind}.sequence_ids": media.sequence_ids,
            }
            flat |= {f"{kind}.{name}": value for name, value in media.fields.items()}
        return flat


@dataclass(frozen=True)
class Split:
    """Micro-batches, and how to put what they gave back into the order of the batch they came from."""

    parts: list[PackedBatch]  # fillers, if any, come last
    members: list[list[int]]  # the sequences of each part that is no filler

    def merge_tokens(self, outputs: list[Tensor]) -> Tensor:
        """One (T_part, ...) tensor for each part -> (T, ...) in the original order; fillers' outputs are left out."""
        pieces: dict[int, Tensor] = {}
        for members, part, output in zip(self.members, self.parts, outputs, strict=False):
            pieces |= dict(zip(members, output.split(part.lengths.tolist()), strict=True))
        return torch.cat([pieces[s] for s in sorted(pieces)])

    def merge_sequences(self, outputs: list[Tensor]) -> Tensor:
        """One (S_part, ...) tensor for each part -> (S, ...) in the original order."""
        order = [s for members in self.members for s in members]
        together = torch.cat([output for _, output in zip(self.members, outputs, strict=False)])
        return together[torch.tensor(order).argsort().to(together.device)]


def best_fit(sizes: list[int], budget: int) -> list[list[int]]:
    """Best-fit decreasing: each item into the fullest bin that still has room. Bins list their items in order."""
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


def _labels(input_ids: Tensor, loss_mask: Tensor) -> Tensor:
    labels = torch.full_like(input_ids, IGNORE)
    labels[:-1] = torch.where(loss_mask[1:].bool(), input_ids[1:], IGNORE)
    return labels


def _versions(*tensors: Tensor) -> list[int]:
    """Changing a tensor in place changes its version; tensors of inference mode have none."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _fit(name: str, values: list[Tensor], input_ids: list[Tensor], dim: int) -> None:
    """Each part by itself: of the right total length, parts could still lie over the boundaries of others."""
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
    return torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (one, two)))


def _concat_media(kind: str, parts: list[tuple[Media, int]]) -> Media:
    names = [sorted(media.fields) for media, _ in parts]
    if any(other != names[0] for other in names):
        raise ValueError(f"cannot concatenate {kind} with different fields: {names}")
    before = torch.tensor([0, *(sequences for _, sequences in parts)]).cumsum(0).tolist()
    return Media(
        _cat_large([media.values for media, _ in parts]),
        torch.cat([media.row_counts for media, _ in parts]),
        torch.cat(
            [media.sequence_ids + offset for (media, _), offset in zip(parts, before, strict=False)]
        ),
        {
            name: torch.cat([media.fields[name] for media, _ in parts])
            for name in parts[0][0].fields
        },
    )


def _cat_large(parts: list[Tensor]) -> Tensor:
    """In a loader's worker straight into shared memory, where it would be copied to on its way out."""
    if get_worker_info() is None:
        return torch.cat(parts)
    shape = (sum(map(len, parts)), *parts[0].shape[1:])
    storage = parts[0]._typed_storage()._new_shared(math.prod(shape), device=parts[0].device)
    return torch.cat(parts, out=parts[0].new(storage).resize_(shape))

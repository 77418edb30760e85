"""Lockstep: every rank runs the same number of forwards and calls every encoder in each, whatever its data.

FSDP ranks all-gather parameters from each other in every forward, so a rank that runs fewer of them, or skips an
encoder that another rank calls, would leave the others waiting. Two kinds of dummies prevent that:

- A rank with fewer micro-batches than another repeats one of them as a *dummy forward*. Its loss is multiplied by 0.
- A micro-batch that lacks a media kind which another rank has gets a *dummy sequence* with such media appended. The
  model runs on both; a slice drops the dummy's outputs, so its gradients are zeros.

Dummies are real samples of the run, if need be another rank's. So they suit every model, and no table of models has to
say which encoders exist. Nothing else knows of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mvp_engine import plugins
from mvp_engine.data.batch import IGNORE, PackedBatch, tensor_versions
from mvp_engine.data.loader import MediaKinds, StepPlan
from mvp_engine.distributed import Layout
from mvp_engine.errors import UserError
from mvp_engine.hf.experts.router_replay import add_routes


@dataclass(eq=False)
class _JoinedBatch(PackedBatch):
    """What the model runs on: a micro-batch, and its dummies behind it."""

    num_real_tokens: int = 0
    num_real_sequences: int = 0

    @classmethod
    def of(cls, batch: Any) -> Any:
        """Join a micro-batch that has dummies; any other argument of a forward stays."""
        if not isinstance(batch, LockstepBatch):
            return batch
        joined = object.__new__(cls)  # checked already, and reading values would be a host sync
        joined.__dict__.update(
            batch.join().__dict__,
            num_real_tokens=batch.num_tokens,
            num_real_sequences=batch.num_sequences,
        )
        return joined


class _Joined(NamedTuple):
    """A batch with its dummies, and the tensors that it was made from."""

    batch: PackedBatch
    tensors: list[Tensor]
    versions: list[int]


@dataclass(eq=False)
class LockstepBatch(PackedBatch):
    """A micro-batch with some dummy sequences in its forward. To `forward_step` it is the micro-batch alone."""

    dummies: list[PackedBatch] = field(default_factory=list)
    _joined: _Joined | None = field(init=False, default=None, repr=False)

    def select(self, sequences: list[int]) -> LockstepBatch:
        return append_dummies(super().select(sequences), self.dummies)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> LockstepBatch:
        """Join on the host, before the copy: joining on the GPU would read sizes there, which is a host sync."""
        joined = self.join()
        if self.input_ids.is_pinned():
            joined = joined.pin_memory()
        moved = super().to(device, non_blocking)
        tensors = moved._all_tensors()
        joined = joined.to(device, non_blocking)
        moved._joined = _Joined(joined, tensors, tensor_versions(*tensors))
        return moved

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        super().record_stream(stream)
        if self._joined is not None:
            self._joined.batch.record_stream(stream)

    def join(self) -> PackedBatch:
        """One batch of the micro-batch and its dummies, with nothing but what a model's forward reads.

        It was made before the copy to the GPU; `forward_step` may have changed the micro-batch since.
        """
        if self._joined is not None and self._is_current(self._joined):
            return self._joined.batch
        device = self.input_ids.device  # dummies stay on the host, until they are needed elsewhere
        return _join([self, *(dummy.to(device) for dummy in self.dummies)])

    def _is_current(self, joined: _Joined) -> bool:
        now = self._all_tensors()
        same = len(now) == len(joined.tensors)
        same = same and all(one is two for one, two in zip(now, joined.tensors, strict=True))
        return same and tensor_versions(*now) == joined.versions

    def _all_tensors(self) -> list[Tensor]:
        batches: list[PackedBatch] = [self, *self.dummies]
        return [tensor for batch in batches for tensor in batch.tensors().values()]


def append_dummies(batch: PackedBatch, dummies: list[PackedBatch]) -> LockstepBatch:
    return LockstepBatch(
        batch.input_ids,
        batch.labels,
        batch.position_ids,
        batch.cu_seqlens,
        batch.token_fields,
        batch.sequence_fields,
        batch.media,
        dummies,
    )


def _join(batches: list[PackedBatch]) -> PackedBatch:
    axes = next((b.position_ids.shape[:-1] for b in batches if b.position_ids.ndim == 2), ())
    kinds = {kind: media for batch in batches for kind, media in batch.media.items()}
    fields = {name for batch in batches for name in batch.token_fields}
    types = {name for name in fields if name.endswith("token_type_ids")}
    of_sequences = {name for batch in batches for name in batch.sequence_fields}
    of_sequences &= plugins.sequence_fields()
    alike = []
    for batch in batches:
        if missing := sorted(types - set(batch.token_fields)):
            raise ValueError(
                f"some batches have token_fields[{missing[0]!r}] and some do not; give them in every batch"
            )
        alike.append(
            PackedBatch(
                batch.input_ids,
                batch.labels,
                batch.position_ids.expand(*axes, -1),
                batch.cu_seqlens,
                {name: batch.token_fields[name] for name in types},
                {name: batch.sequence_fields[name] for name in of_sequences},
                media={kind: batch.media.get(kind) or kinds[kind].select([]) for kind in kinds},
            )
        )
    routes = [batch.token_fields.get("experts") for batch in batches]
    return PackedBatch.concat(add_routes(alike, routes))


def run_dummies_along(model: nn.Module) -> None:
    """Register hooks: a forward on a LockstepBatch runs on its dummies too, and returns outputs without them.

    Call it after FSDP: its hooks must see whole outputs, since it warns of views.
    """
    model.register_forward_pre_hook(_join_dummies, with_kwargs=True)
    model.register_forward_hook(_drop_dummy_outputs, with_kwargs=True)


def _join_dummies(
    _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    joined = tuple(_JoinedBatch.of(one) for one in args)
    return joined, {name: _JoinedBatch.of(one) for name, one in kwargs.items()}


def _drop_dummy_outputs(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any
) -> Any:
    for one in (*args, *kwargs.values()):
        if isinstance(one, _JoinedBatch):
            kept_of = {one.num_tokens: one.num_real_tokens}
            if plugins.sequence_fields() & one.sequence_fields.keys():
                # Outputs are per token or per sequence, and a sequence has more than one token.
                kept_of = {one.num_sequences: one.num_real_sequences, **kept_of}
            return _cut(outputs, kept_of, getattr(model, "drops_dummies", ()))
    return outputs


def _cut(outputs: Any, kept_of: dict[int, int], whole: Sequence[str] = ()) -> Any:
    """Outputs without those of dummies, by length; those named in `whole` as they are.

    The backward of a slice is zeros, never a product with 0 * inf.
    """
    if isinstance(outputs, Tensor):
        kept = kept_of.get(len(outputs)) if outputs.ndim else None
        return outputs if kept is None else outputs[:kept]
    if isinstance(outputs, dict):  # also transformers' ModelOutput
        cut_values = {
            name: outputs[name] if name in whole else _cut(outputs[name], kept_of)
            for name in outputs
        }
        return type(outputs)(**cut_values)
    if isinstance(outputs, list | tuple):
        cut = [_cut(value, kept_of) for value in outputs]
        return type(outputs)(*cut) if hasattr(outputs, "_fields") else type(outputs)(cut)
    return outputs


class Scheduled(NamedTuple):
    """One forward of this rank."""

    micro_batch: Any
    is_dummy: bool  # a dummy forward: its loss and its metrics do not count


class LockstepScheduler:
    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.world = layout.world
        self._repeatable: Any = None  # the micro-batch that dummy forwards of this call repeat
        self.dummies: dict[str, PackedBatch] = {}  # by media kind; the same on all ranks
        self._known: list[str] = []  # media kinds that ranks without a plan have agreed on
        self._packed: bool | None = None  # are micro-batches PackedBatches, on any rank?

    def stream(self, micro_batches: Iterable[Any]) -> Iterator[Scheduled]:
        """One forward after the other, until no rank has a micro-batch left."""
        self._repeatable = None
        for micro_batch in micro_batches:
            yield from self._schedule([micro_batch], None)
        while more := self._schedule([], None):
            yield from more

    def step(self, micro_batches: list[Any], plan: StepPlan | None = None) -> list[Scheduled]:
        """As many forwards as the rank with most micro-batches has. All ranks call it at the same time.

        A dummy forward repeats a micro-batch of this call: one of an earlier call may have other fields, and
        `forward_step` would fail on this rank alone. Without a `plan` the ranks agree on what they hold.
        """
        self._repeatable = None
        return self._schedule(micro_batches, plan)

    def _schedule(self, micro_batches: list[Any], plan: StepPlan | None) -> list[Scheduled]:
        if micro_batches:
            self._repeatable = micro_batches[-1]
        if plan is not None and not self._covers_media(plan, micro_batches):
            plan = None
        if plan is None:
            forwards = self._agreed(micro_batches)
        else:
            having = [rank for rank, kinds in enumerate(plan.ranks) if kinds]
            if having and len(having) < len(plan.ranks):
                ranks_of_data = self.layout.sequence_size * self.layout.tensor
                self._share_repeatable(having[0] * ranks_of_data)
            forwards = _planned_forwards(plan)
        scheduled = [Scheduled(micro_batch, False) for micro_batch in micro_batches]
        scheduled += [Scheduled(self._repeatable, True)] * (len(forwards) - len(scheduled))
        if plan is not None and forwards:
            self._check_against(plan, micro_batches)
        every_kind = frozenset().union(*(one for of_ranks in forwards for one in of_ranks))
        if every_kind:
            self._share_dummies([one.micro_batch for one in scheduled], every_kind)
        completed = []
        for one, of_ranks in zip(scheduled, forwards, strict=True):
            required = self._required(of_ranks, is_planned=plan is not None)
            completed.append(one._replace(micro_batch=self._complete(one.micro_batch, required)))
        return completed

    def _covers_media(self, plan: StepPlan, micro_batches: list[Any]) -> bool:
        """Does the plan say all that dummies depend on? Agreed once, in the first step."""
        if plan.media_known:
            return True
        if self._packed is None:
            mine = any(isinstance(one, PackedBatch) for one in micro_batches)
            self._packed = self.world.any(mine)[0]
        return not self._packed

    def _agreed(self, micro_batches: list[Any]) -> list[list[MediaKinds]]:
        """For each forward of this call, the kinds that some rank has, and those that all ranks have.

        It takes two small all-reduces, whatever the number of ranks; a name that is new, one all-gather more.
        """
        world = self.world
        mine = [media_kinds(micro_batch) for micro_batch in micro_batches]
        new = frozenset().union(*mine) - set(self._known)
        has_none = self._repeatable is None
        lender = -math.inf if has_none else -world.rank
        most = world.all_reduce([len(mine), lender, has_none, bool(new)], torch.maximum)
        if most[0] and most[2]:
            self._share_repeatable(-int(most[1]))
        if most[3]:
            names = set().union(*world.all_gather(new))
            self._known += sorted(names - set(self._known))
        longest = int(most[0])
        mine += [media_kinds(self._repeatable)] * (longest - len(mine))
        flags: list[bool] = []
        for kinds in mine:
            for kind in self._known:
                flags += [kind in kinds, kind not in kinds]
        found = iter(world.any(*flags) if flags else flags)
        forwards = []
        for _ in range(longest):
            has_lacks = {kind: (next(found), next(found)) for kind in self._known}
            some = frozenset(kind for kind, (has, _) in has_lacks.items() if has)
            everywhere = frozenset(kind for kind in some if not has_lacks[kind][1])
            forwards.append([some, everywhere])
        return forwards

    def _check_against(self, plan: StepPlan, micro_batches: list[Any]) -> None:
        planned = plan.ranks[self.layout.data_rank]
        found = [media_kinds(micro_batch) for micro_batch in micro_batches]
        fits = len(found) == len(planned)
        fits = fits and all(one <= other for one, other in zip(found, planned, strict=True))
        if not fits:
            raise UserError(
                f"this step has {[sorted(one) for one in found]} as the media of its micro-batches on rank "
                f"{self.world.rank}, and the loader planned {[sorted(one) for one in planned]}. If train_pre_step "
                "changes ctx.micro_batches, set ctx.plan = None there, on all ranks. If media were replaced, remove "
                "the cached costs (data.cache)"
            )

    def _share_repeatable(self, lender: int) -> None:
        """A rank without a micro-batch of its own gets the one that another rank lends."""
        lent = self._repeatable if self.world.rank == lender else None
        lent = self.world.broadcast(lent, lender)
        if self._repeatable is None:
            self._repeatable = lent

    def _share_dummies(self, batches: list[Any], kinds: MediaKinds) -> None:
        """For each kind that is new, agree on the smallest sequence with it that any rank holds now."""
        new = sorted(kinds - set(self.dummies))
        if not new:
            return
        offers = self.world.all_gather({kind: _smallest(batches, kind) for kind in new})
        for kind in new:
            found = [offer[kind] for offer in offers if offer[kind] is not None]
            if found:  # else every planned row of this kind failed to decode
                self.dummies[kind] = _smallest_of(found, kind)

    def _complete(self, micro_batch: Any, required: set[str]) -> Any:
        """Append dummy sequences, so that this rank calls the encoders that others call in this forward."""
        if not isinstance(micro_batch, PackedBatch):
            return micro_batch
        dummies: list[PackedBatch] = []
        for kind in sorted(required - media_kinds(micro_batch)):
            if not any(kind in media_kinds(dummy) for dummy in dummies):  # one may have several
                dummies.append(self.dummies[kind])
        own = micro_batch.num_tokens + sum(dummy.num_tokens for dummy in dummies)
        missing = self.layout.sequence_size - own
        if missing > 0:  # sequence parallel needs a token for every rank
            dummies += [_one_token(micro_batch)] * missing
        return append_dummies(micro_batch, dummies) if dummies else micro_batch

    def _required(self, of_ranks: list[MediaKinds], is_planned: bool) -> set[str]:
        """The kinds that all ranks run in a forward: those that one has, and those that come with a dummy.

        A rank may lack a kind that was planned for it, so with a plan a dummy of any kind may be in use.
        """
        required = {kind for kinds in of_ranks for kind in kinds if kind in self.dummies}
        while True:
            in_use = [
                kind
                for kind in required
                if is_planned or any(kind not in kinds for kinds in of_ranks)
            ]
            implied = {other for kind in in_use for other in media_kinds(self.dummies[kind])}
            if implied <= required:
                return required
            required |= implied


def _planned_forwards(plan: StepPlan) -> list[list[MediaKinds]]:
    """The kinds of each data-parallel rank in each forward, dummy forwards included."""
    lent = next((kinds[-1:] for kinds in plan.ranks if kinds), ())
    of_ranks: list[tuple[MediaKinds, ...]] = []
    for kinds in plan.ranks:
        repeat = kinds[-1:] or lent
        of_ranks.append(kinds + repeat * (plan.num_micro_batches - len(kinds)))
    return [list(forward) for forward in zip(*of_ranks, strict=True)]


def media_kinds(micro_batch: Any) -> MediaKinds:
    """The kinds of media that a micro-batch holds items of."""
    if not isinstance(micro_batch, PackedBatch):
        return frozenset()
    return frozenset(kind for kind, media in micro_batch.media.items() if len(media.row_counts))


def _smallest(batches: list[Any], kind: str) -> PackedBatch | None:
    """The smallest sequence with such media, without labels."""
    found: list[PackedBatch] = []
    for batch in batches:
        if kind in media_kinds(batch):
            sequences = batch.media[kind].sequence_ids.unique()
            found += [batch.select([int(sequence)]) for sequence in sequences]
    if not found:
        return None
    smallest = _smallest_of(found, kind)
    labels = torch.full_like(smallest.labels, IGNORE)
    media = {name: items.without_labels() for name, items in smallest.media.items()}
    return dataclasses.replace(smallest, labels=labels, media=media)


def _smallest_of(samples: list[PackedBatch], kind: str) -> PackedBatch:
    def size(sample: PackedBatch) -> tuple[int, int]:
        return len(media_kinds(sample)), int(sample.media[kind].row_counts.sum())

    return min(samples, key=size)


def _one_token(batch: PackedBatch) -> PackedBatch:
    """A sequence of one token without a label and without media.

    It is the last token of a sequence: the first may be a placeholder of an image that is not there.
    """
    last = batch.select([0])
    return PackedBatch(
        last.input_ids[-1:],
        torch.full_like(last.labels[:1], IGNORE),
        last.position_ids[..., :1],
        torch.tensor([0, 1], dtype=torch.int32, device=batch.cu_seqlens.device),
        {name: torch.zeros_like(value[:1]) for name, value in last.token_fields.items()},
        {name: torch.zeros_like(value) for name, value in last.sequence_fields.items()},
        {kind: media.select([]) for kind, media in batch.media.items()},
    )

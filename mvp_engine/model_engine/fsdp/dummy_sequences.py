"""Dummy sequences: a model runs on a micro-batch and its dummies, and returns the outputs of the micro-batch alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mvp_engine import plugins
from mvp_engine.data.batch import PackedBatch, tensor_versions


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
    return PackedBatch.concat(alike)


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

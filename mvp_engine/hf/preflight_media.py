"""Preflight of media: the first real rows with images, videos or audio, packed, alone, and in transformers' forward.

The probe of `preflight.py` is text only: nothing but the data knows what an encoder accepts. So the rows come from the
first step that has them, once for each kind of media, before anything is learnt from them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from torch import Tensor

from mvp_engine.data.batch import PackedBatch
from mvp_engine.data.speech import SPEECH
from mvp_engine.errors import UserError
from mvp_engine.hf.packed_model import PackedModel
from mvp_engine.hf.preflight import TRIALS, _difference, _eager_eval, _hidden

MAX_REFERENCE_TOKENS = 512  # eager attention needs memory for the square of the length
# The largest mean difference, relative to the mean output, that rounding explains: fp32, half precision.
BOUNDS = {True: 1e-4, False: 0.1}
NEIGHBOUR_BOUNDS = {True: 1e-4, False: 0.05}  # of equal shapes, so nearly all of rounding is equal


class MediaPreflight:
    """Compares rows with media of one model, each kind of media once."""

    def __init__(self, model: PackedModel) -> None:
        self.model = model
        self.checked: set[str] = set()

    def unchecked(self, batches: Iterable[object]) -> dict[str, list[PackedBatch]]:
        """The smallest rows of each kind of media that was not compared yet; empty in nearly every step."""
        packed = [batch for batch in batches if isinstance(batch, PackedBatch)]
        found = {}
        for kind in sorted({kind for batch in packed for kind in _kinds(batch)} - self.checked):
            found[kind] = _smallest_rows(packed, kind)
        return found

    @torch.no_grad()
    def check(self, rows: dict[str, list[PackedBatch]], *, exact: bool, reference: bool) -> None:
        """Raise unless rows give what they give alone and in transformers' forward. On all ranks of a forward.

        `exact`: the model computes in float32. `reference`: compare with transformers, which does not know
        tensor-parallel weights.
        """
        device = next(self.model.parameters()).device
        for kind, found in rows.items():
            moved = [row.to(device) for row in found]
            with _eager_eval(self.model):
                if self._check_kind(kind, moved, exact, reference):
                    self.checked |= _kinds(found[0])

    def _check_kind(self, kind: str, rows: list[PackedBatch], exact: bool, reference: bool) -> bool:
        """Whether any rows could be compared. Non-finite ones cannot: the next step has others."""
        model_type = self.model.hf.config.model_type  # type: ignore[union-attr]
        error: str | None = None
        for first in range(0, len(rows), 2):  # one pair may fail by chance: see TRIALS
            row = rows[first]
            neighbour = rows[first + 1] if first + 1 < len(rows) else _other_media(row)
            try:
                found = self._compare(row, neighbour, exact, reference)
            except torch.OutOfMemoryError:
                raise
            except Exception as failure:
                start = f"{model_type}: the forward on a row with {kind} fails"
                if isinstance(failure, NotImplementedError | UserError):
                    raise UserError(f"{start}: {failure}") from failure
                raise UserError(
                    f"{start}: {type(failure).__name__}: {failure}. Are the media encoded by the processor of this "
                    "model? If so, its encoder is not supported: choose another model"
                ) from failure
            if found == "":
                return True
            error = found or error
        if error is None:
            return False
        twice = [_hidden(self.model, *rows[:2]) for _ in range(2)]
        if _difference(*twice) > NEIGHBOUR_BOUNDS[exact]:
            error = "two equal forwards differ, because its encoder adds random noise"
        raise UserError(f"{model_type} cannot be trained on packed sequences with {kind}: {error}")

    def _compare(
        self, row: PackedBatch, neighbour: PackedBatch, exact: bool, reference: bool
    ) -> str | None:
        """What is wrong with a row and its neighbour in a pack; empty if nothing is, None if they are non-finite."""
        length = row.num_tokens
        packed = _hidden(self.model, row, neighbour)
        if not bool(packed.isfinite().all()):
            return None
        changed = _hidden(self.model, row, _other_media(neighbour))
        by_neighbour = _difference(packed[:length], changed[:length])
        if by_neighbour > NEIGHBOUR_BOUNDS[exact]:
            return f"the media of one row change the outputs of another one by {by_neighbour:.1e}"
        own_changed = _hidden(self.model, _other_media(row), neighbour)
        floats = [one.values for one in row.media.values() if one.values.is_floating_point()]
        has_values = any(bool(values.any()) for values in floats)
        if has_values and torch.equal(packed[:length], own_changed[:length]):
            return "the media of a row do not change its outputs: the model finds no placeholder tokens of them"
        alone = torch.cat([_hidden(self.model, row), _hidden(self.model, neighbour)])
        from_alone = _difference(packed, alone)
        if from_alone > BOUNDS[exact]:
            return f"two rows in one pack differ from the same two alone by {from_alone:.1e}"
        if not reference or length > MAX_REFERENCE_TOKENS:
            return ""
        from_reference = _difference(alone[:length], self.model.reference_hidden(row))
        if from_reference > BOUNDS[exact]:
            return f"hidden states differ from those of transformers' own forward by {from_reference:.1e}"
        return ""


def _kinds(batch: PackedBatch) -> set[str]:
    kinds = {kind for kind, media in batch.media.items() if len(media.row_counts)}
    return kinds - {SPEECH}  # no input of an encoder


def _smallest_rows(batches: list[PackedBatch], kind: str) -> list[PackedBatch]:
    """The smallest rows with such media, with equal fields; enough for all trials."""
    rows: list[PackedBatch] = []
    for batch in batches:
        if kind in _kinds(batch):
            sequences = batch.media[kind].sequence_ids.unique().tolist()
            rows += [batch.select([sequence]) for sequence in sequences]
    rows.sort(key=lambda row: (len(_kinds(row)), row.num_tokens))
    names = rows[0].tensors().keys()
    return [row for row in rows if row.tensors().keys() == names][: 2 * TRIALS]


def _other_media(row: PackedBatch) -> PackedBatch:
    """The same row with other images, videos or audio of the same sizes."""
    media = {}
    for kind, one in row.media.items():
        values: Tensor = -one.values if one.values.is_floating_point() else one.values
        media[kind] = dataclasses.replace(one, values=values)
    return dataclasses.replace(row, media=media)

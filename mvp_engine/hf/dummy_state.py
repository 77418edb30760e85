"""The dummy sequences of a training as plain values, for its checkpoints.

Ranks choose them from the data of the step that needs one first. A resumed run would choose others: routers and GEMMs
of other sizes round differently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mvp_engine.data.batch import PackedBatch
from mvp_engine.data.media import Media

_OF_BATCHES = "input_ids", "labels", "position_ids", "cu_seqlens", "token_fields", "sequence_fields"
_OF_MEDIA = "values", "row_counts", "sequence_ids", "fields", "shared_with"


def saved_dummies(dummies: Mapping[str, PackedBatch]) -> dict[str, Any]:
    """Tensors and dicts of them, by media kind."""
    saved: dict[str, Any] = {}
    for kind, batch in dummies.items():
        media = {name: _plain(one, _OF_MEDIA) for name, one in batch.media.items()}
        saved[kind] = {**_plain(batch, _OF_BATCHES), "media": media}
    return saved


def loaded_dummies(saved: Mapping[str, Any]) -> dict[str, PackedBatch]:
    dummies: dict[str, PackedBatch] = {}
    for kind, one in saved.items():
        media = {name: Media(**fields) for name, fields in one["media"].items()}
        dummies[kind] = PackedBatch(**{**one, "media": media})
    return dummies


def _plain(one: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: _copied(getattr(one, name)) for name in names}


def _copied(value: Any) -> Any:
    """Without the rest of a batch, of which a tensor may be a view: it would be saved, too."""
    if isinstance(value, Tensor):
        return value.clone()
    return {name: _copied(one) for name, one in value.items()} if value is not None else None

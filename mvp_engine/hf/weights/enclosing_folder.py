"""Folders that hold more than the model that is trained, such as one around a language model that is a part.

transformers has one class for the whole folder, whose conversion tables name its entries. So loading and exporting go
through that class, on the meta device. Entries of parts that are not in memory, such as a vocoder, are copied from the
folder to the export as they are: bit-equal, in their own dtype.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mvp_engine.errors import UserError
from mvp_engine.hf.weights.export import Target
from mvp_engine.hf.weights.load import Entries, Index, WeightFiles

if TYPE_CHECKING:
    from mvp_engine.hf.model.packed_model import PackedModel


@dataclass(frozen=True)
class FolderView:
    """How a folder names the tensors of a `PackedModel`."""

    model: Any  # the transformers model that the folder is of
    prefixes: dict[str, str]  # of names in the PackedModel -> of names in `model`

    def folder_name(self, own: str) -> str | None:
        """The folder model's name of one of our tensors; None for one that it lacks, such as a new head."""
        for ours, theirs in self.prefixes.items():
            if own.startswith(ours):
                return theirs + own.removeprefix(ours)
        return None

    def own_name(self, name: str) -> str | None:
        """Our name of a tensor of the folder's model; None for one of a part that we do not have."""
        for ours, theirs in self.prefixes.items():
            if name.startswith(theirs):
                return ours + name.removeprefix(theirs)
        return None


@dataclass(frozen=True)
class WholeFolder:
    """The transformers model of a folder, of which a `PackedModel` trains some parts."""

    config: Any
    prefixes: dict[str, str]  # as in FolderView

    def view(self) -> FolderView:
        return FolderView(self.skeleton(), self.prefixes)

    def skeleton(self) -> Any:
        """The whole model, on the meta device."""
        from transformers import MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING

        config = copy.deepcopy(self.config)
        config._attn_implementation = "eager"
        model_class: Any = MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING[type(config)]
        with torch.device("meta"):
            return model_class(config)

    def export_target(
        self, model: PackedModel, dtype: torch.dtype, fresh: Entries | None = None
    ) -> Target:
        """The whole folder: our tensors, and the entries that the source (else `fresh`) has for the other parts."""
        carried = fresh
        if carried is None:
            assert model.source is not None
            carried = OtherParts(model.source, self.prefixes)
        view = self.view()
        names: dict[str, str] = {}
        for name in view.model.state_dict():
            own = view.own_name(name)
            if own is not None:
                names[name] = own
        folder = model.side_files or model.source
        return Target(view.model, names, (), dtype, folder, carried)


class OtherParts:
    """The entries of a folder that belong to parts which the model in memory does not have."""

    def __init__(self, folder: Path, prefixes: dict[str, str]) -> None:
        self._files = WeightFiles(folder)
        ours = tuple(prefixes.values())
        self._names = [name for name in self._files if not name.startswith(ours)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def meta(self, key: str) -> Tensor:
        shape = self._files.meta(key).shape
        none = (slice(0, 0),) if shape else ()  # the header alone has no torch dtype
        return torch.empty(shape, dtype=self._files.read(key, none).dtype, device="meta")

    def read(self, key: str, index: Index = ()) -> Tensor:
        return self._files.read(key, index)


def check_folder(model: PackedModel) -> None:
    """Raise for a part of a folder that is not there: an export would have nothing to copy the other parts from."""
    if model.whole is not None and model.source is None:
        kind = model.whole.config.model_type
        raise UserError(
            f"model.config.model_type={kind} without model.path: model.type={model.model_type} trains the thinker, and "
            "an export copies the other parts from the folder. Set model.path, or "
            f"model.config.model_type={kind}_thinker"
        )

"""Which parameters become which entries of a Hugging Face folder, and in which file each entry lies.

A skeleton, a transformers model on the meta device, supplies the names and the conversion tables: loading through them
fuses projections and stacks experts, so exporting applies their inverse. Writing the files is in `export`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mvp_engine.errors import UserError
from mvp_engine.hf.load import Entries
from mvp_engine.hf.weight_files import HEADS, SINGLE

EXPORT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Target:
    """The contents of a Hugging Face folder."""

    skeleton: Any  # a transformers model on the meta device, of the class that `from_pretrained` will build
    names: dict[str, str]  # parameter names of the skeleton -> of our model
    extras: tuple[str, ...] = ()  # tensors outside the skeleton, in a file of their own (HEADS)
    dtype: torch.dtype = torch.float32
    side_files: Path | None = None  # a folder with tokenizer, processor and the like
    carried: Entries | None = None  # entries of other parts of the folder, written as they are


@dataclass
class EntryGroup:
    """Parameters that are converted together, and the entries that they become; most often one of each."""

    params: list[str] = field(default_factory=list)  # names in the skeleton
    entries: dict[str, Tensor] = field(default_factory=dict)  # on the meta device
    carried: bool = False  # `params` are entries of `Target.carried`

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries.values())


class ExportPlan:
    """The conversion of our tensors to the entries of a folder, group by group."""

    def __init__(self, target: Target, like: Callable[[str], Tensor]) -> None:
        """`like` returns one of our tensors by its name, on the meta device."""
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        if target.dtype not in EXPORT_DTYPES:
            known = ", ".join(str(dtype) for dtype in EXPORT_DTYPES)
            raise UserError(f"dtype={target.dtype!r}: a folder is exported as one of {known}")
        self.target = target
        self.model = target.skeleton
        mapping = _inverse_mapping(self.model)
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self._converters: dict[str, Any] = {}  # by source pattern
        for converter in converters:
            self._converters.update(dict.fromkeys(converter.source_patterns, converter))

        # Parameters with a converter -> the first entry that it makes, and the pattern that matched.
        self._converted: dict[str, tuple[str, str]] = {}
        groups: dict[str, EntryGroup] = {}
        for name in untied_names(self.model):
            if target.carried is not None and name not in target.names:
                continue
            first_entry, pattern = _first_match(name, converters)
            if pattern is not None:
                self._converted[name] = (first_entry, pattern)
            key = name if pattern is None else first_entry
            groups.setdefault(key, EntryGroup()).params.append(name)
        carried = [EntryGroup([name], carried=True) for name in target.carried or ()]
        extras = [EntryGroup([name]) for name in target.extras]
        self.groups = [*groups.values(), *carried, *extras]
        for group in self.groups:
            group.entries = dict(self.entries(group, like))

    def entries(
        self, group: EntryGroup, fetch: Callable[[str], Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """The full entries of one group, in the target's dtype. `fetch` returns one of our tensors by its name."""
        if group.carried:
            assert self.target.carried is not None
            read = self.target.carried.read if group.entries else self.target.carried.meta
            yield from ((name, read(name)) for name in group.params)
            return
        values: dict[str, Tensor] = {}
        for name in group.params:
            values[name] = fetch(self.target.names.get(name, name))
        for entry, value in self._convert(values).items():
            yield entry, value.to(self._dtype(entry, value))

    def files(self, max_bytes: int) -> dict[str, list[EntryGroup]]:
        """The groups by file name. A file has at most `max_bytes`, unless one group alone is larger."""
        heads = [group for group in self.groups if group.params[0] in self.target.extras]
        of_heads = {HEADS: heads} if heads else {}
        files: list[list[EntryGroup]] = [[]]
        room = max_bytes
        for group in self.groups[: len(self.groups) - len(heads)]:
            if group.nbytes > room and files[-1]:
                files.append([])
                room = max_bytes
            files[-1].append(group)
            room -= group.nbytes
        if len(files) == 1:
            return {SINGLE: files[0], **of_heads}
        names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
        return {**dict(zip(names, files, strict=True)), **of_heads}

    def _convert(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """The entries that the parameters of one group become."""
        first = next(iter(values))
        if first in self.target.extras:
            return values
        if first in self._converted:
            first_entry, pattern = self._converted[first]
            converter = copy.deepcopy(self._converters[pattern])  # it collects tensors
            for name, value in values.items():
                converter.add_tensor(first_entry, name, self._converted[name][1], value)
            made = converter.convert(first_entry, model=self.model, config=self.model.config)
            values = {}
            for name, value in made.items():
                values[name] = value[0] if isinstance(value, list) else value
        return {self._renamed(name): value for name, value in values.items()}

    def _renamed(self, name: str) -> str:
        for renaming in self._renamings:
            name, _ = renaming.rename_source_key(name)
        return name

    def _dtype(self, name: str, value: Tensor) -> torch.dtype:
        kept = set(self.model._keep_in_fp32_modules or ())
        kept |= set(self.model._keep_in_fp32_modules_strict or ())
        if not value.is_floating_point() or kept & set(name.split(".")):
            return value.dtype
        return self.target.dtype


def _first_match(name: str, converters: list[Any]) -> tuple[str, str | None]:
    """The first entry that the converter of a parameter makes, and the pattern that matched."""
    for converter in converters:
        entry, pattern = converter.rename_source_key(name)
        if pattern is not None:
            return entry, pattern
    return name, None


def _inverse_mapping(model: Any) -> list[Any]:
    """transformers' conversion table for loading this model, inverted, in the order of saving."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    mapping = get_model_conversion_mapping(model, add_legacy=False)
    # A prefix change renames the entries of other model classes, which an export never writes.
    own = [entry for entry in mapping if not isinstance(entry, PrefixChange)]
    return [entry.reverse_transform() for entry in reversed(own)]


def untied_names(model: Any) -> list[str]:
    """The names in a model's state dict, each tensor once: under the name that the others are tied to."""
    state = model.state_dict(keep_vars=True)
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    originals_first = sorted(state, key=lambda name: name in tied)  # a stable sort
    name_of: dict[int, str] = {}
    for name in originals_first:
        name_of.setdefault(id(state[name]), name)
    kept = set(name_of.values())
    return [name for name in state if name in kept]

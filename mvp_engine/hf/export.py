"""Hugging Face folders out: complete, streamed file by file, every rank its share of the files.

What is exported is described by a skeleton, a transformers model on the meta device, whose names and conversion tables
say which of our tensors make which entries. Where the tensors come from is up to the caller: a model on its ranks, or a
checkpoint on disk. Entries go to their file one by one: no more than a parameter, or a group that is converted
together, is held at a time.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mvp_engine.distributed import World
from mvp_engine.errors import UserError
from mvp_engine.files import publish, remove, temporary_path
from mvp_engine.hf.load import INDEX, SINGLE

MAX_FILE_BYTES = 5 * 10**9

KINDS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip

EXPORTED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# What a folder holds beside weights and config: tokenizer, processor, chat template, generation settings.
SIDE_FILES = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model", "*.tiktoken",
    "chat_template*", "additional_chat_templates", "*preprocessor_config.json", "processor_config.json",
    "generation_config.json", "spiece*", "sentencepiece*",
)  # fmt: skip


@dataclass(frozen=True)
class Target:
    """What a folder will hold."""

    skeleton: Any  # a transformers model on the meta device, of the class that `from_pretrained` will build
    names: dict[str, str]  # its names -> ours
    extras: tuple[str, ...] = ()  # tensors of ours that stand beside it, under their own names
    dtype: torch.dtype = torch.float32
    side_files: Path | None = None  # a folder with tokenizer, processor and the like


@dataclass
class _Group:
    """Parameters that become entries together; most often one of each."""

    sources: list[str] = field(default_factory=list)
    entries: dict[str, Tensor] = field(default_factory=dict)  # on the meta device

    @property
    def bytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries.values())


class Plan:
    """Which of our tensors become which entries."""

    def __init__(self, target: Target, like: Callable[[str], Tensor]) -> None:
        """`like` gives a tensor of ours on the meta device."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            PrefixChange,
            WeightConverter,
            WeightRenaming,
            apply_converters,
        )

        if target.dtype not in EXPORTED:
            known = ", ".join(map(str, EXPORTED))
            raise UserError(f"dtype={target.dtype!r}: a folder is exported as one of {known}")
        self.target, self.model = target, target.skeleton
        mapping = get_model_conversion_mapping(self.model, add_legacy=False)
        # What a folder of another class would have called them is of no interest here.
        mapping = [entry for entry in mapping if not isinstance(entry, PrefixChange)][::-1]
        reverse = [entry.reverse_transform() for entry in mapping]
        self.renamings = [entry for entry in reverse if isinstance(entry, WeightRenaming)]
        self.converters = [entry for entry in reverse if isinstance(entry, WeightConverter)]
        self.by_pattern = {
            pattern: entry for entry in self.converters for pattern in entry.source_patterns
        }
        self.patterns: dict[
            str, tuple[str, str]
        ] = {}  # ours in the skeleton -> (first entry, pattern)
        groups: dict[str, _Group] = {}
        for name in untied(self.model):
            first, pattern = apply_converters(name, self.converters)
            if pattern is not None:
                self.patterns[name] = (first, pattern)
            groups.setdefault(first if pattern is not None else name, _Group()).sources.append(name)
        self.groups = list(groups.values())
        self.groups += [_Group([name]) for name in target.extras]
        for group in self.groups:
            group.entries = dict(self.entries(group, like))

    def convert(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """The entries that the parameters of one group become."""
        from transformers.core_model_loading import apply_renamings

        first = next(iter(values))
        if first in self.target.extras:
            return values
        if first not in self.patterns:
            return {apply_renamings(name, self.renamings): value for name, value in values.items()}
        entry, pattern = self.patterns[first]
        converter: Any = copy.deepcopy(self.by_pattern[pattern])
        for name, value in values.items():
            converter.add_tensor(entry, name, self.patterns[name][1], value)
        made = converter.convert(entry, model=self.model, config=self.model.config)
        plain = {
            name: value[0] if isinstance(value, list) else value for name, value in made.items()
        }
        return {apply_renamings(name, self.renamings): value for name, value in plain.items()}

    def files(self, limit: int) -> list[list[_Group]]:
        """The groups, in files of at most `limit` bytes, unless one group alone is larger."""
        files: list[list[_Group]] = [[]]
        room = limit
        for group in self.groups:
            if group.bytes > room and files[-1]:
                files.append([])
                room = limit
            files[-1].append(group)
            room -= group.bytes
        return files

    def entries(
        self, group: _Group, fetch: Callable[[str], Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """One group's entries, whole, in the target's dtype."""
        ours = {name: self.target.names.get(name, name) for name in group.sources}
        for name, value in self.convert({name: fetch(own) for name, own in ours.items()}).items():
            yield name, value.to(self._dtype(name, value))

    def _dtype(self, name: str, value: Tensor) -> torch.dtype:
        kept = {
            *(self.model._keep_in_fp32_modules or ()),
            *(self.model._keep_in_fp32_modules_strict or ()),
        }
        if not value.is_floating_point() or any(part in name.split(".") for part in kept):
            return value.dtype
        return self.target.dtype


def untied(model: Any) -> list[str]:
    """The names of a model's state, each tensor once: under the name that the others are tied to."""
    state = model.state_dict(keep_vars=True)
    ties = set(getattr(model, "all_tied_weights_keys", None) or {})
    seen: dict[int, str] = {}
    for name in sorted(state, key=lambda name: name in ties):  # stable: the originals come first
        seen.setdefault(id(state[name]), name)
    kept = set(seen.values())
    return [name for name in state if name in kept]


def export(
    target: Target,
    folder: Path,
    fetch: Callable[[str], Tensor],
    like: Callable[[str], Tensor],
    world: World,
    limit: int = MAX_FILE_BYTES,
) -> None:
    """Write the folder, which must not exist yet. All ranks call it; `fetch` may be a collective of theirs."""
    if world.broadcast(folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise UserError(
            f"{folder} is there already and not empty; choose another name, or remove it"
        )
    temporary = temporary_path(folder)
    plan = Plan(target, like)
    files = plan.files(limit)
    names = (
        [SINGLE]
        if len(files) == 1
        else [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    )
    failure = _attempt(lambda: _begin(temporary)) if world.is_main else None
    world.barrier()
    for index, (name, groups) in enumerate(zip(names, files, strict=True)):
        mine = index % world.size == world.rank and failure is None
        if mine:
            failure = _attempt(partial(_write_header, temporary / name, groups))
        for group in groups:
            for _, value in plan.entries(group, fetch):  # on every rank: fetching is done together
                if mine and failure is None:
                    failure = _attempt(partial(_append, temporary / name, value))
    if world.is_main and failure is None:
        failure = _attempt(lambda: _describe(temporary, plan, names, files))
    failures = [found for found in world.all_gather(failure) if found]
    if failures:
        if world.is_main:
            remove(temporary)
        raise UserError(f"the Hugging Face folder {folder} could not be written: {failures[0]}")
    if world.is_main:
        publish(temporary, folder)
    world.barrier()


def _write_header(path: Path, groups: list[_Group]) -> None:
    """The beginning of a safetensors file: what it holds, and where."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for group in groups:
        for name, entry in group.entries.items():
            start, end = end, end + entry.nbytes
            header[name] = {
                "dtype": KINDS[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [start, end],
            }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text)


def _append(path: Path, value: Tensor) -> None:
    with open(path, "ab") as file:
        value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tofile(file)


def _attempt(act: Callable[[], Any]) -> str | None:
    """Why it failed, if it did: the other ranks must learn of it before this one leaves."""
    try:
        act()
    except Exception as error:  # noqa: BLE001 - raised again on all ranks
        return f"{type(error).__name__}: {error}"
    return None


def _begin(temporary: Path) -> None:
    remove(temporary)
    temporary.mkdir(parents=True)


def _describe(temporary: Path, plan: Plan, names: list[str], files: list[list[_Group]]) -> None:
    """Everything but the weights."""
    if len(names) > 1:
        where = {
            e: name
            for name, groups in zip(names, files, strict=True)
            for group in groups
            for e in group.entries
        }
        size = sum(group.bytes for group in plan.groups)
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
        (temporary / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    write_side_files(plan.target, temporary)


def write_side_files(target: Target, folder: Path) -> None:
    """Config, generation config, tokenizer, processor, chat template."""
    model = target.skeleton
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    for part in (config, *(getattr(config, key) for key in config.sub_configs)):
        if part is not None:
            part.dtype = target.dtype
    config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    for pattern in SIDE_FILES if target.side_files else ():
        for found in target.side_files.glob(pattern):  # type: ignore[union-attr]
            if found.is_dir():
                shutil.copytree(found, folder / found.name, dirs_exist_ok=True)
            else:
                shutil.copyfile(found, folder / found.name)

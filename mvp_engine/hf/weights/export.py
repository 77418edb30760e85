"""Hugging Face folders out: safetensors, config, tokenizer and processor, complete or not there.

The files are dealt out to the ranks. A rank holds the tensors of one file, at most `MAX_FILE_BYTES`, in host memory.
The tensors come from the caller: from a model on its ranks, or from a checkpoint on disk.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mvp_engine import plugins
from mvp_engine.checkpoint.format import write_safetensors
from mvp_engine.distributed import World
from mvp_engine.distributed.world import raise_on_all_ranks
from mvp_engine.errors import UserError
from mvp_engine.files import leads_out, publish, remove, temporary_path
from mvp_engine.hf.model.attention import config_tree
from mvp_engine.hf.model.config_source import declare_interleaved_mrope
from mvp_engine.hf.weights.load import HEADS, INDEX, SINGLE, Entries, Index, WeightFiles

if TYPE_CHECKING:
    from mvp_engine.hf.model.packed_model import PackedModel

MAX_FILE_BYTES = 5 * 10**9

# Copied from the source folder: tokenizer, processor, chat template, generation settings; and what kits add.
SIDE_FILES = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model", "*.tiktoken",
    "chat_template*", "additional_chat_templates", "*preprocessor_config.json", "processor_config.json",
    "generation_config.json", "spiece*", "sentencepiece*", "spk_dict.pt",
)  # fmt: skip

# Settings of the files above that mean nothing in another folder: code that the source folder brought along, which is
# not copied, and where transformers read the tokenizer from.
LOCAL_SETTINGS = ("auto_map", "is_local", "local_files_only")

# How to read a folder of a model type that transformers has no class for.
HEADS_README = """\
transformers has no class for this model with its heads. Its `{model}` is read by `AutoModel`, the other tensors
({names}) are in `{heads}`:

```python
from safetensors.torch import load_file
from transformers import AutoModel

model = AutoModel.from_pretrained(folder)
heads = load_file(folder + "/{heads}")
hidden = model(**inputs).last_hidden_state
{use}```

`mvp_engine` reads both: `model.path=FOLDER` with the same `model.type`.
"""


def export(
    target: Target,
    folder: Path,
    fetch: Callable[[str], Tensor],
    like: Callable[[str], Tensor],
    world: World,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write a Hugging Face folder; an existing one must be empty.

    All ranks call it. `fetch` returns the full tensor of one of our parameters and may be a collective; `like` returns
    the same on the meta device.
    """
    if world.broadcast(folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise UserError(f"{folder} exists and is not empty; choose another name, or remove it")
    plan = ExportPlan(target, like)
    files = plan.files(max_file_bytes)
    temporary = temporary_path(folder)
    attempt = _Attempt()
    if world.is_main:
        attempt.run(_make_empty, temporary)
    world.barrier()
    for index, (name, groups) in enumerate(files.items()):
        is_mine = index % world.size == world.rank
        tensors: dict[str, Tensor] = {}
        for group in groups:
            for entry, value in plan.entries(group, fetch):  # on every rank: a collective
                if is_mine:
                    attempt.run(_hold, tensors, entry, value)
        if is_mine:
            attempt.run(write_safetensors, tensors, temporary / name, {"format": "pt"})
    if world.is_main:
        attempt.run(_write_index, temporary, files)
        attempt.run(write_side_files, target, temporary)
        attempt.run(_write_readme, target, temporary)
    errors = [error for error in world.all_gather(attempt.error) if error]
    with raise_on_all_ranks(world.host_group):
        if world.is_main and errors:
            remove(temporary)
        elif world.is_main:
            publish(temporary, folder)
    if errors:
        raise UserError(f"the Hugging Face folder {folder} could not be written: {errors[0]}")


class _Attempt:
    """Runs local work and keeps the first error, after which it runs nothing more.

    A rank that fails must keep joining the collectives of the others until all ranks learn of the error.
    """

    def __init__(self) -> None:
        self.error: str | None = None

    def run(self, work: Callable[..., None], *args: Any) -> None:
        if self.error is not None:
            return
        try:
            work(*args)
        except Exception as error:  # noqa: BLE001 - raised again on all ranks
            self.error = f"{type(error).__name__}: {error}"


def _make_empty(folder: Path) -> None:
    remove(folder)
    folder.mkdir(parents=True)


def _hold(tensors: dict[str, Tensor], name: str, value: Tensor) -> None:
    tensors[name] = value.detach().cpu().contiguous()


def _write_index(folder: Path, files: dict[str, list[EntryGroup]]) -> None:
    """The index from entries to files, which transformers needs where a folder has several."""
    if SINGLE in files:
        return
    weight_map: dict[str, str] = {}
    total_size = 0
    for name, groups in files.items():
        if name == HEADS:  # transformers would report its entries as unexpected
            continue
        for group in groups:
            weight_map.update(dict.fromkeys(group.entries, name))
            total_size += group.nbytes
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write_readme(target: Target, folder: Path) -> None:
    if target.extras:
        model = type(target.skeleton).__name__
        names = ", ".join(target.extras)
        text = HEADS_README.format(model=model, heads=HEADS, names=names, use=target.use)
        (folder / "README.md").write_text(text)


def write_side_files(target: Target, folder: Path) -> None:
    """Everything except the weights: config, generation config, tokenizer, processor, chat template."""
    model = target.skeleton
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    for part in config_tree(config):
        part.dtype = target.dtype
    declare_interleaved_mrope(config, model)
    config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    if target.side_files is not None:
        _copy_side_files(target.side_files, folder)
    drop_local_settings(folder)


def _copy_side_files(source: Path, folder: Path) -> None:
    of_kits = [file for folder_type in plugins.model_folders() for file in folder_type.side_files]
    for pattern in (*SIDE_FILES, *of_kits):
        for found in source.glob(pattern):
            for file in (found, *found.rglob("*")):
                if leads_out(file, source):
                    raise UserError(
                        f"{file} is a link to {file.resolve()}, which is not copied: replace it by the file itself, or "
                        "do not trust this model"
                    )
            if found.is_dir():
                shutil.copytree(found, folder / found.name, dirs_exist_ok=True)
            else:
                shutil.copyfile(found, folder / found.name)


def drop_local_settings(folder: Path) -> None:
    """Remove LOCAL_SETTINGS from the configs of a model's folder, at any depth."""
    for file in folder.glob("*config.json"):
        try:
            before = json.loads(file.read_bytes())
        except ValueError:  # a file of the source folder that nothing has read
            continue
        after = _without_local_settings(before)
        if after != before:
            file.write_text(json.dumps(after, indent=2) + "\n")


def _without_local_settings(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_local_settings(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {}
    for key, inner in value.items():
        if key not in LOCAL_SETTINGS:
            kept[key] = _without_local_settings(inner)
    return kept


# Which parameters become which entries of a Hugging Face folder, and in which file each entry lies.
#
# A skeleton, a transformers model on the meta device, supplies the names and the conversion tables: loading through
# them fuses projections and stacks experts, so exporting applies their inverse. Writing the files is in `export`.

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
    use: str = ""  # a line of Python for the README that computes with the extras


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


# Folders that hold more than the model that is trained: an Omni folder around its thinker (and its talker).
#
# transformers has one class for the whole folder, whose conversion tables name its entries. So loading and exporting go
# through that class, on the meta device. Entries of parts that are not in memory, such as a vocoder, are copied from
# the folder to the export as they are: bit-equal, in their own dtype.


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

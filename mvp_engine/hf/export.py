"""Hugging Face folders out: safetensors, config, tokenizer and processor, complete or not there.

The files are dealt out to the ranks. A rank holds the tensors of one file, at most `MAX_FILE_BYTES`, in host memory.
The tensors come from the caller: from a model on its ranks, or from a checkpoint on disk.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from mvp_engine.checkpoint.safetensors_io import write_safetensors
from mvp_engine.distributed import World
from mvp_engine.distributed.collective_errors import raise_on_all_ranks
from mvp_engine.errors import UserError
from mvp_engine.files import leads_out, publish, remove, temporary_path
from mvp_engine.hf.attention import config_tree
from mvp_engine.hf.export_plan import EntryGroup, ExportPlan, Target
from mvp_engine.hf.weight_files import HEADS, INDEX, SINGLE

MAX_FILE_BYTES = 5 * 10**9

# Copied from the source folder: tokenizer, processor, chat template, generation settings, statistics of actions.
SIDE_FILES = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model", "*.tiktoken",
    "chat_template*", "additional_chat_templates", "*preprocessor_config.json", "processor_config.json",
    "generation_config.json", "spiece*", "sentencepiece*", "spk_dict.pt",
    "normalization.json", "act.py",
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
    index = {
        "metadata": {"total_size": total_size},
        "weight_map": dict(sorted(weight_map.items())),
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write_readme(target: Target, folder: Path) -> None:
    if target.extras:
        model = type(target.skeleton).__name__
        use = (
            'values = hidden @ heads["score.weight"].T\n' if "score.weight" in target.extras else ""
        )
        if "action_queries.weight" in target.extras:
            use = (
                "# act.py does the rest: Policy.from_pretrained(folder).act(images, state, task)\n"
            )
        names = ", ".join(target.extras)
        text = HEADS_README.format(model=model, heads=HEADS, names=names, use=use)
        (folder / "README.md").write_text(text)


def write_side_files(target: Target, folder: Path) -> None:
    """Everything except the weights: config, generation config, tokenizer, processor, chat template."""
    model = target.skeleton
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    for part in config_tree(config):
        part.dtype = target.dtype
    config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    if target.side_files is not None:
        _copy_side_files(target.side_files, folder)
    drop_local_settings(folder)


def _copy_side_files(source: Path, folder: Path) -> None:
    for pattern in SIDE_FILES:
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

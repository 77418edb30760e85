"""From a checkpoint of any layout to a Hugging Face folder, in one process without a GPU, one file at a time."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mvp_engine.checkpoint import format as storage
from mvp_engine.checkpoint import state
from mvp_engine.distributed import World
from mvp_engine.errors import UserError
from mvp_engine.hf import export as hf_export
from mvp_engine.hf import load as hf
from mvp_engine.hf.lora import Lora, add_adapters, export_adapter, merging
from mvp_engine.hf.packed_model import PackedModel

ABOUT = f"{state.HF}/mvp.json"


def describe(model: PackedModel, folder: Path, engine_class: type) -> None:
    """Write what `merge` needs beside the weights into `folder`, which goes into each checkpoint as `hf`."""
    folder.mkdir(exist_ok=True)
    target = model.export_target()
    hf_export.write_side_files(target, folder)
    # The config of what was trained, not of the class that the export is read with.
    model.hf.config.save_pretrained(folder)  # type: ignore[union-attr, operator]
    dtype = str(target.dtype).removeprefix("torch.")
    about: dict[str, Any] = {
        "model_type": model.model_type,
        "dtype": dtype,
        "engine": _where(engine_class),
    }
    if model.lora is not None:  # the base's weights may be left where they are
        base = model.source and {
            "path": str(model.source.resolve()),
            "weights": hf.fingerprint(model.source),
        }
        about |= {"lora": model.lora.model_dump(), "base": base or None}
    (folder / "mvp.json").write_text(json.dumps(about) + "\n")


def _where(kind: type) -> str | None:
    """The module or the file that makes this class known when it is imported; None for those of this package."""
    if kind.__module__.split(".")[0] in ("mvp_engine", "__main__"):
        return None  # a script would run once more if it were imported
    module = sys.modules.get(kind.__module__)
    package = sys.modules.get(kind.__module__.rpartition(".")[0])
    if (
        package is not None and package.__spec__ is not None
    ):  # a recipe's folder has none: it only stands for one
        return kind.__module__
    file = getattr(module, "__file__", None)
    return str(Path(file).resolve()) if file else None


def merge(
    checkpoint: Path,
    out: Path,
    build_model: Callable[[str, str | None], PackedModel],
    dtype: torch.dtype | None = None,
    limit: int = hf_export.MAX_FILE_BYTES,
    base: str | None = None,
    adapter: bool = False,
    ema: bool = False,
) -> None:
    """`build_model` makes a model without weights from a model type and the module that registered it in training.

    `base`: the folder that adapters were trained on, if it has moved; `adapter`: write these alone, for `peft`.
    `ema`: the averages of the weights, where the checkpoint has such.
    """
    about = _read_about(checkpoint)
    model = build_model(about.model_type, about.engine)
    if about.lora is not None:
        add_adapters(model, Lora.model_validate(about.lora))
    reader = storage.Reader(checkpoint)
    for name, param in model.named_parameters() if about.base else ():
        param.requires_grad_(
            param.requires_grad and f"model.{name}" in reader.entries
        )  # or model.freeze forbade it
    tensors = model.state_dict(keep_vars=True)
    first = {
        id(value): name for name, value in reversed(tensors.items())
    }  # a tied one is stored under its first name
    alone = World(0, 1, 0, 1, torch.device("cpu"))

    averages = (
        {name for name in first.values() if state.average_of(name) in reader.entries}
        if ema
        else set()
    )
    if ema and not averages:
        raise UserError(
            f"{checkpoint} has no averaged weights: they are kept with optim.ema, by recipes with OptimKit"
        )

    def stored(name: str) -> str:
        own = first[id(tensors[name])]
        return state.average_of(own) if own in averages else f"model.{own}"

    source = Path(base or about.base["path"]).expanduser() if about.base else None
    if adapter:
        model.source = source
        export_adapter(model, out, lambda name: reader.read(stored(name)), alone)
        return
    needed, _ = state.tensors_of(model)
    beside: dict[str, Callable[[], Tensor]] = {}
    if source and about.base and not needed.keys() <= reader.entries.keys():
        beside = _of_base(model, source, about.base, first)
    here = {n: value for n, value in needed.items() if n in reader.entries or n not in beside}
    state.check_fit(checkpoint, here, reader.entries)

    def fetch(name: str) -> Tensor:
        name = stored(name)
        return reader.read(name) if name in reader.entries else beside[name]().float()

    def like(name: str) -> Tensor:
        entry = reader.entries.get(stored(name))
        return torch.empty(
            tensors[name].shape, dtype=entry.dtype if entry else torch.float32, device="meta"
        )

    hf_export.export(
        model.export_target(dtype or about.dtype), out, merging(model, fetch), like, alone, limit
    )


def _of_base(
    model: PackedModel, folder: Path, base: dict[str, str], first: dict[int, str]
) -> dict[str, Callable[[], Tensor]]:
    """What the folder that adapters were trained on has, by the names that a checkpoint would have it under."""
    _same_base(folder, base, "Name the folder: mvp merge --base FOLDER")
    tensors = model.hf.state_dict(keep_vars=True)
    return {
        f"model.{first[id(tensors[name])]}": partial(read, ())
        for _, made in hf.parameters_in(model.hf, folder, keep=False)
        for name, (_, read) in made.items()
        if name in tensors and not tensors[name].requires_grad
    }


def check_base(checkpoint: Path, model: PackedModel) -> None:
    """A checkpoint of adapters is only right on the weights that they were trained on."""
    if (checkpoint / ABOUT).is_file() and (base := _read_about(checkpoint).base) and model.source:
        _same_base(model.source, base, "Set model.path to the folder that the training began with")


def _same_base(folder: Path, base: dict[str, str], fix: str) -> None:
    if not folder.is_dir():
        raise UserError(
            f"the adapters were trained on {base['path']}, and there is no folder {folder}. {fix}"
        )
    if hf.fingerprint(folder) != base["weights"]:
        raise UserError(
            f"the adapters were trained on {base['path']}, and the weights in {folder} are others. {fix}"
        )


@dataclass(frozen=True)
class _About:
    model_type: str
    dtype: torch.dtype
    engine: str | None
    lora: dict[str, Any] | None
    base: dict[str, str] | None


def _read_about(checkpoint: Path) -> _About:
    if not (checkpoint / ABOUT).is_file():
        raise UserError(f"{checkpoint} is no checkpoint of a Hugging Face model: it has no {ABOUT}")
    try:
        about = json.loads((checkpoint / ABOUT).read_text())
        more = (about.get(key) for key in ("engine", "lora", "base"))
        return _About(about["model_type"], getattr(torch, about["dtype"]), *more)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{checkpoint / ABOUT} is damaged: {type(error).__name__}: {error}"
        ) from None

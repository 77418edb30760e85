"""What a checkpoint holds, as flat names: `model.<name>`, `optim.<name>.<state>`, `shared`, `rank.<n>`.

The names are those of the parameters, not their positions, so a checkpoint does not depend on the number of ranks or
on the order of the parameter groups.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mvp_engine.checkpoint import format as storage
from mvp_engine.distributed import World
from mvp_engine.distributed.collective_errors import raise_on_all_ranks
from mvp_engine.distributed.dtensor import is_writer
from mvp_engine.errors import UserError
from mvp_engine.files import remove, temporary_path

EMA = "ema"  # what an optimizer calls an average of a parameter among its state
HF = (
    "hf"  # in a checkpoint: config, tokenizer and all else of a Hugging Face folder but the weights
)


@dataclass(frozen=True)
class SavedState:
    """The small state of a run. `shared` is the same on all ranks, `ranks` has one entry for each rank that saved."""

    shared: dict[str, Any]
    ranks: list[dict[str, Any]]


def collect(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    shared: dict[str, Any],
    own: dict[str, Any],
    rank: int,
    owner: Callable[[str, Tensor], bool] = is_writer,
    without: Set[str] = frozenset(),
) -> dict[str, Tensor]:
    """Everything this rank has to write. Tensors are still those of the model and the optimizer, if there is one.

    `without`: names of tensors of the model that are kept elsewhere.

    Of what several ranks have, each writes that which it is the `owner` of; so every rank must have the same names.
    """
    tensors, other = tensors_of(model)
    tensors = {
        name: value for name, value in tensors.items() if name.removeprefix("model.") not in without
    }
    names = _names(model)
    scalars: dict[str, dict[str, Any]] = {}
    for param, state in optimizer.state.items() if optimizer else ():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"optim.{_name(names, param)}.{key}"] = value
            else:
                scalars.setdefault(_name(names, param), {})[key] = value
    groups = [
        {
            **{k: v for k, v in g.items() if k != "params"},
            "params": [_name(names, p) for p in g["params"]],
        }
        for g in (optimizer.param_groups if optimizer else ())
    ]
    # Buffers may differ between ranks: rank 0's count, as in an evaluation.
    rank_0s = {
        f"model.{name}" for name, buffer in model.named_buffers() if not isinstance(buffer, DTensor)
    }
    mine = {n: t for n, t in tensors.items() if (rank == 0 if n in rank_0s else owner(n, t))}
    if rank == 0:
        shared = {**shared, "model_extra": other, "optim_groups": groups, "optim_scalars": scalars}
        mine["shared"] = storage.to_bytes(shared)
    mine[f"rank.{rank:05d}"] = storage.to_bytes(own)
    return mine


def save(
    folder: Path,
    tensors: dict[str, Tensor],
    world: World,
    describe: Callable[[Path], None] = lambda _: None,
) -> None:
    """Write a checkpoint now and wait. It has its name when it is complete; an older one of that name makes place.

    `describe` writes what `mvp merge` needs to know into a folder inside.
    """
    temporary = temporary_path(folder)
    with raise_on_all_ranks(world.host_group):
        if world.is_main:
            storage.publish_leftover(folder)
            older = storage.file_of(folder, 0).is_file()
            if folder.exists() and not older and (folder.is_file() or any(folder.iterdir())):
                raise UserError(
                    f"{folder} is there already and is no checkpoint; choose another name, or remove it"
                )
            remove(temporary)
            try:
                temporary.mkdir(parents=True)
            except OSError as error:
                raise UserError(
                    f"checkpoint {folder} cannot be written: {error}. Choose another place"
                ) from error
    storage.write(temporary, storage.cut(tensors), world.host_group)
    with raise_on_all_ranks(world.host_group):
        if world.is_main:
            describe(temporary / HF)
            storage.publish(temporary, folder, {"world_size": world.size})


def restore(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    group: dist.ProcessGroup | None,
    whole_groups: bool = False,
    without: Set[str] = frozenset(),
) -> SavedState:
    """Load a checkpoint into the model and, where given, the optimizer; gives the small state.

    `without`: names of tensors of the model that have their values already, and need not be in the checkpoint.

    Of the parameter groups only the learning rates are taken, unless `whole_groups`: the rest is the config's, which
    may have been changed.
    """
    with raise_on_all_ranks(group):
        reader = storage.Reader(folder)
        saved = reader.entries
        tensors, _ = tensors_of(model)
        tensors = {
            n: value
            for n, value in tensors.items()
            if n in saved or n.removeprefix("model.") not in without
        }
        check_fit(folder, tensors, saved)
        states: dict[nn.Parameter, dict[str, Any]] = {}
        params = dict(model.named_parameters()) if optimizer else {}
        for full, entry in saved.items():
            name, _, key = full.removeprefix("optim.").rpartition(".")
            if name in params and full.startswith("optim."):
                # Moments are laid out like their parameter; step counts are plain scalars. An optimizer with state of
                # other shapes says itself where that lies.
                empty = getattr(optimizer, "empty_state", _empty_state)
                tensors[full] = empty(params[name], key, entry.shape, entry.dtype)
                states.setdefault(params[name], {})[key] = tensors[full]
        shared = storage.from_bytes(reader.read("shared"))
        if optimizer and not shared["optim_groups"]:
            raise UserError(
                f"checkpoint {folder} holds weights only, since it was saved without an optimizer. Load it without "
                "one, or export it and begin with that folder"
            )
        reader.fill(tensors)
        ranks = [
            storage.from_bytes(reader.read(name))
            for name in sorted(saved)
            if name.startswith("rank.")
        ]
    if shared["model_extra"]:
        model.load_state_dict(shared["model_extra"], strict=False)
    if optimizer:
        _restore_optimizer(model, optimizer, states, shared, folder, whole_groups)
    return SavedState(shared, ranks)


def _empty_state(param: Tensor, key: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(
        param.detach() if shape == param.shape else torch.empty(shape), dtype=dtype
    )


def _restore_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    states: dict[nn.Parameter, dict[str, Any]],
    shared: dict[str, Any],
    folder: Path,
    whole_groups: bool,
) -> None:
    names = _names(model)
    params = dict(model.named_parameters())
    for name, scalars in shared["optim_scalars"].items():
        states.setdefault(params[name], {}).update(scalars)
    saved_group = {name: g for g in shared["optim_groups"] for name in g["params"]}
    for group in optimizer.param_groups:
        known = [
            saved_group[_name(names, p)] for p in group["params"] if _name(names, p) in saved_group
        ]
        if len(known) != len(group["params"]):
            lost = [_name(names, p) for p in group["params"] if _name(names, p) not in saved_group]
            raise UserError(
                f"checkpoint {folder} has no optimizer state for {lost[:3]}: was it frozen then?"
            )
        group.update(
            {
                k: v
                for k, v in known[0].items()
                if k in ("lr", "initial_lr") or (whole_groups and k != "params")
            }
        )
    order = [p for group in optimizer.param_groups for p in group["params"]]
    # Through the optimizer's own loader, which knows where each kind of state has to live.
    packed = optimizer.state_dict()
    packed["state"] = {i: states[p] for i, p in enumerate(order) if p in states}
    optimizer.load_state_dict(packed)


def average_of(name: str) -> str:
    """Where a checkpoint has the average of a parameter, if it has one."""
    return f"optim.{name}.{EMA}"


def check_fit(folder: Path, weights: dict[str, Tensor], saved: dict[str, storage.Entry]) -> None:
    missing = [n for n in weights if n not in saved]
    extra = [n for n in saved if n.startswith("model.") and n not in weights]
    shapes = [n for n, w in weights.items() if n in saved and saved[n].shape != w.shape]
    if dora := [name for name in extra if ".lora_magnitude_vector." in name]:
        raise UserError(
            f"checkpoint {folder} was trained with DoRA, which was removed: it holds {dora[0]}. "
            "Merge it with the version of mvp_engine that trained it"
        )
    if missing or extra or shapes:
        parts = []
        if shapes:
            n = shapes[0]
            parts.append(f"{n} is {tuple(saved[n].shape)} there and {tuple(weights[n].shape)} here")
        if missing:
            parts.append(f"it lacks {', '.join(missing[:3])}")
        if extra:
            parts.append(f"it also has {', '.join(extra[:3])}")
        raise UserError(
            f"checkpoint {folder} does not fit this model: {'; '.join(parts)}. Was the model config changed?"
        )


def tensors_of(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a model, tied ones under the first of their names only; and what is none (`get_extra_state`)."""
    tensors: dict[str, Tensor] = {}
    values = model.state_dict(keep_vars=True)
    seen: set[int] = set()
    for name, value in values.items():
        if isinstance(value, Tensor) and id(value) not in seen:
            seen.add(id(value))
            tensors[f"model.{name}"] = value
    return tensors, {name: value for name, value in values.items() if not isinstance(value, Tensor)}


def _names(model: nn.Module) -> dict[Tensor, str]:
    return {param: name for name, param in model.named_parameters()}


def _name(names: dict[Tensor, str], param: Tensor) -> str:
    if param not in names:
        raise UserError(
            "the optimizer holds a parameter that is no part of the model; register it on the model"
        )
    return names[param]

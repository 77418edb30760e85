"""The contents of a checkpoint, by flat names: `model.<name>`, `optim.<name>.<state>`, `shared`, `rank.<n>`.

Parameters go by their names, not by their positions, so a checkpoint does not depend on the number of ranks or on the
order of the parameter groups. How tensors lie on disk is in `format`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mvp_engine.checkpoint import format as checkpoint_format
from mvp_engine.checkpoint.format import Entry, Reader, from_bytes, to_bytes
from mvp_engine.distributed import World
from mvp_engine.distributed.collective_errors import raise_on_all_ranks
from mvp_engine.distributed.dtensor import is_writer
from mvp_engine.errors import UserError
from mvp_engine.files import remove, temporary_path

EMA = "ema"  # the key of a parameter's moving average in the optimizer state
HF = "hf"  # the folder in a checkpoint with all of a Hugging Face folder except the weights


@dataclass(frozen=True)
class SavedState:
    """The state of a run that is no tensor: `shared` by all ranks, and one entry of `ranks` for each saving rank."""

    shared: dict[str, Any]
    ranks: Sequence[dict[str, Any]]


class RankStates(Sequence[dict[str, Any]]):
    """The entries of `SavedState.ranks`, read when they are asked for.

    A rank usually needs its own and that of rank 0; all of them would be in as many files.
    """

    def __init__(self, reader: Reader, loaded: Iterable[int]) -> None:
        """`loaded`: the ranks whose state is read at once, as far as they saved one."""
        self._reader = reader
        self._names = sorted(name for name in reader.entries if name.startswith("rank."))
        self._loaded: dict[int, dict[str, Any]] = {}
        for rank in loaded:
            if rank < len(self):
                self._loaded[rank] = self[rank]

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, rank: Any) -> Any:
        if rank in self._loaded:
            return self._loaded[rank]
        return from_bytes(self._reader.read(self._names[rank]))


@dataclass(frozen=True)
class StagePlace:
    """What a pipeline stage saves."""

    ranks: range  # of the stage
    copies: Set[str]  # parameters of the first stage that it holds, too, and does not save
    all_gather: Callable[[Any], list[Any]]  # of the stages

    def is_copy(self, name: str) -> bool:
        kind, _, rest = name.partition(".")
        parameter = rest if kind == "model" else rest.rpartition(".")[0]
        return parameter in self.copies


# ---- Saving -----------------------------------------------------------------------------------------------------


def collect(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    shared: dict[str, Any],
    own: dict[str, Any],
    rank: int,
    without: Set[str] = frozenset(),
    stage: StagePlace | None = None,
) -> dict[str, Tensor]:
    """The tensors that this rank writes; those of model and optimizer are not copied.

    Of a tensor that several ranks hold, one rank writes each shard (`is_writer`), so every rank of a pipeline stage
    must have the same names. `without`: names of model tensors that are stored elsewhere.
    """
    model_tensors, model_extra = tensors_of(model)
    without = {f"model.{name}" for name in without}
    tensors = {name: one for name, one in model_tensors.items() if name not in without}
    scalars: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    if optimizer is not None:
        names = _ParameterNames(model)
        for param, param_state in optimizer.state.items():
            name = names[param]
            for key, value in param_state.items():
                if isinstance(value, Tensor):
                    tensors[f"optim.{name}.{key}"] = value
                else:
                    scalars.setdefault(name, {})[key] = value
        for group in optimizer.param_groups:
            groups.append({**group, "params": [names[param] for param in group["params"]]})

    # Buffers may differ between ranks; those of rank 0 are saved, as they are also the ones to evaluate with.
    buffers = model.named_buffers()
    rank_0_names = {f"model.{name}" for name, one in buffers if not isinstance(one, DTensor)}
    holders = None if stage is None else stage.ranks
    first = 0 if stage is None else stage.ranks.start
    if stage is not None:
        tensors = {name: one for name, one in tensors.items() if not stage.is_copy(name)}
        of_stages = stage.all_gather((groups, scalars))
        groups = [group for of_stage, _ in of_stages for group in of_stage]
        scalars = {name: one for _, of_stage in of_stages for name, one in of_stage.items()}
    mine: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if rank == first if name in rank_0_names else is_writer(name, tensor, holders):
            mine[name] = tensor
    if rank == 0:
        optim_state = {"optim_groups": groups, "optim_scalars": scalars}
        mine["shared"] = to_bytes({**shared, "model_extra": model_extra, **optim_state})
    mine[f"rank.{rank:05d}"] = to_bytes(own)
    return mine


def save(
    folder: Path,
    tensors: dict[str, Tensor],
    world: World,
    describe: Callable[[Path], None] = lambda _: None,
) -> None:
    """Write a checkpoint and wait for it. It gets its name when it is complete, and replaces an older one.

    `describe` writes the folder `hf`, which `mvp merge` needs.
    """
    temporary = temporary_path(folder)
    with raise_on_all_ranks(world.host_group):
        if world.is_main:
            checkpoint_format.publish_leftover(folder)
            _check_replaceable(folder)
            remove(temporary)
            try:
                temporary.mkdir(parents=True)
            except OSError as error:
                raise UserError(
                    f"checkpoint {folder} cannot be written: {error}. Choose another place"
                ) from error
    checkpoint_format.write(temporary, checkpoint_format.shards_of(tensors), world.host_group)
    with raise_on_all_ranks(world.host_group):
        if world.is_main:
            describe(temporary / HF)
            checkpoint_format.publish(temporary, folder, {"world_size": world.size})


def _check_replaceable(folder: Path) -> None:
    """Only a checkpoint or an empty folder may be replaced."""
    is_checkpoint = checkpoint_format.rank_file(folder, 0).is_file()
    if not folder.exists() or is_checkpoint:
        return
    if folder.is_file() or any(folder.iterdir()):
        raise UserError(
            f"{folder} exists and is not a checkpoint; choose another name, or remove it"
        )


# ---- Loading ----------------------------------------------------------------------------------------------------


def restore(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    group: dist.ProcessGroup | None,
    all_group_options: bool = False,
    without: Set[str] = frozenset(),
    elsewhere: Set[str] = frozenset(),
) -> SavedState:
    """Load a checkpoint into the model and, if given, the optimizer; returns the other state.

    Of the parameter groups only the learning rates are restored, unless `all_group_options`: the other options come
    from the config, which may have been changed. `without`: names of model tensors that have their values already and
    may be missing in the checkpoint. `elsewhere`: those that other pipeline stages load.
    """
    with raise_on_all_ranks(group):
        reader = Reader(folder)
        tensors: dict[str, Tensor] = {}
        for name, tensor in tensors_of(model)[0].items():
            if name in reader.entries or name.removeprefix("model.") not in without:
                tensors[name] = tensor
        check_fit(folder, tensors, reader.entries, elsewhere)
        shared = from_bytes(reader.read("shared"))
        if optimizer is not None and not shared["optim_groups"]:
            raise UserError(
                f"checkpoint {folder} holds weights only, since it was saved without an optimizer. Load it without "
                "one, or export it and start from that folder"
            )
        states: dict[nn.Parameter, dict[str, Any]] = {}
        if optimizer is not None:
            states = _empty_states(model, optimizer, reader.entries)
            names = _ParameterNames(model)
            for param, param_state in states.items():
                for key, value in param_state.items():
                    tensors[f"optim.{names[param]}.{key}"] = value
        reader.fill(tensors)
        ranks = RankStates(reader, [0, group.rank() if group else 0])
    if shared["model_extra"]:
        model.load_state_dict(shared["model_extra"], strict=False)
    if optimizer is not None:
        _restore_optimizer(model, optimizer, states, shared, folder, all_group_options)
    return SavedState(shared, ranks)


def read_shared(folder: Path) -> dict[str, Any]:
    """The `shared` state of a checkpoint, without its tensors."""
    shared: dict[str, Any] = from_bytes(Reader(folder).read("shared"))
    return shared


def _empty_states(
    model: nn.Module, optimizer: torch.optim.Optimizer, entries: dict[str, Entry]
) -> dict[nn.Parameter, dict[str, Any]]:
    """Uninitialized optimizer states for all that a checkpoint has of this model's parameters."""
    params = dict(model.named_parameters())
    # An optimizer with states of other shapes than its parameters has its own rule for their placement.
    empty_state = getattr(optimizer, "empty_state", _empty_state)
    states: dict[nn.Parameter, dict[str, Any]] = {}
    for full_name, entry in entries.items():
        if not full_name.startswith("optim."):
            continue
        name, _, key = full_name.removeprefix("optim.").rpartition(".")
        if name in params:
            state = empty_state(params[name], key, entry.shape, entry.dtype)
            states.setdefault(params[name], {})[key] = state
    return states


def _empty_state(param: Tensor, key: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Moments are sharded like their parameter; step counts are plain CPU scalars."""
    like = param.detach() if shape == param.shape else torch.empty(shape)
    return torch.empty_like(like, dtype=dtype)


def _restore_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    states: dict[nn.Parameter, dict[str, Any]],
    shared: dict[str, Any],
    folder: Path,
    all_group_options: bool,
) -> None:
    params = dict(model.named_parameters())
    for name, scalars in shared["optim_scalars"].items():
        if name in params:
            states.setdefault(params[name], {}).update(scalars)

    names = _ParameterNames(model)
    saved_groups: dict[str, dict[str, Any]] = {}  # by parameter name
    for saved_group in shared["optim_groups"]:
        saved_groups.update(dict.fromkeys(saved_group["params"], saved_group))
    for group in optimizer.param_groups:
        group_names = [names[param] for param in group["params"]]
        missing = [name for name in group_names if name not in saved_groups]
        if missing:
            raise UserError(
                f"checkpoint {folder} has no optimizer state for {missing[:3]}: was it frozen in that run?"
            )
        for key, value in saved_groups[group_names[0]].items():
            if key in ("lr", "initial_lr") or (all_group_options and key != "params"):
                group[key] = value

    # The optimizer's own loader moves each state to the device that it has to be on.
    state_dict = optimizer.state_dict()
    ordered = [param for group in optimizer.param_groups for param in group["params"]]
    state_dict["state"] = {i: states[param] for i, param in enumerate(ordered) if param in states}
    optimizer.load_state_dict(state_dict)


def check_fit(
    folder: Path,
    tensors: dict[str, Tensor],
    entries: dict[str, Entry],
    elsewhere: Set[str] = frozenset(),
) -> None:
    """Raise `UserError` unless a checkpoint has exactly these model tensors, with their shapes.

    It may have those of `elsewhere`, too: other pipeline stages hold them.
    """
    extra = [n for n in entries if n.startswith("model.") and n not in tensors]
    extra = [name for name in extra if name.removeprefix("model.") not in elsewhere]
    dora = [name for name in extra if ".lora_magnitude_vector." in name]
    if dora:
        raise UserError(
            f"checkpoint {folder} was trained with DoRA, which was removed: it holds {dora[0]}. "
            "Merge it with the version of mvp_engine that trained it"
        )
    differences: list[str] = []
    for name, tensor in tensors.items():
        if name in entries and entries[name].shape != tensor.shape:
            there = tuple(entries[name].shape)
            differences.append(
                f"{name} has the shape {there} there and {tuple(tensor.shape)} in this model"
            )
            break  # one example is enough
    missing = [name for name in tensors if name not in entries]
    if missing:
        differences.append(f"it lacks {', '.join(missing[:3])}")
    if extra:
        differences.append(f"it also has {', '.join(extra[:3])}")
    if differences:
        raise UserError(
            f"checkpoint {folder} does not fit this model: {'; '.join(differences)}. Was the model config changed?"
        )


# ---- Names ------------------------------------------------------------------------------------------------------


def ema_name(name: str) -> str:
    """The name under which a checkpoint stores a parameter's moving average, if it has one."""
    return f"optim.{name}.{EMA}"


def is_weight(name: str) -> bool:
    """Whether a checkpoint's entry is needed without an optimizer: all but the optimizer state, except EMA weights."""
    return not name.startswith("optim.") or name.endswith(f".{EMA}")


def tensors_of(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a model's state dict, tied ones once, and its other values (`get_extra_state`)."""
    tensors: dict[str, Tensor] = {}
    others: dict[str, Any] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            others[name] = value
        elif id(value) not in seen:
            seen.add(id(value))
            tensors[f"model.{name}"] = value
    return tensors, others


class _ParameterNames:
    """The names of a model's parameters, by parameter."""

    def __init__(self, model: nn.Module) -> None:
        self._names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}

    def __getitem__(self, param: Tensor) -> str:
        if param not in self._names:
            raise UserError(
                "the optimizer holds a parameter that is not part of the model; register it on the model"
            )
        return self._names[param]

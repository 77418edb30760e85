"""The contents of a checkpoint, by flat names: `model.<name>`, `optim.<name>.<state>`, `shared`, `rank.<n>`.

Parameters go by their names, not by their positions, so a checkpoint does not depend on the number of ranks or on the
order of the parameter groups. How tensors lie on disk is in `format`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_leaves, tree_map_only

from mvp_engine.checkpoint import format as checkpoint_format
from mvp_engine.checkpoint.format import Entry, Reader, from_bytes, to_bytes, verify
from mvp_engine.distributed import World
from mvp_engine.distributed.dtensor import empty_sharded_like, is_writer, local_tensor
from mvp_engine.distributed.world import raise_on_all_ranks
from mvp_engine.errors import UserError
from mvp_engine.files import remove, temporary_path

EMA = "ema"  # the key of a parameter's moving average in the optimizer state
ENGINE_EMA = "engine_ema"  # in `shared`: whether the averages are the engine's, not the optimizer's
LIKE_PARAM = "param"  # the placements of a state that is sharded like its parameter
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
    initial_groups: list[dict[str, Any]] | None = None,
    ema: Mapping[Tensor, Tensor] | None = None,
) -> dict[str, Tensor]:
    """The tensors that this rank writes; those of model and optimizer are not copied.

    Of a tensor that several ranks hold, one rank writes each shard (`is_writer`), so every rank of a pipeline stage
    must have the same names. `without`: names of model tensors that are stored elsewhere. `initial_groups`: what
    `group_options` returned for the new optimizer. `ema`: averages that the optimizer does not keep itself.
    """
    model_tensors, model_extra = tensors_of(model)
    without = {f"model.{name}" for name in without}
    tensors = {name: one for name, one in model_tensors.items() if name not in without}
    optim = _OptimizerState()
    if optimizer is not None:
        names = _ParameterNames(model)
        tensors |= optim.add(optimizer, names, initial_groups)
        for param, average in (ema or {}).items():
            if tensors.setdefault(ema_name(names[param]), average) is not average:
                _refuse(
                    optimizer,
                    names[param],
                    EMA,
                    "has the name of the EMA of the weights: rename it",
                )

    # Buffers may differ between ranks; those of rank 0 are saved, as they are also the ones to evaluate with.
    buffers = model.named_buffers()
    rank_0_names = {f"model.{name}" for name, one in buffers if not isinstance(one, DTensor)}
    holders = None if stage is None else stage.ranks
    first = 0 if stage is None else stage.ranks.start
    if stage is not None:
        tensors = {name: one for name, one in tensors.items() if not stage.is_copy(name)}
        optim = _OptimizerState.merged(stage.all_gather(optim))
    mine: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if rank == first if name in rank_0_names else is_writer(name, tensor, holders):
            mine[name] = tensor
    if rank == 0:
        shared = {**shared, "model_extra": model_extra, **optim.shared()}
        mine["shared"] = to_bytes({**shared, ENGINE_EMA: ema is not None})
    mine[f"rank.{rank:05d}"] = to_bytes(own)
    return mine


def group_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """A copy of the options of each parameter group: those that change later are state of the optimizer."""
    return [
        {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


class _OptimizerState:
    """What a checkpoint says of an optimizer, apart from the tensors that are states of parameters."""

    def __init__(self) -> None:
        self.groups: list[dict[str, Any]] = []
        # Of each group: the options that are state, and whether they are tensors on the host.
        self.changed: list[dict[str, bool]] = []
        self.scalars: dict[str, dict[str, Any]] = {}  # by parameter name and key
        self.layouts: dict[
            str, dict[str, Any]
        ] = {}  # the same, of states that are not as by default

    def add(
        self,
        optimizer: torch.optim.Optimizer,
        names: _ParameterNames,
        initial_groups: list[dict[str, Any]] | None,
    ) -> dict[str, Tensor]:
        """Add an optimizer; returns the tensors among its states."""
        tensors: dict[str, Tensor] = {}
        has_rule = hasattr(optimizer, "empty_state")
        for param, param_state in optimizer.state.items():
            if not isinstance(param, Tensor):
                raise UserError(
                    f"{type(optimizer).__name__} keeps state that belongs to no parameter ({param!r}), which a "
                    "checkpoint does not save: keep it in param_groups"
                )
            name = names[param]
            for key, value in param_state.items():
                if not isinstance(key, str) or "." in key:
                    _refuse(
                        optimizer, name, key, "has a key that is no string without dots: rename it"
                    )
                layout = None if has_rule else _layout(optimizer, param, name, key, value)
                if layout is not None:
                    self.layouts.setdefault(name, {})[key] = layout
                if isinstance(value, Tensor):
                    tensors[f"optim.{name}.{key}"] = value
                else:
                    self.scalars.setdefault(name, {})[key] = value
        for index, group in enumerate(optimizer.param_groups):
            self.groups.append({**group, "params": [names[param] for param in group["params"]]})
            has_initial = initial_groups is not None and index < len(initial_groups)
            initial = initial_groups[index] if has_initial else group  # type: ignore[index]
            device = next((param.device for param in group["params"]), torch.device("cpu"))
            changed = changed_options(group, initial)
            self.changed.append({key: _is_only_on_host(group[key], device) for key in changed})
        return tensors

    @staticmethod
    def merged(parts: Iterable[_OptimizerState]) -> _OptimizerState:
        every = _OptimizerState()
        for part in parts:
            every.groups += part.groups
            every.changed += part.changed
            every.scalars |= part.scalars
            every.layouts |= part.layouts
        return every

    def shared(self) -> dict[str, Any]:
        return {f"optim_{name}": value for name, value in vars(self).items()}


def changed_options(group: dict[str, Any], initial: dict[str, Any]) -> list[str]:
    """The options of a parameter group that are new or have another value."""
    changed = []
    for key, value in group.items():
        before = initial.get(key)
        if isinstance(value, Tensor) and isinstance(before, Tensor):
            is_same = torch.equal(value, before)
        else:
            is_same = type(value) is type(before) and bool(value == before)
        if key != "params" and not (key in initial and is_same):
            changed.append(key)
    return changed


def _is_only_on_host(value: Any, device: torch.device) -> bool:
    """Whether the tensors in a value are on the host, where its parameter on `device` is not."""
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    is_on_host = all(leaf.device.type == "cpu" for leaf in leaves)
    return bool(leaves) and is_on_host and device.type != "cpu"


def _layout(
    optimizer: torch.optim.Optimizer, param: Tensor, name: str, key: str, value: Any
) -> dict[str, Any] | None:
    """Placements, strides and device of a state, where `_empty_state` would make others; refuses what has none."""
    local_param = local_tensor(param.detach())
    if not isinstance(value, Tensor):
        if any(isinstance(leaf, DTensor) for leaf in tree_leaves(value)):
            _refuse(
                optimizer, name, key, "holds DTensors in a container: store each under its own key"
            )
        return {"on_host": True} if _is_only_on_host(value, param.device) else None
    local = local_tensor(value.detach())
    on_host = _is_only_on_host(local, param.device)
    if _is_step_count(key, value):
        return None  # torch's optimizers know where it has to be
    order = sorted(range(local.ndim), key=lambda dim: -local.stride()[dim])
    is_dense = local.permute(order).is_contiguous()
    placements: Any = None
    expected: Any = None
    if isinstance(value, DTensor):
        if not isinstance(param, DTensor) or value.device_mesh != param.device_mesh:
            _refuse(optimizer, name, key, "is a DTensor on another device mesh than its parameter")
        if value.placements == param.placements:
            placements = LIKE_PARAM
        elif all(type(one) in (Shard, Replicate) for one in value.placements):
            placements = [getattr(one, "dim", None) for one in value.placements]
        else:
            _refuse(
                optimizer,
                name,
                key,
                f"has the placements {value.placements}, which cannot be saved",
            )
    if not is_dense and (placements is not None or 0 in local.stride()):
        _refuse(optimizer, name, key, "is a view with gaps or overlaps: store a clone() of it")
    is_default_type = isinstance(value, DTensor) == isinstance(param, DTensor)
    if value.shape == param.shape and is_default_type and placements in (None, LIKE_PARAM):
        expected = torch.empty_like(local_param, device="meta").stride()
    elif value.shape != param.shape and placements is None:
        expected = torch.empty(local.shape, device="meta").stride()
    if local.stride() == expected and not on_host:
        return None
    stride = list(local.stride())
    return {"placements": placements, "order": order, "stride": stride, "on_host": on_host}


def check_ranks_agree(model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> None:
    """Raise `UserError` if ranks keep other optimizer states of the same parameters, since one rank writes them.

    DTensors may differ, and so may the values of replicated parameters' states, by rounding. All ranks call it.
    """
    names = _ParameterNames(model)
    own: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        options = {
            f"{key} of param_groups": value for key, value in group.items() if key != "params"
        }
        for param in group["params"]:
            state = {**options, **optimizer.state.get(param, {})}
            own[names[param]] = {
                key: _digest(value, isinstance(param, DTensor)) for key, value in state.items()
            }
            options = {}  # once for each group
    first: dict[str, dict[str, Any]] = {}
    for of_rank in world.all_gather(own):
        for name, digests in of_rank.items():
            expected = first.setdefault(name, digests)
            different = {key for key, _ in {*expected.items()} ^ {*digests.items()}}
            if different:
                _refuse(
                    optimizer,
                    name,
                    sorted(map(str, different))[0],
                    "is not the same on all ranks, and is no DTensor: compute it equally on all ranks (all-reduce what "
                    "it is computed from), or make it a DTensor with the placements of its parameter",
                )


def _digest(value: Any, is_sharded: bool) -> Any:
    """What must be equal on all ranks of a state: of a tensor, its data only if it may be a shard."""
    if isinstance(value, DTensor):
        return f"DTensor {value.dtype} {tuple(value.shape)}"
    if isinstance(value, Tensor):
        about = f"{value.dtype} {tuple(value.shape)}"
        if not is_sharded and value.ndim:
            return about
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return f"{about} {crc32(data.numpy().tobytes())}"
    if isinstance(value, Mapping):
        return tuple((key, _digest(one, is_sharded)) for key, one in value.items())
    if isinstance(value, list | tuple):
        return tuple(_digest(one, is_sharded) for one in value)
    return repr(value)


def _refuse(optimizer: torch.optim.Optimizer, name: str, key: Any, why: str) -> NoReturn:
    raise UserError(
        f"{type(optimizer).__name__}: the state {key!r} of {name} cannot be saved exactly: it {why}. "
        "See docs/optim.md, Your own optimizer"
    )


def save(
    folder: Path,
    tensors: dict[str, Tensor],
    world: World,
    describe: Callable[[Path], None] = lambda _: None,
) -> None:
    """Write a checkpoint and wait for it. It gets its name when it is complete, and replaces an older one.

    `describe` writes the folder `hf`, which `mvp export` needs.
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
    ema: dict[Tensor, Tensor] | None = None,
) -> SavedState:
    """Load a checkpoint into the model and, if given, the optimizer; returns the other state.

    Of the parameter groups the learning rates are restored, and what the optimizer has changed itself; with
    `all_group_options` everything. Other options come from the config, which may have been changed. `ema`: gets the
    averages of the trained parameters, which the optimizer does not keep. `without`: names of model tensors that have
    their values already and may be missing in the checkpoint. `elsewhere`: those that other pipeline stages load.
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
            keeps_ema = ema is None and (
                not shared.get(ENGINE_EMA) or hasattr(optimizer, "averaged")
            )
            states = _empty_states(model, optimizer, reader.entries, shared, keeps_ema)
            names = _ParameterNames(model)
            for param, param_state in states.items():
                for key, value in param_state.items():
                    tensors[f"optim.{names[param]}.{key}"] = value
            if ema is not None:
                for param in chain(*(one["params"] for one in optimizer.param_groups)):
                    if (average := ema_name(names[param])) in reader.entries:
                        ema[param] = torch.empty_like(param.detach(), dtype=torch.float32)
                        tensors[average] = ema[param]
        reader.fill(tensors)
        ranks = RankStates(reader, [0, group.rank() if group else 0])
    if shared["model_extra"]:
        model.load_state_dict(shared["model_extra"], strict=False)
    if optimizer is not None:
        _restore_optimizer(model, optimizer, states, shared, folder, all_group_options)
    return SavedState(shared, ranks)


def read_state(folder: Path) -> SavedState:
    """The state of a checkpoint that is no tensor. Raises CorruptCheckpoint."""
    verify(folder, names=lambda name: name == "shared" or name.startswith("rank."))
    reader = Reader(folder)
    return SavedState(from_bytes(reader.read("shared")), RankStates(reader, []))


def read_shared(folder: Path) -> dict[str, Any]:
    """The `shared` state of a checkpoint, without its tensors."""
    shared: dict[str, Any] = from_bytes(Reader(folder).read("shared"))
    return shared


def _empty_states(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    entries: dict[str, Entry],
    shared: dict[str, Any],
    keeps_ema: bool,
) -> dict[nn.Parameter, dict[str, Any]]:
    """Uninitialized optimizer states for all that a checkpoint has of this model's parameters."""
    params = dict(model.named_parameters())
    layouts = shared.get("optim_layouts", {})
    # An optimizer with states of other shapes than its parameters may have its own rule for their placement.
    own_rule = getattr(optimizer, "empty_state", None)
    states: dict[nn.Parameter, dict[str, Any]] = {}
    for full_name, entry in entries.items():
        if not full_name.startswith("optim."):
            continue
        name, _, key = full_name.removeprefix("optim.").rpartition(".")
        if name not in params or (key == EMA and not keeps_ema):
            continue
        param = params[name]
        layout = layouts.get(name, {}).get(key)
        if own_rule is not None:
            state = own_rule(param, key, entry.shape, entry.dtype)
        elif layout is None:
            state = _empty_state(param, entry.shape, entry.dtype)
        else:
            state = _empty_in_layout(param, full_name, entry, layout)
        states.setdefault(param, {})[key] = state
    return states


def _empty_state(param: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Moments are sharded like their parameter; step counts are plain CPU scalars."""
    like = param.detach() if shape == param.shape else torch.empty(shape)
    return torch.empty_like(like, dtype=dtype)


def _empty_in_layout(param: Tensor, name: str, entry: Entry, layout: dict[str, Any]) -> Tensor:
    """An uninitialized state as `_layout` has described it; on one rank, shards are full tensors."""
    placements = layout["placements"]
    device = torch.device("cpu") if layout["on_host"] else local_tensor(param).device
    if placements is None:
        return torch.empty_strided(entry.shape, layout["stride"], dtype=entry.dtype, device=device)
    order = layout["order"]
    if not isinstance(param, DTensor):
        return _empty_in_order(entry.shape, order, entry.dtype, device)
    if placements != LIKE_PARAM and len(placements) != param.device_mesh.ndim:
        raise UserError(
            f"{name} was saved on a device mesh of {len(placements)} dimensions, and this layout has "
            f"{param.device_mesh.ndim}: resume with the parallel.* keys of the checkpoint"
        )
    wanted = param.placements
    if placements != LIKE_PARAM:
        wanted = tuple(Replicate() if dim is None else Shard(dim) for dim in placements)
    state = empty_sharded_like(param, entry.shape, entry.dtype, wanted)
    assert isinstance(state, DTensor)
    local_shape = state._local_tensor.shape
    state._local_tensor = _empty_in_order(local_shape, order, entry.dtype, device)
    return state


def _empty_in_order(
    shape: Sequence[int], order: list[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """An uninitialized dense tensor whose dimensions have strides in this order, the largest first."""
    dense = torch.empty([shape[dim] for dim in order], dtype=dtype, device=device)
    return dense.permute([order.index(dim) for dim in range(len(order))])


def _restore_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    states: dict[nn.Parameter, dict[str, Any]],
    shared: dict[str, Any],
    folder: Path,
    all_group_options: bool,
) -> None:
    params = dict(model.named_parameters())
    layouts = shared.get("optim_layouts", {})
    for name, scalars in shared["optim_scalars"].items():
        if name in params:
            for key, value in scalars.items():
                on_host = (layouts.get(name, {}).get(key) or {}).get("on_host")
                device = torch.device("cpu") if on_host else local_tensor(params[name]).device
                value = tree_map_only(Tensor, partial(_moved, device=device), value)
                states.setdefault(params[name], {})[key] = value

    names = _ParameterNames(model)
    saved_groups: dict[str, tuple[dict[str, Any], dict[str, bool]]] = {}  # by parameter name
    changed = shared.get("optim_changed") or [{} for _ in shared["optim_groups"]]
    for saved_group, of_group in zip(shared["optim_groups"], changed, strict=True):
        saved_groups.update(dict.fromkeys(saved_group["params"], (saved_group, of_group)))
    for group in optimizer.param_groups:
        group_names = [names[param] for param in group["params"]]
        if not group_names:
            continue
        missing = [name for name in group_names if name not in saved_groups]
        if missing:
            raise UserError(
                f"checkpoint {folder} has no optimizer state for {missing[:3]}: was it frozen in that run?"
            )
        saved_group, on_host_by_key = saved_groups[group_names[0]]
        for key, value in saved_group.items():
            is_state = key in ("lr", "initial_lr") or key in on_host_by_key
            if is_state or (all_group_options and key != "params"):
                here = group.get(key)
                like = here if isinstance(here, Tensor) else group["params"][0]
                on_host = on_host_by_key.get(key, False)
                group[key] = value if on_host else _moved(value, local_tensor(like).device)

    # The optimizer's own loader moves each state to the device that it has to be on.
    state_dict = optimizer.state_dict()
    ordered = [param for group in optimizer.param_groups for param in group["params"]]
    state_dict["state"] = {i: states[param] for i, param in enumerate(ordered) if param in states}
    optimizer.load_state_dict(state_dict)
    # torch's casts to the dtype of the parameter, which is right for the step counts of its own optimizers only.
    is_torch = type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
    if not is_torch or optimizer._optimizer_load_state_dict_post_hooks:
        return
    for param, param_state in states.items():
        if param not in optimizer.state:
            continue
        for key, value in param_state.items():
            if not _is_step_count(key, value):
                device = local_tensor(param).device
                on_host = (layouts.get(names[param], {}).get(key) or {}).get("on_host")
                exact = value if on_host or not isinstance(value, Tensor) else _moved(value, device)
                optimizer.state[param][key] = exact


def _is_step_count(key: str, value: Any) -> bool:
    return key == "step" and isinstance(value, Tensor) and value.ndim == 0


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


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

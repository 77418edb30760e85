"""What a check finds out about model and loss after its steps: gradients that are missing, media that no step had,
optimizer states that a checkpoint changes, and losses that depend on the split into micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from mvp_engine.checkpoint import state
from mvp_engine.distributed.collective_errors import raise_on_all_ranks
from mvp_engine.distributed.dtensor import local_tensor
from mvp_engine.errors import UserError, count
from mvp_engine.hf.actions.action_model import ActionModel
from mvp_engine.hf.model.model_parts import parts_of
from mvp_engine.kit.data.pack.costs import MEDIA_BITS
from mvp_engine.kit.data.pack.packs import PackLoader
from mvp_engine.model_engine.fsdp.base_engine import FSDPBaseEngine
from mvp_engine.model_engine.fsdp.lockstep import media_kinds
from mvp_engine.tools.check.checked_engine import MAX_IDS, CheckedEngine
from mvp_engine.tools.check.record import CheckRecord
from mvp_engine.tools.check.splits import PAGE, batch_norms, compare_splits, explain

LORA_A = (".lora_A.weight", ".lora_A")  # ends of names


def check_rare_media(engine: CheckedEngine) -> None:
    """Raise if the model fails on a kind of media that the steps did not have, such as one video in many images.

    The training would find that out in its first step with such a row. All ranks call it.
    """
    loader = engine.feed.loader
    if not isinstance(loader, PackLoader):
        return
    dataset = loader.dataset
    bits = int(np.bitwise_or.reduce(np.concatenate([costs.media for costs in dataset.costs])))
    kinds = dataset.row_encoder.media_names(kind for kind, bit in MEDIA_BITS.items() if bits & bit)
    missing = kinds.difference(*engine.world.all_gather(engine.media_seen))
    for index in range(len(dataset)):
        if not missing:
            return
        if dataset.media_kinds(index) & missing:
            batch, _ = dataset[index]
            engine.model_engine.adapter.preflight_media(engine.model_engine, [batch])  # type: ignore[attr-defined]
            missing -= media_kinds(batch)


def report_unused_parameters(record: CheckRecord, engine: CheckedEngine) -> None:
    names = engine.without_gradient()
    if isinstance(
        engine.model, ActionModel
    ):  # a training on actions alone leaves these as they are
        names = [name for name in names if name not in engine.model.text_parameters]
    if engine.step == 1:  # LoRA begins with B = 0, so that A has no gradient in the first step
        names = [name for name in names if not name.endswith(LORA_A)]
    record["without_gradient"] = names
    if not names:
        return
    total = sum(param.requires_grad for param in engine.model.parameters())
    record.warning(
        f"{len(names)} of {total} parameters that train got no gradient in {engine.step} steps: "
        f"{_by_part(engine.model, names)}. Is the loss computed without them, or do the rows of these steps lack "
        "their data (images, ...)? model.freeze freezes them"
    )


def check_optimizer_state(record: CheckRecord, engine: CheckedEngine) -> None:
    """Does the optimizer come back from a checkpoint bit by bit? All ranks call it.

    It saves and loads one parameter for each kind of state and each parameter group, the smallest.
    """
    model_engine: Any = engine.model_engine
    if not isinstance(model_engine, FSDPBaseEngine):
        return
    world = engine.world
    trained = model_engine.optimizer
    names: dict[Tensor, str] = {one: name for name, one in engine.model.named_parameters()}
    chosen = _one_of_each_kind(trained)
    part = nn.Module()
    parameters: dict[str, Any] = {names[param]: param for param in chosen}
    part._parameters.update(parameters)
    saved: Any = object.__new__(type(trained))  # of the chosen parameters only
    saved.state = {param: trained.state[param] for param in chosen if param in trained.state}
    saved.param_groups = _groups_of(chosen, trained)
    loaded: Any = engine.prepare_optimizer(engine.model)
    loaded.param_groups = _groups_of(chosen, loaded)
    try:
        state.check_ranks_agree(engine.model, trained, world)
        with raise_on_all_ranks(world.host_group):
            initial = model_engine.initial_groups
            tensors = state.collect(part, saved, {}, {}, world.rank, initial_groups=initial)
        folder = engine.run.dir / "optimizer"
        state.save(folder, tensors, world)
        whole_groups = not isinstance(model_engine.scheduler, LambdaLR)
        state.restore(folder, part, loaded, world.host_group, whole_groups)
    except UserError as error:
        record.problem(str(error))
        return
    kind = type(trained).__name__
    found = [*chain(*world.all_gather(optimizer_differences(saved, loaded, names)))]
    if found:
        record.problem(
            f"{kind} does not come back from a checkpoint as it was: {'; '.join(found[:MAX_IDS])}. A resume would not "
            "be exact: does its load_state_dict or its state_dict change states? See docs/optim.md, Your own optimizer"
        )
    attributes = [
        key
        for key, value in vars(trained).items()
        if type(value) in (int, float) or isinstance(value, Tensor)  # schedulers set flags
        if key not in ("found_inf", "grad_scale")  # of the model engine
        if not _is_same(value, vars(loaded).get(key))
    ]
    if attributes:
        record.warning(
            f"{kind} changes its {count(len(attributes), 'attribute')} {', '.join(attributes)} in training, which a "
            "checkpoint does not save: keep this in param_groups"
        )


def _groups_of(chosen: set[Tensor], optimizer: Optimizer) -> list[dict[str, Any]]:
    """The parameter groups with these parameters only."""
    return [
        {**group, "params": [param for param in group["params"] if param in chosen]}
        for group in optimizer.param_groups
    ]


def _one_of_each_kind(optimizer: Optimizer) -> set[Tensor]:
    """The smallest parameter of each group, and the smallest with each kind of state."""
    smallest: dict[Any, Tensor] = {}
    for index, group in enumerate(optimizer.param_groups):
        for param in sorted(group["params"], key=lambda param: param.numel()):
            param_state = optimizer.state.get(param, {})
            kind = tuple((key, *_kind(param, value)) for key, value in param_state.items())
            for key in (index, kind):
                if key not in smallest or param.numel() < smallest[key].numel():
                    smallest[key] = param
    return set(smallest.values())


def _kind(param: Tensor, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, Tensor):
        return (type(value),)
    is_contiguous = local_tensor(value).is_contiguous()
    return type(value), value.dtype, value.device.type, value.shape == param.shape, is_contiguous


def optimizer_differences(
    saved: Optimizer, loaded: Optimizer, names: Mapping[Tensor, str]
) -> list[str]:
    """What differs between an optimizer and one that was loaded from its checkpoint: keys, layouts, bits."""
    found = []
    for group, other in zip(saved.param_groups, loaded.param_groups, strict=True):
        keys = {*group, *other} - {"params"}
        if group["params"]:
            different = [key for key in keys if not _is_same(group.get(key), other.get(key))]
            found += [f"param_groups have another {key!r}" for key in sorted(different)]
    for param, param_state in saved.state.items():
        other_state = loaded.state.get(param, {})
        for key in {**param_state, **other_state}:
            if not _is_same(param_state.get(key), other_state.get(key)):
                found.append(f"{names[param]} has another state {key!r}")
    return found


def _is_same(value: Any, other: Any) -> bool:
    """Equal in type, layout and bits, also inside of containers."""
    if type(value) is not type(other):
        return False
    if isinstance(value, Mapping):
        same_keys = value.keys() == other.keys()
        return same_keys and all(_is_same(value[key], other[key]) for key in value)
    if isinstance(value, list | tuple):
        same_length = len(value) == len(other)
        return same_length and all(_is_same(a, b) for a, b in zip(value, other, strict=True))
    if not isinstance(value, Tensor):
        return bool(value == other) or repr(value) == repr(other)  # NaN
    if isinstance(value, DTensor) and (value.placements, value.shape) != (
        other.placements,
        other.shape,
    ):
        return False
    a, b = local_tensor(value.detach()), local_tensor(other.detach())
    layouts = [(one.dtype, one.device, one.shape, one.stride()) for one in (a, b)]
    bits = [one.contiguous().reshape(-1).view(torch.uint8) for one in (a, b)]
    return layouts[0] == layouts[1] and torch.equal(*bits)


def _by_part(model: nn.Module, names: list[str]) -> str:
    """Parameter names for a message: first parts of the model that are complete, then some names."""
    parts = parts_of(model)
    trained = [name for name, param in model.named_parameters() if param.requires_grad]
    kept = {parts.get(name) for name in trained if name not in names}
    affected = {parts.get(name) for name in names}
    whole = [part for part in dict.fromkeys(parts.values()) if part in affected - kept]
    others = [name for name in names if parts.get(name) not in whole]
    more = [f"{len(others) - MAX_IDS} more"] if len(others) > MAX_IDS else []
    return ", ".join([*(f"all of {part}" for part in whole), *others[:MAX_IDS], *more])


def split_stage(record: CheckRecord, engine: CheckedEngine) -> None:
    """Does the loss depend on how the rows of a step are split into micro-batches?"""
    record.begin_stage("split")
    found = compare_splits(engine, engine.first_micro_batches or [])
    if norms := batch_norms(engine.model):
        kind = f"{type(norms[0]).__name__} module"
        record.warning(
            f"{count(len(norms), kind)} with statistics of one micro-batch of one rank: "
            f"results depend on data.micro_batch_size and the number of ranks. See {PAGE}"
        )
    if isinstance(found, str):
        record.end_stage(found)
        return
    record["split"] = found.facts()
    if found.exceeds:
        record.problem(explain(found))
    record.end_stage(found.summary(), ok=not found.exceeds)

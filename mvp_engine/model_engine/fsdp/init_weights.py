"""Weights for a model that was built on the meta device and is on its layout already: read, or drawn from the seed.

Random weights are drawn unit by unit (a block, or what is outside of all blocks), whole, on the CPU, by the model's own
rules; each rank then keeps its part. So they are the same on every layout, and no rank holds more than one unit.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from mvp_engine.data import derived_seed
from mvp_engine.distributed.dtensor import local_shards, shard_slices
from mvp_engine.distributed.fsdp import blocks
from mvp_engine.errors import UserError
from mvp_engine.hf import load as hf
from mvp_engine.hf.packed_model import PackedModel

LOGGER = logging.getLogger("mvp_engine")


def materialize_weights(
    model: nn.Module, skeleton: nn.Module, device: torch.device, seed: int
) -> None:
    """`skeleton` is the same model, still on the meta device and untouched by any layout."""
    _allocate(model, device)
    loaded: set[str] = set()
    if isinstance(model, PackedModel) and model.source is not None:
        loaded = _read(model, skeleton)
        model.from_folder = frozenset(loaded)
    real = dict(model.state_dict(keep_vars=True)) | dict(model.named_buffers())
    owners = _owners(skeleton)
    for name, modules in _units(skeleton):
        _draw(modules, owners, real, loaded, derived_seed(seed, "weights", name))


def _allocate(model: nn.Module, device: torch.device) -> None:
    """Memory for this rank's part of everything; parameters that were tied stay so."""
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for kind in (module._parameters, module._buffers):
            for name, tensor in kind.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if tensor not in made:
                    empty = torch.empty_like(tensor, device=device)
                    is_param = isinstance(tensor, nn.Parameter)
                    made[tensor] = (
                        nn.Parameter(empty, requires_grad=tensor.requires_grad)
                        if is_param
                        else empty
                    )
                kind[name] = made[tensor]  # type: ignore[assignment]


def _read(model: PackedModel, skeleton: nn.Module) -> set[str]:
    """Fill the model from its folder; what is missing must be something that the model type adds."""
    assert model.source is not None
    own = {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor)
    }
    prefix = "hf."
    assert isinstance(skeleton, PackedModel)
    found, unused = hf.load(
        skeleton.hf,
        model.source,
        {n.removeprefix(prefix): value for n, value in own.items() if n.startswith(prefix)},
    )
    filled = {own[prefix + name] for name in found}  # tied ones with each other
    loaded = {name for name, value in own.items() if value in filled}
    if extra := [name for name in own if not name.startswith(prefix) and name in unused]:
        hf.load_plain(model.source, {name: own[name] for name in extra})
        loaded |= set(extra)
        unused = [name for name in unused if name not in extra]
    missing = [
        n
        for n in own
        if n not in loaded and not any(fnmatchcase(n, fresh) for fresh in model.fresh)
    ]
    if missing:
        head = skeleton.hf.get_output_embeddings()  # type: ignore[operator]
        only_head = head is not None and {skeleton.get_parameter(name) for name in missing} <= set(
            head.parameters()
        )
        hint = "If its embeddings are its head too, set model.config.tie_word_embeddings=true."
        raise UserError(
            f"{model.source} lacks {len(missing)} parameter(s) of {type(skeleton.hf).__name__}, such as {missing[0]}. "
            + (hint if only_head else "Is it a folder of this architecture?")
        )
    if drawn := [n for n in own if n not in loaded]:
        LOGGER.info("not in %s, so drawn from the seed: %s", model.source, _some(drawn))
    if unused := [name for name in unused if not _expected(skeleton.hf, name)]:
        LOGGER.warning("in %s, but not in the model: %s", model.source, _some(unused))
    return loaded


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _expected(model: Any, name: str) -> bool:
    """May a folder have this entry, which its model has not? Heads beside a backbone, and what transformers drops."""
    dropped = {
        r"rotary_emb\.inv_freq",
        r"position_ids$",
        *(model._keys_to_ignore_on_load_unexpected or ()),
    }
    is_backbone = model.base_model is model and not name.startswith(f"{model.base_model_prefix}.")
    return is_backbone or any(re.search(pattern, name) for pattern in dropped)


def _units(skeleton: nn.Module) -> Iterator[tuple[str, dict[str, nn.Module]]]:
    names = {module: name for name, module in skeleton.named_modules()}
    inside: set[nn.Module] = set()
    for block in blocks(skeleton):
        inside |= set(block.modules())
        yield names[block], {names[module]: module for module in block.modules()}
    yield "", {name: module for module, name in names.items() if module not in inside}


def _draw(
    modules: dict[str, nn.Module],
    owners: dict[nn.Module, Any],
    real: dict[str, Tensor],
    loaded: set[str],
    seed: int,
) -> None:
    """Draw what was not read, and compute the buffers, of some modules of the skeleton; copy them into the model."""
    drawn: dict[str, Tensor] = {}
    ties: dict[Tensor, Tensor] = {}
    for prefix, module in modules.items():
        for kind in (module._parameters, module._buffers):
            for name, tensor in kind.items():
                full = f"{prefix}.{name}" if prefix else name
                if tensor is None or full in loaded:
                    continue
                if tensor not in ties:
                    empty = torch.empty_like(tensor, device="cpu")
                    if empty.is_floating_point():
                        empty.fill_(float("nan"))  # to see that nothing was forgotten
                    ties[tensor] = (
                        nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty
                    )
                kind[name] = ties[tensor]  # type: ignore[assignment]
                drawn[full] = ties[tensor]
    if not drawn:
        return
    before = {
        full: value._version for full, value in drawn.items()
    }  # of integers, only writing tells
    with torch.random.fork_rng([]), torch.no_grad():
        torch.manual_seed(seed)
        for module in reversed(list(modules.values())):
            _own_rule(module, owners[module])
    back = {new: old for old, new in ties.items()}
    for full, value in drawn.items():
        unset = value.isnan().any() if value.is_floating_point() else value._version == before[full]
        if value.numel() and bool(unset):
            raise UserError(
                f"{full} has no value: its model's _init_weights does not set it. Set it there, or read it from a "
                "folder that has it (model.path)"
            )
        with torch.no_grad():
            for offset, part in local_shards(real[full]):
                part.copy_(value[shard_slices(offset, part)])
    for module in modules.values():
        for kind in (module._parameters, module._buffers):
            for name, tensor in kind.items():
                if tensor is not None and tensor in back:
                    kind[name] = back[tensor]  # type: ignore[assignment]


def _owners(model: nn.Module) -> dict[nn.Module, Any]:
    """For each module, the part of the model that knows how it is drawn."""
    owners: dict[nn.Module, Any] = {}

    def walk(module: nn.Module, owner: Any) -> None:
        owner = module if hasattr(module, "_init_weights") else owner
        owners[module] = owner
        for child in module.children():
            walk(child, owner)

    walk(model, None)
    return owners


def _own_rule(module: nn.Module, owner: Any) -> None:
    if owner is not None:
        owner._init_weights(module)
    elif (reset := getattr(module, "reset_parameters", None)) is not None:
        reset()

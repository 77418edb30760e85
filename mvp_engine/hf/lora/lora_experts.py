"""LoRA on stacked experts: adapters of whole 3-dimensional parameters, as peft's `target_parameters`.

Legend: E experts, r rank, I inputs, O outputs of an expert's matrix.

Each stacked parameter gets a child module with `lora_A` (E, r, I) and `lora_B` (E, O, r), which the grouped GEMMs of
`moe_layers.py` multiply with the rows of each expert. peft computes the product of the two for all experts, and its
gradient, the size of all experts, in every pass. FSDP and expert parallel shard the adapters as the experts themselves.
peft stores them as two matrices, (E * r, I) and (O, r * E): `peft_matrices` converts.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mvp_engine.errors import UserError, count
from mvp_engine.hf.experts import moe_layers as local_experts
from mvp_engine.hf.lora.lora_settings import Lora

LOGGER = logging.getLogger("mvp_engine")
KEY = "lora.target_parameters"


class StackedAdapter(nn.Module):
    def __init__(self, experts: int, rank: int, inputs: int, outputs: int, device: Any) -> None:
        super().__init__()
        options: Any = {"device": device, "dtype": torch.float32}
        self.lora_A = nn.Parameter(torch.empty(experts, rank, inputs, **options))
        self.lora_B = nn.Parameter(torch.empty(experts, outputs, rank, **options))
        self._init_weights(self)

    def _init_weights(self, _: nn.Module) -> None:
        # In place, on the parameters themselves. Of a stack, kaiming_uniform_ would take another number of inputs.
        bound = 1.0 / math.sqrt(self.lora_A.shape[-1])
        nn.init.uniform_(self.lora_A, -bound, bound)
        nn.init.zeros_(self.lora_B)


def add_expert_adapters(model: nn.Module, settings: Lora) -> None:
    """Add adapters to the stacked parameters that `lora.target_parameters` names; say what stays without one."""
    found = local_experts.modules(model)
    targets = set(settings.target_parameters)
    if targets:
        _check(settings, found)
    used: set[str] = set()
    frozen = 0
    for name, experts in found.items():
        experts.lora_names = []  # type: ignore[assignment]
        for key, param in list(experts.named_parameters(recurse=False)):
            matches = {target for target in targets if _matches(target, f"{name}.{key}")}
            used |= matches
            if not matches:
                frozen += 0 if param.requires_grad else param.numel()
                continue
            _adapt(experts, key, param, settings)
    if missing := sorted(targets - used):
        some = [
            key
            for one in found.values()
            for key, p in one.named_parameters(recurse=False)
            if p.ndim == 3
        ]
        known = sorted({f"experts.{key}" for key in some})
        raise UserError(f"{KEY}: no stacked experts {missing[0]!r}. There are: {', '.join(known)}")
    if frozen:
        sizes = {name: param.numel() for name, param in model.named_parameters()}
        total = sum(size for name, size in sizes.items() if ".lora_" not in name)
        LOGGER.warning(
            "lora: the stacked experts of %s have no adapter and stay frozen, %.0f %% of all weights: adapters of "
            "linear layers do not reach them. lora.target_parameters=[experts.gate_up_proj,experts.down_proj] adapts "
            "them, too",
            count(len(found), "layer"),
            100 * frozen / total,
        )


def _check(settings: Lora, found: dict[str, nn.Module]) -> None:
    if not found:
        raise UserError(f"{KEY}: the model has no stacked experts. Leave it out")
    if settings.dropout:
        raise UserError(f"{KEY}: stacked experts take no dropout (nor in peft). Set lora.dropout=0")
    if settings.rank % local_experts.MULTIPLE:
        raise UserError(
            f"{KEY}: lora.rank={settings.rank} is no multiple of {local_experts.MULTIPLE}, which grouped GEMMs need"
        )


def _matches(target: str, name: str) -> bool:
    """As peft matches: the name, or its end from a dot on."""
    return name == target or name.endswith(f".{target}")


def _adapt(experts: Any, key: str, param: nn.Parameter, settings: Lora) -> None:
    if param.ndim != 3:
        raise UserError(f"{KEY}: {key} has {param.ndim} dimensions; stacked matrices have 3")
    if param.requires_grad:
        raise UserError(f"{KEY}: {key} is trained in full (lora.train), so it takes no adapter")
    total, *sizes = param.shape
    outputs, inputs = reversed(sizes) if experts.is_transposed else sizes
    adapter = StackedAdapter(total, settings.rank, inputs, outputs, param.device)
    setattr(experts, local_experts.adapter_name(key), adapter)
    experts.lora_names.append(key)
    experts.lora_scaling = settings.scaling
    experts.lora_switch = None


def adapted_experts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The names and modules of stacked experts with an adapter."""
    for name, module in model.named_modules():
        if getattr(module, "lora_names", None):
            yield name, module


def delta(experts: Any, lora_a: Tensor, lora_b: Tensor) -> Tensor:
    """What an adapter adds to its stacked parameter."""
    product = experts.lora_scaling * (lora_b.float() @ lora_a.float())
    return product.mT if experts.is_transposed else product


def peft_matrices(lora_a: Tensor, lora_b: Tensor) -> tuple[Tensor, Tensor]:
    """The two matrices that peft stores: experts are rows of the first, and the inner columns of the second."""
    return lora_a.flatten(0, 1), lora_b.permute(1, 2, 0).flatten(1).contiguous()

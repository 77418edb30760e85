"""Which layers of a model run in FP8 (`model.fp8`)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from mvp_engine.errors import UserError, count
from mvp_engine.hf import experts
from mvp_engine.hf.fp8_grouped_mm import is_supported
from mvp_engine.hf.parts import blocks_by_part
from mvp_engine.ops import fp8

LOGGER = logging.getLogger("mvp_engine")


def use_fp8(
    model: nn.Module, parts: Mapping[str, bool], weight_gradients: bool, device: torch.device
) -> None:
    """Linear layers and stacked experts of the blocks of some parts run in FP8; logs which."""
    if not any(parts.values()):
        return
    blocks = [block for block, part in blocks_by_part(model) if parts.get(part, False)]
    layers = {layer for block in blocks for layer in experts.fp8_layers(block)}
    fp8.use(layers, weight_gradients)
    found = [module for block in blocks for module in experts.modules(block).values()]
    chosen = [module for module in found if experts.fit_fp8(module)]
    reason = f"their sizes are no multiples of {fp8.MULTIPLE}"
    if not is_supported(device):
        reason = f"torch has no FP8 grouped GEMM for {torch.cuda.get_device_name(device)}"
        chosen = []
    for module in chosen:
        experts.use_fp8(module)
    if not layers and not chosen:
        why = f"; the experts of {count(len(found), 'layer')} would not: {reason}" if found else ""
        raise UserError(
            f"model.fp8: no block of {type(model).__name__} has linear layers with sizes that are multiples of "
            f"{fp8.MULTIPLE}{why}. So nothing would change: leave it out"
        )
    if weight_gradients and not layers:
        raise UserError(
            f"model.fp8_weight_gradients is for linear layers in FP8, and {type(model).__name__} has only experts in "
            "FP8. Remove model.fp8_weight_gradients"
        )
    stacked = f" and the experts of {count(len(chosen), 'layer')}" if chosen else ""
    LOGGER.info("model.fp8: %s%s run in FP8", count(len(layers), "linear layer"), stacked)
    if left := len(found) - len(chosen):
        LOGGER.warning(
            "model.fp8: the experts of %s do not run in FP8: %s", count(left, "layer"), reason
        )
    others = {param for block in blocks for param in block.parameters() if param.ndim > 2}
    if others.difference(*(module.parameters() for module in found)):
        LOGGER.warning("model.fp8: convolutions and other stacked matrices stay in bf16")


@contextmanager
def run_in_bf16(model: nn.Module) -> Iterator[None]:
    """A context in which layers in FP8 run in bf16, for comparisons whose bounds are the rounding of bf16."""
    layers: list[nn.Module] = [one for one in model.modules() if isinstance(one, fp8.Fp8Linear)]
    stacked = [module for module in model.modules() if experts.is_fp8(module)]
    for layer in layers:
        layer.__class__ = nn.Linear
    for module in stacked:
        experts.use_fp8(module, False)
    try:
        yield
    finally:
        for layer in layers:
            layer.__class__ = fp8.Fp8Linear
        for module in stacked:
            experts.use_fp8(module)

"""Vision encoders without host syncs: patch embedding as a matmul, grid positions cached per size.

An encoder such as Qwen-VL's gets its images as patches plus `grid_thw`, the size of each image in
patches (frames, height, width). transformers derives positions and interpolation weights from the
grid on the encoder's device, which costs dozens of small kernels and host syncs per micro-batch.
Here the grids stay on the host (`PackedBatch.to` keeps them there) and forward pre-hooks pass
the derived tensors in, under the argument names that transformers documents for that purpose.
The results are bit-equal. Nothing here depends on tokens: see `media_features.py` for those.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mvp_engine.hf.media.media_features import copy_to_device

HookResult = tuple[Any, dict[str, Any]] | None


def apply_sync_free_vision(model: nn.Module) -> None:
    """Change the vision encoders of one model instance; transformers' classes stay as they are."""
    for module in list(model.modules()):
        if isinstance(module, nn.Conv3d) and _is_patch_embedding(module):
            module.__class__ = PatchConv3d  # same parameters, same state dict
        if "grid_thw" in inspect.signature(module.forward).parameters:
            hook = _pass_grid_plans if _uses(module) == _PLANNED else _move_grid_to_device
            module.register_forward_pre_hook(hook, with_kwargs=True)


# ---- Patch embedding ---------------------------------------------------------------------------


class PatchConv3d(nn.Conv3d):
    """A Conv3d with stride equal to kernel size, computed as a matmul when it gets single patches.

    cuDNN's convolution left a gap of 4 ms per micro-batch; the GEMM has fast kernels in all dtypes.
    """

    def forward(self, patches: Tensor) -> Tensor:
        if patches.shape[2:] != self.kernel_size or self.groups != 1:
            return super().forward(patches)
        out_PC = F.linear(patches.flatten(1), self.weight.flatten(1), self.bias)
        return out_PC[:, :, None, None, None]


def _is_patch_embedding(conv: nn.Conv3d) -> bool:
    return conv.kernel_size == conv.stride and not any(conv.padding)


# ---- Grids -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GridPlan:
    """The tensors that an encoder derives from the grid of one image or video, on its device."""

    interp_indices: Tensor  # entries of the position-embedding table that each patch averages
    interp_weights: Tensor  # and their weights
    position_ids: Tensor  # row and column of each patch, for rotary embeddings


# Per encoder: (grid, device) -> plan. Weak keys: a deleted model drops its plans.
_PLANS: WeakKeyDictionary[nn.Module, dict[Any, GridPlan]] = WeakKeyDictionary()

_ON_HOST = ("grid_thw", "merge_sizes")  # inputs of encoders that stay on the host

MAX_PLANS = 2048  # per encoder; a plan takes about 70 kB

# The `get_vision_*` functions of transformers that GridPlan and cu_seqlens stand in for.
_PLANNED = {"interpolation_indices_and_weights", "position_ids", "attention_seqlens"}


def _uses(encoder: nn.Module) -> set[str]:
    """The `get_vision_*` functions that the forward of an encoder calls, without that prefix."""
    names = inspect.unwrap(type(encoder).forward).__code__.co_names
    prefix = "get_vision_"
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


def _move_grid_to_device(encoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> HookResult:
    """Forward pre-hook for all other encoders, which read the grid on the device of the patches.

    Their inputs have many names and orders, so only what `PackedBatch.to` left on the host moves.
    """
    names = inspect.signature(encoder.forward).parameters
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    inputs = [value for name, value in given.items() if name not in _ON_HOST]
    device = next(value.device for value in inputs if isinstance(value, Tensor))
    for name in _ON_HOST:
        if given.get(name) is not None:
            given[name] = given[name].to(device)
    moved_args = tuple(given[name] for name, _ in zip(names, args, strict=False))
    return moved_args, {name: given[name] for name in kwargs}


def _patches_and_grid(args: Any, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """The two inputs of an encoder's forward, whether given by position or by name."""
    patches: Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    positional_grid = args[1] if len(args) > 1 else None
    return patches, kwargs.get("grid_thw", positional_grid)


def _pass_grid_plans(encoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> HookResult:
    """Forward pre-hook: adds what the encoder would otherwise derive from the grid on the GPU.

    A cached plan per grid size cut the gap before the encoder from 20 to 2 ms per micro-batch.
    """
    from transformers.vision_utils import get_vision_cu_seqlens

    patches, grid = _patches_and_grid(args, kwargs)
    if grid is None or grid.is_cuda:
        return None
    plans = [_grid_plan(encoder, tuple(size), patches.device) for size in grid.tolist()]
    cu_seqlens = get_vision_cu_seqlens(grid)  # on the host
    planned = {
        "grid_thw": grid,
        "interp_indices": torch.cat([plan.interp_indices for plan in plans]),
        "interp_weights": torch.cat([plan.interp_weights for plan in plans]),
        "position_ids": torch.cat([plan.position_ids for plan in plans]),
        "cu_seqlens": copy_to_device(cu_seqlens, patches.device),
        "max_seqlen": int(cu_seqlens.diff().max()),
    }
    return args[:1], {**kwargs, **planned}


def _grid_plan(encoder: nn.Module, size: tuple[int, ...], device: torch.device) -> GridPlan:
    """The plan for one grid size, from the cache of this encoder or computed now."""
    cached = _PLANS.setdefault(encoder, {})
    if (size, device) not in cached:
        if len(cached) >= MAX_PLANS:
            cached.clear()
        cached[size, device] = _compute_plan(encoder, size, device)
    return cached[size, device]


def _compute_plan(encoder: Any, size: tuple[int, ...], device: torch.device) -> GridPlan:
    from transformers.vision_utils import (
        get_vision_interpolation_indices_and_weights,
        get_vision_position_ids,
    )

    grid = torch.tensor([size])
    indices, weights = get_vision_interpolation_indices_and_weights(
        grid,
        num_grid_per_side=encoder.num_grid_per_side,
        mode=encoder.interpolation_mode,
        align_corners=encoder.interpolation_align_corners,
        spatial_merge_size=encoder.spatial_merge_size,
    )
    position_ids = get_vision_position_ids(grid, encoder.spatial_merge_size)
    on_host = (indices, weights, position_ids)
    return GridPlan(*(copy_to_device(one, device) for one in on_host))

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
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mvp_engine.hf.media.media_features import PlaceholderMask, copy_to_device
from mvp_engine.hf.model.attention import names_in_forward

HookResult = tuple[Any, dict[str, Any]] | None


def apply_sync_free_vision(model: nn.Module) -> None:
    """Change the vision encoders of one model instance; transformers' classes stay as they are."""
    for module in list(model.modules()):
        if isinstance(module, nn.Conv3d) and _is_patch_embedding(module):
            module.__class__ = PatchConv3d  # same parameters, same state dict
        if "grid_thw" in inspect.signature(module.forward).parameters:
            names = names_in_forward(type(module))
            derived = {name for name in names if name.startswith("get_vision_")}
            hook = _pass_grid_plans if derived == _PLANNED else _move_grid_to_device
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

# The functions of transformers that GridPlan and cu_seqlens stand in for.
_PLANNED = {
    "get_vision_interpolation_indices_and_weights",
    "get_vision_position_ids",
    "get_vision_attention_seqlens",
}


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


def _pass_grid_plans(encoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> HookResult:
    """Forward pre-hook: adds what the encoder would otherwise derive from the grid on the GPU.

    A cached plan per grid size cut the gap before the encoder from 20 to 2 ms per micro-batch.
    """
    from transformers.vision_utils import get_vision_cu_seqlens

    patches: Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    grid: Tensor | None = kwargs.get("grid_thw", args[1] if len(args) > 1 else None)
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


# Audio encoders of Omni models without host syncs: chunks and boundaries are planned on the host.
#
# The encoder cuts the mel frames of each sound into chunks, and its attention into windows. transformers derives both
# from the frame masks on the encoder's device, which costs host syncs in each micro-batch. Here the masks stay on the
# host (`PackedBatch.to` keeps them there), and a forward pre-hook passes the derived tensors in, under the argument
# names that transformers reads them from. transformers' own functions compute them, so the results are bit-equal.
#
# One result differs on purpose. Qwen3-Omni pads all chunks of a call to the longest one, and its second and third
# convolution see the bias of the first one there, where zeros are at the end of a sound alone: a sound of less than a
# second would change with its neighbours in the pack. `_ConvPadding` puts zeros there.

FRAME_MASK = "feature_attention_mask"  # of media, (sounds, frames)
_CHUNKS = "chunk_and_pad_features"
# Functions that an encoder may call after it, and the argument that stands in for their results.
_DERIVED = {
    "get_valid_indices": "valid_indices",
    "get_pool_indices": "pool_indices",
    "get_audio_cu_seqlens": "cu_seqlens",
}


def apply_sync_free_audio(model: nn.Module) -> None:
    """Change the audio encoders of one model instance; transformers' classes stay as they are."""
    for module in model.modules():
        if _CHUNKS in names_in_forward(type(module)):
            padding = _ConvPadding(module)
            hook = partial(_pass_chunk_plan, padding)
            module.register_forward_pre_hook(hook, with_kwargs=True)


def frame_mask(base: nn.Module, mask: Tensor, device: torch.device) -> Tensor:
    """The mask of a batch, which is on the host, as the forward of a model gets it."""
    on_device = copy_to_device(mask, device)
    if not any(_CHUNKS in names_in_forward(type(module)) for module in base.children()):
        return on_device
    return FrameMask.of(on_device.bool(), mask.bool())


class FrameMask(PlaceholderMask):
    """A mask over the frames of sounds. Their numbers are taken from the host copy, and stay on the host."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.sum, torch.sum):
            with torch._C.DisableTorchFunctionSubclass():
                return func(args[0].host, *args[1:], **(kwargs or {}))
        if func is Tensor.bool:
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)


class _ConvPadding:
    """Zeros after the end of each sound in the inputs of an encoder's 2d convolutions, by forward pre-hooks.

    The encoder calls its convolutions in turn, for one slice of the chunks after the other.
    """

    def __init__(self, encoder: nn.Module) -> None:
        self.lengths_C: Tensor | None = None  # frames after which chunks are zero; None: no zeros
        self._first = 0  # chunk of the next slice
        self._slice_C = torch.zeros(0)
        convs = [child for child in encoder.children() if isinstance(child, nn.Conv2d)]
        for index, conv in enumerate(convs):
            before = convs[index - 1] if index else None
            conv.register_forward_pre_hook(partial(self._end_sounds, before))

    def plan(self, chunk_lengths: Tensor, lengths: Tensor, size: int, device: torch.device) -> None:
        """`size`: frames of a full chunk, to which the last one of a longer sound is padded when it is alone, too."""
        counts = (lengths + size - 1) // size
        alone = torch.where(counts > 1, size, lengths).repeat_interleave(counts)
        is_needed = bool((alone < chunk_lengths.max()).any())
        self.lengths_C = copy_to_device(alone, device) if is_needed else None
        self._first = 0

    def _end_sounds(self, before: nn.Conv2d | None, conv: nn.Module, args: Any) -> Any:
        if self.lengths_C is None:
            return None
        inputs = args[0]
        if before is None:  # a new slice; its padding is zero
            self._slice_C = self.lengths_C[self._first : self._first + len(inputs)]
            self._first += len(inputs)
            return None
        kernel, stride, pad = before.kernel_size[-1], before.stride[-1], int(before.padding[-1])
        self._slice_C = (self._slice_C + 2 * pad - kernel) // stride + 1
        is_after_CL = torch.arange(inputs.shape[-1], device=inputs.device) >= self._slice_C[:, None]
        return (inputs.masked_fill(is_after_CL[:, None, None], 0.0), *args[1:])


def _pass_chunk_plan(
    padding: _ConvPadding, encoder: Any, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    """Forward pre-hook: adds what the encoder would otherwise derive from the lengths of the sounds."""
    features_ML = kwargs["input_features"] if "input_features" in kwargs else args[0]
    lengths = kwargs.get("feature_lens")
    if lengths is None or lengths.device.type != "cpu":
        padding.lengths_C = None
        return None
    functions = sys.modules[type(encoder).__module__]
    known = {"feature_lens": lengths, "n_window": encoder.n_window}
    known["n_window_infer"] = getattr(encoder, "n_window_infer", None)
    # The place of each frame in its chunk; 0 is padding.
    places_1L = torch.arange(1, features_ML.shape[1] + 1)[None]
    places, known["chunk_lengths"] = getattr(functions, _CHUNKS)(
        places_1L, lengths, encoder.n_window
    )
    plan = {"chunk_lengths": known["chunk_lengths"]}
    padding.plan(plan["chunk_lengths"], lengths, 2 * encoder.n_window, features_ML.device)
    for name in names_in_forward(type(encoder)):
        if name in _DERIVED:
            function = getattr(functions, name)
            wanted = inspect.signature(function).parameters.keys() & known.keys()
            plan[_DERIVED[name]] = function(**{key: known[key] for key in wanted})
    moved = {name: copy_to_device(one, features_ML.device) for name, one in plan.items()}
    places_CL = copy_to_device(places[:, 0], features_ML.device)
    padded_ML = torch.cat([torch.zeros_like(features_ML[:, :1]), features_ML], dim=1)
    planned = {
        **moved,
        "padded_feature": padded_ML[:, places_CL].transpose(0, 1),
        "max_seqlen": int(plan["cu_seqlens"].diff().max()),
    }
    return args, {**kwargs, **planned}

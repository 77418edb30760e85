"""Encoders and their features without waiting for the GPU: the same numbers, by way of hooks and layers of our own.

Grids of images stay on the host (`PackedBatch.to` leaves them there). What encoders make of a grid, positions of its
patches and their shares in the table of embeddings, is made once for each size and kept; transformers would ask the GPU
for each grid, and launch dozens of kernels for it. Which tokens stand for media, and whether there are as many of them
as features, is looked up in the tokens on the host. Features that go into deeper layers are laid out over all tokens
once, instead of asking the GPU at each layer which tokens are images.
"""

from __future__ import annotations

import inspect
from functools import partial
from types import EllipsisType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from mvp_engine.errors import UserError


def tune(model: nn.Module, decoder: nn.Module) -> None:
    """Give a model of transformers what of this suits it."""
    for module in list(model.modules()):
        if (
            isinstance(module, nn.Conv3d)
            and module.kernel_size == module.stride
            and not any(module.padding)
        ):
            module.__class__ = PatchConv3d  # the same layer with the same parameters
        if "grid_thw" in _parameters(module):
            hook = _plan_ahead if _asks_for(module) == _KNOWN else _send_grid
            module.register_forward_pre_hook(hook, with_kwargs=True)
        if hasattr(module, "get_placeholder_mask"):
            module.__dict__["get_placeholder_mask"] = partial(_placeholder_mask, module)
    if hasattr(decoder, "_deepstack_process"):
        decoder.register_forward_pre_hook(_lay_out, with_kwargs=True)


class PatchConv3d(nn.Conv3d):
    """A convolution whose kernel meets every patch once. Given patches one by one it is a matrix product, for which
    there are quick kernels in every precision."""

    def forward(self, patches: Tensor) -> Tensor:
        if patches.shape[2:] != self.kernel_size or self.groups != 1:
            return super().forward(patches)
        out_PC = F.linear(patches.flatten(1), self.weight.flatten(1), self.bias)
        return out_PC[:, :, None, None, None]


def _parameters(module: nn.Module) -> Any:
    return inspect.signature(module.forward).parameters


def _given(args: Any, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    patches: Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    return patches, kwargs.get("grid_thw", args[1] if len(args) > 1 else None)


def _send_grid(
    encoder: Any, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    """A forward pre-hook: grids that are on the host, for an encoder that looks at them on its own device."""
    patches, grid = _given(args, kwargs)
    return None if grid is None else (args[:1], {**kwargs, "grid_thw": grid.to(patches.device)})


def _plan_ahead(
    encoder: Any, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    """A forward pre-hook: grids that are on the host, for an encoder that may be on a GPU."""
    patches, grid = _given(args, kwargs)
    if grid is None or grid.is_cuda:
        return None
    from transformers.vision_utils import get_vision_cu_seqlens

    plans = [_plan(encoder, tuple(one), patches.device) for one in grid.tolist()]
    indices, weights, positions = (torch.cat(parts) for parts in zip(*plans, strict=True))
    ahead = {"interp_indices": indices, "interp_weights": weights, "position_ids": positions}
    ends = get_vision_cu_seqlens(grid)
    ahead["cu_seqlens"] = _send(ends, patches.device)
    return args[:1], {**kwargs, "grid_thw": grid, **ahead, "max_seqlen": int(ends.diff().max())}


def _plan(encoder: Any, grid: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
    """Indices and weights of the position embeddings, and the positions, of one image or video."""
    kept = _PLANS.setdefault(encoder, {})
    if (grid, device) not in kept:
        from transformers.vision_utils import (
            get_vision_interpolation_indices_and_weights,
            get_vision_position_ids,
        )

        if len(kept) >= MOST_PLANS:
            kept.clear()
        sizes, merge = torch.tensor([grid]), encoder.spatial_merge_size
        shares = get_vision_interpolation_indices_and_weights(
            sizes,
            num_grid_per_side=encoder.num_grid_per_side,
            mode=encoder.interpolation_mode,
            align_corners=encoder.interpolation_align_corners,
            spatial_merge_size=merge,
        )
        kept[grid, device] = tuple(
            one.to(device) for one in (*shares, get_vision_position_ids(sizes, merge))
        )
    return kept[grid, device]


MOST_PLANS = 2048  # about 70 kB each
_PLANS: WeakKeyDictionary[nn.Module, dict[Any, tuple[Tensor, ...]]] = WeakKeyDictionary()


# What an encoder may ask of transformers about its grids, if all of it is to be planned here.
_KNOWN = {"interpolation_indices_and_weights", "position_ids", "attention_seqlens"}


def _asks_for(encoder: nn.Module) -> set[str]:
    names = inspect.unwrap(type(encoder).forward).__code__.co_names
    return {name.removeprefix("get_vision_") for name in names if name.startswith("get_vision_")}


class _EveryToken:
    """In the place of the mask that says which tokens a layer's features are for. What a decoder indexes with, the
    mask on its device, is then the first row of the batch: all tokens, of which there are features for each."""

    def to(self, device: torch.device) -> int:
        return 0


def _lay_out(
    decoder: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    """A forward pre-hook: features of images for deeper layers, a row for each token, zero where it is text."""
    mask, layers = kwargs.get("visual_pos_masks"), kwargs.get("deepstack_visual_embeds")
    if mask is None or layers is None:
        return None
    places_N = _places(mask[0], len(layers[0]))
    wide = [
        _Insert.apply(layer.new_zeros(mask.shape[1], layer.shape[1]), places_N, layer)
        for layer in layers
    ]
    return args, {**kwargs, "visual_pos_masks": _EveryToken(), "deepstack_visual_embeds": wide}


# ---- Features in the place of tokens --------------------------------------------------------------------------------

_ON_HOST = WeakTensorKeyDictionary()


def remember(input_ids: Tensor, on_host: Tensor | None) -> None:
    """What these tokens are, for those who would ask the GPU for it."""
    if (
        on_host is not None and on_host.numel() == input_ids.numel()
    ):  # not if ranks share the tokens
        _ON_HOST[input_ids] = on_host.view(input_ids.shape)


def _placeholder_mask(
    model: Any,
    input_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """transformers' own, which compares numbers of tokens and features, but on the host: of tensors on the GPU it is
    shown the shapes alone."""
    theirs = partial(type(model).get_placeholder_mask, model)
    unknown = input_ids is None or torch.compiler.is_compiling()
    ids = None if unknown else _ON_HOST.get(input_ids)
    if ids is None or inputs_embeds is None:
        return theirs(input_ids, inputs_embeds, *args, **kwargs)

    def shape_of(value: Any) -> Any:
        return torch.empty(()).expand(value.shape) if isinstance(value, Tensor) else value

    found = theirs(
        ids,
        shape_of(inputs_embeds),
        *map(shape_of, args),
        **{k: shape_of(v) for k, v in kwargs.items()},
    )

    def sent(mask: Any) -> Any:
        if not isinstance(mask, Tensor):
            return mask
        by_feature = mask.ndim > ids.ndim
        mask = (
            mask[..., :1].contiguous() if by_feature else mask
        )  # the same for all features of a token
        there = _send(mask, inputs_embeds.device)
        return _Mask.of(there, mask) if by_feature else there

    return tuple(map(sent, found)) if isinstance(found, tuple) else sent(found)


def _send(here: Tensor, device: torch.device) -> Tensor:
    """To the device, without waiting for what it does."""
    return (
        here.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else here.to(device)
    )


class _Mask(Tensor):
    """Which tokens features are to replace, all of them, and the same on the host: features are put in place, and
    masks of images and of videos made one, without asking the GPU where a mask is true."""

    here: Tensor  # with one entry for all features of a token

    @classmethod
    def of(cls, mask: Tensor, here: Tensor) -> _Mask:
        new = mask.as_subclass(cls)
        new.here = here
        return new

    @property
    def whole(self) -> bool:
        return self.shape == self.here.shape

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.masked_scatter and len(args) == 3 and isinstance(args[1], cls):
                return _insert(*args)
            if func is Tensor.sum and len(args) == 1 and not kwargs and args[0].whole:
                return args[0].here.sum()
            here = _made_here(func, args)
            if func in (Tensor.__getitem__, Tensor.__setitem__):
                args = (args[0], _by_place(args[1]), *args[2:])
            found = func(*args, **(kwargs or {}))
        return found if here is None else cls.of(found, here)


def _made_here(func: Any, args: Any) -> Tensor | None:
    """On the host: what a function makes of masks, where it is a mask again."""
    mask, other = args[0], args[1] if len(args) > 1 else None
    if not isinstance(mask, _Mask):
        return None
    if func in (Tensor.expand, Tensor.expand_as, Tensor.to):
        return mask.here
    if func is Tensor.__or__ and isinstance(other, _Mask) and mask.shape == other.shape:
        return mask.here | other.here
    if func is not Tensor.__getitem__:
        return None
    match other:
        case _Mask() if mask.whole and other.whole:
            return mask.here[other.here]
        case (EllipsisType(), int(feature)) if feature == 0:
            return mask.here[..., 0]
    return None


def _by_place(index: Any) -> tuple[Any, ...]:
    """An index in which the places where a mask is true stand for the mask."""
    found: list[Any] = []
    for part in index if isinstance(index, tuple) else (index,):
        known = isinstance(part, _Mask) and part.whole
        found += _send(part.here.nonzero().T.contiguous(), part.device) if known else [part]
    return tuple(found)


def _insert(embeds: Tensor, mask: _Mask, features: Tensor) -> Tensor:
    flat_TD, features_ND = embeds.flatten(0, -2), features.reshape(-1, embeds.shape[-1])
    if (count := int(mask.here.sum())) != len(features_ND):  # not all models compare them
        raise UserError(
            f"{count} tokens of a batch stand for media whose encoder gives {len(features_ND)} features: make "
            "the tokens with the processor that belongs to the model"
        )
    mask_T = mask.as_subclass(Tensor)[..., 0].flatten()
    return _Insert.apply(flat_TD, _places(mask_T, len(features_ND)), features_ND).view(embeds.shape)


def _places(mask_T: Tensor, count: int) -> Tensor:
    """Where the mask is true, which is `count` times, without asking for their number."""
    order_T = torch.where(mask_T, mask_T.cumsum(0) - 1, count)
    places = torch.empty(count + 1, dtype=torch.long, device=mask_T.device)
    return places.scatter_(0, order_T, torch.arange(len(mask_T), device=mask_T.device))[:count]


class _Insert(torch.autograd.Function):
    """Rows in the place of others. Its backward, unlike that of `masked_scatter`, knows where they are."""

    @staticmethod
    def forward(ctx: Any, into_TD: Tensor, places_N: Tensor, rows_ND: Tensor) -> Tensor:
        ctx.save_for_backward(places_N)
        return into_TD.index_copy(0, places_N, rows_ND)

    @staticmethod
    def backward(ctx: Any, d_TD: Tensor) -> tuple[Tensor | None, ...]:
        (places_N,) = ctx.saved_tensors
        d_into = d_TD.index_fill(0, places_N, 0) if ctx.needs_input_grad[0] else None
        return d_into, None, d_TD.index_select(0, places_N) if ctx.needs_input_grad[2] else None

"""Encoder features in place of placeholder tokens, without host syncs.

A sequence with an image holds one placeholder token per feature vector of the encoder. transformers
finds the placeholders on the GPU and copies the features over their embeddings with
`masked_scatter`; comparing the two counts, and indexing by a mask, are host syncs. The host has
the token ids anyway, so here the masks are computed there and copied to the GPU. The results,
gradients included, are bit-equal.

What is replaced: `get_placeholder_mask` becomes an attribute of each model *instance* that has
the method. It is called as a plain method in the middle of a forward, so neither a hook nor an
argument reaches it. The class stays as transformers wrote it: other models of the process,
such as a reference model without this wrapper, are not affected. The replacement still calls the
method of the class, with host tensors.
"""

from __future__ import annotations

from functools import partial
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from mvp_engine.data.batch import PackedBatch
from mvp_engine.errors import UserError


def apply_sync_free_features(model: nn.Module, decoder: nn.Module) -> None:
    """Change one model instance, and its text decoder if that takes features at deeper layers."""
    for module in list(model.modules()):
        if hasattr(module, "get_placeholder_mask"):
            module.__dict__["get_placeholder_mask"] = partial(_placeholder_mask, module)
    if hasattr(decoder, "_deepstack_process"):
        decoder.register_forward_pre_hook(_spread_deepstack, with_kwargs=True)


def copy_to_device(host: Tensor, device: torch.device) -> Tensor:
    """A copy on `device`; to a GPU it is asynchronous, which needs pinned memory."""
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


# ---- Placeholder masks from the token ids on the host ------------------------------------------

_HOST_IDS = WeakTensorKeyDictionary()  # input_ids on the device -> the same values on the host
_TYPES = WeakTensorKeyDictionary()  # input_ids on the device -> mm_token_type_ids on the host
NO_TOKEN = -1
OTHER_TYPE = {"image_features": 2, "video_features": 1}  # of mm_token_type_ids: 1 image, 2 video


def register_host_ids(input_ids: Tensor, host_input_ids: Tensor | None) -> None:
    """Remember the host copy of `input_ids`, as long as that tensor lives.

    With sequence parallelism `input_ids` may be a slice; then the sizes differ and nothing is kept.
    """
    if host_input_ids is not None and host_input_ids.numel() == input_ids.numel():
        _HOST_IDS[input_ids] = host_input_ids.view(input_ids.shape)


def register_video_tokens(input_ids: Tensor, batch: PackedBatch, config: Any) -> None:
    """Remember which tokens are videos where images and videos have one placeholder, such as in GLM-4V."""
    types = batch.token_fields.get("mm_token_type_ids")
    host_ids = _HOST_IDS.get(input_ids)
    num_kinds = sum(len(media.row_counts) > 0 for media in batch.media.values())
    if types is None or host_ids is None or num_kinds < 2:
        return
    video_token = getattr(config, "video_token_id", None)
    if video_token is not None and not bool((host_ids == video_token).any()):
        _TYPES[input_ids] = types.cpu().view(input_ids.shape)


def _placeholder_mask(
    model: Any,
    input_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """transformers' `get_placeholder_mask`, run on host token ids; the masks go to the GPU.

    The method compares the number of placeholders with the shape of the features. It gets tensors
    of those shapes on the host, never the features themselves.
    """
    original = partial(type(model).get_placeholder_mask, model)
    host_ids = None
    if input_ids is not None and not torch.compiler.is_compiling():
        host_ids = _HOST_IDS.get(input_ids)
    if host_ids is None or inputs_embeds is None:
        return original(input_ids, inputs_embeds, *args, **kwargs)

    types = _TYPES.get(input_ids)
    given = [name for name in OTHER_TYPE if kwargs.get(name) is not None]
    if types is not None and len(given) == 1:
        host_ids = host_ids.masked_fill(types == OTHER_TYPE[given[0]], NO_TOKEN)
    host_args = [_shape_only(value) for value in (inputs_embeds, *args)]
    host_kwargs = {name: _shape_only(value) for name, value in kwargs.items()}
    try:
        masks = original(host_ids, *host_args, **host_kwargs)
    except ValueError as error:
        raise UserError(
            f"{type(model).__name__}: {error}. If rows with images and rows with videos train alone, this model cannot "
            "have both in one pack"
        ) from error
    device = inputs_embeds.device
    if isinstance(masks, tuple):
        return tuple(_mask_to_device(mask, host_ids, device) for mask in masks)
    return _mask_to_device(masks, host_ids, device)


def _shape_only(value: Any) -> Any:
    """A tensor of the same shape on the host that takes no memory; other values as they are."""
    return torch.empty(()).expand(value.shape) if isinstance(value, Tensor) else value


def _mask_to_device(mask: Any, host_ids: Tensor, device: torch.device) -> Any:
    if not isinstance(mask, Tensor):
        return mask
    if mask.ndim <= host_ids.ndim:  # a mask over token ids, used to replace ids by ids
        return copy_to_device(mask, device)
    mask_BT1 = mask[..., :1].contiguous()  # equal for all features of a token
    return PlaceholderMask.of(copy_to_device(mask_BT1, device), mask_BT1)


class PlaceholderMask(Tensor):
    """A boolean mask over embeddings on the GPU that carries its own copy on the host.

    Operations that would read the mask back from the GPU use the host copy: `masked_scatter`,
    `sum`, and indexing by the mask. Operations that return a mask again (`expand`, `to`, `|`,
    and the two kinds of indexing that deepstack models use) return a PlaceholderMask; all others
    return plain tensors.
    """

    host: Tensor  # one entry per token, even where the mask was expanded over features

    @classmethod
    def of(cls, mask: Tensor, host: Tensor) -> PlaceholderMask:
        new = mask.as_subclass(cls)
        new.host = host
        return new

    @property
    def is_per_token(self) -> bool:
        """Whether the mask has the shape of its host copy, that is, was not expanded."""
        return self.shape == self.host.shape

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            is_scatter = func is Tensor.masked_scatter and len(args) == 3
            if is_scatter and isinstance(args[1], cls):
                return _insert_features(*args)
            is_total = func is Tensor.sum and len(args) == 1 and not kwargs
            if is_total and args[0].is_per_token:
                return args[0].host.sum()
            host = _host_result(func, args)
            if func in (Tensor.__getitem__, Tensor.__setitem__):
                args = (args[0], _masks_to_indices(args[1]), *args[2:])
            result = func(*args, **(kwargs or {}))
        return result if host is None else cls.of(result, host)


def _host_result(func: Any, args: Any) -> Tensor | None:
    """The host copy of the result, for functions that return a PlaceholderMask again."""
    mask = args[0]
    other = args[1] if len(args) > 1 else None
    if not isinstance(mask, PlaceholderMask):
        return None
    if func in (Tensor.expand, Tensor.expand_as, Tensor.to):
        return mask.host
    if func is Tensor.__or__ and isinstance(other, PlaceholderMask):
        return mask.host | other.host if mask.shape == other.shape else None
    if func is not Tensor.__getitem__:
        return None
    match other:
        case PlaceholderMask():
            both_per_token = mask.is_per_token and other.is_per_token
            return mask.host[other.host] if both_per_token else None
        case (EllipsisType(), int(0)):  # mask[..., 0]
            return mask.host[..., 0]
    return None


def _masks_to_indices(index: Any) -> tuple[Any, ...]:
    """An index with integer positions in place of masks: indexing by a GPU mask is a host sync."""
    converted: list[Any] = []
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, PlaceholderMask) and part.is_per_token:
            positions = part.host.nonzero().T.contiguous()  # a row per dimension of the mask
            converted += copy_to_device(positions, part.device)
        else:
            converted.append(part)
    return tuple(converted)


# ---- Insertion ---------------------------------------------------------------------------------


def _insert_features(embeds: Tensor, mask: PlaceholderMask, features: Tensor) -> Tensor:
    """`embeds.masked_scatter(mask, features)`; a wrong number of features is an error."""
    features_ND = features.reshape(-1, embeds.shape[-1])
    num_placeholders = int(mask.host.sum())
    if num_placeholders != len(features_ND):  # not all models of transformers compare them
        raise UserError(
            f"a batch has {num_placeholders} tokens that are placeholders for media, but the "
            f"encoder returned {len(features_ND)} features: tokenize with the model's own processor"
        )
    mask_T = mask.as_subclass(Tensor)[..., 0].flatten()
    positions_N = _true_positions(mask_T, len(features_ND))
    if embeds.ndim == 3 and embeds.shape[0] == 1:
        # Not a view, which later layers do not get either: torch would compile them a second time.
        return _InsertRows.apply(embeds, positions_N, features_ND[None])
    embeds_TD = embeds.flatten(0, -2)
    return _InsertRows.apply(embeds_TD, positions_N, features_ND).view(embeds.shape)


def _true_positions(mask_T: Tensor, count: int) -> Tensor:
    """`mask_T.nonzero()` for a mask with `count` true entries, known to the host: no host sync."""
    rank_T = torch.where(mask_T, mask_T.cumsum(0) - 1, count)
    positions = torch.empty(count + 1, dtype=torch.long, device=mask_T.device)
    positions.scatter_(0, rank_T, torch.arange(len(mask_T), device=mask_T.device))
    return positions[:count]  # the last entry collected all false ones


class _InsertRows(torch.autograd.Function):
    """Replace rows of a matrix, (T, D) or (1, T, D). The backward of `masked_scatter` would index by the mask again."""

    @staticmethod
    def forward(ctx: Any, embeds_TD: Tensor, positions_N: Tensor, rows_ND: Tensor) -> Tensor:
        ctx.save_for_backward(positions_N)
        return embeds_TD.index_copy(-2, positions_N, rows_ND)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        (positions_N,) = ctx.saved_tensors
        needs_embeds, _, needs_rows = ctx.needs_input_grad
        grad_embeds = grad_TD.index_fill(-2, positions_N, 0) if needs_embeds else None
        grad_rows = grad_TD.index_select(-2, positions_N) if needs_rows else None
        return grad_embeds, None, grad_rows


# ---- Deepstack: features that are added at deeper layers ---------------------------------------


class _AllTokens:
    """Stands for `visual_pos_masks` in a decoder that adds one feature row per token.

    The decoder indexes `hidden_states[mask.to(device), :]`. With 0 as the index that is the only
    row of the batch, which is all tokens.
    """

    def to(self, device: torch.device) -> int:
        return 0


def _spread_deepstack(
    decoder: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    """Forward pre-hook: one deepstack feature row per token, zero for text.

    The decoder would index by the mask at each deepstack layer: six host syncs per micro-batch
    for Qwen3-VL.
    """
    mask = kwargs.get("visual_pos_masks")
    layers = kwargs.get("deepstack_visual_embeds")
    if mask is None or layers is None:
        return None
    positions_N = _true_positions(mask[0], len(layers[0]))
    spread = []
    for features_ND in layers:
        zeros_TD = features_ND.new_zeros(mask.shape[1], features_ND.shape[1])
        spread.append(_InsertRows.apply(zeros_TD, positions_N, features_ND))
    changed = {"visual_pos_masks": _AllTokens(), "deepstack_visual_embeds": spread}
    return args, {**kwargs, **changed}

"""Attention over packed sequences, registered with transformers: no sequence sees another, whatever the model.

Legend: T tokens of all sequences, L tokens of one, H query heads, K key/value heads, d head size, N items.

After `use(config)` the text layers of a model call `packed_attention` and make no mask; the boundaries arrive as
keyword arguments of the model's forward (`boundaries(batch)`). Layers of its encoders call `encoder_attention`, with
boundaries of their own or one item per row. What a layer asks for and this cannot do is refused by name, not ignored.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mvp_engine.distributed.ulysses import UlyssesShard
from mvp_engine.errors import UserError
from mvp_engine.ops import cudnn_attention as ragged
from mvp_engine.ops import flex_attention as flex
from mvp_engine.ops.autocast import autocast_dtype
from mvp_engine.ops.reference_attention import reference_attention

NAME = "mvp_packed"
# Encoders that see "flash" hand over all their images in one call with boundaries, else they loop over images.
ENCODER = "mvp_encoder_flash"

# Handed down by models next to what matters; none of them changes what attention computes.
_HARMLESS = {
    "cu_seq_lens_k", "max_length_k", "position_ids", "position_embeddings", "use_cache", "output_attentions",
    "output_hidden_states", "output_router_logits", "cache_position", "return_dict", "layer_idx", "logits_to_keep",
}  # fmt: skip


# What masks are made of. The first three say what attention does anyway; blocks are looked up by index.
_PLAIN = {"causal_mask_function", "sliding_window_overlay", "packed_sequence_mask_function"}
_BLOCKS = "blockwise_overlay"


class UnsupportedAttention(UserError, NotImplementedError):
    """A model asks attention for something that packed attention does not have."""


@dataclass(frozen=True)
class Overlay:
    """A mask that is more than causal, such as images whose tokens all see each other: who may see whom, by index.

    It has the shape of a mask tensor, since some models hand it to transformers' mask functions a second time.
    """

    allows: Callable[[int, int, Tensor, Tensor], Tensor]
    shape: tuple[int, int, int, int]
    ndim: int = 4


@dataclass(frozen=True)
class Window:
    """A mask that is causal within a window. Most layers tell attention their window, too; some leave it at that."""

    size: int


@dataclass(frozen=True)
class NoMask:
    """What a decoder is given for its mask: without one transformers would look for sequences in the positions, and
    wait for the GPU to see whether there are several. It has the shape of one."""

    shape: tuple[int, int, int, int]
    ndim: int = 4


def without_mask(
    decoder: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    """A forward pre-hook for decoders, and for models that make the masks of theirs."""
    inputs = (
        kwargs.get("inputs_embeds")
        if kwargs.get("inputs_embeds") is not None
        else kwargs.get("input_ids")
    )
    packed = decoder.config._attn_implementation == NAME  # type: ignore[union-attr]
    if not packed or inputs is None or kwargs.get("attention_mask") is not None:
        return None
    tokens = inputs.shape[1]
    return args, {**kwargs, "attention_mask": NoMask((1, 1, tokens, tokens))}


def register() -> str:
    """Make both names known to transformers (again is fine); gives the name for text."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, _packed_mask)
    AttentionInterface.register(ENCODER, encoder_attention)
    AttentionMaskInterface.register(ENCODER, sdpa_mask)
    return NAME


def use(config: Any) -> None:
    """Packed attention in the text backbone of a model that is built, encoder attention in all that is not text.

    Before it is built, only `NAME` may be set: transformers takes a name with "flash" for a kernel to download.
    """
    config._attn_implementation = register()  # here and in all below
    text = config.get_text_config()
    for sub in _below(config):
        if any(part is text for part in config_tree(sub)):
            use(sub)
        else:
            sub._attn_implementation = ENCODER


@contextmanager
def own_attention(config: Any) -> Iterator[None]:
    """The model with transformers' own plain attention in every part."""
    before = [(part, part._attn_implementation) for part in config_tree(config)]
    config._attn_implementation = "eager"
    try:
        yield
    finally:
        for part, name in before:  # those above come first, and set all below
            part._attn_implementation = name


def _below(config: Any) -> list[Any]:
    return [sub for key in config.sub_configs if (sub := getattr(config, key, None)) is not None]


def config_tree(config: Any) -> list[Any]:
    """A config and those of all its parts, each above those below it."""
    return [config, *(part for sub in _below(config) for part in config_tree(sub))]


def boundaries(cu_seqlens: Tensor, max_seqlen: int) -> dict[str, Any]:
    """The keyword arguments of a model's forward that carry the boundaries to every attention layer."""
    if (
        cu_seqlens.is_cuda
    ):  # or compiled blocks would be compiled anew when the number of sequences first changes
        torch._dynamo.maybe_mark_dynamic(cu_seqlens, 0)
    return {
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": max_seqlen,
        "max_length_k": max_seqlen,
    }


def _packed_mask(
    *, mask_function: Callable[..., Any], attention_mask: Any, kv_length: int, config: Any, **_: Any
) -> Overlay | Window | None:
    """What a model asks of its mask besides causality, which attention knows of."""
    if isinstance(attention_mask, Overlay):
        return attention_mask
    found = dict(_mask_parts(mask_function))
    parts = set(found)
    leaves_it_to_the_mask = (
        getattr(config, "use_bidirectional_attention", None) is True
    )  # PaliGemma's layers do
    if parts <= _PLAIN and not leaves_it_to_the_mask:
        window = found.get("sliding_window_overlay")
        return (
            None
            if window is None
            else Window(inspect.getclosurevars(window).nonlocals["sliding_window"])
        )
    if parts <= {*_PLAIN, _BLOCKS}:
        return Overlay(mask_function, (1, 1, kv_length, kv_length))
    unknown = ", ".join(sorted(parts - {*_PLAIN, _BLOCKS}))
    raise UnsupportedAttention(
        f"the mask of {config.model_type} has {unknown}, which packed attention does not have"
    )


def _mask_parts(function: Callable[..., Any]) -> list[tuple[str, Callable[..., Any]]]:
    """The functions that transformers put together to this one, with the names of their makers."""
    maker = getattr(function, "__qualname__", repr(function)).split(".")[0]
    if maker not in ("and_masks", "or_masks"):
        return [(maker, function)]
    return [
        found
        for part in inspect.getclosurevars(function).nonlocals["mask_functions"]
        for found in _mask_parts(part)
    ]


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Overlay | Window | NoMask | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    ulysses_shard: UlyssesShard | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The signature of transformers' attention interface: (1, H, T, d) in, (1, T, H, d) out."""
    who = type(module).__name__
    _refuse(who, others)
    if isinstance(attention_mask, Tensor):
        raise UnsupportedAttention(
            f"{who} brings an attention mask of its own, which packed attention cannot honour"
        )
    if isinstance(attention_mask, Window):
        if sliding_window not in (None, attention_mask.size):
            raise UnsupportedAttention(
                f"{who} has a window of {sliding_window} and a mask with one of {attention_mask.size}"
            )
        sliding_window = attention_mask.size
    if cu_seq_lens_q is None or max_length_q is None:
        raise UnsupportedAttention(
            f"{who} was not told where sequences begin: its model drops keyword arguments"
        )
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise UnsupportedAttention(
            f"{who} calls attention with a batch or a cache; packed batches have neither"
        )
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    q, k, v = (x[0] for x in _as_autocast(query, key, value))
    if ulysses_shard is not None:
        ranks = len(ulysses_shard.sizes)
        copies = max(
            1, ranks // k.shape[0]
        )  # fewer key/value heads than ranks: each goes to several
        k, v = k.repeat_interleave(copies, 0), v.repeat_interleave(copies, 0)
        q, k, v = ulysses_shard.to_heads(q, k, v)
        s_aux = None if s_aux is None else s_aux.chunk(ranks)[ulysses_shard.rank]
    how = (scaling, dropout, causal, sliding_window, softcap, s_aux)
    overlay = attention_mask if isinstance(attention_mask, Overlay) else None
    out = varlen_attention(q, k, v, cu_seq_lens_q, max_length_q, overlay, *how)
    if ulysses_shard is not None:
        out = ulysses_shard.to_tokens(out)
    return out.transpose(0, 1)[None].contiguous(), None  # some models view it


def encoder_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    ulysses_shard: UlyssesShard | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """(N, H, L, d) in, (N, L, H, d) out: an item per row with a mask of its own if it likes, or all in one row with
    boundaries. Ranks that share sequences each run the encoder whole."""
    who = type(module).__name__
    _refuse(who, others)
    causal = bool(getattr(module, "is_causal", False)) if is_causal is None else is_causal
    q, k, v = _as_autocast(query, key, value)
    if cu_seq_lens_q is not None:
        if query.shape[0] != 1 or query.shape[2] != key.shape[2] or attention_mask is not None:
            raise UnsupportedAttention(f"{who} has boundaries and also a batch, a cache or a mask")
        torch._assert_async(
            cu_seq_lens_q[-1] == query.shape[2], f"{who} was given boundaries that are not its own"
        )
        how = (scaling, dropout, causal, None, None, None)
        longest = query.shape[2] if max_length_q is None else int(max_length_q)
        return varlen_attention(q[0], k[0], v[0], cu_seq_lens_q, longest, None, *how).transpose(
            0, 1
        )[None], None
    if attention_mask is not None and attention_mask.ndim != 4:
        raise UnsupportedAttention(
            f"{who} has a mask of shape {tuple(attention_mask.shape)}, not (items, heads, L, L)"
        )
    out_NHLd = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=attention_mask,
        dropout_p=dropout,
        is_causal=causal and attention_mask is None,
        scale=scaling,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out_NHLd.transpose(1, 2), None


def _refuse(who: str, others: dict[str, Any]) -> None:
    unknown = [
        name for name, value in others.items() if name not in _HARMLESS and value is not None
    ]
    if unknown:
        raise UnsupportedAttention(
            f"{who} asks attention for {', '.join(unknown)}, which packed attention does not have"
        )


def _as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Norms and rotary positions may have brought float32 back."""
    dtype = autocast_dtype(tensors[0])
    return tensors if dtype is None else tuple(x.to(dtype) for x in tensors)


def varlen_attention(
    q_HTd: Tensor,
    k_KTd: Tensor,
    v_KTd: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    overlay: Overlay | None,
    scale: float | None,
    dropout: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    allows = None if overlay is None else overlay.allows
    if allows is None and dropout == 0.0 and softcap is None and sinks_H is None:
        what = (q_HTd, k_KTd, v_KTd, cu_seqlens, longest, scale, causal, window)
        if ragged.can(q_HTd, longest, causal, window):
            return _ragged(*what)
        if _flash_can(q_HTd, v_KTd):
            return _flash(*what)
    if dropout == 0.0 and flex.can(q_HTd, v_KTd):
        return _flex(
            q_HTd, k_KTd, v_KTd, cu_seqlens, allows, scale, causal, window, softcap, sinks_H
        )
    return _loop(
        q_HTd, k_KTd, v_KTd, cu_seqlens, allows, scale, dropout, causal, window, softcap, sinks_H
    )


_loop, _flex = reference_attention, flex.flex


def compile_around() -> None:
    """Blocks will be compiled: around what goes sequence by sequence, not through it, or each number of sequences would
    be a graph of its own; and around FlexAttention, which is compiled for sizes of its own."""
    global _loop, _flex
    _loop, _flex = torch.compiler.disable(reference_attention), torch.compiler.disable(flex.flex)


def _ragged(q_HTd: Tensor, k_KTd: Tensor, v_KTd: Tensor, *how: Any) -> Tensor:
    """cuDNN's kernels: one call for all sequences, no wait for the GPU, and the fastest where they exist."""
    q, k, v = (x.transpose(0, 1) for x in (q_HTd, k_KTd, v_KTd))
    return ragged.ragged_attention(q, k, v, *how).transpose(0, 1)


def _flash_can(q: Tensor, v: Tensor) -> bool:
    """torch's variable-length FlashAttention: the same, on more GPUs and head sizes."""
    fits = q.shape[-1] % 8 == 0 and q.shape[-1] <= 256 and v.shape[-1] == q.shape[-1]
    return fits and q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)


def _flash(
    q_HTd: Tensor,
    k_KTd: Tensor,
    v_KTd: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    scale: float | None,
    causal: bool,
    window: int | None,
) -> Tensor:
    from mvp_engine.ops.torch_varlen import varlen

    q, k, v = (x.transpose(0, 1).contiguous() for x in (q_HTd, k_KTd, v_KTd))
    behind = (
        -1 if window is None or window >= longest else window - 1
    )  # a token sees itself and window - 1 before it
    ahead = 0 if causal else behind
    return varlen(q, k, v, cu_seqlens, longest, scale, (behind, ahead)).transpose(0, 1)

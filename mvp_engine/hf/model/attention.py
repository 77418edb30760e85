"""Packed attention as transformers attention functions: registration, call signatures, refusals.

Legend: T tokens of all sequences, L tokens of one item, H query heads, K key/value heads, d head size, N items.

After `use(config)` the text layers of a model call `packed_attention` and build no mask tensor; the sequence boundaries
reach them as keyword arguments of the model's forward (`boundaries`). Encoder layers call `encoder_attention`, either
with boundaries of their own or with one item per row. An option that a layer passes and that is not supported raises
`UnsupportedAttention`; it is never ignored. Masks are in `mvp_engine.hf.model.attention`, kernels in
`mvp_engine.ops.attention`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mvp_engine.distributed.sequence_parallel import ContextShard, KeyExchange, Keys, UlyssesShard
from mvp_engine.errors import UserError
from mvp_engine.hf.model.kv_cache import KVCache
from mvp_engine.ops import triton_ops
from mvp_engine.ops.attention import varlen_attention
from mvp_engine.ops.attn_spec import AttnSpec, KeySpec, MaskFunction
from mvp_engine.ops.precision import autocast_dtype

__all__ = [
    "ENCODER",
    "NAME",
    "Overlay",
    "UnsupportedAttention",
    "boundaries",
    "build_encoders_eagerly",
    "check_options",
    "config_tree",
    "eager_attention",
    "encoder_attention",
    "packed_attention",
    "register",
    "register_variant",
    "use",
    "use_own_masks",
    "without_mask",
]

# With "flash" in the name, encoders of transformers pass all images in one call with boundaries; without it they loop
# over images.
ENCODER = "mvp_encoder_flash"

# Keyword arguments that models pass on to attention and that do not change what it computes.
_IGNORED = {
    "cu_seq_lens_k",
    "max_length_k",
    "position_ids",
    "position_embeddings",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "cache_position",
    "return_dict",
    "layer_idx",
    "logits_to_keep",
    "vision_feature_layer",
    "vision_feature_select_strategy",
    "kv_cache",  # of text layers; an encoder runs with the prompts only
}


def register() -> str:
    """Register both attention functions with transformers, as often as called; returns the name for text layers."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, packed_mask)
    AttentionInterface.register(ENCODER, encoder_attention)
    AttentionMaskInterface.register(ENCODER, sdpa_mask)
    return NAME


def register_variant(name: str, function: Callable[..., tuple[Tensor, None]]) -> None:
    """Register another attention function for text layers of packed batches, with the masks of packed attention.

    A model chooses it by `config._attn_implementation = name` in a text config, after `use`.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    PACKED.add(name)
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, packed_mask)


def use(config: Any) -> None:
    """Set packed attention in the text backbone of a built model, and encoder attention in all other parts.

    Before the model is built only `NAME` may be set: transformers takes a name with "flash" for a kernel to download.
    """
    config._attn_implementation = register()  # transformers' setter also sets all sub-configs
    text = config.get_text_config()
    for sub_config in _sub_configs(config):
        if any(part is text for part in config_tree(sub_config)):
            use(sub_config)
        else:
            sub_config._attn_implementation = ENCODER


def use_own_masks(model: nn.Module) -> None:
    """Give encoders with attention code of their own (Gemma 4's for audio) the masks that this code reads."""
    seen: list[Any] = []
    for encoder in model.modules():
        config = getattr(encoder, "config", None)
        if getattr(config, "_attn_implementation", None) != ENCODER:
            continue
        is_first = not any(config is other for other in seen)  # parents come before their layers
        seen.append(config)
        names = {name for layer in encoder.modules() for name in names_in_forward(type(layer))}
        if is_first and "ALL_ATTENTION_FUNCTIONS" not in names:
            config._attn_implementation = "eager"  # type: ignore[union-attr]


def names_in_forward(module_class: type) -> frozenset[str]:
    """The names of functions, methods and attributes in the code of a class's forward.

    To choose a path by what a layer does: transformers has no attribute that says which functions a layer calls.
    """
    code = getattr(inspect.unwrap(module_class.forward), "__code__", None)  # type: ignore[attr-defined]
    return frozenset() if code is None else frozenset(code.co_names)


def build_encoders_eagerly(config: Any) -> None:
    """Before a model is built: packed attention in its text backbone, transformers' eager code in all other parts."""
    text = config.get_text_config()
    for sub_config in _sub_configs(config):
        if any(part is text for part in config_tree(sub_config)):
            build_encoders_eagerly(sub_config)
        else:
            sub_config._attn_implementation = "eager"


@contextmanager
def eager_attention(config: Any) -> Iterator[None]:
    """Run the model with transformers' eager attention in every part."""
    before = [(part, part._attn_implementation) for part in config_tree(config)]
    config._attn_implementation = "eager"
    try:
        yield
    finally:
        # Parents come first: setting one also sets its sub-configs.
        for part, name in before:
            part._attn_implementation = name


def _sub_configs(config: Any) -> list[Any]:
    configs = [getattr(config, key, None) for key in config.sub_configs]
    return [sub_config for sub_config in configs if sub_config is not None]


def config_tree(config: Any) -> list[Any]:
    """A config and all its sub-configs, parents before children."""
    tree = [config]
    for sub_config in _sub_configs(config):
        tree += config_tree(sub_config)
    return tree


def boundaries(cu_seqlens: Tensor, max_seqlen: int) -> dict[str, Any]:
    """The keyword arguments of a model's forward that pass the sequence boundaries to every attention layer."""
    if cu_seqlens.is_cuda:
        # Otherwise the first change of the number of sequences would recompile every compiled block.
        torch._dynamo.maybe_mark_dynamic(cu_seqlens, 0)
    return {
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": max_seqlen,
        "max_length_k": max_seqlen,
    }


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Overlay | Window | Chunks | NoMask | None,
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
    kv_cache: KVCache | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of text layers, with transformers' signature: (1, H, T, d) in, (1, T, H, d) out."""
    layer = type(module).__name__
    check_options(layer, others)
    if isinstance(attention_mask, Tensor):
        raise UnsupportedAttention(
            f"{layer} passes its own attention mask tensor, which packed attention does not support"
        )
    if cu_seq_lens_q is None or max_length_q is None:
        raise UnsupportedAttention(
            f"{layer} received no sequence boundaries: its model drops keyword arguments of forward"
        )
    if isinstance(attention_mask, Chunks) and max_length_q > attention_mask.size:
        raise UnsupportedAttention(
            f"{layer} attends in chunks of {attention_mask.size} tokens, and a sequence has {max_length_q}: "
            "packed attention supports shorter sequences. Set data.max_length"
        )
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise UnsupportedAttention(
            f"{layer} calls attention with a batch dimension or a KV cache; packed batches have neither"
        )
    q_HTd = _as_autocast(query)[0]
    k_KTd = _as_autocast(key)[0]
    v_KTd = _as_autocast(value)[0]
    heads = None if ulysses_shard is None else ulysses_shard.heads
    if heads is not None:
        ranks = len(heads.sizes)
        # With fewer key/value heads than ranks, each head goes to several ranks.
        copies = max(1, ranks // k_KTd.shape[0])
        k_KTd = k_KTd.repeat_interleave(copies, 0)
        v_KTd = v_KTd.repeat_interleave(copies, 0)
        qkv = heads.to_heads(q_HTd, k_KTd, v_KTd)
        q_HTd = qkv[0]
        k_KTd = qkv[1]
        v_KTd = qkv[2]
        s_aux = None if s_aux is None else s_aux.chunk(ranks)[heads.rank]
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    spec = AttnSpec(
        cu_seqlens=cu_seq_lens_q,
        max_seqlen=max_length_q,
        scale=scaling,
        causal=is_causal,
        window=_window(layer, sliding_window, attention_mask),
        dropout=dropout,
        softcap=softcap,
        sinks=s_aux,
        mask_function=attention_mask.mask_function if isinstance(attention_mask, Overlay) else None,
    )
    context = None if ulysses_shard is None else ulysses_shard.context
    if context is not None:
        spec, exchange = context_spec(spec, context)
        gathered = exchange.run(k_KTd, v_KTd, context.context_group)
        k_KTd = gathered[0]
        v_KTd = gathered[1]
    if kv_cache is not None and kv_cache.is_prefilled:
        out_HTd = kv_cache.attend(module, q_HTd, k_KTd, v_KTd, spec)
    else:
        out_HTd = varlen_attention(q_HTd, k_KTd, v_KTd, spec)
        if kv_cache is not None:
            kv_cache.store_prompts(module, k_KTd, v_KTd)
    if heads is not None:
        out_HTd = heads.to_tokens(out_HTd)
    # Contiguous, since some models call view on it.
    return out_HTd.transpose(0, 1)[None].contiguous(), None


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
    """Attention of encoder layers, with transformers' signature: (N, H, L, d) in, (N, L, H, d) out.

    Either one item per row, with an optional mask, or all items in one row with boundaries. `ulysses_shard` is accepted
    and not used: the ranks of a sequence parallel group share items, not their tokens.
    """
    layer = type(module).__name__
    check_options(layer, others)
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", False))
    q_NHLd = _as_autocast(query)
    k_NKLd = _as_autocast(key)
    v_NKLd = _as_autocast(value)
    if cu_seq_lens_q is not None:
        tokens = query.shape[2]
        if query.shape[0] != 1 or tokens != key.shape[2] or attention_mask is not None:
            raise UnsupportedAttention(
                f"{layer} passes boundaries together with a batch dimension, a KV cache or a mask"
            )
        torch._assert_async(
            cu_seq_lens_q[-1] == tokens,
            f"{layer} received boundaries that do not end at its number of tokens",
        )
        max_seqlen = tokens if max_length_q is None else int(max_length_q)
        spec = AttnSpec(cu_seq_lens_q, max_seqlen, scaling, is_causal, dropout=dropout)
        out_HTd = varlen_attention(q_NHLd[0], k_NKLd[0], v_NKLd[0], spec)
        return out_HTd.transpose(0, 1)[None], None
    if attention_mask is not None and attention_mask.ndim != 4:
        raise UnsupportedAttention(
            f"{layer} passes a mask of shape {tuple(attention_mask.shape)}, not (items, heads, L, L)"
        )
    if (
        attention_mask is None
        and dropout == 0.0
        and triton_ops.short_attention_is_supported(q_NHLd, k_NKLd, v_NKLd)
    ):
        return triton_ops.short_attention(
            q_NHLd, k_NKLd, v_NKLd, scale=scaling, causal=is_causal
        ), None
    out_NHLd = F.scaled_dot_product_attention(
        q_NHLd,
        k_NKLd,
        v_NKLd,
        attn_mask=attention_mask,
        dropout_p=dropout,
        is_causal=is_causal and attention_mask is None,
        scale=scaling,
        enable_gqa=q_NHLd.shape[1] != k_NKLd.shape[1],
    )
    return out_NHLd.transpose(1, 2), None


def check_options(layer: str, others: dict[str, Any]) -> None:
    """Raise for keyword arguments of a layer that would change what attention computes."""
    given = [name for name, value in others.items() if value is not None]
    unknown = [name for name in given if name not in _IGNORED]
    if unknown:
        raise UnsupportedAttention(
            f"{layer} passes {', '.join(unknown)} to attention, which packed attention does not support"
        )


def _window(layer: str, sliding_window: int | None, mask: Any) -> int | None:
    """The window size of the layer's argument or of its mask; both must agree."""
    if not isinstance(mask, Window):
        return sliding_window
    if sliding_window not in (None, mask.size):
        raise UnsupportedAttention(
            f"{layer} passes a window of {sliding_window} and a mask with a window of {mask.size}"
        )
    return mask.size


def _as_autocast(x: Tensor) -> Tensor:
    """Cast to the autocast dtype: norms and rotary embeddings may have returned float32."""
    dtype = autocast_dtype(x)
    return x if dtype is None else x.to(dtype)


# The attention of one context rank: its chunks of queries as sequences, and the keys that they attend to.


def context_spec(spec: AttnSpec, shard: ContextShard) -> tuple[AttnSpec, KeyExchange]:
    """The spec of the whole batch as that of this rank's queries, and the exchange of the keys that they need.

    Each chunk of queries becomes a sequence. In causal attention its keys end where it ends; otherwise they are its
    whole sequence, and a mask function counts from the tokens of the batch.
    """
    if spec.causal and spec.mask_function is None:
        exchange = shard.keys(spec.window)
        # Whole sequences are an ordinary pack: cuDNN's backward takes half the time without a bottom-right mask.
        keys = None if exchange.is_own else exchange.keys
        return _with_keys(spec, shard, keys), exchange
    exchange = _all_keys(shard)
    if spec.mask_function is None and spec.window is not None:
        # Of the same window for all layers one object: block masks are cached by it.
        function = shard.__dict__.setdefault(f"window_{spec.window}", partial(_near, spec.window))
        spec = dataclasses.replace(spec, mask_function=function)
    return _with_keys(spec, shard, exchange.keys), exchange


def _with_keys(spec: AttnSpec, shard: ContextShard, keys: Keys | None) -> AttnSpec:
    by_tokens = (
        None
        if keys is None
        else KeySpec(keys.cu_seqlens, keys.max_seqlen, shard.queries, keys.tokens)
    )
    return dataclasses.replace(
        spec, cu_seqlens=shard.cu_queries, max_seqlen=shard.max_queries, keys=by_tokens
    )


@torch.compiler.disable
def _all_keys(shard: ContextShard) -> KeyExchange:
    return shard.all_keys


def _near(window: int, _batch: int, _head: int, q: Tensor, kv: Tensor) -> Tensor:
    return (q - kv).abs() < window


# Masks of transformers models as values that packed attention can apply: windows and block-wise overlays.
#
# transformers builds a mask function out of a few known parts. `packed_mask`, its mask interface, recognizes the parts
# by name and returns an `Overlay`, a `Window` or None instead of an (L, L) tensor; an unknown part raises
# `UnsupportedAttention`.

# Keyword arguments about the pack, which text layers get.
PACK_ARGUMENTS = (
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "ulysses_shard",
    "kv_cache",
)

NAME = "mvp_packed"  # of packed attention in transformers' attention and mask interfaces
PACKED = {NAME}  # with the names of other attention functions that take these masks

# Mask parts that packed attention applies anyway: causality, window, sequence boundaries.
_PLAIN = {"causal_mask_function", "sliding_window_overlay", "packed_sequence_mask_function"}
_BLOCKS = "blockwise_overlay"  # looked up by token index


class UnsupportedAttention(UserError, NotImplementedError):
    """A model uses an attention option that packed attention does not support."""


@dataclass(frozen=True)
class Overlay:
    """A mask that is more than causal, such as images with bidirectional attention between their tokens.

    It has the shape of a mask tensor, since some models pass it to transformers' mask functions a second time.
    """

    mask_function: MaskFunction
    shape: tuple[int, int, int, int]
    ndim: int = 4


@dataclass(frozen=True)
class Window:
    """A causal sliding window mask. Most layers also pass the window size to attention; some rely on the mask."""

    size: int


@dataclass(frozen=True)
class Chunks:
    """A causal mask in which a token sees its own chunk of the sequence only, such as in Llama 4."""

    size: int


@dataclass(frozen=True)
class NoMask:
    """A placeholder for the mask of a decoder, with the shape of one.

    Without any mask, transformers would search the positions for sequence boundaries, which costs a host sync.
    """

    shape: tuple[int, int, int, int]
    ndim: int = 4


def without_mask(
    decoder: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    """A forward pre-hook that passes `NoMask` to decoders, and to models that build the masks of their decoder."""
    inputs = kwargs.get("inputs_embeds")
    if inputs is None:
        inputs = kwargs.get("input_ids")
    is_packed = decoder.config._attn_implementation in PACKED  # type: ignore[union-attr, operator]
    if not is_packed or inputs is None or kwargs.get("attention_mask") is not None:
        return None
    tokens = inputs.shape[1]
    mask: Any = NoMask((1, 1, tokens, tokens))
    chunk = getattr(decoder.config, "attention_chunk_size", None)
    if chunk is not None:  # by kind of layer: transformers looks for padding before it makes chunks
        mask = {"full_attention": mask, "chunked_attention": Chunks(chunk)}
    return args, {**kwargs, "attention_mask": mask}


def packed_mask(
    *, mask_function: Callable[..., Any], attention_mask: Any, kv_length: int, config: Any, **_: Any
) -> Overlay | Window | None:
    """The part of a model's mask that attention does not apply anyway, with transformers' mask signature."""
    if isinstance(attention_mask, Overlay):
        return attention_mask
    parts = dict(_mask_parts(mask_function))
    # PaliGemma's layers leave causality to the mask.
    relies_on_mask = getattr(config, "use_bidirectional_attention", None) is True
    if parts.keys() <= _PLAIN and not relies_on_mask:
        window = parts.get("sliding_window_overlay")
        if window is None:
            return None
        return Window(inspect.getclosurevars(window).nonlocals["sliding_window"])
    unknown = parts.keys() - {*_PLAIN, _BLOCKS}
    if unknown:
        raise UnsupportedAttention(
            f"the mask of {config.model_type} contains {', '.join(sorted(unknown))}, which packed attention does not "
            "support"
        )
    return Overlay(mask_function, (1, 1, kv_length, kv_length))


def _mask_parts(function: Callable[..., Any]) -> list[tuple[str, Callable[..., Any]]]:
    """The functions that transformers combined into this one, each with the name of the factory that made it."""
    factory = getattr(function, "__qualname__", repr(function)).split(".")[0]
    if factory not in ("and_masks", "or_masks"):
        return [(factory, function)]
    parts = []
    for part in inspect.getclosurevars(function).nonlocals["mask_functions"]:
        parts += _mask_parts(part)
    return parts

"""Attention in which groups of queries have keys of their own: the suffixes of a sequence, which share its prefix.

Legend: T tokens (queries), M keys of all groups' sources, R gathered keys of one group, H query heads, K key/value
heads, d head size.

An action expert attends to the prefix of its sequence and to its own suffix; several noise draws share the prefix. Each
group is one call of `varlen_attention` with its own key lengths: on GPUs a varlen kernel, on CPUs an exact loop. Keys
that several queries share are gathered once per use; the backward sums the uses of each key in a fixed order, where
`index_add` would be atomic and thus not reproducible on GPUs.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mvp_engine.hf.model import attention
from mvp_engine.hf.model.attention import UnsupportedAttention
from mvp_engine.ops.attention import varlen_attention
from mvp_engine.ops.attn_spec import AttnSpec, KeySpec
from mvp_engine.ops.precision import autocast_dtype

NAME = "mvp_grouped_queries"  # in transformers' attention interface
_PACKED_ARGUMENTS = inspect.signature(attention.packed_attention).parameters.keys()


def use(text_config: Any) -> None:
    """Set the attention of this file in the config of the text layers of a built model."""
    attention.register_variant(NAME, grouped_attention)
    text_config._attn_implementation = NAME


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    key_values: list[Tensor] | None = None,
    prefix: tuple[Tensor, Tensor] | None = None,
    query_groups: Sequence[QueryGroup] | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Packed attention with transformers' signature, or attention by groups of queries where a call has groups.

    This layer's keys and values are appended to `key_values`. `prefix` are those of another layer, which come first.
    """
    if key_values is not None:
        key_values += [key, value]
    if query_groups is None:
        return attention.packed_attention(module, query, key, value, attention_mask, **options)
    layer = type(module).__name__
    if any(options.get(name) is not None for name in ("sliding_window", "softcap", "s_aux")):
        raise UnsupportedAttention(
            f"{layer} has a sliding window, a soft cap or sinks, which an action head does not support"
        )
    others = {name: option for name, option in options.items() if name not in _PACKED_ARGUMENTS}
    attention.check_options(layer, others)
    q_HTd = _as_autocast(query)[0]
    k_KMd = _as_autocast(key)[0]
    v_KMd = _as_autocast(value)[0]
    if prefix is not None:
        k_KMd = torch.cat([_as_autocast(prefix[0])[0], k_KMd], dim=1)
        v_KMd = torch.cat([_as_autocast(prefix[1])[0], v_KMd], dim=1)
    scale, dropout = options.get("scaling"), options.get("dropout", 0.0)
    out_HTd = grouped_query_attention(q_HTd, k_KMd, v_KMd, query_groups, scale, dropout)
    return out_HTd.transpose(0, 1)[None].contiguous(), None


def _as_autocast(x: Tensor) -> Tensor:
    dtype = autocast_dtype(x)
    return x if dtype is None else x.to(dtype)


@dataclass(frozen=True, eq=False)
class KeyRows:
    """Which keys a group reads: rows of all keys, with repetitions."""

    index: Tensor  # (R,) int64: the key in each place
    # (M, U) int64: the places of each key; R where a key has fewer uses than the most used one
    uses: Tensor

    @classmethod
    def of(cls, index_R: Tensor, num_keys: int) -> KeyRows:
        """Build both tables on the host."""
        order_R = index_R.argsort(stable=True)
        counts_M = torch.bincount(index_R, minlength=num_keys)
        most = int(counts_M.max()) if len(counts_M) else 0
        uses_MU = torch.full((num_keys, max(1, most)), len(index_R))
        starts_M = counts_M.cumsum(0) - counts_M
        sorted_R = index_R[order_R]
        uses_MU[sorted_R, torch.arange(len(index_R)) - starts_M[sorted_R]] = order_R
        return cls(index_R, uses_MU)


@dataclass(frozen=True, eq=False)
class QueryGroup:
    """Consecutive queries, cut into sequences, and the keys of each sequence.

    The number of queries is read from tensor sizes: a number would be part of a compiled block, which the first pack
    with fewer sequences would compile again.
    """

    cu_seqlens: Tensor  # int32, of the queries of this group alone
    max_seqlen: int
    is_even: bool = False  # all sequences have `max_seqlen` queries; one group may be uneven
    causal: bool = False
    keys: KeyRows | None = None  # None: the keys of the same tokens, which come first
    cu_seqlens_k: Tensor | None = None  # int32, of the gathered keys
    max_seqlen_k: int = 0

    def to(self, device: torch.device) -> QueryGroup:
        """A copy on a GPU, without a host sync."""
        if device.type != "cuda":
            return self
        keys = self.keys
        if keys is not None:
            keys = KeyRows(_to(keys.index, device), _to(keys.uses, device))
        moved = replace(
            self,
            cu_seqlens=_to(self.cu_seqlens, device),
            keys=keys,
            cu_seqlens_k=None if self.cu_seqlens_k is None else _to(self.cu_seqlens_k, device),
        )
        for boundaries in (moved.cu_seqlens, moved.cu_seqlens_k):
            if boundaries is not None:  # see `attention.boundaries`
                torch._dynamo.maybe_mark_dynamic(boundaries, 0)
        return moved

    @property
    def even_queries(self) -> int:
        """The number of queries, of an even group."""
        return (self.cu_seqlens.shape[0] - 1) * self.max_seqlen

    def spec(self, scale: float | None, dropout: float) -> AttnSpec:
        keys = None
        if self.keys is not None:
            assert self.cu_seqlens_k is not None
            nothing = self.cu_seqlens  # indices are for mask functions, and there is none
            keys = KeySpec(self.cu_seqlens_k, self.max_seqlen_k, nothing, nothing)
        return AttnSpec(
            self.cu_seqlens, self.max_seqlen, scale, self.causal, dropout=dropout, keys=keys
        )


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory().to(device, non_blocking=True)


def grouped_query_attention(
    q_HTd: Tensor,
    k_KMd: Tensor,
    v_KMd: Tensor,
    groups: Sequence[QueryGroup],
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of shape (H, T, d): the groups lie one after the other in the queries."""
    outs = []
    rest = q_HTd.shape[1] - sum(group.even_queries for group in groups if group.is_even)
    sizes = [group.even_queries if group.is_even else rest for group in groups]
    for group, q_HLd in zip(groups, q_HTd.split(sizes, 1), strict=True):
        if group.keys is None:
            k_KRd = k_KMd[:, : q_HLd.shape[1]]
            v_KRd = v_KMd[:, : q_HLd.shape[1]]
        else:
            k_KRd = _GatherRows.apply(k_KMd, group.keys.index, group.keys.uses)
            v_KRd = _GatherRows.apply(v_KMd, group.keys.index, group.keys.uses)
        outs.append(varlen_attention(q_HLd, k_KRd, v_KRd, group.spec(scale, dropout)))
    return torch.cat(outs, dim=1)


class _GatherRows(torch.autograd.Function):
    """`x[:, index]`, whose backward gathers as well."""

    @staticmethod
    def forward(ctx: Any, x_KMd: Tensor, index_R: Tensor, uses_MU: Tensor) -> Tensor:
        ctx.save_for_backward(uses_MU)
        return x_KMd.index_select(1, index_R)

    @staticmethod
    def backward(ctx: Any, grad_KRd: Tensor) -> tuple[Tensor | None, ...]:
        (uses_MU,) = ctx.saved_tensors
        heads = grad_KRd.shape[0]
        zero_K1d = grad_KRd.new_zeros(heads, 1, grad_KRd.shape[2])
        padded = torch.cat([grad_KRd, zero_K1d], dim=1)
        picked = padded.index_select(1, uses_MU.flatten())
        # Sums of half-precision gradients in float32: a prefix has one use for each noise draw.
        of_uses = picked.view(heads, *uses_MU.shape, -1).float()
        return of_uses.sum(2).to(grad_KRd.dtype), None, None

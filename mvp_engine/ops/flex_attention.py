"""FlexAttention over packed sequences, for what the other kernels lack: soft caps, sinks, mask functions, head sizes.

Legend: T tokens of all sequences, P tokens after padding, H query heads, K key/value heads, d head size.

torch compiles one kernel per number of tokens, so packs are padded to a few sizes with tokens that are masked out. The
block mask is computed on the GPU, once per pack and kind of layer, in `mvp_engine.ops.flex_attention`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CellType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from mvp_engine.ops.attn_spec import AttnSpec, MaskFunction, round_up_to_bucket
from mvp_engine.ops.precision import HAS_TRITON, is_half_on_gpu

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# Graphs per compiled function: 15 pack sizes up to 131,072 tokens, times kinds of layers, with and without gradients.
# torch falls back to eager after 8.
_RECOMPILE_LIMIT = 256


def is_supported(q_HTd: Tensor, v_KTd: Tensor) -> bool:
    """Half precision on a GPU. float32 stays with the reference, which kernels are tested against."""
    if not HAS_TRITON or not is_half_on_gpu(q_HTd):
        return False
    head_sizes = (q_HTd.shape[-1], v_KTd.shape[-1])
    return min(head_sizes) >= 16 and max(head_sizes) <= 512


def flex_varlen_attention(q_HTd: Tensor, k_KTd: Tensor, v_KTd: Tensor, spec: AttnSpec) -> Tensor:
    """Attention of shape (H, T, d), without a host sync."""
    tokens = q_HTd.shape[1]
    keys = k_KTd.shape[1]
    mask = block_mask_of(spec, tokens, keys)
    key_padding = mask.seq_lengths[1] - keys
    q_1HPd = _padded(q_HTd, mask.seq_lengths[0] - tokens)[None]
    k_1KPd = _padded(k_KTd, key_padding)[None]
    v_1KPd = _padded(v_KTd, key_padding)[None]
    with torch._dynamo.config.patch(recompile_limit=_RECOMPILE_LIMIT):
        out_1HPd = _compiled()(q_1HPd, k_1KPd, v_1KPd, mask, spec.scale, spec.softcap, spec.sinks)
    return out_1HPd[0, :, :tokens]


def _padded(x_HTd: Tensor, padding: int) -> Tensor:
    """A contiguous copy even without padding: another memory layout would compile another kernel."""
    zeros = x_HTd.new_zeros(len(x_HTd), padding, x_HTd.shape[-1])
    return torch.cat([x_HTd, zeros], dim=1)


def _attend(
    q_1HPd: Tensor,
    k_1KPd: Tensor,
    v_1KPd: Tensor,
    mask: BlockMask,
    scale: float | None,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    def soft_cap(score: Tensor, *_: Tensor) -> Tensor:
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    options: dict[str, Any] = {"score_mod": soft_cap, "block_mask": mask, "scale": scale}
    options["enable_gqa"] = q_1HPd.shape[1] != k_1KPd.shape[1]
    if q_1HPd.shape[-1] > 256:
        # Three pipeline stages would not fit into a multiprocessor's shared memory.
        options["kernel_options"] = {"fwd_num_stages": 1}
    if sinks_H is None:
        return flex_attention(q_1HPd, k_1KPd, v_1KPd, **options)
    out, aux = flex_attention(q_1HPd, k_1KPd, v_1KPd, return_aux=AuxRequest(lse=True), **options)
    # The sink is one more logit per head with a value of zero, so it scales the output by 1 - p(sink).
    remaining_1HP = torch.sigmoid(aux.lse - sinks_H.float()[:, None])
    return (out * remaining_1HP[..., None]).to(out.dtype)


@functools.cache
def _compiled() -> Any:
    return torch.compile(_attend, dynamic=False, fullgraph=True)


# Block masks of packed sequences for FlexAttention, computed on the GPU without a host sync and cached per pack.
#
# Legend: T tokens of all sequences, P tokens after padding, B = P / 128 blocks.
#
# torch's `create_block_mask` materializes all (P, P) pairs of tokens, or is compiled for each pack size; this one
# counts the visible pairs in row chunks of bounded size.

_BLOCK = 128
_SMALLEST_PACK = 1024  # tokens, padding included
_PAIRS_PER_CHUNK = 1 << 26  # pairs of tokens in one materialized part of the mask
_BLOCK_MASKS = WeakTensorKeyDictionary()  # cu_seqlens -> its block masks, which die with it


def block_mask_of(spec: AttnSpec, tokens: int, keys: int | None = None) -> BlockMask:
    """The block mask of a spec. All layers of a forward share a few, so they are cached by `cu_seqlens`.

    `keys`: their number, if it is not `tokens`.
    """
    keys = tokens if keys is None else keys
    cu_seqlens = spec.cu_seqlens
    cached = _BLOCK_MASKS.setdefault(cu_seqlens, {})
    # Tensors made in inference mode have no version counter.
    version = 0 if cu_seqlens.is_inference() else cu_seqlens._version
    key = (version, tokens, keys, spec.mask_function, spec.causal, spec.window)
    if key not in cached:
        # A mask made during inference must not be an inference tensor: training may use it next.
        with torch.inference_mode(False), torch.no_grad():
            padded = (
                round_up_to_bucket(tokens, _SMALLEST_PACK),
                round_up_to_bucket(keys, _SMALLEST_PACK),
            )
            mask_mod = _mask_mod(spec, tokens, keys, padded)
            cached[key] = _block_mask(mask_mod, padded, cu_seqlens.device)
    return cached[key]


def _mask_mod(spec: AttnSpec, tokens: int, keys: int, padded: tuple[int, int]) -> MaskFunction:
    """The spec as FlexAttention's `mask_mod`. Padding tokens belong to sequence -1 and see nothing."""
    q_sequence_P = _sequence_of(spec.cu_seqlens, tokens, padded[0])
    k_sequence_P = q_sequence_P
    key_at: Callable[[Tensor], Tensor] = _same_place
    if spec.keys is not None:
        k_sequence_P = _sequence_of(spec.keys.cu_seqlens, keys, padded[1])
        key_at = _key_at(spec.cu_seqlens, spec.keys.cu_seqlens, q_sequence_P)
    causal = spec.causal
    window = spec.window
    mask_function = None if spec.mask_function is None else _of_places(spec, padded)

    def mask_mod(b: Any, h: Any, q: Tensor, kv: Tensor) -> Tensor:
        visible = (q_sequence_P[q] == k_sequence_P[kv]) & (q_sequence_P[q] >= 0)
        if mask_function is not None:
            return visible & mask_function(b, h, q, kv)
        if causal:
            visible = visible & (kv <= key_at(q))
        if window is not None:
            visible = visible & (kv > key_at(q) - window)
            if not causal:
                visible = visible & (kv < key_at(q) + window)
        return visible

    return mask_mod


def _same_place(q: Tensor) -> Tensor:
    """The key that a query stands at, where queries and keys are of the same tokens."""
    return q


def _key_at(
    cu_seqlens: Tensor, cu_seqlens_k: Tensor, sequence_P: Tensor
) -> Callable[[Tensor], Tensor]:
    """The same for keys of other tokens: the last query of a sequence stands at its last key."""
    index_P = torch.arange(len(sequence_P), device=cu_seqlens.device)
    q_at_P = index_P + (cu_seqlens_k - cu_seqlens)[1:][sequence_P.clamp(min=0)]
    return lambda q: q_at_P[q]


def _sequence_of(cu_seqlens: Tensor, tokens: int, padded_tokens: int) -> Tensor:
    """The sequence of each token; -1 for padding."""
    index_P = torch.arange(padded_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    sequence_P = torch.searchsorted(cu_seqlens[1:], index_P, right=True, out_int32=True)
    return sequence_P.masked_fill_(index_P >= tokens, -1)


def _of_places(spec: AttnSpec, padded: tuple[int, int]) -> MaskFunction:
    """The spec's mask function, of places among the queries and among the keys."""
    assert spec.mask_function is not None
    function: MaskFunction = spec.mask_function
    if spec.keys is None:
        padded_function: MaskFunction = _padded_function(function, padded[0])
        return padded_function
    # Padding gets the index of the first token: the sequence ids mask it.
    q_index_P = F.pad(spec.keys.q_index, (0, padded[0] - len(spec.keys.q_index)))
    k_index_P = F.pad(spec.keys.k_index, (0, padded[1] - len(spec.keys.k_index)))

    def of_places(b: Any, h: Any, q: Tensor, kv: Tensor) -> Tensor:
        return function(b, h, q_index_P[q], k_index_P[kv])

    return of_places


def _padded_function(part: Any, tokens: int) -> Any:
    """A copy of a mask function with its index tensors padded to `tokens`.

    The function, and the functions that it closes over, look tokens up in tensors with one value per token, where -1
    means "in no block". An index past their end would be an illegal memory access on the GPU.
    """
    if isinstance(part, Tensor):
        return F.pad(part, (0, tokens - part.shape[-1]), value=-1)
    if isinstance(part, tuple):
        return tuple(_padded_function(one, tokens) for one in part)
    if isinstance(part, FunctionType) and part.__closure__:
        contents = [_padded_function(cell.cell_contents, tokens) for cell in part.__closure__]
        cells = tuple(CellType(content) for content in contents)
        return FunctionType(
            part.__code__, part.__globals__, part.__name__, part.__defaults__, cells
        )
    return part


def _block_mask(mask_mod: MaskFunction, padded: tuple[int, int], device: torch.device) -> BlockMask:
    """Which blocks are partly visible (the kernel applies the mask) and which fully (it does not)."""
    from torch.nn.attention.flex_attention import BlockMask

    queries_P = torch.arange(padded[0], device=device)
    keys_P = torch.arange(padded[1], device=device)
    block_rows_per_chunk = max(1, _PAIRS_PER_CHUNK // len(keys_P) // _BLOCK)
    row_chunks = queries_P.split(block_rows_per_chunk * _BLOCK)
    visible_BB = torch.cat([_visible_pairs(mask_mod, rows, keys_P) for rows in row_chunks])
    full_BB = visible_BB == _BLOCK * _BLOCK
    partial_BB = (visible_BB > 0) & ~full_BB
    return BlockMask.from_kv_blocks(
        *_counts_and_indices(partial_BB),
        *_counts_and_indices(full_BB),
        _BLOCK,
        mask_mod,
        seq_lengths=padded,
    )


def _visible_pairs(mask_mod: MaskFunction, rows: Tensor, index_P: Tensor) -> Tensor:
    """The number of visible pairs in each block of these rows of the mask."""
    visible = mask_mod(0, 0, rows[:, None], index_P[None, :])
    tiles = visible.view(-1, _BLOCK, len(index_P) // _BLOCK, _BLOCK)
    return tiles.sum((1, 3), dtype=torch.int32)


def _counts_and_indices(blocks_BB: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of each row are set, and the column indices with those that are set first."""
    order = blocks_BB.byte().argsort(dim=-1, descending=True, stable=True)
    counts = blocks_BB.sum(-1, dtype=torch.int32)
    return counts[None, None], order.int()[None, None]

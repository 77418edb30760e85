"""Block masks of packed sequences for FlexAttention, computed on the GPU without a host sync and cached per pack.

Legend: T tokens of all sequences, P tokens after padding, B = P / 128 blocks.

torch's `create_block_mask` materializes all (P, P) pairs of tokens, or is compiled for each pack size; this one counts
the visible pairs in row chunks of bounded size.
"""

from __future__ import annotations

from types import CellType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from mvp_engine.ops.attn_spec import AttnSpec, MaskFunction
from mvp_engine.ops.size_bucket import round_up_to_bucket

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_BLOCK = 128
_SMALLEST_PACK = 1024  # tokens, padding included
_PAIRS_PER_CHUNK = 1 << 26  # pairs of tokens in one materialized part of the mask
_BLOCK_MASKS = WeakTensorKeyDictionary()  # cu_seqlens -> its block masks, which die with it


def block_mask_of(spec: AttnSpec, tokens: int) -> BlockMask:
    """The block mask of a spec. All layers of a forward share a few, so they are cached by `cu_seqlens`."""
    cu_seqlens = spec.cu_seqlens
    cached = _BLOCK_MASKS.setdefault(cu_seqlens, {})
    # Tensors made in inference mode have no version counter.
    version = 0 if cu_seqlens.is_inference() else cu_seqlens._version
    key = (version, tokens, spec.mask_function, spec.causal, spec.window)
    if key not in cached:
        # A mask made during inference must not be an inference tensor: training may use it next.
        with torch.inference_mode(False), torch.no_grad():
            padded_tokens = round_up_to_bucket(tokens, _SMALLEST_PACK)
            mask_mod = _mask_mod(spec, tokens, padded_tokens)
            cached[key] = _block_mask(mask_mod, padded_tokens, cu_seqlens.device)
    return cached[key]


def _mask_mod(spec: AttnSpec, tokens: int, padded_tokens: int) -> MaskFunction:
    """The spec as FlexAttention's `mask_mod`. Padding tokens belong to sequence -1 and see nothing."""
    cu_seqlens = spec.cu_seqlens
    index_P = torch.arange(padded_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    sequence_P = torch.searchsorted(cu_seqlens[1:], index_P, right=True, out_int32=True)
    sequence_P.masked_fill_(index_P >= tokens, -1)
    causal = spec.causal
    window = spec.window
    mask_function = None
    if spec.mask_function is not None:
        mask_function = _padded_function(spec.mask_function, padded_tokens)

    def mask_mod(b: Any, h: Any, q: Tensor, kv: Tensor) -> Tensor:
        visible = (sequence_P[q] == sequence_P[kv]) & (sequence_P[q] >= 0)
        if mask_function is not None:
            return visible & mask_function(b, h, q, kv)
        if causal:
            visible = visible & (kv <= q)
        if window is not None:
            visible = visible & (kv > q - window)
            if not causal:
                visible = visible & (kv < q + window)
        return visible

    return mask_mod


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


def _block_mask(mask_mod: MaskFunction, tokens: int, device: torch.device) -> BlockMask:
    """Which blocks are partly visible (the kernel applies the mask) and which fully (it does not)."""
    from torch.nn.attention.flex_attention import BlockMask

    index_P = torch.arange(tokens, device=device)
    block_rows_per_chunk = max(1, _PAIRS_PER_CHUNK // tokens // _BLOCK)
    row_chunks = index_P.split(block_rows_per_chunk * _BLOCK)
    visible_BB = torch.cat([_visible_pairs(mask_mod, rows, index_P) for rows in row_chunks])
    full_BB = visible_BB == _BLOCK * _BLOCK
    partial_BB = (visible_BB > 0) & ~full_BB
    return BlockMask.from_kv_blocks(
        *_counts_and_indices(partial_BB),
        *_counts_and_indices(full_BB),
        _BLOCK,
        mask_mod,
        seq_lengths=(tokens, tokens),
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

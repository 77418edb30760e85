"""FlexAttention over packed sequences, for what other kernels do not have: soft caps, sinks, overlays, odd head sizes.

Legend: T tokens of all sequences, P tokens after padding, H query heads, K key/value heads, d head size.

torch compiles a kernel for each number of tokens, so packs are padded to a few sizes, with tokens that see nothing.
Which blocks of a pack there is anything to compute in is found out on the GPU, once for all layers that see alike.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from types import CellType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from mvp_engine.ops.cudnn_attention import round_up

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

INSTALLED = importlib.util.find_spec("triton") is not None
Sees = Callable[[Any, Any, Tensor, Tensor], Tensor]  # batch, head, query, key -> may it?
_BLOCK = 128
_AT_ONCE = 1 << 26  # pairs of tokens that are looked at in one go
_GRAPHS = 256  # 15 sizes of packs up to 131,072 tokens, times kinds of layers, trained or not; torch gives up after 8
_MASKS = WeakTensorKeyDictionary()  # of boundaries, for as long as these live


def can(q_HTd: Tensor, v_KTd: Tensor) -> bool:
    """float32 is left to plain attention, which is what kernels are held against."""
    sizes = (q_HTd.shape[-1], v_KTd.shape[-1])
    fits = INSTALLED and q_HTd.is_cuda and q_HTd.dtype in (torch.bfloat16, torch.float16)
    return fits and min(sizes) >= 16 and max(sizes) <= 512


def flex(
    q_HTd: Tensor,
    k_KTd: Tensor,
    v_KTd: Tensor,
    cu_seqlens: Tensor,
    allows: Sees | None,
    scale: float | None,
    causal: bool,
    window: int | None,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """(H, T, d). With a window, a token sees itself and `window - 1` before it; `allows`, where it is given, has
    causality and window in it."""
    tokens = q_HTd.shape[1]
    mask = _mask(cu_seqlens, tokens, allows, causal, window)
    q, k, v = (_padded(x, mask.seq_lengths[0] - tokens)[None] for x in (q_HTd, k_KTd, v_KTd))
    with torch._dynamo.config.patch(recompile_limit=_GRAPHS):
        return _compiled()(q, k, v, mask, scale, softcap, sinks_H)[0, :, :tokens]


def _padded(x_HTd: Tensor, more: int) -> Tensor:
    """In one order in memory, padded or not: else a kernel would be compiled for packs that need no padding."""
    return torch.cat([x_HTd, x_HTd.new_zeros(len(x_HTd), more, x_HTd.shape[-1])], dim=1)


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

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    how: dict[str, Any] = {"score_mod": capped, "block_mask": mask, "scale": scale}
    how["enable_gqa"] = q_1HPd.shape[1] != k_1KPd.shape[1]
    if q_1HPd.shape[-1] > 256:  # or three stages would not fit into a multiprocessor's memory
        how["kernel_options"] = {"fwd_num_stages": 1}
    if sinks_H is None:
        return flex_attention(q_1HPd, k_1KPd, v_1KPd, **how)
    out, more = flex_attention(q_1HPd, k_1KPd, v_1KPd, return_aux=AuxRequest(lse=True), **how)
    # One more logit per head takes its share of the probability and gives nothing: what is left is this much.
    left_1HP = torch.sigmoid(more.lse - sinks_H.float()[:, None])
    return (out * left_1HP[..., None]).to(out.dtype)


@functools.cache
def _compiled() -> Any:
    return torch.compile(_attend, dynamic=False, fullgraph=True)


def _mask(
    cu_seqlens: Tensor, tokens: int, allows: Sees | None, causal: bool, window: int | None
) -> BlockMask:
    """All layers of a pass ask for the same few."""
    kept = _MASKS.setdefault(cu_seqlens, {})
    version = (
        0 if cu_seqlens.is_inference() else cu_seqlens._version
    )  # what inference makes has none
    key = (version, tokens, allows, causal, window)
    if key not in kept:
        with (
            torch.inference_mode(False),
            torch.no_grad(),
        ):  # made in inference, it may serve training as well
            sees = _sees(cu_seqlens, tokens, allows, causal, window)
            kept[key] = _blocks(sees, round_up(tokens, 1024), cu_seqlens.device)
    return kept[key]


def _sees(
    cu_seqlens: Tensor, tokens: int, allows: Sees | None, causal: bool, window: int | None
) -> Sees:
    padded = round_up(tokens, 1024)
    index = torch.arange(padded, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    owner_P = torch.searchsorted(cu_seqlens[1:], index, right=True, out_int32=True).masked_fill_(
        index >= tokens, -1
    )
    more = None if allows is None else _longer(allows, padded)

    def sees(b: Any, h: Any, q: Tensor, kv: Tensor) -> Tensor:
        seen = (owner_P[q] == owner_P[kv]) & (owner_P[q] >= 0)
        if more is not None:
            return seen & more(b, h, q, kv)
        if causal:
            seen = seen & (kv <= q)
        if window is not None:
            seen = seen & (kv > q - window)
            if not causal:
                seen = seen & (kv < q + window)
        return seen

    return sees


def _longer(part: Any, tokens: int) -> Any:
    """A mask function of transformers that may be asked about so many tokens: all tensors that it, and the functions it
    is put together of, look things up in are padded. They have a value for each token; -1 is for none."""
    if isinstance(part, Tensor):
        return F.pad(part, (0, tokens - part.shape[-1]), value=-1)
    if isinstance(part, tuple):
        return tuple(_longer(one, tokens) for one in part)
    if isinstance(part, FunctionType) and part.__closure__:
        cells = tuple(CellType(_longer(cell.cell_contents, tokens)) for cell in part.__closure__)
        return FunctionType(
            part.__code__, part.__globals__, part.__name__, part.__defaults__, cells
        )
    return part


def _blocks(sees: Sees, tokens: int, device: torch.device) -> BlockMask:
    """Of each row of blocks: those where some pairs see each other, and those where all do. torch's own way to find
    them holds all pairs of tokens in memory, or is to be compiled for each size of pack."""
    from torch.nn.attention.flex_attention import BlockMask

    index, blocks = torch.arange(tokens, device=device), tokens // _BLOCK
    counts = [
        sees(0, 0, rows[:, None], index[None, :])
        .view(-1, _BLOCK, blocks, _BLOCK)
        .sum((1, 3), dtype=torch.int32)
        for rows in index.split(max(1, _AT_ONCE // tokens // _BLOCK) * _BLOCK)
    ]
    seen = torch.cat(counts)
    full = seen == _BLOCK * _BLOCK
    some = _ordered((seen > 0) & ~full)
    return BlockMask.from_kv_blocks(
        *some, *_ordered(full), _BLOCK, sees, seq_lengths=(tokens, tokens)
    )


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of each row, and which come first."""
    first = blocks.byte().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], first.int()[None, None]

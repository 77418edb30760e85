"""FlexAttention over packed sequences, for what the other kernels lack: soft caps, sinks, mask functions, head sizes.

Legend: T tokens of all sequences, P tokens after padding, H query heads, K key/value heads, d head size.

torch compiles one kernel per number of tokens, so packs are padded to a few sizes with tokens that are masked out. The
block mask is computed on the GPU, once per pack and kind of layer, in `mvp_engine.ops.flex_block_mask`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mvp_engine.ops.attn_spec import AttnSpec
from mvp_engine.ops.flex_block_mask import block_mask_of
from mvp_engine.ops.half_precision import HAS_TRITON, is_half_on_gpu

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

"""The kernels for many short sequences attend as PyTorch does, forward and backward."""

import torch
import torch.nn.functional as F

from mvp_engine.ops.triton_ops import short_attention, short_attention_is_supported

device = "cuda" if torch.cuda.is_available() else "cpu"
generator = torch.Generator().manual_seed(0)


def randn(*shape):
    return torch.randn(*shape, generator=generator).to(device)


# Sequences, query heads, key/value heads, tokens, head size; the last tile has room for more sequences.
for shape, causal in [
    ((9, 4, 2, 16, 32), True),
    ((14, 2, 2, 5, 16), False),
    ((2, 4, 1, 32, 16), True),
]:
    sequences, heads, kv_heads, tokens, size = shape
    # As layers have them.
    q = randn(sequences, tokens, heads, size).transpose(1, 2).requires_grad_()
    k, v = (randn(sequences, kv_heads, tokens, size).requires_grad_() for _ in range(2))
    weight = randn(sequences, tokens, heads, size)
    found = short_attention(q, k, v, scale=0.3, causal=causal)
    assert found.is_contiguous()
    expected = F.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    gradients = [torch.autograd.grad((x * weight).sum(), (q, k, v)) for x in (found, expected)]
    for one, other in zip((found, *gradients[0]), (expected, *gradients[1]), strict=True):
        assert (one - other).abs().max() < 1e-5, shape
    if device == "cuda":
        half = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
        assert short_attention_is_supported(*half)
        compiled = torch.compile(short_attention, fullgraph=True)(*half, scale=0.3, causal=causal)
        assert (compiled - expected).abs().max() < 0.05, shape
        for one, other in zip(
            torch.autograd.grad((compiled * weight).sum(), half), gradients[1], strict=True
        ):
            assert (one - other).norm() < 0.02 * other.norm(), shape

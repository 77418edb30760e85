"""The decode kernel attends as plain PyTorch does: any lengths, windows, soft caps, sinks, splits."""

import torch

from mvp_engine.hf.model.kv_cache import attend_to_cache
from mvp_engine.ops.decode_attention import decode_attention

device = "cuda" if torch.cuda.is_available() else "cpu"
generator = torch.Generator().manual_seed(0)


def randn(*shape):
    return torch.randn(*shape, generator=generator).to(device)


# Sequences, query heads, key/value heads, head sizes, capacity; options.
CASES = [
    ((3, 4, 2, 16, 16, 150), {}),  # several splits, some without a token
    ((5, 6, 1, 40, 24, 70), {"window": 9, "softcap": 2.0}),
    ((2, 2, 2, 16, 16, 200), {"sinks_H": randn(2), "window": 130}),
    ((3, 2, 2, 8, 8, 40), {"sinks_H": randn(2)}),  # one split
]
for (sequences, heads, kv_heads, size, value_size, capacity), options in CASES:
    q = randn(sequences, heads, size).transpose(0, 1)
    k = randn(sequences, kv_heads, capacity, size)
    v = randn(sequences, kv_heads, capacity, value_size)
    newest = torch.randint(capacity, (sequences,), generator=generator).to(device)
    newest[0] = 0
    token = torch.arange(capacity, device=device)[None]
    allowed = (token <= newest[:, None]) & (
        token > newest[:, None] - options.get("window", capacity)
    )
    plain = {"softcap": options.get("softcap"), "sinks_H": options.get("sinks_H")}
    expected = attend_to_cache(q, k, v, allowed, scale=0.3, **plain)
    found = decode_attention(q, k, v, newest, scale=0.3, **options)
    assert (found - expected).abs().max() < 2e-5, (sequences, options)
    assert (
        decode_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), newest, **options).dtype
        == torch.bfloat16
    )

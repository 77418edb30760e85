"""The kernels for the activation of experts compute what PyTorch does, forward and backward."""

import torch
import torch.nn.functional as F

from mvp_engine.ops.triton_ops import gated_rows, gated_rows_is_supported

device = "cuda" if torch.cuda.is_available() else "cpu"
generator = torch.Generator().manual_seed(0)


def randn(*shape):
    return torch.randn(*shape, generator=generator).to(device)


def plain(gate_up, weight):
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up * weight[:, None]


# Rows and columns that do not fill the last tile; no rows at all.
for rows, size in [(21, 24), (8, 300), (0, 16)]:
    gate_up, weight, upstream = randn(rows, 2 * size), randn(rows), randn(rows, size)
    inputs = [gate_up.requires_grad_(), weight.requires_grad_()]
    results = []
    for function in (gated_rows, plain):
        out = function(*inputs)
        results.append((out, *torch.autograd.grad((out * upstream).sum(), inputs)))
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, atol=1e-5, rtol=1e-5), (rows, size)
    if device == "cuda" and rows:
        half = [x.detach().bfloat16().requires_grad_() for x in inputs]
        assert gated_rows_is_supported(half[0])
        compiled = torch.compile(gated_rows, fullgraph=True)(*half)
        for one, other in zip(
            (compiled, *torch.autograd.grad((compiled * upstream).sum(), half)),
            results[1],
            strict=True,
        ):
            assert (one - other).norm() < 0.02 * other.norm(), (rows, size)

"""The kernel that transposes FP8 matrices writes what PyTorch computes, bit by bit.

Triton's interpreter rounds small float8 numbers down, and tiny half-precision ones wrongly: rows are more alike there,
and the last bit may differ.
"""

import torch

from mvp_engine.ops import fp8
from mvp_engine.ops.fp8 import transpose
from mvp_engine.ops.triton_kernels import transpose_fp8 as kernel

on_gpu = torch.cuda.is_available()
device = "cuda" if on_gpu else "cpu"
generator = torch.Generator().manual_seed(0)

# Tiles that are not full, padding beyond a tile, stacked matrices, no rows.
for shape, padded in [((70, 48), 80), ((250, 272), 272), ((3, 32, 144), 32), ((0, 16), 16)]:
    size = torch.rand(*shape[:-1], 1, generator=generator)
    size = size**20 if on_gpu else 0.1 + size
    values, scale = fp8.quantize(size * torch.randn(shape, generator=generator))
    assert not (scale.view(torch.int32) & (2**23 - 1)).any()  # powers of two
    wanted, largest = transpose(values, scale, padded)
    assert largest.shape == (*shape[:-2], 1, 1)
    found = kernel(*(one.to(device) for one in (values, scale, largest)), padded).cpu()
    if on_gpu:
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)), shape
    assert torch.allclose(found.float(), wanted.float(), rtol=0, atol=2.0**-9), shape
    assert not wanted[..., shape[-2] :].float().any()
    back = (wanted.float() * largest)[..., : shape[-2]].mT
    lost = (back - values.float() * scale).abs()
    assert (lost <= 2.0**-10 * largest).all()  # half of float8's smallest number

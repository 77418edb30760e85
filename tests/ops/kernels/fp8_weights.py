"""The kernels that quantize weights in both orientations compute what PyTorch does."""

import torch

from mvp_engine.hf.fp8_weights import empty_copy, quantize_weights
from mvp_engine.hf.fp8_weights_kernel import quantize_both
from mvp_engine.ops import fp8

device = "cuda" if torch.cuda.is_available() else "cpu"
generator = torch.Generator().manual_seed(0)
# Rows and columns that do not fill the last tile, an outlier, zeros.
weights = [torch.randn(*shape, generator=generator) for shape in [(48, 160), (128, 64), (80, 16), (3, 80, 48)]]
weights[0][3, 5] = 1e4
weights[1][:, 7] = weights[1][9] = 0
found, wanted = ([empty_copy(weight.to(where)) for weight in weights] for where in (device, "cpu"))
quantize_weights(wanted, weights)
if device == "cpu":  # Triton's interpreter rounds 127 to 64 in float8: PyTorch rounds what it computed
    found = [one._replace(values=one.values.float(), transposed=one.transposed.float()) for one in found]
quantize_both(found, [weight.to(device) for weight in weights])
for one, other in zip(found, wanted, strict=True):
    for name in fp8.Fp8Weight._fields[1:]:
        expected = getattr(other, name)
        assert torch.equal(getattr(one, name).to("cpu", expected.dtype).float(), expected.float()), name

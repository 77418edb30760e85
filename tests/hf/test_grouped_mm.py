"""The grouped GEMM of compiled experts in float32."""

import torch

from mvp_engine.hf.experts.grouped_mm import opaque_grouped_mm


def test_grouped_mm_compiled_in_float32_has_the_gradients_of_a_loop_over_experts():
    torch.manual_seed(0)
    x_NI = torch.randn(13, 6, requires_grad=True)
    weight_EOI = torch.randn(4, 5, 6, requires_grad=True)
    ends_E = torch.tensor([4, 4, 9, 13], dtype=torch.int32)  # the second expert has no rows

    def out(x, weight):
        return opaque_grouped_mm(x, weight.transpose(-2, -1), ends_E).tanh()

    compiled = torch.compile(out, backend="aot_eager", fullgraph=True)(x_NI, weight_EOI)
    found = torch.autograd.grad(compiled.sum(), (x_NI, weight_EOI))
    parts = zip(x_NI.split([4, 0, 5, 4]), weight_EOI, strict=True)
    expected = torch.cat([rows @ matrix.T for rows, matrix in parts]).tanh()
    torch.testing.assert_close(compiled, expected)
    torch.testing.assert_close(found, torch.autograd.grad(expected.sum(), (x_NI, weight_EOI)))

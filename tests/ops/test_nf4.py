"""NF4 linear layers: the numbers of bitsandbytes, and gradients of a layer with the dequantized weight."""

import copy
import os
import subprocess
import sys
from zlib import crc32

import pytest
import torch
from conftest import CAMPAIGN
from functorch.compile import nop
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition as partition

from mvp_engine.model_engine.fsdp.parallelize import checkpoint_block
from mvp_engine.ops import nf4
from mvp_engine.ops.nf4 import Nf4Linear


def weight(rows=48, columns=192):
    """Values that are the same on every machine, one block of zeros among them."""
    numbers = torch.arange(rows * columns, dtype=torch.float64)
    values = ((numbers * 0.7548776662 + 0.1) % 1.0 - 0.5) * (1 + (numbers * 0.5698402909) % 1.0)
    found = values.float().view(rows, columns)
    found[3, :64] = 0
    return found


def test_nf4_bytes_are_those_of_bitsandbytes():
    # Checksums of what bitsandbytes 0.50.2 returns: quantize_4bit(weight(), blocksize=64, quant_type="nf4").
    for dtype in (torch.float32, torch.bfloat16):
        stored = nf4.quantize(weight(), dtype)
        assert stored.shape == (48, (96 + 12) // dtype.itemsize)
        codes, scales = stored.view(torch.uint8).split([96, 12], dim=1)
        assert crc32(codes.contiguous().numpy().data) == CODES
        assert crc32(scales.contiguous().numpy().data) == SCALES
        whole = nf4.dequantize(stored, 192, torch.float32)
        assert crc32(whole.numpy().data) == VALUES


CODES, SCALES, VALUES = 756389248, 2598200326, 2282023436


def test_nf4_numbers_equal_those_of_an_installed_bitsandbytes():
    functional = pytest.importorskip("bitsandbytes.functional")
    for dtype in (torch.float32, torch.bfloat16):
        original = torch.randn(64, 256).to(dtype)
        packed, state = functional.quantize_4bit(original, blocksize=64, quant_type="nf4")
        stored = nf4.quantize(original, torch.bfloat16)
        assert torch.equal(stored.view(torch.uint8)[:, :128].reshape(-1), packed.view(-1))
        expected = functional.dequantize_4bit(packed, state)
        assert torch.equal(nf4.dequantize(stored, 256, dtype), expected)


def layers(dtype):
    """A plain layer with the dequantized weight, and the quantized layer."""
    plain = nn.Linear(192, 48)
    plain.weight = nn.Parameter(weight(), requires_grad=False)
    quantized = copy.deepcopy(plain)
    nf4.use(quantized, dtype)
    assert type(quantized) is Nf4Linear
    assert nf4.num_parameters(nn.Sequential(quantized)) == {"0.weight": 48 * 192, "0.bias": 48}
    values = nf4.dequantize(quantized.weight, 192, torch.float32)
    plain.weight = nn.Parameter(values, requires_grad=False)
    return plain, quantized


def run(layer, dtype):
    x = (weight(20, 192) * 3).view(2, 10, 192).requires_grad_()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        out = layer(x)
    out.backward(weight(20, 64)[:, :48].reshape(2, 10, 48).to(out.dtype))
    assert x.grad is not None
    return out.detach(), x.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nf4_linear_equals_a_linear_layer_with_the_dequantized_weight(dtype):
    plain, quantized = layers(dtype)
    rtol = 1e-6 if dtype == torch.float32 else 1e-2
    for found, expected in zip(run(quantized, dtype), run(plain, dtype), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=rtol)
    assert float((plain.weight - weight()).abs().max()) > 0.01  # it was quantized


def test_nf4_linear_compiled_equals_uncompiled():
    _, quantized = layers(torch.float32)
    compiled = torch.compile(copy.deepcopy(quantized), backend="aot_eager", fullgraph=True)
    results = [run(layer, torch.float32) for layer in (compiled, quantized)]
    assert all(map(torch.equal, *results))


def test_nf4_fits_only_plain_layers_with_whole_blocks():
    assert nf4.fits(nn.Linear(128, 7))
    assert not nf4.fits(nn.Linear(96, 7))
    assert not nf4.fits(nn.Conv1d(64, 64, 1))
    assert not nf4.fits(layers(torch.float32)[1])


@CAMPAIGN
def test_nf4_kernel_returns_the_weight_of_the_plain_path():
    """By Triton's interpreter, which needs no GPU; in float32, since it rounds bf16 in its own way."""
    pytest.importorskip("triton")
    code = """
import torch
from mvp_engine.ops import nf4, triton_kernels
for shape in ((3, 64), (2, 4096), (4, 192)):
    stored = nf4.quantize(torch.randn(shape), torch.bfloat16)
    found = triton_kernels.dequantize_nf4(stored.view(torch.uint8), torch.tensor(nf4.LEVELS), shape[1], torch.float32)
    assert torch.equal(found, nf4.dequantize(stored, shape[1], torch.float32))
"""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)


def test_compiled_block_with_full_checkpointing_keeps_no_dequantized_weight():
    """torch 2.11 would keep them for backward if they were computed in an autograd.Function."""
    block = nn.Sequential(layers(torch.float32)[1], nn.SiLU())
    checkpoint_block(block, "full", backend=None)
    block.compile(backend=aot_autograd(fw_compiler=nop, bw_compiler=nop, partition_fn=partition))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        x = torch.randn(20, 192, requires_grad=True)
        block(x)
    known = {x.data_ptr(), *(param.data_ptr() for param in block.parameters())}
    assert kept
    assert {value.data_ptr() for value in kept} <= known

"""Triton kernels of flash-linear-attention on a CPU, by Triton's interpreter. `test_interpreted_kernels.py` runs it.

What the interpreter of Triton 3.7 lacks is added here: loop variables with the methods of tensors, and bfloat16, which
is held as float32 and rounded after every operation. No autotuner: each kernel has the first of its configurations.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined

import importlib
import json
import sys
import time
from contextlib import nullcontext

import numpy as np
import torch
import triton.language as tl
from mixer_families import mixer_model
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner

from mvp_engine.data.batch import PackedBatch
from mvp_engine.hf.mixers import kernels
from mvp_engine.hf.mixers.kernels import KERNELS, Loaded
from mvp_engine.hf.mixers.per_sequence import Packing

LENGTHS = (70, 5, 130)  # kernels work on chunks of 64 tokens
HEADS_OF_16 = {
    "qwen3_5_text": {
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    # All experts for every token: else rounding to bfloat16 changes which ones.
    "kimi_linear": {"linear_num_heads": 2, "linear_head_dim": 16, "num_experts_per_tok": 4},
    "mamba2": {"state_size": 16, "num_heads": 4, "head_dim": 16, "num_hidden_layers": 1},
}


class Step(int):
    """A loop variable."""

    def to(self, dtype):
        return tl.full((), int(self), dtype)


def steps(*bounds):
    return map(Step, range(*(int(bound) for bound in bounds)))


def rounded(data):
    return torch.tensor(data).bfloat16().float().numpy()


def add_bfloat16():
    builder = interpreter.InterpreterBuilder
    np_dtype = interpreter._get_np_dtype
    load, store, fabs = builder.create_masked_load, builder.create_masked_store, builder.create_fabs

    def is_bfloat16(dtype):
        return getattr(dtype, "scalar", dtype) == tl.bfloat16

    def round_result(handle):
        if is_bfloat16(handle.dtype) and handle.data.dtype != bool:
            handle.data = rounded(handle.data.astype(np.float32))

    def masked_load(self, ptrs, mask, other, *options):
        if ptrs.get_element_ty() != tl.bfloat16:
            return load(self, ptrs, mask, other, *options)
        mask = getattr(mask, "data", mask)
        bits = interpreter._interpreter.load(
            ptrs.data, mask, np.zeros(ptrs.data.shape, np.uint16), np.dtype(np.uint16)
        )
        data = (bits.astype(np.uint32) << 16).view(np.float32)
        data = data if other is None else np.where(mask, data, other.data)
        return interpreter.TensorHandle(data, tl.bfloat16)

    def masked_store(self, ptrs, value, mask, *options):
        if is_bfloat16(value.dtype):
            bits = (np.ascontiguousarray(value.data).view(np.uint32) >> 16).astype(np.uint16)
            return interpreter._interpreter.store(ptrs.data, bits, mask.data)
        return store(self, ptrs, value, mask, *options)

    def cast(self, src, dst_type):
        return interpreter.TensorHandle(
            src.data.astype(interpreter._get_np_dtype(dst_type)), dst_type.scalar
        )

    interpreter._get_np_dtype = lambda dtype: (
        np.dtype(np.float32) if is_bfloat16(dtype) else np_dtype(dtype)
    )
    interpreter.TensorHandle.__post_init__ = round_result
    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store
    builder.create_fabs = lambda self, x: (
        self.unary_op(x, np.abs) if is_bfloat16(x.dtype) else fabs(self, x)
    )
    builder.cast_impl = cast
    builder.get_bf16 = lambda self, value: interpreter.TensorHandle(
        np.array([value], np.float32), tl.bfloat16
    )


def prepare():
    """Import the kernels, and add what the interpreter lacks."""
    for kernel in {
        kernel for every in KERNELS.values() for kernel in every if kernel.package == kernels.FLA
    }:
        importlib.import_module(kernel.module)
    for name, module in sys.modules.items():
        if name.startswith("fla."):
            module.range = steps
    add_bfloat16()
    Autotuner._bench = lambda *_, **__: [0.0]  # the first of equals wins


class Kernels:
    """The kernels of a model, for tensors on a CPU, and how often Triton started one."""

    def __init__(self, by_channel):
        self.by_channel = by_channel
        self.is_used = True
        self.launches = 0
        run = interpreter.GridExecutor.__call__

        def counted(executor, *args, **kwargs):
            self.launches += 1
            run(executor, *args, **kwargs)

        interpreter.GridExecutor.__call__ = counted

    def kernel_for(self, operation, tensor):
        if not self.is_used:
            return None
        every = [kernel for kernel in KERNELS[operation] if kernel.package == kernels.FLA]
        kernel = every[-1 if self.by_channel else 0]
        function = getattr(importlib.import_module(kernel.module), kernel.function)
        return Loaded(kernel, kernels._with_known_arguments(function))


def sequences(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 90, (length,), generator=generator) for length in LENGTHS]


def run(model, ids, dtype, weights):
    """Log-probs and the gradients of their weighted sum."""
    autocast = torch.autocast("cpu", dtype) if dtype != torch.float32 else nullcontext()
    model.zero_grad()
    with autocast:
        log_probs = model(PackedBatch.from_sequences(ids), ["log_probs"])["log_probs"].float()
    (log_probs * weights).sum().backward()
    gradients = {
        name: param.grad.clone()
        for name, param in model.named_parameters()
        if param.grad is not None
    }
    return {"log_probs": log_probs.detach(), **gradients}


def errors(found, expected):
    """By name: the largest difference, relative to the largest value where that is above 1."""
    assert found.keys() == expected.keys()
    scales = {name: value.abs().max().clamp(min=1.0) for name, value in expected.items()}
    return {
        name: float((found[name] - value).abs().max() / scales[name])
        for name, value in expected.items()
    }


def compare(name, by_channel):
    used = Kernels(by_channel)
    kernels.kernel_for = used.kernel_for
    model = mixer_model(name, **HEADS_OF_16[name])
    for parameter, value in model.named_parameters():
        if parameter.endswith("A_log"):
            # Some heads of a new model forget within a token: nothing would reach a neighbour.
            value.data -= value.data.max() + 2
    prepare()
    ids = sequences(seed=0)
    weights = torch.linspace(-1, 1, sum(LENGTHS))
    used.is_used = False
    expected = run(model, ids, torch.float32, weights)
    reference_bf16 = run(model, ids, torch.bfloat16, weights)
    assert used.launches == 0
    used.is_used = True
    start = time.time()
    result = {
        "float32": errors(run(model, ids, torch.float32, weights), expected),
        "bfloat16": errors(run(model, ids, torch.bfloat16, weights), expected),
        "bfloat16 reference": errors(reference_bf16, expected),
    }
    # The one in the middle, between other sequences. Only its tokens have a loss.
    first, end = LENGTHS[0], LENGTHS[0] + LENGTHS[1]
    only = torch.zeros(sum(LENGTHS))
    only[first:end] = 1
    others = sequences(seed=1)
    before = run(model, ids, torch.float32, only)
    after = run(model, [others[0], ids[1], others[2]], torch.float32, only)
    for found in (before, after):
        found["log_probs"] = found["log_probs"][first:end]
    result["neighbours"] = errors(after, before)
    Packing.fla_boundaries = lambda self: {"cu_seqlens": self._boundaries[[0, -1]]}
    leaked = run(model, ids, torch.float32, weights)
    result["without boundaries"] = errors(
        {"log_probs": leaked["log_probs"]}, {"log_probs": expected["log_probs"]}
    )
    return {**result, "launches": used.launches, "seconds": time.time() - start}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(compare(sys.argv[1], by_channel=sys.argv[2] == "by_channel")))

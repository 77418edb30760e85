"""NF4 linear layers: frozen weights of 4 bits each, dequantized whenever they are used (QLoRA).

Legend: T tokens, K inputs, N outputs, B bytes of a row.

A block of 64 weights shares a float32 scale, its largest absolute value; each weight is the nearest of 16 levels,
quantiles of a normal distribution. The numbers are those of bitsandbytes. A row of the weight is stored as its codes,
followed by the scales of its blocks, so any rows can be a shard. The bytes lie in a tensor of the dtype that the model
computes in: FSDP2 neither casts nor pads them, and code that asks a weight for its dtype finds the usual one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from mvp_engine.distributed.dtensor import Index, local_shards
from mvp_engine.ops.precision import autocast_dtype

BLOCK = 64  # weights that share a scale
LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_CHUNK = 2**24  # weights that are quantized at a time, which takes about 20 bytes each


# ---- Layers ------------------------------------------------------------------------------------------------------


def fits(layer: nn.Module) -> bool:
    """A plain linear layer (not an adapter's) whose rows are whole blocks."""
    return type(layer) is nn.Linear and layer.in_features % BLOCK == 0


def use(layer: nn.Linear, dtype: torch.dtype) -> None:
    """Convert a layer in place: the same module and parameter names, with its weight stored in NF4."""
    weight = layer.weight.detach()
    if weight.is_meta:
        stored = weight.new_empty(len(weight), _row_bytes(layer.in_features) // dtype.itemsize)
        stored = stored.to(dtype)
    else:
        stored = quantize(weight, dtype)
    layer.__class__ = Nf4Linear
    layer.weight = nn.Parameter(stored, requires_grad=False)


class Nf4Linear(nn.Linear):
    """A linear layer with a frozen weight in NF4. `weight` holds the bytes, (N, B / itemsize)."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(autocast_dtype(x) or x.dtype)
        x_TK = x.reshape(-1, self.in_features)
        out = _matmul(x_TK, self.weight).view(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias.to(x.dtype)

    def fill(self, read: Callable[[Index], Tensor]) -> None:
        """Quantize this rank's rows of a weight; `read` returns a slice of it."""
        for offset, shard in local_shards(self.weight):
            rows = slice(offset[0], offset[0] + len(shard))
            weight = read((rows, slice(0, self.in_features)))
            shard.copy_(quantize(weight.to(shard.device), shard.dtype))


def quantized_layers(model: nn.Module) -> dict[str, Nf4Linear]:
    """The quantized layers of a model by the names of their weights."""
    modules = model.named_modules()
    return {f"{name}.weight": one for name, one in modules if isinstance(one, Nf4Linear)}


def num_parameters(model: nn.Module) -> dict[str, int]:
    """The number of weights of each parameter by its name; the size of a quantized one does not show it."""
    sizes = {name: param.numel() for name, param in model.named_parameters()}
    for name, layer in quantized_layers(model).items():
        sizes[name] = layer.in_features * layer.out_features
    return sizes


# Operators, not an autograd.Function: in a compiled block, activation checkpointing of torch 2.11 does not see into
# functions, and all dequantized weights would be kept for backward.
@torch.library.custom_op("mvp::nf4_matmul", mutates_args=())
def _matmul(x_TK: Tensor, stored: Tensor) -> Tensor:
    return x_TK @ dequantize(stored, x_TK.shape[1], x_TK.dtype).t()


@torch.library.custom_op("mvp::nf4_matmul_backward", mutates_args=())
def _matmul_backward(d_TN: Tensor, stored: Tensor) -> Tensor:
    return d_TN @ dequantize(stored, in_features_of(stored), d_TN.dtype)


@_matmul.register_fake
def _(x_TK, stored):  # type: ignore[no-untyped-def]
    return x_TK.new_empty(len(x_TK), len(stored))


@_matmul_backward.register_fake
def _(d_TN, stored):  # type: ignore[no-untyped-def]
    return d_TN.new_empty(len(d_TN), in_features_of(stored))


def _keep_stored(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _gradients(ctx: Any, d_TN: Tensor) -> tuple[Tensor, None]:
    [stored] = ctx.saved_tensors
    return _matmul_backward(d_TN, stored), None


_matmul.register_autograd(_gradients, setup_context=_keep_stored)


# ---- Numbers -----------------------------------------------------------------------------------------------------


def _row_bytes(in_features: int) -> int:
    return in_features // 2 + in_features // BLOCK * 4


def in_features_of(stored: Tensor) -> int:
    """Of a weight that is given by its stored bytes: a block has 32 bytes of codes and 4 of a scale."""
    return stored.shape[1] * stored.element_size() // _row_bytes(BLOCK) * BLOCK


@cache
def _levels(device: torch.device) -> Tensor:
    return torch.tensor(LEVELS, device=device)


@cache
def _level_pairs(device: torch.device) -> Tensor:
    """The two levels of each byte, (256, 2)."""
    levels = _levels(device)
    codes = torch.arange(256, device=device)
    return torch.stack([levels[codes >> 4], levels[codes & 15]], dim=1)


@torch.no_grad()
def quantize(weight_NK: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes of a weight, as a tensor of `dtype`."""
    in_features = weight_NK.shape[1]
    stored = weight_NK.new_empty(len(weight_NK), _row_bytes(in_features), dtype=torch.uint8)
    rows = max(1, _CHUNK // in_features)
    for weight, out in zip(weight_NK.split(rows), stored.split(rows), strict=True):
        codes, scales = _quantize_blocks(weight.float().unflatten(1, (-1, BLOCK)))
        out[:, : in_features // 2] = codes
        out[:, in_features // 2 :] = scales.contiguous().view(torch.uint8)
    return stored.view(dtype)


def _quantize_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, two in a byte, and float32 scales of weights that are given as (rows, blocks of a row, BLOCK)."""
    scales = blocks.abs().amax(2)
    inverse = 1.0 / scales.clamp(min=1e-38)  # a block of zeros has the scale 0
    levels = _levels(blocks.device)
    between = (levels[1:] + levels[:-1]) / 2
    scaled = (blocks * inverse[..., None]).flatten(1)
    codes = torch.bucketize(scaled, between, out_int32=True).to(torch.uint8)
    return codes[:, ::2] << 4 | codes[:, 1::2], scales


def dequantize(stored: Tensor, in_features: int, dtype: torch.dtype) -> Tensor:
    """The weight (N, K) of `dtype` that these bytes stand for."""
    stored = stored.contiguous().view(torch.uint8)
    if stored.is_cuda:
        from mvp_engine.ops.triton_kernels import dequantize_nf4

        return dequantize_nf4(stored, _levels(stored.device), in_features, dtype)
    codes, scales = stored.split([in_features // 2, in_features // BLOCK * 4], dim=1)
    pairs = torch.nn.functional.embedding(codes.int(), _level_pairs(stored.device))
    blocks = pairs.view(len(stored), -1, BLOCK)
    blocks *= scales.contiguous().view(torch.float32)[..., None]
    return blocks.view(-1, in_features).to(dtype)

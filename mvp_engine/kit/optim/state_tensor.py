"""StateTensor: one optimizer state of one parameter, stored as float32, bfloat16, or 8-bit codes with block scales.

All stored tensors are sharded like the parameter, so a checkpoint saves and reshards them like any other state. 8-bit
states have keys of their own (`exp_avg_codes`, `exp_avg_scales`): an optimizer that does not know them finds no state,
instead of wrong values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mvp_engine.distributed.dtensor import (
    empty_sharded_like,
    local_tensor,
    shard_slices,
)
from mvp_engine.errors import UserError
from mvp_engine.kit.optim.blockwise import (
    BLOCK,
    blocks_of,
    dequantize,
    quantize,
    scales_shape,
)
from mvp_engine.kit.optim.chunks import Chunk, chunks, has_whole_blocks
from mvp_engine.kit.optim.host_states import host_copy, host_zeros_like
from mvp_engine.kit.optim.rounding import random_bits, round_to_bfloat16, rounding_key

CODES = "_codes"
SCALES = "_scales"
QUANTIZED = (torch.int8, torch.uint8)


def storage_dtype(param: Tensor, name: str, state_dtype: str, signed: bool) -> torch.dtype:
    """The dtype that `optim.state_dtype` gives to a state of this parameter; vectors are never quantised."""
    if state_dtype == "float32" or (state_dtype == "int8" and param.ndim < 2):
        return torch.float32
    if state_dtype == "bfloat16":
        return torch.bfloat16
    if not has_whole_blocks(param):
        assert isinstance(param, DTensor)
        raise UserError(
            f"optim.state_dtype=int8: {name} is sharded inside of rows ({param.placements}), at other places than "
            f"between blocks of {BLOCK}. Set optim.state_dtype=bfloat16, or parallel.tensor=1"
        )
    return torch.int8 if signed else torch.uint8


@dataclass(frozen=True)
class StateSpec:
    """How a state is stored: its key, its dtype, and the salt of the random bits that round it."""

    key: str
    dtype: torch.dtype
    salt: int

    @cached_property
    def is_quantized(self) -> bool:
        return self.dtype in QUANTIZED

    @cached_property
    def stored_keys(self) -> list[str]:
        """The keys of what is stored in the state dict of a parameter."""
        if self.is_quantized:
            return [self.key + CODES, self.key + SCALES]
        return [self.key]


class StateTensor:
    """One state of one parameter in the parameter's state dict, read and written as float32."""

    def __init__(self, param: Tensor, state: dict[str, Any], spec: StateSpec) -> None:
        self.param = param
        self.state = state
        self.key = spec.key
        self.dtype = spec.dtype
        self.salt = spec.salt
        self.is_quantized = spec.is_quantized
        self.stored_keys = spec.stored_keys

    @property
    def stored(self) -> Tensor:
        """This rank's part of what is stored: values, or codes."""
        return local_tensor(self.state[self.stored_keys[0]])

    @property
    def scales(self) -> Tensor:
        """This rank's part of the scales of a quantised state."""
        return local_tensor(self.state[self.key + SCALES])

    def create(self, *, on_host: bool = False) -> None:
        """Store zeros, on the device of the parameter or on the host."""
        zeros_like = host_zeros_like if on_host else torch.zeros_like
        self.state[self.stored_keys[0]] = zeros_like(self.param, dtype=self.dtype)
        if self.is_quantized:
            shape = scales_shape(self.param.shape)
            scales = empty_sharded_like(self.param, shape, torch.float32)
            self.state[self.key + SCALES] = zeros_like(scales, dtype=torch.float32)

    def rounding_key(self, step: Tensor) -> Tensor:
        return rounding_key(self.salt, step)

    def read(self, chunk: Chunk) -> Tensor:
        """A float32 copy of a chunk."""
        stored = self.stored[chunk.index]
        if self.is_quantized:
            return dequantize(stored, self.scales[chunk.scales_index])
        return stored.to(torch.float32, copy=True)

    def write(self, chunk: Chunk, value: Tensor, rounding_key: Tensor, skip: Tensor | None) -> None:
        """Round a chunk and store it; where `skip` is set on the device, keep what is stored."""
        stored = self.stored[chunk.index]
        if self.dtype is torch.float32:
            _store(stored, value, skip)
            return
        bits = random_bits(rounding_key, value.shape, chunk.offset, self.param.shape)
        if self.dtype is torch.bfloat16:
            _store(stored, round_to_bfloat16(value, bits), skip)
            return
        codes, scales = quantize(value, self.dtype, bits)
        _store(stored, codes, skip)
        _store(self.scales[chunk.scales_index], scales, skip)

    def load(
        self, saved: Mapping[str, Any], rounding_key: Tensor, *, on_host: bool = False
    ) -> bool:
        """Take over a saved state, converted if it has another dtype; False if none was saved under this key."""
        if self._fits(saved):
            for key in self.stored_keys:
                value = saved[key]
                self.state[key] = host_copy(value) if on_host else value.to(self.param.device)
            return True
        has_values = self.key in saved
        has_codes = self.key + CODES in saved
        if not has_values and not has_codes:
            return False
        self.create(on_host=on_host)
        for chunk in chunks(self.param):
            value = _saved_values(saved, self.key, chunk).to(rounding_key.device)
            self.write(chunk, value, rounding_key, skip=None)
        return True

    def _fits(self, saved: Mapping[str, Any]) -> bool:
        """Whether a saved state has the keys and dtypes of this one."""
        values, *scales = self.stored_keys
        if values not in saved or saved[values].dtype != self.dtype:
            return False
        return all(key in saved and saved[key].dtype == torch.float32 for key in scales)


def _store(target: Tensor, value: Tensor, skip: Tensor | None) -> None:
    target.copy_(value if skip is None else torch.where(skip, target, value))


def _saved_values(saved: Mapping[str, Any], key: str, chunk: Chunk) -> Tensor:
    """A chunk of a saved state of any dtype, as float32."""
    if key in saved:
        return local_tensor(saved[key])[chunk.index].float()
    codes = local_tensor(saved[key + CODES])[chunk.index]
    scales = saved[key + SCALES]
    if isinstance(scales, DTensor):
        return dequantize(codes, local_tensor(scales)[chunk.scales_index])
    return _dequantize_part_of_rows(codes, scales.to(codes.device), chunk)


def _dequantize_part_of_rows(codes: Tensor, full_scales: Tensor, chunk: Chunk) -> Tensor:
    """The values of codes that may start and end inside of blocks, with the scales of the full parameter.

    A layout that shards inside of rows cannot shard the scales alike, so each rank has all of them.
    """
    *rows, columns = shard_slices(chunk.offset, codes)
    first_block, codes_before = divmod(columns.start, BLOCK)
    blocks = slice(first_block, blocks_of(columns.stop))
    scales = full_scales[(*rows, blocks)]
    # Zeros in front, so that the codes start with a whole block.
    padded = torch.nn.functional.pad(codes, (codes_before, 0))
    return dequantize(padded, scales)[..., codes_before:]

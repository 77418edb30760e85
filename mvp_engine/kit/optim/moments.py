"""The moments of one parameter, kept as float32, as bfloat16, or as 8-bit codes with a scale for each block of a row.

Everything is laid out like the parameter, so it is sharded, saved and read on another layout like any moment. Keys of
8-bit moments have names of their own: an optimizer that does not know them finds nothing, instead of wrong numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from mvp_engine.distributed.dtensor import empty_sharded_like, local_tensor, shard_offsets
from mvp_engine.errors import UserError
from mvp_engine.kit.optim.rounding import BLOCK, from_codes, hashed, noise, to_bfloat16, to_codes

CODES, SCALES = "_codes", "_scales"
CHUNK = 2**22  # elements that are worked on at once, which bounds the memory of the work
KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


@dataclass(frozen=True)
class Part:
    """A box of a parameter that is worked on at once: where it begins in the whole, and where it lies here."""

    offset: tuple[int, ...]
    index: tuple[slice, ...]

    @property
    def blocks(self) -> tuple[slice, ...]:
        """Where the scales of this box lie."""
        last = self.index[-1]
        return (*self.index[:-1], slice(last.start // BLOCK, -(-last.stop // BLOCK)))


def parts(param: Tensor) -> Iterator[Part]:
    """All that this rank holds of a parameter, some rows at a time."""
    for offset, index in shard_offsets(param):
        if not index:
            yield Part(offset, index)
            continue
        rows, (start, stop, _) = prod(s.stop - s.start for s in index[1:]), index[0].indices(2**62)
        step = max(1, CHUNK // max(1, rows))
        for begin in range(start, stop, step):
            here = slice(begin, min(begin + step, stop))
            yield Part((offset[0] + begin - start, *offset[1:]), (here, *index[1:]))


class Moment:
    """One moment of one parameter: where its numbers are, and how they are read and written."""

    def __init__(
        self, param: Tensor, state: dict[str, Any], key: str, signed: bool, kind: str, name: str
    ) -> None:
        self.param, self.state, self.key = param, state, key
        self.dtype = KINDS[kind]
        if kind == "int8":
            self.dtype = torch.float32 if param.ndim < 2 else torch.int8 if signed else torch.uint8
            if param.ndim > 1 and not blocks_are_whole(param):
                raise UserError(
                    f"optim.state_dtype=int8: {name} is cut inside of rows ({param.placements}), where 8-bit moments have "  # type: ignore[attr-defined]
                    f"blocks of {BLOCK}. Set optim.state_dtype=bfloat16, or parallel.tensor=1"
                )

    @property
    def is_coded(self) -> bool:
        return self.dtype in (torch.int8, torch.uint8)

    def create(self) -> None:
        if self.is_coded:
            size = scales_shape(self.param.shape)
            self.state[self.key + CODES] = torch.zeros_like(self.param, dtype=self.dtype)
            self.state[self.key + SCALES] = empty_sharded_like(self.param, size, torch.float32)
            local_tensor(self.state[self.key + SCALES]).zero_()
        else:
            self.state[self.key] = torch.zeros_like(self.param, dtype=self.dtype)

    def read(self, part: Part) -> Tensor:
        """As float32; a copy."""
        if self.is_coded:
            codes, scales = (
                local_tensor(self.state[self.key + CODES]),
                local_tensor(self.state[self.key + SCALES]),
            )
            return from_codes(codes[part.index], scales[part.blocks])
        return local_tensor(self.state[self.key])[part.index].to(torch.float32, copy=True)

    def write(self, part: Part, value: Tensor, key: Tensor, bad: Tensor | None) -> None:
        """Round and keep; where the step is `bad`, what is there stays."""
        if self.dtype is torch.float32:
            _put(local_tensor(self.state[self.key])[part.index], value, bad)
            return
        bits = noise(key, value.shape, part.offset, self.param.shape)
        if self.dtype is torch.bfloat16:
            _put(local_tensor(self.state[self.key])[part.index], to_bfloat16(value, bits), bad)
            return
        codes, scales = to_codes(value, self.dtype, bits)
        _put(local_tensor(self.state[self.key + CODES])[part.index], codes, bad)
        _put(local_tensor(self.state[self.key + SCALES])[part.blocks], scales, bad)

    def take(self, saved: Mapping[str, Any], key: Tensor) -> bool:
        """Take over what was saved, in whatever form that is; is there anything?"""
        self.create()
        same = [name for name in self.state if name.startswith(self.key)]
        if all(name in saved and saved[name].dtype == self.state[name].dtype for name in same):
            self.state.update({name: saved[name].to(self.param.device) for name in same})
            return True
        if self.key not in saved and self.key + CODES not in saved:
            return False
        for part in parts(self.param):
            self.write(part, _as_float(saved, self.key, part), key, None)
        return True


def _as_float(saved: Mapping[str, Any], key: str, part: Part) -> Tensor:
    if key in saved:
        return local_tensor(saved[key])[part.index].float()
    codes, scales = local_tensor(saved[key + CODES])[part.index], saved[key + SCALES]
    if isinstance(scales, DTensor):
        return from_codes(codes, local_tensor(scales)[part.blocks])
    # Whole scales, since rows are cut here: those of the blocks that this box touches, beginning inside of the first.
    first, inside = divmod(part.offset[-1], BLOCK)
    rows = tuple(slice(o, o + n) for o, n in zip(part.offset[:-1], codes.shape[:-1], strict=True))
    scales = scales.to(codes.device)[
        (*rows, slice(first, -(-(part.offset[-1] + codes.shape[-1]) // BLOCK)))
    ]
    return from_codes(torch.nn.functional.pad(codes, (inside, 0)), scales)[..., inside:]


def _put(target: Tensor, value: Tensor, bad: Tensor | None) -> None:
    target.copy_(value if bad is None else torch.where(bad, target, value))


def scales_shape(shape: torch.Size) -> tuple[int, ...]:
    return (*shape[:-1], -(-shape[-1] // BLOCK))


def blocks_are_whole(param: Tensor) -> bool:
    """Does every rank hold whole blocks of the rows? Sure, unless rows are cut."""
    if not isinstance(param, DTensor):
        return True
    cuts = [
        (type(placement), ranks)
        for placement, ranks in zip(param.placements, param.device_mesh.shape, strict=True)
        if getattr(placement, "dim", None) == param.ndim - 1
    ]
    return all(kind is Shard for kind, _ in cuts) and (
        not cuts or param.shape[-1] % (BLOCK * prod(ranks for _, ranks in cuts)) == 0
    )


def flat_begin(param: Tensor) -> int | None:
    """Where in the whole parameter this rank's part begins, if that is one piece of the numbers in their order."""
    pieces = shard_offsets(param)
    if len(pieces) != 1 or param.ndim == 0 or not local_tensor(param).is_contiguous():
        return None
    ((first, *others), index), rest = pieces[0], param.shape[1:]
    whole = not any(others) and [s.stop - s.start for s in index[1:]] == list(rest)
    return first * prod(rest) if whole else None


def salt_of(seed: int, name: str, moment: str) -> int:
    return crc32(f"{seed}/{name}/{moment}".encode()) - 2**31


def key_of(seed: int, name: str, moment: str, step: Tensor) -> Tensor:
    """The key of the noise in one step, as an int32 scalar on the device: nobody has to know the step on the host."""
    salt = salt_of(seed, name, moment)
    count = step.to(torch.int32).reshape(()).clone()
    return hashed(hashed(count.add_(salt)).add_(salt))

"""Inputs of checkpointed blocks that wait for backward on the host (`model.activation_checkpointing=offload`).

    compute     block 1        block 2        block 3     ...     backward of 3    backward of 2    backward of 1
    side stream  input 1 to host  input 2 to host         ...                      input 1 to device

Copies run on one side stream, so that they are in order among themselves: a host buffer is written again only after it
was read. When a block starts, the input of the block before it leaves, and the one before that has left: the compute
stream waits for that copy, and only then the memory is freed, in its own order. (`record_stream` would free it when the
*host* sees the copy done. The host is far ahead: nothing would be freed in time.) The inputs of the last two blocks
are still there when backward begins. When backward of a block starts, the input of the block before it comes back.

What is kept for backward belongs to the autograd graph: an interrupted forward drops the graph, and its buffers are
free again. On a CPU the same code copies at once.
"""

from __future__ import annotations

import os
import weakref
from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from mvp_engine.errors import UserError
from mvp_engine.ops import side_stream
from mvp_engine.ops.host_memory import GIB, available_host_memory, pinned_zeros

KEY = "model.activation_checkpointing=offload"
FIX = "Free host memory, set smaller packs (micro_batch_tokens), or model.activation_checkpointing=full"
SMALL = 2**20  # bytes; smaller inputs stay on the device
STEPS = 8  # sizes of buffers between two powers of two: packs of nearly the same size share them
_OF_MODEL: weakref.WeakKeyDictionary[nn.Module, HostInputs] = weakref.WeakKeyDictionary()


def host_bytes(model: nn.Module) -> int:
    """Bytes of the buffers on the host that the inputs of a model's blocks have used."""
    return _OF_MODEL[model].host_bytes if model in _OF_MODEL else 0


class HostInputs:
    """The inputs of a model's blocks on the host, in buffers that later micro-batches use again."""

    def __init__(self, model: nn.Module) -> None:
        _OF_MODEL[model] = self
        self.host_bytes = 0  # of all buffers
        self._free: list[Tensor] = []  # by size
        # Buffers of inputs that are gone, at any moment and in any thread: the next `take` sorts them in.
        self._returned: list[Tensor] = []
        self._stream: side_stream.Stream = None
        self._recent: list[weakref.ref[_Input]] = []  # of the last two blocks

    def offloading(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call of a checkpointed block whose input waits on the host."""

        def offloaded(*args: Any, **kwargs: Any) -> Any:
            hidden = self._hidden_states((*args, *kwargs.values()))
            if hidden is None:
                return call(*args, **kwargs)
            self._move_earlier_inputs()
            found = [_Input(self, hidden, self._recent[-1:])]
            del hidden
            # Autograd calls this with all that it saves: also weights, and the input with other shapes.
            with saved_tensors_hooks(lambda saved: found[0].pack(saved), _unpack):
                result = call(*args, **kwargs)
            saved = weakref.ref(found.pop())
            if saved() is not None:
                self._recent.append(saved)
            return result

        return offloaded

    def _hidden_states(self, values: tuple[Any, ...]) -> Tensor | None:
        """The first large argument that needs gradients. Later ones, such as an encoder's output, are the same for all
        blocks."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        for value in values:
            # Not of subclasses: DTensors, and fake tensors of `mvp plan`.
            if type(value) is not Tensor or value.grad_fn is None or value.nbytes < SMALL:
                continue
            if value.is_floating_point() and value.is_contiguous():
                return value
        return None

    def _move_earlier_inputs(self) -> None:
        earlier = [one for ref in self._recent if (one := ref()) is not None]
        for one in earlier[:-1]:
            one.free_on_device()
        for one in earlier[-1:]:
            one.copy_to_host()
        self._recent = [weakref.ref(one) for one in earlier[-1:]]

    def stream(self, device: torch.device) -> side_stream.Stream:
        if self._stream is None:
            self._stream = side_stream.new_stream(device)
        return self._stream

    # ---- Buffers ----------------------------------------------------------------------------------------------------

    def take(self, size: int, device: torch.device) -> Tensor:
        """The smallest free buffer of at least `size` bytes; a new one takes the place of one that is too small."""
        while self._returned:
            insort(self._free, self._returned.pop(), key=len)
        place = bisect_left(self._free, size, key=len)
        if place < len(self._free):
            return self._free.pop(place)
        if self._free:
            self.host_bytes -= len(self._free.pop())
        step = max(1, 2 ** (size - 1).bit_length() // (2 * STEPS))
        size = -(-size // step) * step
        buffer = self._allocate(size, device)
        self.host_bytes += size
        return buffer

    def _allocate(self, size: int, device: torch.device) -> Tensor:
        if device.type != "cuda":
            return torch.empty(size, dtype=torch.uint8)
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        available = available_host_memory()
        if available is not None and ranks * size > available:
            raise UserError(
                f"{KEY}: a rank has {self.host_bytes / GIB:.1f} GiB of inputs of blocks on the host, and "
                f"{available / GIB:.1f} GiB are left for more on {ranks} ranks of this machine. {FIX}"
            )
        return pinned_zeros((size,), torch.uint8, KEY, FIX)

    def give_back(self, buffer: Tensor) -> None:
        self._returned.append(buffer)


class _Input:
    """The input of one call of a block: on the device, on the host, or on both."""

    def __init__(
        self, inputs: HostInputs, hidden: Tensor, before: list[weakref.ref[_Input]]
    ) -> None:
        self.buffer: Tensor | None = None  # on the host
        self.is_copied: side_stream.Event = None  # the compute stream has yet to wait for it
        self.inputs = inputs
        self.before = before  # of the block before this one
        self.device = hidden.device
        self.dtype = hidden.dtype
        self.shape = hidden.shape
        self.storage = hidden.untyped_storage()._cdata
        self.offset = hidden.storage_offset()
        self.on_device: Tensor | None = hidden.detach()
        self.version = hidden._version  # which the detached tensor shares
        # Of the memory on the device. Garbage collection may run `__del__` on the side stream, or in another thread.
        self.compute_stream = side_stream.current_stream(self.device)
        self.is_computed = side_stream.event(self.device)
        self.num_packed = 0  # a graph may save it with several shapes
        self.num_used = 0

    def pack(self, saved: Tensor) -> Any:
        """What autograd saves: itself, unless it is this input."""
        if type(saved) is not Tensor or saved.dtype != self.dtype or not saved.is_contiguous():
            return saved
        if saved.untyped_storage()._cdata != self.storage:
            return saved
        # Another argument may be another slice of the same storage.
        if saved.storage_offset() != self.offset or saved.numel() != self.shape.numel():
            return saved
        self.num_packed += 1
        return _Packed(self, saved.shape)

    def copy_to_host(self) -> None:
        if self.buffer is not None or self.on_device is None:
            return
        self.buffer = self.inputs.take(self.on_device.nbytes, self.device)
        with side_stream.on(self.inputs.stream(self.device), self.is_computed):
            self._host().copy_(self.on_device, non_blocking=True)
            self.is_copied = side_stream.event(self.device)

    def free_on_device(self) -> None:
        if self.buffer is None:  # its copy failed
            return
        self._check_unchanged()
        self._wait()
        self.on_device = None

    def copy_to_device(self) -> None:
        if self.on_device is not None:
            return
        # Memory of the compute stream: what used it before is done at the event.
        on_device = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        with side_stream.on(self.inputs.stream(self.device), side_stream.event(self.device)):
            on_device.copy_(self._host(), non_blocking=True)
            self.is_copied = side_stream.event(self.device)
        self.on_device = on_device
        self.version = on_device._version

    def use(self) -> Tensor:
        """The input, for backward; that of the block before it is copied to the device meanwhile."""
        self.copy_to_device()
        self._check_unchanged()
        self._wait()
        found = self.on_device
        assert found is not None
        self.num_used += 1
        is_last = self.num_used % self.num_packed == 0
        if self.buffer is not None and is_last:  # a second backward would copy it again
            self.on_device = None
        for ref in self.before:
            if (before := ref()) is not None:
                before.copy_to_device()
        return found

    def _host(self) -> Tensor:
        assert self.buffer is not None
        size = self.shape.numel() * self.dtype.itemsize
        return self.buffer[:size].view(self.dtype).view(self.shape)

    def _wait(self) -> None:
        side_stream.wait(self.is_copied, self.compute_stream)
        self.is_copied = None

    def _check_unchanged(self) -> None:
        if self.on_device is not None and self.on_device._version != self.version:
            raise UserError(
                f"{KEY}: the input of a block was changed in place after the block had read it, and backward needs it. "
                "Change it out of place (x = x + y for x += y)"
            )

    def __del__(self) -> None:
        self._wait()  # before the memory on the device is freed
        if self.buffer is not None:
            self.inputs.give_back(self.buffer)


class _Packed(NamedTuple):
    """What the autograd graph holds in place of the input of a block."""

    kept: _Input
    shape: torch.Size


def _unpack(packed: Any) -> Any:
    return packed.kept.use().view(packed.shape) if isinstance(packed, _Packed) else packed

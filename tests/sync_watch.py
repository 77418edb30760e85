"""Host syncs that a GPU would have, found on the CPU: reads of values that were computed on the device."""

from __future__ import annotations

import traceback
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from mvp_engine.data.batch import PackedBatch

# Operations whose result, or its shape, is a value of a tensor.
_READS = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "repeat_interleave",
    "_unique2",
    "unique_dim",
    "equal",
)
_METHODS = {
    Tensor.tolist,
    Tensor.item,
    Tensor.numpy,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
}
_METHODS |= {Tensor.__index__, Tensor.cpu, Tensor.__contains__}


CPU_KERNELS = ("reference_attention",)  # which read boundaries; the kernels of GPUs do not


class MovedBatch(PackedBatch):
    """A batch as it is on a GPU: its tensors are copies, and the host keeps token ids and labels."""

    host: PackedBatch

    @classmethod
    def of(cls, batch):
        moved = batch._map(Tensor.clone)
        moved.__class__ = cls
        moved.host = batch
        return moved

    def _on_host(self, name):
        return getattr(self.host, name)


class SyncWatch:
    """`syncs`: the places that read the value of a device tensor, inside of `with`.

    Device tensors are those of `mark`, and all that is computed from one; others, such as grids and the host's token
    ids, may be read. Both modes are needed: `tolist` of a CPU tensor dispatches nothing, a backward calls no function.
    """

    def __init__(self):
        self.syncs: list[str] = []
        self._on_device: Any = WeakIdKeyDictionary()
        self._modes: list[Any] = []

    def mark(self, model, batch):
        host = {one.untyped_storage().data_ptr() for one in batch.host.tensors().values()}
        of_batch = [
            one for one in batch.tensors().values() if one.untyped_storage().data_ptr() not in host
        ]
        for tensor in [*model.parameters(), *model.buffers(), *of_batch]:
            self._on_device[tensor.untyped_storage()] = True

    def __enter__(self):
        self._modes = [_Functions(self), _Dispatches(self)]
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error):
        for mode in reversed(self._modes):
            mode.__exit__(*error)

    def is_on_device(self, values):
        return any(one.untyped_storage() in self._on_device for one in _tensors(values))

    def found(self, what):
        frames = [one for one in traceback.extract_stack() if "/torch/" not in one.filename]
        place = next((one for one in reversed(frames) if one.filename != __file__), frames[-1])
        if place.name not in CPU_KERNELS:
            self.syncs.append(f"{what} at {place.filename}:{place.lineno}: {place.line}")


def _tensors(values):
    return [
        one
        for one in tree_leaves(values)
        if isinstance(one, Tensor) and one.layout == torch.strided
    ]


class _Functions(TorchFunctionMode):
    def __init__(self, watch):
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _METHODS and self.watch.is_on_device(args[:1]):
            self.watch.found(func.__name__)
        return func(*args, **(kwargs or {}))


class _Dispatches(TorchDispatchMode):
    def __init__(self, watch):
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = (args, kwargs or {})
        on_device = self.watch.is_on_device(given)
        name = func._schema.name.removeprefix("aten::")
        if on_device and self._reads(name, args, kwargs or {}):
            self.watch.found(name)
        result = func(*args, **(kwargs or {}))
        if on_device:
            for one in _tensors(result):
                self.watch._on_device[one.untyped_storage()] = True
        return result

    def _reads(self, name, args, kwargs):
        if name.rstrip("_") in ("index", "index_put", "_index_put_impl"):
            masks = [one for one in args[1] if isinstance(one, Tensor) and one.dtype == torch.bool]
            return self.watch.is_on_device(masks)
        if name == "repeat_interleave":
            return kwargs.get("output_size") is None and self.watch.is_on_device(args)
        return name in _READS


def device_reads(model, batch, *wanted):
    """The host syncs of a forward and backward for each list of outputs."""
    watch = SyncWatch()
    watch.mark(model, batch)
    model.check = lambda batch: None  # of batches on the host
    with watch:
        for names in wanted:
            sum(one.sum() for one in model(batch, names).values()).backward()
    return watch.syncs

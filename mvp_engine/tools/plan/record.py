"""CollectiveRecorder: every collective that runs inside of it, in order, on real ranks and on simulated ones alike."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

TORCH = str(Path(torch.__file__).parent)
OWN_FOLDER = str(Path(__file__).parent)

# Parts of the names of torch's operators, in the namespaces below; the first that matches.
NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")
KINDS = {
    "reduce_scatter": "reduce-scatter",
    "allgather": "all-gather",
    "all_gather": "all-gather",
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "alltoall": "all-to-all",
    "all_to_all": "all-to-all",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "receive",
    "barrier": "barrier",
    "scatter": "scatter",
    "gather": "gather",
    "reduce": "reduce",
}
INPUTS = ("input", "inputs", "input_tensor", "input_tensors", "tensors", "tensor")


@dataclass(frozen=True)
class Collective:
    """One call of a collective by one rank."""

    kind: str  # as in KINDS
    ranks: tuple[int, ...]  # of its group
    bytes: int  # that this rank puts in
    dtype: str
    # all-to-all: elements for each rank of the group, and from each; empty: equal shares
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    peer: int | None = None  # the other rank of a send or receive, the source of a broadcast
    overlaps: bool = False  # FSDP or DDP runs it while blocks compute
    where: str = field(default="", compare=False)  # the module, or the line of code, that calls it

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole tensor: what an all-gather returns, what a reduce-scatter or all-reduce adds up."""
        return self.bytes * len(self.ranks) if self.kind == "all-gather" else self.bytes

    def __str__(self) -> str:
        return f"{self.kind} of {self.bytes:,} bytes of {self.dtype} over {ranks_text(self.ranks)}"


def ranks_text(ranks: tuple[int, ...]) -> str:
    """The ranks of a group: "ranks 0, 8, ..., 56"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    step = ranks[1] - ranks[0]
    is_even = all(b - a == step for a, b in pairwise(ranks))
    if len(ranks) > 4 and is_even:
        if step == 1:
            return f"ranks {ranks[0]}-{ranks[-1]}"
        return f"ranks {ranks[0]}, {ranks[1]}, ..., {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"


class CollectiveRecorder(TorchDispatchMode):
    """A context that records the collectives of this process, also those of backward, which runs in the same thread."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Collective] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.record(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kind = _kind(func)
        if kind is None:
            return
        names = [argument.name for argument in func._schema.arguments]
        values = dict(zip(names, args, strict=False)) | kwargs
        group = _group(values)
        inputs = [values[name] for name in INPUTS if name in values and kind != "barrier"]
        tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        peer = next((values[n] for n in ("dst", "src", "root_rank") if n in values), None)
        frames = list(_frames())
        fsdp_module = next((name for frame in frames if (name := _fsdp_module(frame))), None)
        in_ddp = any(frame.f_code.co_filename.endswith("distributed/ddp.py") for frame in frames)
        self.calls.append(
            Collective(
                kind,
                tuple(dist.get_process_group_ranks(group)),
                sum(tensor.numel() * tensor.element_size() for tensor in tensors),
                str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
                tuple(values.get("input_split_sizes") or ()),
                tuple(values.get("output_split_sizes") or ()),
                None if peer is None else dist.get_process_group_ranks(group)[peer],
                overlaps=fsdp_module is not None or in_ddp,
                where=fsdp_module or _line(frames),
            )
        )


@cache
def _kind(func: Any) -> str | None:
    if func.namespace not in NAMESPACES or "wait_tensor" in func.__name__:
        return None
    name = func.__name__
    return next((kind for part, kind in KINDS.items() if part in name), None)


def _group(values: dict[str, Any]) -> ProcessGroup:
    if "process_group" in values:
        return ProcessGroup.unbox(values["process_group"])
    found = values["group_name"]
    return found if isinstance(found, ProcessGroup) else _resolve_process_group(found)


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _fsdp_module(frame: FrameType) -> str | None:
    """The name of the module that FSDP2 gathers or reduces in this frame."""
    if "torch/distributed/fsdp" not in frame.f_code.co_filename:
        return None
    name = getattr(frame.f_locals.get("self"), "_module_fqn", None)
    return None if name is None else f"FSDP of {name or 'the root module'}"


def _line(frames: list[FrameType]) -> str:
    """The innermost line outside of torch."""
    for frame in frames:
        file = frame.f_code.co_filename
        if not file.startswith((TORCH, OWN_FOLDER, "<")):
            return f"{Path(file).name}:{frame.f_lineno}"
    return ""

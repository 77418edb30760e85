"""CollectiveRecorder: every collective that runs inside of it, in order, on real ranks and on simulated ones alike.

`find_differences` compares those of ranks: a difference is a hang, or mixes up data.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations, pairwise, zip_longest
from pathlib import Path
from traceback import walk_stack
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

# In the names of operators of these namespaces, without "-" and "_"; the first that matches counts.
NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")
KINDS = ["reduce-scatter", "all-gather", "all-reduce", "all-to-all", "broadcast", "send", "recv"]
KINDS += ["barrier", "scatter", "gather", "reduce"]
INPUTS = ("input", "inputs", "input_tensor", "input_tensors", "tensors", "tensor")


@dataclass(frozen=True)
class Collective:
    """One call of a collective by one rank."""

    kind: str  # as in KINDS; "receive" for recv
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
        frames = [frame for frame, _ in walk_stack(sys._getframe(1))]
        fsdp_module = next((name for frame in frames if (name := _fsdp_module(frame))), None)
        in_ddp = any(
            frame.f_code.co_filename.endswith("distributed/data_parallel.py") for frame in frames
        )
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
    name = func.__name__.replace("_", "")
    kind = next((kind for kind in KINDS if kind.replace("-", "") in name), None)
    return "receive" if kind == "recv" else kind


def _group(values: dict[str, Any]) -> ProcessGroup:
    if "process_group" in values:
        return ProcessGroup.unbox(values["process_group"])
    group = values["group_name"]
    return group if isinstance(group, ProcessGroup) else _resolve_process_group(group)


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


# ---- Hangs ---------------------------------------------------------------------------------------------------------

Calls = Sequence[Collective]
POINT_TO_POINT = ("send", "receive")


@dataclass(frozen=True)
class Difference:
    """The first call in which a rank differs from another one."""

    rank: int
    other: int
    number: int  # of the call, counted from 1, among those that both ranks make together
    call: Collective | None  # None: the rank has no such call
    expected: Collective | None

    def __str__(self) -> str:
        calls = (self.call, self.expected)
        mine, theirs = ("missing" if call is None else f"{call} ({call.where})" for call in calls)
        return (
            f"rank {self.rank} would hang: call {self.number} that it shares with rank {self.other} is {mine}; "
            f"on rank {self.other} it is {theirs}"
        )


def find_differences(calls_of: Mapping[int, Calls]) -> list[Difference]:
    """One difference for each rank that is not like the others, the rank with most differences first.

    Of two ranks that differ only from each other, the higher one is named. They are compared by the calls over groups
    that both are members of. Sends are compared with the receives of the other rank, apart from the collectives: a
    pipeline orders them differently on its two sides.
    """
    compared = [_compare(calls_of, *pair) for pair in combinations(sorted(calls_of), 2)]
    left = [difference for difference in compared if difference is not None]
    named = list[Difference]()
    while left:
        votes = Counter(rank for difference in left for rank in (difference.rank, difference.other))
        odd = max(votes, key=lambda rank: (votes[rank], rank))
        first = min((d for d in left if odd in (d.rank, d.other)), key=lambda d: d.number)
        if first.rank != odd:
            first = Difference(odd, first.rank, first.number, first.expected, first.call)
        named.append(first)
        left = [d for d in left if odd not in (d.rank, d.other)]
    return named


def _compare(calls_of: Mapping[int, Calls], rank: int, other: int) -> Difference | None:
    together, theirs = (
        [c for c in calls_of[one] if two in c.ranks and c.kind not in POINT_TO_POINT]
        for one, two in ((rank, other), (other, rank))
    )
    # Ranks that send each other the sizes of later calls agree on them, whatever a simulation assumes.
    agreed = {call.ranks for call in together if call.kind == "all-to-all" and not call.sent}
    for number, (mine, its) in enumerate(zip_longest(together, theirs), 1):
        if mine is None or its is None or not _match(rank, mine, other, its, agreed):
            return Difference(other, rank, number, its, mine)
    for sender, receiver in ((rank, other), (other, rank)):
        sent = [c for c in calls_of[sender] if (c.kind, c.peer) == ("send", receiver)]
        received = [c for c in calls_of[receiver] if (c.kind, c.peer) == ("receive", sender)]
        for number, (mine, its) in enumerate(zip_longest(sent, received), 1):
            if mine is None or its is None or (mine.bytes, mine.dtype) != (its.bytes, its.dtype):
                return Difference(receiver, sender, number, its, mine)
    return None


def _match(
    rank: int, one: Collective, other: int, two: Collective, agreed: set[tuple[int, ...]]
) -> bool:
    if (one.kind, one.ranks, one.dtype, one.peer) != (two.kind, two.ranks, two.dtype, two.peer):
        return False
    if not one.sent or not two.sent:
        return one.bytes == two.bytes
    mine, its = one.ranks.index(rank), one.ranks.index(other)
    exchanged = (one.sent[its], one.received[its]) == (two.received[mine], two.sent[mine])
    return one.ranks in agreed or exchanged

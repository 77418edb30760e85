"""DDPReducer: all-reduces the gradients of data-parallel replicas in buckets, while backward still runs.

There is no wrapper module: `p.grad` is a view into a bucket from the start, so nothing is copied in or out. Unlike in
torch's DDP a rank may have no micro-batch at all in a step, and a parameter may get no gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_BYTES = 32 * 2**20


class _Bucket:
    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params
        self.allocate()
        self.reduced: Tensor | None = None  # what an earlier `finish` of this step has summed
        self.waiting = 0
        self.work: dist.Work | None = None

    def allocate(self) -> None:
        first = self.params[0]
        sizes = [param.numel() for param in self.params]
        self.flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        slices = self.flat.split(sizes)
        self.views = [view.view_as(p) for view, p in zip(slices, self.params, strict=True)]

    def attach(self) -> None:
        """Make the gradients views of the bucket."""
        for param, view in zip(self.params, self.views, strict=True):
            param.grad = view


class DDPReducer:
    def __init__(self, params: list[nn.Parameter], group: dist.ProcessGroup | None = None) -> None:
        """`group`: the ranks that hold replicas; None: all."""
        self.group = group
        self.buckets = [_Bucket(chunk) for chunk in _buckets(params)]
        self.used: set[Tensor] = set()  # parameters that got a gradient on this rank, in this step
        self._counted: set[Tensor] = set()  # in the last backward of the step
        self._armed = False
        self._finished = False
        self._next = 0
        for bucket in self.buckets:
            for param in bucket.params:
                hook = _hook(weakref.ref(self), weakref.ref(bucket))
                param.register_post_accumulate_grad_hook(hook)

    def zero_grad(self) -> None:
        self.used.clear()
        self._finished = False
        for bucket in self.buckets:
            bucket.flat.zero_()
            bucket.reduced = None
            bucket.attach()

    def begin(self) -> None:
        """More gradients of this step follow: what is reduced already must not be sent again."""
        for bucket in self.buckets:
            for param, view in zip(bucket.params, bucket.views, strict=True):
                if param.grad is None:  # the first call, or cleared by the caller
                    view.zero_()
            bucket.attach()
            if self._finished:
                bucket.reduced = bucket.flat.clone()
                bucket.flat.zero_()
        self._finished = False

    def arm(self) -> None:
        """The next backward is the last of this step: all-reduce each bucket as soon as it is complete."""
        self._armed = True
        self._next = 0
        self._counted.clear()
        for bucket in self.buckets:
            bucket.waiting = len(bucket.params)

    def finish(self) -> None:
        """All-reduce the buckets that are left, and wait for all of them."""
        if not self._armed:
            self.arm()  # this rank has no micro-batch in this step
        for bucket in self.buckets:
            bucket.waiting = 0
        self._send_ready()
        self._armed = False
        for bucket in self.buckets:
            assert bucket.work is not None
            bucket.work.wait()
            bucket.work = None
            if bucket.reduced is not None:
                bucket.flat += bucket.reduced
                bucket.reduced = None
        self._finished = True

    def release(self) -> None:
        """Free the buckets while the parameters are offloaded; there are no gradients then."""
        for bucket in self.buckets:
            bucket.flat = bucket.flat.new_empty(0)
            bucket.views = []
            for param in bucket.params:
                param.grad = None

    def allocate(self) -> None:
        for bucket in self.buckets:
            bucket.allocate()

    def _on_gradient(self, bucket: _Bucket, param: Tensor) -> None:
        self.used.add(param)
        if not self._armed:
            return
        if param in self._counted:
            raise RuntimeError(
                "a parameter got its gradient twice in one backward, so it may have been sent too early; "
                "re-entrant activation checkpointing does that: use checkpoint(..., use_reentrant=False)"
            )
        self._counted.add(param)
        bucket.waiting -= 1
        self._send_ready()

    def _send_ready(self) -> None:
        # In the same order on every rank: collectives are matched by order.
        while self._next < len(self.buckets) and self.buckets[self._next].waiting <= 0:
            bucket = self.buckets[self._next]
            bucket.work = dist.all_reduce(bucket.flat, group=self.group, async_op=True)
            self._next += 1


def _hook(
    reducer: weakref.ref[DDPReducer], bucket: weakref.ref[_Bucket]
) -> Callable[[Tensor], None]:
    """A hook with weak references: Python cannot collect a reference cycle that runs through a tensor hook."""

    def on_gradient(param: Tensor) -> None:
        owner = reducer()
        its_bucket = bucket()
        if owner is not None and its_bucket is not None:
            owner._on_gradient(its_bucket, param)

    return on_gradient


def _buckets(params: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters by dtype and size, the last ones first: backward reaches the last layers first."""
    chunks: list[list[nn.Parameter]] = []
    current: dict[torch.dtype, list[nn.Parameter]] = {}
    room: dict[torch.dtype, int] = {}
    for param in reversed(params):
        dtype = param.dtype
        if dtype not in current or param.nbytes > room[dtype]:
            current[dtype] = []
            room[dtype] = BUCKET_BYTES
            chunks.append(current[dtype])
        current[dtype].append(param)
        room[dtype] -= param.nbytes
    return chunks

"""Sums the gradients of replicas, in buckets, while backward still runs. The model itself stays as it is.

Gradients live in the buckets from the start (`p.grad` is a view), so nothing is copied in or out. A rank may have no
micro-batch at all in a step, and a parameter may get no gradient: the sum is still right and nobody waits for ever.
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
        self.summed: Tensor | None = None  # over ranks already, by an earlier `finish` of this step
        self.waiting = 0
        self.work: dist.Work | None = None

    def allocate(self) -> None:
        sizes = [p.numel() for p in self.params]
        self.flat = torch.zeros(
            sum(sizes), dtype=self.params[0].dtype, device=self.params[0].device
        )
        self.views = [
            v.view_as(p) for v, p in zip(self.flat.split(sizes), self.params, strict=True)
        ]


class DDPReducer:
    def __init__(self, params: list[nn.Parameter], host_group: dist.ProcessGroup) -> None:
        self.buckets = [_Bucket(chunk) for chunk in _chunks(params)]
        self._host_group = host_group
        self._touched: set[Tensor] = set()  # in this step
        self._counted: set[Tensor] = set()  # in its last backward
        self._armed = self._finished = False
        self._next = 0
        for bucket in self.buckets:
            for param in bucket.params:
                param.register_post_accumulate_grad_hook(
                    _hook(weakref.ref(self), weakref.ref(bucket))
                )

    def zero_grad(self) -> None:
        self._touched.clear()
        self._finished = False
        for bucket in self.buckets:
            bucket.flat.zero_()
            bucket.summed = None
            for param, view in zip(bucket.params, bucket.views, strict=True):
                param.grad = view

    def begin(self) -> None:
        """More gradients of this step follow: what is summed already must not be sent again."""
        for bucket in self.buckets:
            for param, view in zip(bucket.params, bucket.views, strict=True):
                if param.grad is None:  # not begun, not used, or cleared by somebody else
                    view.zero_()
                param.grad = view
            if self._finished:
                bucket.summed = bucket.flat.clone()
                bucket.flat.zero_()
        self._finished = False

    def arm(self) -> None:
        """The next backward is the last of this step: send each bucket as soon as it is complete."""
        self._armed, self._next = True, 0
        self._counted.clear()
        for bucket in self.buckets:
            bucket.waiting = len(bucket.params)

    def finish(self) -> None:
        """Send what is left, wait for everything. A parameter that no rank touched ends with no gradient."""
        if not self._armed:
            self.arm()  # this rank had nothing to do in this step
        for bucket in self.buckets:
            bucket.waiting = 0
        self._send_ready()
        self._armed = False
        params = [param for bucket in self.buckets for param in bucket.params]
        used = torch.tensor([param in self._touched for param in params], dtype=torch.uint8)
        dist.all_reduce(used, dist.ReduceOp.MAX, group=self._host_group)
        for bucket in self.buckets:
            assert bucket.work is not None
            bucket.work.wait()
            bucket.work = None
            if bucket.summed is not None:
                bucket.flat += bucket.summed
                bucket.summed = None
        self._finished = True
        for param, is_used in zip(params, used.tolist(), strict=True):
            if not is_used:
                param.grad = None

    def release(self) -> None:
        """Give the memory back while the parameters are elsewhere; there are no gradients then."""
        for bucket in self.buckets:
            bucket.flat, bucket.views = bucket.flat.new_empty(0), []
            for param in bucket.params:
                param.grad = None

    def allocate(self) -> None:
        for bucket in self.buckets:
            bucket.allocate()

    def _on_gradient(self, bucket: _Bucket, param: Tensor) -> None:
        self._touched.add(param)
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
        # Always in the same order, on every rank: collectives are matched by order.
        while self._next < len(self.buckets) and self.buckets[self._next].waiting <= 0:
            bucket = self.buckets[self._next]
            bucket.work = dist.all_reduce(bucket.flat, async_op=True)
            self._next += 1


def _hook(
    reducer: weakref.ref[DDPReducer], bucket: weakref.ref[_Bucket]
) -> Callable[[Tensor], None]:
    """Python cannot collect a circle that runs through a hook: one that held its parameter would keep it for ever."""

    def on_gradient(param: Tensor) -> None:
        if (owner := reducer()) is not None and (its := bucket()) is not None:
            owner._on_gradient(its, param)

    return on_gradient


def _chunks(params: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Split by dtype and size, last parameter first: backward reaches the last layers first."""
    chunks: list[list[nn.Parameter]] = []
    room: dict[torch.dtype, tuple[list[nn.Parameter], int]] = {}
    for param in reversed(params):
        chunk, size = room.get(param.dtype, ([], BUCKET_BYTES + 1))
        if size + param.nbytes > BUCKET_BYTES:
            chunk, size = [], 0
            chunks.append(chunk)
        chunk.append(param)
        room[param.dtype] = (chunk, size + param.nbytes)
    return chunks

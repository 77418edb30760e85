"""Pipeline parallel: what the stages of a pipeline send to each other.

Every rank of a pipeline holds the same micro-batches, so a stage knows the shapes of what it receives. Activations and
their gradients have a process group each: a send of one never waits behind a receive of the other, so no order of the
two can deadlock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mvp_engine.distributed.layout import Layout
from mvp_engine.errors import UserError

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
)  # of activations; a code is an index into them


@dataclass
class StageCall:
    """One forward of a stage with gradients: what it received and what it sent. The ends of a pipeline lack one."""

    received: Tensor | None = None
    sent: Tensor | None = None


class StageLink:
    """This rank's connections to the same place of the stages before and after its own."""

    def __init__(self, layout: Layout) -> None:
        assert layout.pipeline_groups is not None
        self.stage = layout.stage
        self.stages = layout.pipeline
        self.is_first = self.stage == 0
        self.is_last = layout.is_last_stage
        self.device = layout.world.device
        self._activations, self._gradients = layout.pipeline_groups
        self._ranks = dist.get_process_group_ranks(self._activations)
        # gloo carries CUDA tensors in collectives only.
        has_nccl = "nccl" in str(dist.get_backend(self._activations))
        self._buffers_on = self.device if has_nccl else torch.device("cpu")
        self._dtypes: dict[
            tuple[str, torch.dtype | None], torch.dtype
        ] = {}  # by direction and autocast
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()
        self._calls: list[StageCall] | None = None
        self.kept = 0  # micro-batches whose activations this stage keeps
        self.most_kept = 0

    # ---- A micro-batch --------------------------------------------------------------------------------------------

    @contextmanager
    def recording(self) -> Iterator[list[StageCall]]:
        """A context around the forward of a micro-batch: the calls of the stage in it, for `backward`."""
        calls: list[StageCall] = []
        self._calls = calls
        try:
            yield calls
        finally:
            self._calls = None
        self.kept += 1
        self.most_kept = max(self.most_kept, self.kept)

    def backward(self, calls: list[StageCall], loss: Tensor) -> None:
        """The backward of a micro-batch: of the loss on the last stage, of what was sent on the others."""
        if self.is_last:
            loss.backward()
        else:
            outputs: list[Tensor] = []
            grads: list[Tensor] = []
            for call in calls:
                assert call.sent is not None
                grad = self._receive(self._gradients, 1, call.sent.shape, call.sent.dtype)
                if call.sent.requires_grad:  # not if all that is before it is frozen
                    outputs.append(call.sent)
                    grads.append(grad)
            if outputs:
                torch.autograd.backward(outputs, grads)
        for call in calls:
            if call.received is not None:
                grad_or_none = call.received.grad  # None where the loss does not depend on it
                grad = torch.zeros_like(call.received) if grad_or_none is None else grad_or_none
                self._send(self._gradients, -1, grad)
        self.kept -= 1

    def receive(self, shape: tuple[int, ...]) -> Tensor:
        """The activations that the stage before sends; a leaf that collects their gradient."""
        received = self._receive(self._activations, -1, shape, self._dtype_received())
        if torch.is_grad_enabled():
            received.requires_grad_()
            self._call().received = received
        return received

    def send(self, activations: Tensor) -> None:
        """Send activations to the next stage."""
        self._send_dtype(activations)
        self._send(self._activations, 1, activations.detach())
        if torch.is_grad_enabled():
            if self.is_first:
                self._call()
            assert self._calls is not None
            self._calls[-1].sent = activations

    def _call(self) -> StageCall:
        """A new call of the micro-batch that runs."""
        if self._calls is None:
            raise UserError(
                "parallel.pipeline > 1: the model was called with gradients outside of forward_step, where no backward "
                "follows on the other stages. Call it in forward_step, or under torch.no_grad()"
            )
        self._calls.append(StageCall())
        return self._calls[-1]

    def flush(self) -> None:
        """Wait until all that was sent has left."""
        while self._sending:
            self._sending.popleft()[0].wait()

    # ---- All stages -----------------------------------------------------------------------------------------------

    def result(self, output: Tensor) -> Tensor:
        """An output of the last stage, on all stages; half precision becomes float32, which the others have."""
        halves = (torch.bfloat16, torch.float16)
        return self.from_stage_(output.float() if output.dtype in halves else output)

    def from_stage_(self, tensor: Tensor, stage: int = -1) -> Tensor:
        """Overwrite a tensor with that of a stage, by default the last one."""
        dist.broadcast(tensor, src=self._ranks[stage], group=self._activations)
        return tensor

    def all_gather(self, value: Any) -> list[Any]:
        """The objects of all stages, in their order."""
        values: list[Any] = [None] * self.stages
        dist.all_gather_object(values, value, group=self._activations)
        return values

    def add_of_other_end(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor of the first and of the last stage, equal bit for bit on both."""
        to_other, to_this = (self._activations, self._gradients)
        if self.is_last:
            to_other, to_this = to_this, to_other
        step = self.stages - 1 if self.is_first else 1 - self.stages
        self._send(to_other, step, tensor)
        received = self._receive(to_this, step, tensor.shape, tensor.dtype)
        self.flush()  # the caller may change the tensor
        return tensor + received

    # ---- Point to point -------------------------------------------------------------------------------------------

    def _send(self, group: dist.ProcessGroup, step: int, tensor: Tensor) -> None:
        """Start to send to the stage `step` after this one."""
        tensor = tensor.contiguous().to(self._buffers_on)
        work = dist.isend(tensor, self._ranks[self.stage + step], group=group)
        assert work is not None
        self._sending.append((work, tensor))
        while len(self._sending) > 4 * self.stages:
            self._sending.popleft()[0].wait()

    def _receive(
        self, group: dist.ProcessGroup, step: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self._buffers_on)
        dist.recv(tensor, self._ranks[self.stage + step], group=group)
        return tensor.to(self.device)

    def _send_dtype(self, activations: Tensor) -> None:
        """Under each autocast, the first forward says which dtype the activations have."""
        key = self._autocast()
        known = self._dtypes.get(("sent", key))
        if known is None:
            code = torch.tensor([DTYPES.index(activations.dtype)], device=self.device)
            self._send(self._activations, 1, code)
            self._dtypes["sent", key] = activations.dtype
        elif known != activations.dtype:
            raise RuntimeError(f"activations of {activations.dtype} after some of {known}")

    def _dtype_received(self) -> torch.dtype:
        key = self._autocast()
        if ("received", key) not in self._dtypes:
            code = self._receive(self._activations, -1, (1,), torch.int64)
            self._dtypes["received", key] = DTYPES[int(code)]
        return self._dtypes["received", key]

    def _autocast(self) -> torch.dtype | None:
        kind = self.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def recorded(link: StageLink | None) -> AbstractContextManager[list[StageCall]]:
    """`StageLink.recording`, or without a pipeline a context with no calls."""
    return nullcontext([]) if link is None else link.recording()

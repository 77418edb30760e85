"""FSDPEngine: any `nn.Module`, replicated or sharded over the ranks; plain modules and Hugging Face models alike.

It computes one step: sum losses and weights over all micro-batches and ranks, divide once, clip, update, advance the
schedule. Whether a step is finite is decided on the device, equally on every rank. On a GPU the host reads the result
one step later, so a step has no host sync.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mvp_engine.data.loader import StepPlan
from mvp_engine.distributed import DDPReducer, Layout
from mvp_engine.distributed.data_parallel import UnusedParameterTracker
from mvp_engine.distributed.dtensor import local_tensor
from mvp_engine.distributed.pipeline import StageCall
from mvp_engine.errors import UserError
from mvp_engine.hf import LanguageModel, PackedModel, ValueModel
from mvp_engine.log.metrics import device_scalar
from mvp_engine.model_engine.base import (
    ForwardStep,
    ModelSource,
    Settings,
    StepNumbers,
    StepStatus,
    register,
)
from mvp_engine.model_engine.fsdp import base_engine
from mvp_engine.model_engine.fsdp.base_engine import DevicePrefetcher, FSDPBaseEngine
from mvp_engine.model_engine.fsdp.lockstep import Scheduled
from mvp_engine.model_engine.fsdp.step_status import (
    LOSS_SPIKE,
    NONFINITE_GRAD,
    NONFINITE_LOSS,
    NONFINITE_WEIGHT,
    ZERO_WEIGHT,
    LossScale,
    ParameterUsage,
    Places,
    SpikeDetector,
    first_nonfinite_grad,
    local_grad_norm_sq,
)
from mvp_engine.model_engine.optim import with_learning_rate


class _Forwarded(NamedTuple):
    """A forward that waits for its backward."""

    loss_sum: Tensor
    calls: list[StageCall]  # of the pipeline stage


@register("module", "fsdp")
class FSDPEngine(FSDPBaseEngine):
    def __init__(self, model: nn.Module, layout: Layout, settings: Settings | None = None) -> None:
        super().__init__(model, layout, settings)
        self._prefetch = DevicePrefetcher(self.world.device, self._on_device)
        self._gradients: DDPReducer | UnusedParameterTracker
        # [loss_sum, weight] of this rank since optimizer_zero_grad
        self._totals = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        self._losses: list[Tensor] = []  # the same of each micro-batch
        self._grads_used = False  # the gradients that exist belong to a finished step

    def _prepare_training(self) -> None:
        self.training = True
        with self.autocast():
            self.adapter.preflight_gradients(self.layout)
        self.params = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        self._ranks_may_differ = True
        if self.sharded:
            self._gradients = tracker = UnusedParameterTracker(self.model)
            self._ranks_may_differ = tracker.can_differ
            scalars = [param for param in self.params if param.ndim == 0]
            if scalars:
                self.reducer = DDPReducer(scalars, self.layout.stage_group)
            for param in scalars:  # tensor-parallel ranks have equal gradients, which count once
                param.register_hook(partial(torch.div, other=self.layout.tensor))
        elif self.world.size > 1:
            self._gradients = self.reducer = DDPReducer(self.params, self.layout.stage_group)
        self._tied = [p for p in self.adapter.tied_to_other_stage() if p.requires_grad]
        self._copies = set(self._tied) if self.layout.stage > 0 else set()
        self._usage = ParameterUsage(self.params, self._places())
        device = self.world.device
        if self.settings.precision == "fp16":
            self.loss_scale = LossScale(device)
        if self.settings.spike_sigmas is not None:
            self.spike_detector = SpikeDetector(self.settings.spike_sigmas, device)
        # A fused optimizer skips a step by itself when a flag on the device is set: no host sync.
        can_skip = getattr(self.optimizer, "_step_supports_amp_scaling", False)
        self._skips_on_device = device.type == "cuda" and can_skip

    def _places(self) -> Places | None:
        """Where each parameter is among those of all pipeline stages; None: this rank has all."""
        if self._link is None:
            return None
        names = {param: name for name, param in self.model.named_parameters()}
        own = [names[param] for param in self.params]
        every = dict.fromkeys(name for of_stage in self._link.all_gather(own) for name in of_stage)
        places = {name: place for place, name in enumerate(every)}
        return Places([places[name] for name in own], len(places))

    # ---- Forward and backward -------------------------------------------------------------------------------------

    def forward_backward_batch(
        self, micro_batches: list[Any], forward_step: ForwardStep, plan: StepPlan | None = None
    ) -> Tensor:
        if self._grads_used:
            self.optimizer_zero_grad()
        if self.reducer:
            self.reducer.begin()
        totals = torch.zeros_like(self._totals)
        scheduled = [Scheduled(micro_batch, False) for micro_batch in micro_batches]
        if self.sharded:
            scheduled = self.lockstep.step(micro_batches, plan)
        self.adapter.preflight_media(self, self.lockstep.dummies.values() or micro_batches)
        prefetched = self._prefetch(scheduled)
        losses: list[Tensor] = []
        waiting: deque[_Forwarded] = deque()  # for their backward; at most one without a pipeline
        backwards = 0
        order = one_forward_one_backward(len(scheduled), self.layout.stage, self.layout.pipeline)
        for is_forward in order:
            if is_forward:
                waiting.append(self._forward(forward_step, *next(prefetched), losses))
            else:
                backwards += 1
                self._before_backward(is_last=backwards == len(scheduled))
                forwarded = waiting.popleft()
                if self._link is None:
                    forwarded.loss_sum.backward()
                else:
                    self._link.backward(forwarded.calls, forwarded.loss_sum)
        if self.reducer:
            self.reducer.finish()
        if losses:
            of_micro_batches = torch.stack(losses)
            if self._link is not None:  # the other stages computed them from zeros
                self._link.from_stage_(of_micro_batches)
                self._link.flush()
            self._losses += of_micro_batches.unbind()
            totals = of_micro_batches.sum(0)
        self._totals += totals
        return totals

    def _forward(
        self, forward_step: ForwardStep, micro_batch: Any, is_dummy: bool, losses: list[Tensor]
    ) -> _Forwarded:
        """A forward; its [loss_sum, weight] is appended to `losses` if it counts."""
        balance = self.adapter.expert_balance
        if balance:
            balance.is_active = not is_dummy
            balance.loss_scale = self.loss_scale.value if self.loss_scale else None
        self.is_dummy = is_dummy  # for `forward_step`
        calls: list[StageCall] = []
        try:
            recording = nullcontext(calls) if self._link is None else self._link.recording()
            with recording as calls, self.autocast():
                result = forward_step(micro_batch)
        finally:
            self.is_dummy = False
            if balance:
                balance.is_active = False
        if not (isinstance(result, tuple) and len(result) == 2):
            kind = type(result).__name__
            raise TypeError(f"forward_step must return (loss_sum, weight), not {kind}")
        loss_sum, weight = result
        is_scalar = isinstance(loss_sum, Tensor) and loss_sum.ndim == 0
        if not is_scalar or not loss_sum.requires_grad:
            raise TypeError(
                "forward_step must return the loss as a summed scalar tensor that carries a gradient"
            )
        if is_dummy:
            loss_sum = loss_sum.nan_to_num(0.0, 0.0, 0.0) * 0.0
        else:
            weight = device_scalar(weight, self.world.device)
            losses.append(torch.stack([loss_sum.detach().double(), weight]))
        if self.loss_scale:
            loss_sum = loss_sum * self.loss_scale.value
        return _Forwarded(loss_sum, calls)

    def _before_backward(self, is_last: bool) -> None:
        """Replicas all-reduce gradients in the last backward of a call only. Shards reduce-scatter in every one:
        otherwise each rank would hold the gradients of the whole model until the last."""
        if self.reducer and is_last:
            self.reducer.arm()
        if self.sharded:
            root = self.sharded[0]  # passes it on to the others
            root.set_requires_gradient_sync(is_last or self._ranks_may_differ)
            root.set_requires_all_reduce(is_last)
            root.set_is_last_backward(is_last)
            root.set_reshard_after_backward(is_last or self.layout.reshard)

    def optimizer_zero_grad(self) -> None:
        if not self.training:
            raise UserError("a step needs initialize(optimizer=...); this engine is for inference")
        self._grads_used = False
        self._totals.zero_()
        self._losses = []
        if self.sharded:
            self._gradients.used.clear()
        if self.sharded or not self.reducer:
            self.optimizer.zero_grad(set_to_none=True)
        if self.reducer:
            self.reducer.zero_grad()
        if self.adapter.expert_balance:
            self.adapter.expert_balance.reset()

    # ---- Update ---------------------------------------------------------------------------------------------------

    def optimizer_step(self, lr: float | None = None) -> StepNumbers:
        self._status.read()  # the schedule advances
        if lr is not None:
            with with_learning_rate(self.optimizer, lr):
                return self.optimizer_step()
        self._grads_used = True
        totals = self._totals.clone()
        reduced = self._reduce_numbers(totals)
        loss_sum, weight, grad_norm_sq = reduced[:3].unbind()
        divisor = weight * self.loss_scale.value if self.loss_scale else weight
        norm = grad_norm_sq.sqrt() / divisor
        factor = 1.0 / divisor
        if self.settings.clip_grad_norm is not None:
            factor = factor * (self.settings.clip_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        if self._skips_on_device:  # the fused optimizer multiplies: no pass over all gradients
            self.optimizer.grad_scale = (1.0 / factor).float()  # type: ignore[attr-defined]
        elif grads := [local_tensor(param.grad) for param in self.params if param.grad is not None]:
            torch._foreach_mul_(grads, factor.float())
        self.learning_rates = base_engine.learning_rates(self.optimizer)
        code = (~loss_sum.isfinite()) * NONFINITE_LOSS
        code = code + (weight <= 0) * ZERO_WEIGHT + (~norm.isfinite()) * NONFINITE_GRAD
        code = code + (~weight.isfinite()) * NONFINITE_WEIGHT
        if self.spike_detector:
            loss = torch.where(code > 0, torch.nan, loss_sum / weight)
            code = code + self.spike_detector.is_spike(loss) * LOSS_SPIKE
        self._update(code, loss_sum / weight)
        self._recompiles.after_step()
        metrics: dict[str, Tensor] = {}
        if self.adapter.expert_balance:
            metrics = self.adapter.expert_balance.update(reduced[3:], weight, code > 0)
        skipped = code & ~NONFINITE_GRAD if self.loss_scale else code
        return StepNumbers(totals[0], totals[1], norm, skipped > 0, metrics)

    def _reduce_numbers(self, totals: Tensor) -> Tensor:
        """Loss sum, weight, squared gradient norm and counts of experts over all ranks, in one all-reduce."""
        if not self._ranks_may_differ:
            ranks = self.layout.stage_ranks
            self._usage.check_ranks_agree(self._gradients.used, self.model, self.world, ranks)
        for param in self._tied:
            # Tied embeddings are two copies, on the first and the last stage: both get the sum of their gradients.
            assert self._link is not None
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            grad = local_tensor(param.grad)
            grad.copy_(self._link.add_of_other_end(grad))
        with_grad = [p for p in self.params if p.grad is not None and p not in self._copies]
        grad_norm_sq, self._norms = local_grad_norm_sq(with_grad, self.layout.stage_size)
        # Ranks with the same data have the same losses, which count once.
        numbers = [totals / self.layout.model_parallel_size, grad_norm_sq.to(totals.device)[None]]
        if self.adapter.expert_balance:  # tensor-parallel ranks route the same tokens
            numbers.append(self.adapter.expert_balance.counts_LE.view(-1) / self.layout.tensor)
        own = torch.cat(numbers)
        if self.world.size == 1:
            return own
        used = self._gradients.used
        reduced = torch.cat([own, self._usage.of_rank(used, totals.device)])
        dist.all_reduce(reduced)
        self._usage.drop_unused(used, reduced[len(own) :])
        return reduced[: len(own)]

    def _update(self, code: Tensor, loss: Tensor) -> None:
        skip = code > 0
        found_inf = skip.float() if self._skips_on_device else None
        if found_inf is not None:
            self.optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        if found_inf is not None or not bool(skip):
            if self.ema is not None:
                self.ema.before_step()
            self.optimizer.step()
            if self.ema is not None:
                self.ema.after_step(found_inf)
        scale = self.loss_scale.value if self.loss_scale else torch.ones_like(code)
        is_finite = torch.stack([self._totals, *self._losses]).isfinite().all(1).double()
        values = torch.cat([torch.stack([code.double(), scale.double(), loss]), is_finite[1:]])
        self._status.put(values, non_blocking=self._skips_on_device)
        if self.loss_scale:
            self.loss_scale.update((code & NONFINITE_GRAD) > 0)

    def step_status(self, wait: bool = True) -> list[StepStatus]:
        if wait:
            self._status.read()
        return self._status.take()

    def first_nonfinite_grad(self) -> str | None:
        return first_nonfinite_grad(self.model, self._norms)

    def lr_scheduler_step(self) -> None:
        self.scheduler.step()


class PackedModelEngine(FSDPEngine):
    """A model of `hf/` on the FSDP backend."""

    model_class: type[PackedModel]

    @classmethod
    def build_model(cls, source: ModelSource) -> nn.Module:
        return cls.model_class.on_meta(source.path, source.config)


@register("language_model", "fsdp")
class LanguageModelEngine(PackedModelEngine):
    """A language model: per-token log-probs, entropy and loss."""

    model_class = LanguageModel


@register("value_model", "fsdp")
class ValueModelEngine(PackedModelEngine):
    """A value model: one number per token."""

    model_class = ValueModel


def one_forward_one_backward(micro_batches: int, stage: int, stages: int) -> Iterator[bool]:
    """The 1F1B schedule of a stage: True for a forward, False for the backward of the oldest forward that has none.

    A stage starts with as many forwards as stages follow it, so it keeps the activations of at most `stages - stage`
    micro-batches. One stage alternates.
    """
    ahead = min(stages - stage - 1, micro_batches)
    yield from [True] * ahead
    for _ in range(micro_batches - ahead):
        yield True
        yield False
    yield from [False] * ahead

"""A plain `nn.Module`, replicated or sharded over the ranks: the model engine that needs no ceremony.

It owns the numbers of a step: sum the losses and weights of all micro-batches and ranks, divide once, clip, update,
move the schedule. Whether a step was finite is decided on the device, equally on every rank. The host learns of it one
step later on a GPU (`settle`), so it never waits for a step that the GPU is still working on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from mvp_engine.distributed import GradientReducer, Layout
from mvp_engine.distributed.sharding import sharded_modules
from mvp_engine.log.metrics import device_scalar

ForwardStep = Callable[[Any], tuple[Tensor, Tensor | float]]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BAD_LOSS, NO_WEIGHT, BAD_GRADIENT = 1, 2, 4


@dataclass(frozen=True)
class StepNumbers:
    """What one step gave, still on the device. Loss and weight are this rank's; the norm is the global one."""

    loss_sum: Tensor
    weight: Tensor
    grad_norm: Tensor


@dataclass(frozen=True)
class Outcome:
    """How a step ended. `reason` is None when the weights were updated."""

    reason: str | None
    overflow: bool = False  # fp16 only: the loss scale was too high, which is routine


class LossScale:
    """fp16's loss scale, kept on the device: halved on overflow, doubled after `interval` good steps.

    It multiplies a *sum* over hundreds to many thousands of tokens, so it starts low and may have to go below 1.
    """

    LOWEST = 2.0**-24

    def __init__(self, device: torch.device, start: float = 2.0**6, interval: int = 2000) -> None:
        self.value = torch.tensor(start, device=device)
        self.good = torch.zeros((), dtype=torch.int64, device=device)
        self.interval = interval

    def update(self, bad: Tensor) -> None:
        self.good = torch.where(bad, 0, self.good + 1)
        grow = self.good >= self.interval
        self.value = torch.where(
            bad, (self.value / 2).clamp(min=self.LOWEST), torch.where(grow, self.value * 2, self.value)
        )
        self.good = torch.where(grow, 0, self.good)


class ModuleEngine:
    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        optimizer: torch.optim.Optimizer | None = None,  # None: for inference only
        scheduler: LRScheduler | None = None,
        precision: str = "fp32",
        clip_grad_norm: float | None = None,
    ) -> None:
        self.model, self.layout, self.world = model, layout, layout.world
        self.dtype, self.clip_grad_norm = DTYPES[precision], clip_grad_norm
        self.rates: dict[str, float] = {}  # the learning rates of the last update
        self.sharded = list(sharded_modules(model))
        self._filler: Any = None  # the last micro-batch seen, for passes in which only other ranks have one
        if optimizer is None or scheduler is None:
            return
        self.optimizer, self.scheduler = optimizer, scheduler
        self.params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        host_group = self.world.host_group
        self.reducer = GradientReducer(self.params, host_group) if host_group and not self.sharded else None
        self.scale = LossScale(self.world.device) if precision == "fp16" else None
        # Fused optimizers skip a step by themselves when this flag is set, so the host need not read it first.
        self._device_skip = self.world.device.type == "cuda" and getattr(optimizer, "_step_supports_amp_scaling", False)
        self._pending: tuple[Tensor, torch.cuda.Event | None] | None = None
        self._outcomes: list[Outcome] = []

    def train_batch(self, micro_batches: list[Any], forward_step: ForwardStep) -> StepNumbers:
        """One optimizer step over this rank's micro-batches (there may be none)."""
        self.optimizer_zero_grad()
        return self.optimizer_step(self.forward_backward_batch(micro_batches, forward_step))

    def forward_backward_batch(self, micro_batches: list[Any], forward_step: ForwardStep) -> Tensor:
        """Add the gradients of the summed loss; gives [loss_sum, weight] of this rank, on the device."""
        totals = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        rounds = self._rounds(micro_batches)
        for index, (micro_batch, counts) in enumerate(rounds):
            with self.autocast():
                loss_sum, weight = _checked(forward_step(self._on_device(micro_batch)))
            if counts:
                totals += torch.stack([loss_sum.detach().double(), device_scalar(weight, self.world.device)])
            else:
                loss_sum = loss_sum.nan_to_num(0.0, 0.0, 0.0) * 0.0
            self._before_backward(last=index == len(rounds) - 1)
            (loss_sum * self.scale.value if self.scale else loss_sum).backward()
        if self.reducer:
            self.reducer.finish()
        return totals

    def _rounds(self, micro_batches: list[Any]) -> list[tuple[Any, bool]]:
        """The micro-batches, each with whether it counts."""
        rounds = [(micro_batch, True) for micro_batch in micro_batches]
        if not self.sharded:
            return rounds
        most = max(self.world.all_gather(len(micro_batches)))
        filler = self._filler_like(micro_batches) if most else None
        return rounds + [(filler, False)] * (most - len(rounds))

    def in_step(self, micro_batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
        """All micro-batches of all ranks, for an evaluation; each with whether it counts on this rank."""
        for micro_batch in micro_batches:
            if self.sharded:
                self.world.any(True)
                self._filler_like([micro_batch])
            yield micro_batch, True
        while self.sharded and self.world.any(False)[0]:
            yield self._filler_like([]), False

    def _filler_like(self, micro_batches: list[Any]) -> Any:
        """A micro-batch for a pass that does not count; all ranks ask at the same time.

        Sharded ranks gather parameters from each other in every pass, so all make the same number of passes. A rank
        that never had a micro-batch of its own gets another's.
        """
        if micro_batches:
            self._filler = micro_batches[-1]
        if self.world.any(self._filler is None)[0]:
            self._filler = next(found for found in self.world.all_gather(self._filler) if found is not None)
        return self._filler

    def _before_backward(self, last: bool) -> None:
        """Gradients travel during the last backward of a step only."""
        if self.reducer and last:
            self.reducer.arm()
        for module in self.sharded[:1]:  # the root tells the others
            module.set_requires_gradient_sync(last)
            module.set_is_last_backward(last)

    def optimizer_zero_grad(self) -> None:
        if self.reducer:
            self.reducer.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=True)

    def optimizer_step(self, totals: Tensor) -> StepNumbers:
        """Normalise, clip and update, or skip on all ranks together if anything is not finite."""
        self.settle()
        loss_sum, weight = self._over_ranks(totals)
        grads = [p.grad for p in self.params if p.grad is not None]
        divisor = weight * self.scale.value if self.scale else weight
        norm = total_norm(grads).to(divisor.device) / divisor
        factor = 1.0 / divisor
        if self.clip_grad_norm is not None:
            factor = factor * (self.clip_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        local = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
        if local:
            torch._foreach_mul_(local, factor.float())
        self.rates = self._learning_rates()
        code = (~loss_sum.isfinite()) * BAD_LOSS + (weight <= 0) * NO_WEIGHT + (~norm.isfinite()) * BAD_GRADIENT
        self._update(code)
        return StepNumbers(totals[0], totals[1], norm)

    def _update(self, code: Tensor) -> None:
        bad = code > 0
        scale = self.scale.value if self.scale else torch.ones((), device=code.device)
        verdict = torch.stack([code.double(), scale.double()])
        if self._device_skip:
            self.optimizer.found_inf, self.optimizer.grad_scale = bad.float(), None  # type: ignore[attr-defined]
            self.optimizer.step()
            host = torch.empty(2, dtype=torch.float64, pin_memory=True)
            host.copy_(verdict, non_blocking=True)
            self._pending = (host, torch.cuda.current_stream().record_event())
        else:
            if not bool(bad):
                self.optimizer.step()
            self._pending = (verdict.cpu(), None)
            self.settle()
        if self.scale:
            self.scale.update(bad)

    def settle(self) -> None:
        """Take in how the last step ended: the schedule moves only when the weights did."""
        if self._pending is None:
            return
        (host, event), self._pending = self._pending, None
        if event is not None:
            event.synchronize()
        code, scale = host.tolist()
        reason, overflow = _reason(int(code), scale if self.scale else None)
        if reason is None:
            self.lr_scheduler_step()
        self._outcomes.append(Outcome(reason, overflow))

    def take_outcomes(self) -> list[Outcome]:
        """The outcomes, in order, of the steps that ended since this was last asked."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def lr_scheduler_step(self) -> None:
        self.scheduler.step()

    @contextlib.contextmanager
    def eval_mode(self) -> Iterator[None]:
        """No gradients, no dropout; the modes of all submodules are put back afterwards."""
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module, training in modes:
                module.training = training

    def infer_batch(self, micro_batch: Any, step: Callable[[Any], Any]) -> Any:
        """`step` on one micro-batch, on the device and in the training precision; call it inside `eval_mode`."""
        with self.autocast():
            return step(self._on_device(micro_batch))

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.world.device.type, self.dtype)

    def _learning_rates(self) -> dict[str, float]:
        """`lr`, or `lr/<group>` for each group where they differ."""
        rates = {str(g.get("name", i)): float(g["lr"]) for i, g in enumerate(self.optimizer.param_groups)}
        if len(set(rates.values())) == 1:
            return {"lr": next(iter(rates.values()))}
        return {f"lr/{name}": rate for name, rate in rates.items()}

    def state_dict(self) -> dict[str, Any]:
        """The small state beside weights and moments."""
        assert self._pending is None, "settle() comes first"
        scale = [float(self.scale.value), int(self.scale.good)] if self.scale else None
        schedule = {k: v for k, v in self.scheduler.state_dict().items() if k != "lr_lambdas"}
        return {"scheduler": schedule, "scale": scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if isinstance(self.scheduler, LambdaLR):
            # Where it stands comes from the checkpoint, its rates from the config, which may have been changed.
            self.scheduler.last_epoch = state["scheduler"]["last_epoch"]
            self.scheduler._step_count = state["scheduler"]["_step_count"]
            factors = [factor(self.scheduler.last_epoch) for factor in self.scheduler.lr_lambdas]
            rates = [base * factor for base, factor in zip(self.scheduler.base_lrs, factors, strict=True)]
            self.scheduler._last_lr = list(rates)
            for group, base, rate in zip(self.optimizer.param_groups, self.scheduler.base_lrs, rates, strict=True):
                group["initial_lr"], group["lr"] = base, rate
        else:
            self.scheduler.load_state_dict(state["scheduler"])
        if self.scale and state["scale"]:
            self.scale.value.fill_(state["scale"][0])
            self.scale.good.fill_(state["scale"][1])

    def _on_device(self, micro_batch: Any) -> Any:
        return micro_batch if self.world.device.type == "cpu" else to_device(micro_batch, self.world.device)

    def _over_ranks(self, totals: Tensor) -> Tensor:
        """Summed over data: ranks that share a sequence have the same numbers, which count once."""
        if self.world.size == 1:
            return totals
        totals = totals / self.layout.sequence
        dist.all_reduce(totals)
        return totals


def total_norm(grads: list[Tensor]) -> Tensor:
    """The norm of all gradients together, in float64, whole on every rank, whatever meshes they are sharded over."""
    groups: dict[Any, list[Tensor]] = {}
    for grad in grads:
        groups.setdefault((grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None, []).append(grad)
    squares = []
    for members in groups.values():
        norm = torch.nn.utils.get_total_norm(members, foreach=True)
        squares.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).double().square())
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros((), dtype=torch.float64)


def to_device(value: Any, device: torch.device) -> Any:
    """Tensors, and anything else with a `to`, inside dicts, lists and tuples; the rest stays as it is."""
    if hasattr(value, "to"):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(to_device(item, device) for item in value)
    return value


def _checked(given: Any) -> tuple[Tensor, Tensor | float]:
    if not (isinstance(given, tuple) and len(given) == 2):
        raise TypeError(f"forward_step must return (loss_sum, weight), not {type(given).__name__}")
    loss_sum, weight = given
    if not isinstance(loss_sum, Tensor) or loss_sum.ndim != 0 or not loss_sum.requires_grad:
        raise TypeError("forward_step must return the loss as a summed scalar tensor that carries a gradient")
    return loss_sum, weight


def _reason(code: int, scale: float | None) -> tuple[str | None, bool]:
    if code == 0:
        return None, False
    if code & NO_WEIGHT:
        return "the batch has weight 0 (nothing to train on)", False
    if code & BAD_LOSS:
        return "the loss is not finite", False
    if scale is not None and scale > LossScale.LOWEST:
        return f"fp16 gradients overflowed at loss scale {scale:g}", True
    return "a gradient is not finite", False

"""Any `nn.Module`, replicated or sharded over the ranks: plain modules with no ceremony, and Hugging Face models.

It owns the numbers of a step: sum the losses and weights of all micro-batches and ranks, divide once, clip, update,
move the schedule. Whether a step was finite is decided on the device, equally on every rank. The host learns of it one
step later on a GPU (`settle`), so it never waits for a step that the GPU is still working on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from mvp_engine.checkpoint import state
from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import DDPReducer, Layout
from mvp_engine.distributed.collective_errors import raise_on_all_ranks
from mvp_engine.distributed.dtensor import full_tensor
from mvp_engine.distributed.fsdp import UnusedParameterTracker, sharded_modules
from mvp_engine.errors import UserError
from mvp_engine.hf import export as hf_export
from mvp_engine.hf.export_plan import ExportPlan
from mvp_engine.hf.lora import merge_adapters
from mvp_engine.hf.model_info import check_base, write_model_info
from mvp_engine.hf.packed_model import PackedModel
from mvp_engine.hf.preflight import check_gradients, check_packing
from mvp_engine.log.metrics import device_scalar
from mvp_engine.model_engine.base import (
    ForwardStep,
    ModelEngine,
    Outcome,
    Settings,
    StepNumbers,
    register,
)
from mvp_engine.model_engine.fsdp import grad_norm as numbers
from mvp_engine.model_engine.fsdp.lockstep import Pass, Passes
from mvp_engine.model_engine.fsdp.offload import move_model, move_optimizer
from mvp_engine.model_engine.fsdp.parallelize import place
from mvp_engine.model_engine.fsdp.prefetch import DevicePrefetcher


@register("module", "fsdp")
class FSDPEngine(ModelEngine):
    def __init__(self, model: nn.Module, layout: Layout, settings: Settings | None = None) -> None:
        super().__init__(model, layout, settings)
        self.dtype = numbers.DTYPES[self.settings.precision]
        self._ahead = DevicePrefetcher(self.world.device, self._on_device)
        self._passes = Passes(self.world)
        self._outcomes: list[Outcome] = []
        self._pending: tuple[Tensor, torch.cuda.Event | None] | None = None
        self._totals = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        self._on_host: set[str] = set()  # of "model" and "optimizer"
        self._initialized = self.training = False  # training: there is an optimizer
        self.reducer: DDPReducer | None = None
        self._used: UnusedParameterTracker | None = None
        self._spent = False  # the gradients that are there were used in a step

    def initialize(
        self,
        optimizer: Callable[[nn.Module], Optimizer] | None = None,
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
    ) -> None:
        if self._initialized:
            raise UserError("initialize() was called before, and a model is put on its layout once")
        if scheduler is not None and optimizer is None:
            raise UserError(
                "initialize(scheduler=...) needs an optimizer that the scheduler is for"
            )
        place(self.model, self.layout, self.settings)
        self._initialized, self.sharded = True, list(sharded_modules(self.model))
        if isinstance(self.model, PackedModel):
            with self.eval_mode(), self.autocast(), raise_on_all_ranks(self.world.host_group):
                check_packing(
                    self.model,
                    exact=self.dtype == torch.float32,
                    own=self.layout.tensor_mesh is None,
                    group=self.world.host_group,
                )
        if optimizer is not None:
            self.training = True
            self.model.train()
            self.optimizer = optimizer(self.model)
            self.scheduler = (
                scheduler(self.optimizer) if scheduler else LambdaLR(self.optimizer, lambda _: 1.0)
            )
            self._prepare_training()
        if self.settings.offload != "none":
            self.to("cpu", model=self.settings.offload == "all")

    def _prepare_training(self) -> None:
        if self.layout.tensor_mesh is not None:
            with self.autocast():
                check_gradients(self._packed(), self.layout.tensor_mesh, self.world.host_group)
        self.params = [
            p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad
        ]
        if self.world.host_group and not self.sharded:
            self.reducer = DDPReducer(self.params, self.world.host_group)
        if self.sharded:
            self._used = UnusedParameterTracker(self.model, self.world.host_group)
        self.scale = (
            numbers.LossScale(self.world.device) if self.settings.precision == "fp16" else None
        )
        sigmas = self.settings.spike_sigmas
        self.spikes = (
            numbers.SpikeDetector(sigmas, self.world.device) if sigmas is not None else None
        )
        # Fused optimizers skip a step by themselves when this flag is set, so the host need not read it first.
        can_skip = getattr(self.optimizer, "_step_supports_amp_scaling", False)
        self._device_skip = self.world.device.type == "cuda" and can_skip

    # ---- A step ---------------------------------------------------------------------------------------------------

    def forward_backward_batch(
        self, micro_batches: list[Any], forward_step: ForwardStep, aside: ForwardStep | None = None
    ) -> Tensor:
        if self._spent:  # gradients were used in a step, whoever should have cleared them
            self.optimizer_zero_grad()
        if self.reducer:
            self.reducer.begin()
        totals = torch.zeros_like(self._totals)
        rounds = self._rounds(micro_batches)
        for index, (micro_batch, counts) in enumerate(self._ahead(rounds)):
            step = forward_step if counts or aside is None else aside
            with self.autocast():
                loss_sum, weight = numbers.checked(step(micro_batch))
            if counts:
                totals += torch.stack(
                    [loss_sum.detach().double(), device_scalar(weight, self.world.device)]
                )
            else:
                loss_sum = loss_sum.nan_to_num(0.0, 0.0, 0.0) * 0.0
            self._before_backward(last=index == len(rounds) - 1)
            (loss_sum * self.scale.value if self.scale else loss_sum).backward()
        if self.reducer:
            self.reducer.finish()
        self._totals += totals
        return totals

    def _rounds(self, micro_batches: list[Any]) -> list[Pass]:
        """The micro-batches, each with whether it counts."""
        return (
            self._passes.together(micro_batches)
            if self.sharded
            else [(batch, True) for batch in micro_batches]
        )

    def in_step(self, micro_batches: Iterable[Any]) -> Iterator[Pass]:
        return (
            self._passes.through(micro_batches)
            if self.sharded
            else ((batch, True) for batch in micro_batches)
        )

    def _before_backward(self, last: bool) -> None:
        """Between copies gradients travel during the last backward of a call only. Shards are summed in every one, or
        each rank would hold the whole model's gradients until then."""
        if self.reducer and last:
            self.reducer.arm()
        for module in self.sharded[:1]:  # the root tells the others
            module.set_requires_gradient_sync(last or self._used is None or self._used.can_differ)
            module.set_requires_all_reduce(last)
            module.set_is_last_backward(last)

    def optimizer_zero_grad(self) -> None:
        if not self.training:
            raise UserError(
                "a step needs initialize(optimizer=...); without one the engine is for inference"
            )
        self._spent = False
        self._totals.zero_()
        if self._used:
            self._used.clear()
        if self.reducer:
            self.reducer.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=True)

    def optimizer_step(self) -> StepNumbers:
        self.settle()
        self._spent = True
        totals = self._totals.clone()
        if self._used:
            self._used.drop_the_others()
        grads = [p.grad for p in self.params if p.grad is not None]
        squares, self._norms = numbers.local_grad_norm_sq(
            [p for p in self.params if p.grad is not None], self.world.size
        )
        # Ranks that work on the same data have the same losses, which count once.
        sums = torch.cat(
            [totals / self.layout.model_parallel_size, squares.to(totals.device)[None]]
        )
        if self.world.size > 1:
            dist.all_reduce(sums)
        loss_sum, weight, squares = sums
        divisor = weight * self.scale.value if self.scale else weight
        norm = squares.sqrt() / divisor
        factor = 1.0 / divisor
        if self.settings.clip_grad_norm is not None:
            factor = factor * (self.settings.clip_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        if self._device_skip:  # it multiplies on its way: a pass less over all gradients
            self.optimizer.grad_scale = (1.0 / factor).float()  # type: ignore[attr-defined]
        elif local := [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]:
            torch._foreach_mul_(local, factor.float())
        self.rates = self._learning_rates()
        bad_loss, bad_norm = ~loss_sum.isfinite(), ~norm.isfinite()
        code = (
            bad_loss * numbers.BAD_LOSS
            + (weight <= 0) * numbers.NO_WEIGHT
            + bad_norm * numbers.BAD_GRADIENT
        )
        if self.spikes:
            loss = torch.where(code > 0, torch.nan, loss_sum / weight)
            code = code + self.spikes.judge(loss) * numbers.SPIKE
        self._update(code)
        return StepNumbers(totals[0], totals[1], norm)

    def _update(self, code: Tensor) -> None:
        bad = code > 0
        scale = self.scale.value if self.scale else torch.ones((), device=code.device)
        verdict = torch.stack([code.double(), scale.double()])
        if self._device_skip:
            self.optimizer.found_inf = bad.float()  # type: ignore[attr-defined]
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
            self.scale.update((code & numbers.BAD_GRADIENT) > 0)

    def settle(self) -> None:
        if self._pending is None:
            return
        (host, event), self._pending = self._pending, None
        if event is not None:
            event.synchronize()
        code, scale = host.tolist()
        reason, overflow = numbers.reason_of(int(code), scale if self.scale else None)
        if reason is None:
            self.lr_scheduler_step()
        elif code == numbers.BAD_GRADIENT and not overflow:
            reason += numbers.whose(self.model, self._norms)
        self._outcomes.append(Outcome(reason, overflow))

    def take_outcomes(self) -> list[Outcome]:
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def lr_scheduler_step(self) -> None:
        self.scheduler.step()

    def infer_step(self, micro_batch: Any, step: Callable[[Any], Any]) -> Any:
        with self.autocast():
            return step(self._on_device(micro_batch))

    def infer_batch(
        self, batch: PackedBatch, outputs: Iterable[str], budget: int | None = None
    ) -> dict[str, Tensor]:
        wanted = tuple(outputs)
        if not self._initialized:
            raise UserError("infer_batch() needs initialize(), which gives the model its weights")
        with raise_on_all_ranks(
            self.world.host_group if self.sharded else None
        ):  # a batch that is too long may be one rank's
            split = batch.split(batch.num_tokens if budget is None else budget)
        parts: list[dict[str, Tensor]] = []
        with self.eval_mode():
            for part, counts in self.in_step(split.parts):
                given = self.infer_step(part, lambda micro_batch: self.model(micro_batch, wanted))
                if counts:
                    parts.append(given)
        if single := [name for name in wanted if parts[0][name].ndim == 0]:
            raise UserError(
                f"infer_batch() gives outputs per token, and {single[0]} is one number: ask for log_probs"
            )
        return {name: split.merge_tokens([part[name] for part in parts]) for name in wanted}

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.world.device.type, self.dtype)

    def _learning_rates(self) -> dict[str, float]:
        """`lr`, or `lr/<group>` for each group where they differ."""
        rates = {
            str(g.get("name", i)): float(g["lr"]) for i, g in enumerate(self.optimizer.param_groups)
        }
        if len(set(rates.values())) == 1:
            return {"lr": next(iter(rates.values()))}
        return {f"lr/{name}": rate for name, rate in rates.items()}

    def _on_device(self, micro_batch: Any) -> Any:
        if self.world.device.type == "cpu":
            return micro_batch
        if (
            isinstance(self.model, PackedModel)
            and isinstance(micro_batch, PackedBatch)
            and micro_batch.labels.is_cpu
        ):
            self.model.check(micro_batch)
        return numbers.to_device(micro_batch, self.world.device)

    # ---- Where things are -----------------------------------------------------------------------------------------

    def train_mode(self) -> contextlib.AbstractContextManager[None]:
        return self._loaded(optimizer=True)  # the modules are in the modes that their owner wants

    @contextlib.contextmanager
    def eval_mode(self) -> Iterator[None]:
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with self._loaded(optimizer=False), torch.no_grad():
                yield
        finally:
            for module, training in modes:
                module.training = training
            for (
                part
            ) in self.sharded:  # or what is still gathered would outlive a change of the weights
                part.reshard()

    @contextlib.contextmanager
    def _loaded(self, optimizer: bool) -> Iterator[None]:
        """On the device for the time of this context, but for an optimizer that is to be offloaded and is not needed.

        Contexts may be nested: an evaluation inside of a training has the optimizer on the host.
        """
        before = set(self._on_host)
        idle = {"optimizer"} if self.settings.offload != "none" else before & {"optimizer"}
        self._keep_on_host(set() if optimizer else idle)
        try:
            yield
        finally:
            self._keep_on_host(before)

    def _keep_on_host(self, parts: set[str]) -> None:
        for part in parts ^ self._on_host:
            where = "cpu" if part in parts else self.world.device.type
            self.to(where, model=part == "model", optimizer=part == "optimizer")

    def to(self, device: str, *, model: bool = True, optimizer: bool = True) -> None:
        if self.world.device.type == "cpu":
            return  # host and device are the same memory
        to_host = device == "cpu"
        target = torch.device("cpu") if to_host else self.world.device
        self.settle()
        if model and ("model" in self._on_host) != to_host:
            if self.training and to_host:
                self.optimizer_zero_grad()  # gradients do not travel: a step before new ones is skipped
            if self.reducer and to_host:
                self.reducer.release()
            move_model(self.model, target)
            if self.reducer and not to_host:
                self.reducer.allocate()
            self._on_host ^= {"model"}
        if optimizer and self.training and ("optimizer" in self._on_host) != to_host:
            move_optimizer(self.optimizer, target)
            self._on_host ^= {"optimizer"}

    # ---- State ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        assert self._pending is None, "settle() comes first"
        if not self.training:
            return {}
        scale = [float(self.scale.value), int(self.scale.good)] if self.scale else None
        schedule = {k: v for k, v in self.scheduler.state_dict().items() if k != "lr_lambdas"}
        return {
            "scheduler": schedule,
            "scale": scale,
            "spikes": self.spikes.state.tolist() if self.spikes else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if isinstance(self.scheduler, LambdaLR):
            # Where it stands comes from the checkpoint, its rates from the config, which may have been changed.
            self.scheduler.last_epoch = state["scheduler"]["last_epoch"]
            self.scheduler._step_count = state["scheduler"]["_step_count"]
            factors = [factor(self.scheduler.last_epoch) for factor in self.scheduler.lr_lambdas]
            rates = [
                base * factor for base, factor in zip(self.scheduler.base_lrs, factors, strict=True)
            ]
            self.scheduler._last_lr = list(rates)
            for group, base, rate in zip(
                self.optimizer.param_groups, self.scheduler.base_lrs, rates, strict=True
            ):
                group["initial_lr"], group["lr"] = base, rate
        else:
            self.scheduler.load_state_dict(state["scheduler"])
        if self.spikes and state.get("spikes"):
            self.spikes.state = torch.tensor(
                state["spikes"], dtype=torch.float64, device=self.world.device
            )
        if self.scale and state["scale"]:
            self.scale.value.fill_(state["scale"][0])
            self.scale.good.fill_(state["scale"][1])

    def collect(self, shared: dict[str, Any], own: dict[str, Any]) -> dict[str, Tensor]:
        shared = {**shared, "model_engine": self.state_dict()}
        optimizer = self.optimizer if self.training else None
        return state.collect(
            self.model, optimizer, shared, own, self.world.rank, without=self._elsewhere()
        )

    def _elsewhere(self) -> set[str]:
        """Tensors that a checkpoint need not have: frozen under adapters, they are read from the folder again."""
        model = self.model
        if not isinstance(model, PackedModel) or model.lora is None:
            return set()
        return {
            name
            for name, p in model.named_parameters()
            if not p.requires_grad and name in model.from_folder
        }

    def restore(self, folder: Path) -> state.SavedState:
        without = self._elsewhere()
        if without:
            with raise_on_all_ranks(self.world.host_group):
                check_base(folder, self._packed())
        if not self.training:
            return state.restore(folder, self.model, None, self.world.host_group, without=without)
        # What a scheduler that is no function of the step did to the parameter groups is part of its state.
        whole_groups = not isinstance(self.scheduler, LambdaLR)
        saved = state.restore(
            folder, self.model, self.optimizer, self.world.host_group, whole_groups, without
        )
        self.load_state_dict(saved.shared["model_engine"])
        return saved

    def describe(self, folder: Path) -> None:
        if isinstance(self.model, PackedModel) and self.model.model_type:
            write_model_info(self.model, folder, type(self))

    def export_hf(self, folder: str | Path, dtype: torch.dtype | None = None) -> None:
        tensors = self._packed().state_dict()
        target = self._packed().export_target(dtype)
        fetch, like = (
            merge_adapters(self.model, lambda n: full_tensor(tensors[n])),
            (lambda n: _on_meta(tensors[n])),
        )
        hf_export.export(target, Path(folder).expanduser().resolve(), fetch, like, self.world)

    def get_per_tensor_param(
        self, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        tensors = self._packed().state_dict()
        plan = ExportPlan(self._packed().export_target(dtype), lambda n: _on_meta(tensors[n]))
        fetch = merge_adapters(self.model, lambda n: full_tensor(tensors[n]))
        for group in plan.groups:
            yield from plan.entries(group, fetch)

    def _packed(self) -> PackedModel:
        if not isinstance(self.model, PackedModel):
            raise UserError(
                f"{type(self.model).__name__} is no Hugging Face model, so it has no such folder or names"
            )
        return self.model


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

"""FSDPBaseEngine: a model on its layout, without the training step: building, inference, offloading, checkpoints.

The small state of an FSDP engine in a checkpoint: learning-rate schedule, loss scale, spike statistics, counts
of experts, dummy sequences.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils._pytree import tree_map_only

from mvp_engine.checkpoint import format as checkpoint_format
from mvp_engine.checkpoint import state
from mvp_engine.data.batch import Media, PackedBatch
from mvp_engine.distributed import DDPReducer, Layout
from mvp_engine.distributed.data_parallel import sharded_modules
from mvp_engine.distributed.dtensor import local_tensor
from mvp_engine.distributed.pipeline import StageLink
from mvp_engine.distributed.world import raise_on_all_ranks
from mvp_engine.errors import UserError, count
from mvp_engine.hf.experts.fp8_layers import gather_fp8
from mvp_engine.hf.model.adapter import adapter_of
from mvp_engine.hf.model.model_parts import names_by_part
from mvp_engine.model_engine.base import DTYPES, ModelEngine, Settings, WeightEMA
from mvp_engine.model_engine.fsdp.compile import RecompileWatch
from mvp_engine.model_engine.fsdp.init_weights import materialize_weights
from mvp_engine.model_engine.fsdp.lockstep import LockstepScheduler, Scheduled
from mvp_engine.model_engine.fsdp.parallelize import parallelize_model
from mvp_engine.model_engine.fsdp.step_status import LossScale, SpikeDetector, StatusReader
from mvp_engine.ops.host_memory import available_host_memory

LOGGER = logging.getLogger("mvp_engine")


class DevicePrefetcher:
    """Copies one micro-batch ahead. On a CPU nothing is copied."""

    def __init__(self, device: torch.device, move: Callable[[Any], Any]) -> None:
        self.move = move
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, scheduled: list[Scheduled]) -> Iterator[Scheduled]:
        copied = self._copy(scheduled[0].micro_batch) if scheduled else None
        for index, one in enumerate(scheduled):
            current = copied
            copied = None
            if self.stream is not None:
                compute_stream = torch.cuda.current_stream()
                compute_stream.wait_stream(self.stream)
                _record_stream(current, compute_stream)
            if index + 1 < len(scheduled):
                copied = self._copy(scheduled[index + 1].micro_batch)
            yield Scheduled(current, one.is_dummy)

    def _copy(self, batch: Any) -> Any:
        with torch.cuda.stream(self.stream):  # does nothing for None
            return self.move(batch)


def to_device(value: Any, device: torch.device) -> Any:
    """Copy tensors, and anything else with a `to`, inside dicts, lists and tuples; other values stay."""
    if hasattr(value, "to"):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(to_device(item, device) for item in value)
    return value


def _record_stream(value: Any, stream: torch.cuda.Stream) -> None:
    """Keep the allocator from giving this memory to the next copy before `stream` is done with it."""
    if isinstance(value, torch.Tensor):
        if value.is_cuda:
            value.record_stream(stream)
    elif hasattr(value, "record_stream"):
        value.record_stream(stream)
    elif isinstance(value, Mapping):
        for item in value.values():
            _record_stream(item, stream)
    elif isinstance(value, list | tuple):
        for item in value:
            _record_stream(item, stream)


def state_dict(engine: FSDPBaseEngine) -> dict[str, Any]:
    schedule = engine.scheduler.state_dict()
    balance = engine.adapter.expert_balance
    schedule.pop("lr_lambdas", None)  # functions of the config, which is read again
    return {
        "scheduler": schedule,
        "scale": engine.loss_scale.state() if engine.loss_scale else None,
        "spikes": engine.spike_detector.state.tolist() if engine.spike_detector else None,
        "experts": balance.state() if balance else None,
        "dummies": saved_dummies(engine.lockstep.dummies),
    }


def load_state_dict(engine: FSDPBaseEngine, state: dict[str, Any]) -> None:
    if isinstance(engine.scheduler, LambdaLR):
        _load_lambda_schedule(engine.scheduler, engine.optimizer, state["scheduler"])
    else:
        engine.scheduler.load_state_dict(state["scheduler"])
    if engine.spike_detector and state.get("spikes"):
        spikes = engine.spike_detector.state.new_tensor(state["spikes"])
        engine.spike_detector.state = spikes
    if engine.adapter.expert_balance and state.get("experts"):
        engine.adapter.expert_balance.load_state(state["experts"])
    if engine.loss_scale and state["scale"]:
        engine.loss_scale.load_state(state["scale"])
    engine.lockstep.dummies = loaded_dummies(state.get("dummies", {}))


def _load_lambda_schedule(scheduler: LambdaLR, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """The position comes from the checkpoint; the learning rates from the config, which may have changed."""
    scheduler.last_epoch = state["last_epoch"]
    scheduler._step_count = state["_step_count"]
    groups = zip(optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    for group, base, factor in groups:
        group["initial_lr"] = base
        group["lr"] = base * factor(scheduler.last_epoch)
    scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]


def check_groups(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse parameters that require a gradient and are in no group: they would never change, in silence."""
    held = {param for group in optimizer.param_groups for param in group["params"]}
    named = model.named_parameters()
    names = [name for name, param in named if param.requires_grad and param not in held]
    if names:
        raise UserError(
            f"{count(len(names), 'trainable parameter')} of {type(model).__name__} in no parameter group of "
            f"{type(optimizer).__name__}, which would never train: {names_by_part(model, names, 5)}. Put what requires "
            "a gradient into a group (prepare_optimizer), or freeze it (model.freeze, or requires_grad_(False))"
        )


def learning_rates(optimizer: Optimizer) -> dict[str, float]:
    """`lr`, or `lr/<group>` for each parameter group where they differ."""
    groups = enumerate(optimizer.param_groups)
    rates = {str(group.get("name", index)): float(group["lr"]) for index, group in groups}
    if len(set(rates.values())) == 1:
        return {"lr": next(iter(rates.values()))}
    return {f"lr/{name}": rate for name, rate in rates.items()}


# The dummy sequences of a training as plain values, for its checkpoints.
#
# Ranks choose them from the data of the step that needs one first. A resumed run would choose others: routers and GEMMs
# of other sizes round differently.

_OF_BATCHES = "input_ids", "labels", "position_ids", "cu_seqlens", "token_fields", "sequence_fields"
_OF_MEDIA = "values", "row_counts", "sequence_ids", "fields", "shared_with"


def saved_dummies(dummies: Mapping[str, PackedBatch]) -> dict[str, Any]:
    """Tensors and dicts of them, by media kind."""
    saved: dict[str, Any] = {}
    for kind, batch in dummies.items():
        media = {
            name: {**_plain(one, _OF_MEDIA), "label_column": one.label_column}
            for name, one in batch.media.items()
        }
        saved[kind] = {**_plain(batch, _OF_BATCHES), "media": media}
    return saved


def loaded_dummies(saved: Mapping[str, Any]) -> dict[str, PackedBatch]:
    dummies: dict[str, PackedBatch] = {}
    for kind, one in saved.items():
        media = {name: Media(**fields) for name, fields in one["media"].items()}
        dummies[kind] = PackedBatch(**{**one, "media": media})
    return dummies


def _plain(one: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: _copied(getattr(one, name)) for name in names}


def _copied(value: Any) -> Any:
    """Without the rest of a batch, of which a tensor may be a view: it would be saved, too."""
    if isinstance(value, Tensor):
        return value.clone()
    return {name: _copied(one) for name, one in value.items()} if value is not None else None


class FSDPBaseEngine(ModelEngine):
    def __init__(self, model: nn.Module, layout: Layout, settings: Settings | None = None) -> None:
        super().__init__(model, layout, settings)
        self.adapter = adapter_of(model)
        self.dtype = DTYPES[self.settings.precision]
        self.training = False  # is there an optimizer?
        self.sharded: list[FSDPModule] = []
        self._runs_alone = False  # forwards need no other rank; see `gathered_weights`
        self.reducer: DDPReducer | None = None
        self.loss_scale: LossScale | None = None
        self.spike_detector: SpikeDetector | None = None
        self._link: StageLink | None = None  # to other pipeline stages
        self._initialized = False
        self.initial_groups: list[dict[str, Any]] = []  # options of the new optimizer
        self._keeps_grads = False  # while the weights move to the host
        self._ranks_agree = False  # on the states of the optimizer, as far as they are saved once
        self.lockstep = LockstepScheduler(layout)
        self._recompiles = RecompileWatch()
        self._offloader = Offloader(self.settings.offload_outside_steps, self._move)
        self._status = StatusReader(
            self.settings.precision == "fp16",
            on_update=self.lr_scheduler_step,
            find_bad_grad=self.first_nonfinite_grad,
        )

    def initialize(
        self,
        optimizer: Callable[[nn.Module], Optimizer] | None = None,
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
    ) -> None:
        if self._initialized:
            raise UserError("initialize() was called before; a model is parallelized once")
        if scheduler is not None and optimizer is None:
            raise UserError(
                "initialize(scheduler=...) needs an optimizer that the scheduler is for"
            )
        skeleton = parallelize_model(self.model, self.adapter, self.layout, self.settings)
        if skeleton is not None:
            self._materialize(skeleton)
        gather_fp8(self.model)
        self.sharded = list(sharded_modules(self.model))
        self._link = self.adapter.stage_link
        self._initialized = True
        with self.eval_mode(), self.autocast():
            self.adapter.preflight(self.layout, exact=self.dtype == torch.float32)
        if optimizer is not None:
            self.model.train()
            self.optimizer = optimizer(self.model)
            with raise_on_all_ranks(self.world.host_group):  # a stage may have all of its own
                check_groups(self.model, self.optimizer)
            scheduler = scheduler or partial(LambdaLR, lr_lambda=lambda _: 1.0)
            self.scheduler = scheduler(self.optimizer)
            self.initial_groups = state.group_options(self.optimizer)
            has_ema = getattr(self.optimizer, "ema", None) is not None
            keeps_ema = has_ema and hasattr(self.optimizer, "averaged")
            if self.settings.ema is not None and not keeps_ema:
                params = [param for group in self.param_groups for param in group["params"]]
                self.ema = WeightEMA(params, self.settings.ema, self.world.device)
            self._prepare_training()
        if self.settings.offload_outside_steps != "none":
            self.to("cpu", model=self.settings.offload_outside_steps == "all")

    def _materialize(self, skeleton: nn.Module) -> None:
        # A file may be damaged in one rank's slices only, or on one machine.
        with raise_on_all_ranks(self.world.host_group):
            seed = self.settings.seed
            materialize_weights(self.model, self.adapter, skeleton, self.world.device, seed)

    @abc.abstractmethod
    def _prepare_training(self) -> None:
        """The optimizer is there: build what a training step needs."""

    @abc.abstractmethod
    def first_nonfinite_grad(self) -> str | None: ...

    # ---- Inference ------------------------------------------------------------------------------------------------

    def infer_micro_batches(
        self, micro_batches: Iterable[Any], step: Callable[[Any], Any]
    ) -> Iterator[Any]:
        scheduled: Iterable[Scheduled]
        if self.sharded and not self._runs_alone:
            scheduled = self.lockstep.stream(micro_batches)
        else:
            scheduled = (Scheduled(micro_batch, False) for micro_batch in micro_batches)
        results: deque[Any] = deque()
        for micro_batch, is_dummy in scheduled:
            with self.dummy(is_dummy), self.autocast():
                result = step(self._on_device(micro_batch))
            if not is_dummy:
                results.append(result)
            # A stage runs ahead of the later ones, whose results it waits for.
            if len(results) >= self.layout.pipeline:
                yield self._result(results.popleft())
        for result in results:
            yield self._result(result)
        if self._link is not None:
            self._link.flush()

    def _result(self, result: Any) -> Any:
        """A result of the last pipeline stage, the only one that has the outputs of the model."""
        return result if self._link is None else tree_map_only(Tensor, self._link.result, result)

    def infer_batch(
        self,
        batch: PackedBatch,
        outputs: Iterable[str],
        budget: int | None = None,
        temperature: float | None = None,
    ) -> dict[str, Tensor]:
        wanted = tuple(outputs)
        if not self._initialized:
            raise UserError("infer_batch() needs initialize(), which gives the model its weights")
        # A sequence longer than the budget may be one rank's alone.
        with raise_on_all_ranks(self.world.host_group if self.sharded else None):
            split = batch.split(batch.num_tokens if budget is None else budget)
        with self.eval_mode():
            options = {} if temperature is None else {"temperature": temperature}
            results = self.infer_micro_batches(
                split.parts, lambda one: self.model(one, wanted, **options)
            )
            parts = list(results)
        if scalars := [name for name in wanted if parts[0][name].ndim == 0]:
            raise UserError(
                f"infer_batch() returns outputs per token, and {scalars[0]} is one number: ask for log_probs"
            )
        return {name: split.merge_tokens([part[name] for part in parts]) for name in wanted}

    @contextlib.contextmanager
    def dummy(self, is_dummy: bool) -> Iterator[None]:
        """A context in which `forward_step` sees whether its batch is a dummy."""
        self.is_dummy = is_dummy
        try:
            yield
        finally:
            self.is_dummy = False

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.world.device.type, self.dtype)

    def _on_device(self, micro_batch: Any) -> Any:
        if self.world.device.type == "cpu":
            return micro_batch
        self.adapter.check_batch(micro_batch)  # on the host, where it costs no sync
        return to_device(micro_batch, self.world.device)

    # ---- Modes and offloading -------------------------------------------------------------------------------------

    def train_mode(self) -> contextlib.AbstractContextManager[None]:
        if new := self.adapter.take_new():  # what no checkpoint has loaded since
            LOGGER.info(new)
        # Modules stay in the modes that their owner set.
        return self._offloader.loaded(optimizer=True)

    @contextlib.contextmanager
    def eval_mode(self) -> Iterator[None]:
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with self._offloader.loaded(optimizer=False), torch.no_grad():
                yield
        finally:
            for module, training in modes:
                module.training = training
            # Gathered parameters must not outlive a change of the weights.
            for part in self.sharded:
                part.reshard()
            self._recompiles.forget()  # graphs without gradients

    @contextlib.contextmanager
    def gathered_weights(self) -> Iterator[bool]:
        """Gather the weights once, for all tokens of a generation; `eval_mode` frees them at its end."""
        if not self.sharded:
            yield True
            return
        if self.world.any(self._gathered_bytes() > self._free_bytes() / 2)[0]:
            yield False
            return
        for part in self.sharded:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
        self._runs_alone = self.layout.model_parallel_size == self.layout.expert == 1
        try:
            yield self._runs_alone
        finally:
            self._runs_alone = False
            for part in self.sharded:
                # FSDP2's own choice: it keeps those of the root.
                is_block = part is not self.model
                part.set_reshard_after_forward(is_block and self.layout.reshard, recurse=False)

    def _gathered_bytes(self) -> int:
        """What the weights that this rank does not hold take, in the dtype of the all-gather."""
        missing = [
            param.numel() - local_tensor(param).numel()
            for param in self.model.parameters()
            if isinstance(param, DTensor)
        ]
        return sum(missing) * self.dtype.itemsize

    def _free_bytes(self) -> float:
        if self.world.device.type == "cuda":
            # What the allocator has reserved and not handed out is free, too.
            free, _ = torch.cuda.mem_get_info()
            return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        free_of_host = available_host_memory()
        return math.inf if free_of_host is None else free_of_host / self.world.local_size

    def to(
        self, device: str, *, model: bool = True, optimizer: bool = True, grad: bool = False
    ) -> None:
        if grad and not model:
            raise UserError("to(grad=True): gradients move with the weights. Set model=True")
        if model:
            self._keeps_grads = grad
            self._offloader.move("model", to_host=device == "cpu")
            self._keeps_grads = False
        if optimizer:
            self._offloader.move("optimizer", to_host=device == "cpu")

    def _move(self, part: Part, to_host: bool) -> None:
        if self.world.device.type == "cpu":
            return  # host and device are the same memory
        self._status.read()
        target = torch.device("cpu") if to_host else self.world.device
        if part == "optimizer":
            if self.training:
                move_optimizer(self.optimizer, target)
                move_averages(self.ema, target)
            return
        if self.training and to_host and not self._keeps_grads:
            self.optimizer_zero_grad()
        if self.reducer and to_host:
            self.reducer.release(keep=self._keeps_grads)
        move_model(self.model, target)
        gather_fp8(self.model)
        if self.reducer and not to_host:
            self.reducer.allocate()

    # ---- State ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        self._status.read()
        return state_dict(self) if self.training else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_state_dict(self, state)

    def collect(self, shared: dict[str, Any], own: dict[str, Any]) -> dict[str, Tensor]:
        shared = {**shared, "model_engine": self.state_dict()}
        optimizer = self.optimizer if self.training else None
        without: set[str] = set()
        if self._saves_trainable_only():
            without = self.adapter.external_tensors()
            shared["external"] = self.adapter.external_checksums(without)
        place = None
        if self._link is not None:
            ranks = self.layout.stage_ranks
            place = state.StagePlace(ranks, self.adapter.stage_copies(), self._link.all_gather)
        if optimizer is not None and self.world.size > 1 and not self._ranks_agree:
            state.check_ranks_agree(self.model, optimizer, self.world)
            self._ranks_agree = True
        return state.collect(
            self.model,
            optimizer,
            shared,
            own,
            self.world.rank,
            without=without,
            stage=place,
            initial_groups=self.initial_groups,
            ema=self.ema.averages if self.ema else None,
        )

    def restore(self, folder: Path) -> state.SavedState:
        group = self.world.host_group
        with raise_on_all_ranks(group):
            names = (lambda _: True) if self.training else state.is_weight
            checkpoint_format.verify(folder, self.world.rank, self.world.size, names)
            external = state.read_shared(folder).get("external")
            without = self.adapter.left_out(folder, external)
        # A scheduler that is no function of the step keeps state in the parameter groups.
        optimizer = self.optimizer if self.training else None
        whole_groups = self.training and not isinstance(self.scheduler, LambdaLR)
        elsewhere = self.adapter.elsewhere()
        saved = state.restore(
            folder,
            self.model,
            optimizer,
            group,
            whole_groups,
            without,
            elsewhere,
            ema=self.ema.averages if self.ema else None,
        )
        self.adapter.take_new()
        if self.training:
            self.load_state_dict(saved.shared["model_engine"])
        if self.ema:
            self.ema.steps.fill_(self.scheduler.last_epoch)
        return saved

    def _saves_trainable_only(self) -> bool:
        wanted = self.settings.trainable_only
        return self.adapter.has_lora() if wanted is None else wanted

    def describe(self, folder: Path) -> None:
        self.adapter.describe(folder, type(self), self._saves_trainable_only())

    def export_hf(self, folder: str | Path, dtype: torch.dtype | None = None) -> None:
        self.adapter.export(Path(folder).expanduser().resolve(), dtype, self.world)

    def get_per_tensor_param(
        self, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        return self.adapter.named_full_tensors(dtype)


# Offloading weights and optimizer states to pinned host memory. The parameters stay the same objects.

Part = Literal["model", "optimizer"]


class Offloader:
    """Keeps track of what is on the host. `move(part, to_host)` does the moving."""

    def __init__(self, setting: str, move: Callable[[Part, bool], None]) -> None:
        self.setting = setting  # none, optimizer, all
        self.on_host: set[Part] = set()
        self._move = move

    @contextlib.contextmanager
    def loaded(self, optimizer: bool) -> Iterator[None]:
        """A context in which the model is on the device, and the optimizer too if it is needed.

        Contexts may be nested: during an evaluation inside of a training the optimizer is on the host.
        """
        before = set(self.on_host)
        offload_optimizer = self.setting != "none" or "optimizer" in before
        idle: set[Part] = {"optimizer"} if offload_optimizer and not optimizer else set()
        self._keep_on_host(idle)
        try:
            yield
        finally:
            self._keep_on_host(before)

    def _keep_on_host(self, parts: set[Part]) -> None:
        for part in parts ^ self.on_host:
            self.move(part, to_host=part in parts)

    def move(self, part: Part, to_host: bool) -> None:
        if (part in self.on_host) != to_host:
            self._move(part, to_host)
            self.on_host ^= {part}


def to_host(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, so that the copy back is asynchronous."""
    copy = tensor.detach().cpu()
    if isinstance(copy, DTensor):
        copy._local_tensor = copy._local_tensor.pin_memory()
        return copy
    return copy.pin_memory()


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    return to_host(tensor) if device.type == "cpu" else tensor.to(device, non_blocking=True)


def move_model(model: nn.Module, device: torch.device) -> None:
    model._apply(partial(_moved, device=device))  # what `model.to` calls; FSDP2 supports it


def move_averages(ema: WeightEMA | None, device: torch.device) -> None:
    for param, average in ema.averages.items() if ema else ():
        ema.averages[param] = _moved(average, device)  # type: ignore[union-attr]


def move_optimizer(optimizer: Optimizer, device: torch.device) -> None:
    """Move all optimizer states, except those that live on the host anyway: step counts, or what the optimizer says."""
    groups = optimizer.param_groups
    host_steps = not any(group.get("fused") or group.get("capturable") for group in groups)
    is_offloaded = getattr(optimizer, "is_offloaded", lambda param: False)
    for param, states in optimizer.state.items():
        for name, value in states.items():
            stays = host_steps if name == "step" else is_offloaded(param)
            if isinstance(value, Tensor) and not stays:
                states[name] = _moved(value, device)

"""Worker: a model engine inside a rank's process. A WorkerGroup calls its methods on all ranks of the group at once.

Methods get the part of a batch that this rank's data-parallel rank works on, or None if there is none. Ranks that work
on the same part compute the same; the first of them returns results, the others None.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from mvp_engine.checkpoint import state
from mvp_engine.checkpoint.format import publish_leftover
from mvp_engine.config.schema import Config, Model, Parallel, default_values
from mvp_engine.data import derived_seed, keep_rng_state, rng_state, seed_everything, set_rng_state
from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.engine.monitor import peak_memory
from mvp_engine.errors import UserError, count
from mvp_engine.hf.experts.router_replay import RouterReplay
from mvp_engine.hf.lora.lora_settings import Lora
from mvp_engine.hf.weights.pretrained import WeightReceiver
from mvp_engine.kit.decoding import Completion, Decoding, complete
from mvp_engine.kit.model import MLLMModelKit
from mvp_engine.kit.optim import OptimKit
from mvp_engine.kit.optim.settings import OptimSettings
from mvp_engine.log.metrics import device_scalar
from mvp_engine.model_engine import Settings, engine_class
from mvp_engine.model_engine.base import Shard

Bucket = list[tuple[str, Tensor]]
Stream = Literal["weights", "adapter", "delta"]


def in_buckets(
    weights: Iterable[tuple[str, Any]], limit: int, keep: Callable[[Any], Any] | None
) -> Iterator[list[tuple[str, Any]]]:
    """Lists with at most `limit` bytes, or with one larger tensor; `keep` makes the entry of a tensor.

    Without `keep` the lists are empty: every rank of a model runs the same collectives.
    """
    bucket: list[tuple[str, Any]] = []
    num_bytes = 0
    for name, value in weights:
        if num_bytes and num_bytes + value.nbytes > limit:
            yield bucket
            bucket = []
            num_bytes = 0
        if keep is not None:
            bucket.append((name, keep(value)))
        num_bytes += value.nbytes
    if num_bytes:
        yield bucket


def _device_copy(value: Tensor) -> Tensor:
    return value.detach().clone()


def host_copy(value: Tensor) -> Tensor:
    """A copy in host memory, which an update of the model does not change."""
    return value.detach().to("cpu", copy=True)


def broadcast_bucket(bucket: Bucket | None, world: World) -> Bucket:
    """The bucket of rank 0 on all ranks, by one collective on the device."""
    if world.size == 1:
        assert bucket is not None
        return bucket
    described = [(name, value.dtype, value.shape) for name, value in bucket or []]
    described = world.broadcast(described)
    sizes = [dtype.itemsize * shape.numel() for _, dtype, shape in described]
    if bucket is None:
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=world.device)
    else:
        raw = [value.contiguous().reshape(-1).view(torch.uint8) for _, value in bucket]
        flat = torch.cat([one.to(world.device) for one in raw])
    dist.broadcast(flat, src=0)
    received: Bucket = []
    for (name, dtype, shape), part in zip(described, flat.split(sizes), strict=True):
        # A copy: a slice may not be aligned to the size of its elements.
        received.append((name, part.clone().view(dtype).reshape(shape)))
    return received


def checksum(value: Tensor) -> str:
    """A hash of a tensor's dtype, shape and bytes."""
    found = hashlib.blake2b(f"{value.dtype} {tuple(value.shape)}".encode(), digest_size=16)
    raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    found.update(raw.numpy().data)
    return found.hexdigest()


@dataclass(frozen=True)
class WorkerSpec:
    model: Model
    settings: Settings
    parallel: Parallel
    optim: OptimSettings | None = None  # None: for inference only
    total_steps: int | None = None  # of the learning-rate schedule: optimizer steps
    lora: Lora | None = None
    seed: int = 0
    device: str = "auto"  # auto, cpu, cuda
    cpu_threads: int | None = None
    deterministic: bool = False
    side_files: str | None = None  # a folder with tokenizer and processor, for exports

    @classmethod
    def from_config(cls, config: Config, precision: str, **changes: Any) -> WorkerSpec:
        """The spec of a recipe's config, for a precision that is not "auto"; `changes` replace fields."""
        fields: dict[str, Any] = {
            "model": config.model,
            "settings": Settings.from_config(config, precision),
            "parallel": config.parallel,
            "optim": config.optim,
            "total_steps": config.train.max_steps,
            "lora": getattr(config, "lora", None),
            "seed": config.seed,
            "device": config.device,
            "cpu_threads": config.cpu_threads,
            "deterministic": config.deterministic,
        }
        return cls(**{**fields, **changes})

    @classmethod
    def of(
        cls,
        path: str | None = None,
        *,
        model: dict[str, Any] | None = None,
        parallel: dict[str, Any] | None = None,
        optim: dict[str, Any] | None = None,
        settings: Settings | None = None,
        precision: str = "fp32",
        seed: int = 0,
        **fields: Any,
    ) -> WorkerSpec:
        """The spec of a Hugging Face folder, for programs without a config file: config keys with their defaults.

        `optim=None` is for inference only; `optim={}` is the default optimizer. `settings` replace those of `model`,
        `precision` and `seed`.
        """
        keys = {**default_values("model"), "type": "language_model", "path": path, **(model or {})}
        section = Model(**keys)
        if settings is None:
            names = {field.name for field in dataclasses.fields(Settings)}
            of_model = {name: value for name, value in section if name in names}
            of_model["freeze"] = tuple(section.freeze)
            settings = Settings(**of_model, precision=precision, seed=seed)
        layout = Parallel(**{**default_values("parallel"), **(parallel or {})})
        optimizer = None if optim is None else OptimSettings(**{**default_values("optim"), **optim})
        return cls(section, settings, layout, optimizer, seed=seed, **fields)

    @property
    def model_parallel_size(self) -> int:
        """Ranks that work on the same sequences."""
        parallel = self.parallel
        return parallel.pipeline * parallel.context * parallel.ulysses * parallel.tensor

    def data_size(self, ranks: int) -> int:
        """The data-parallel size of a group of this many ranks."""
        each = self.model_parallel_size
        if ranks % each:
            raise UserError(
                f"parallel.pipeline={self.parallel.pipeline} times parallel.context={self.parallel.context} times "
                f"parallel.ulysses={self.parallel.ulysses} times parallel.tensor={self.parallel.tensor} does not "
                f"divide the {count(ranks, 'rank')} of the group: use {each * (ranks // each + 1)}, or change them"
            )
        return ranks // each


COPY_BYTES = 2**28  # of full tensors that a rank holds while it copies weights
Log = Callable[[str, Tensor, "Tensor | float"], None]


class Loss(Protocol):
    """A loss of a packed batch: a small frozen dataclass, since it is sent to the ranks.

    It returns the summed loss and its weight; the model engine divides. `log(name, sum, weight)` adds to a metric. A
    loss with a method `micro_batches(model, cut, budget)` makes those of a step itself; all ranks call it.
    """

    def __call__(self, model: Any, batch: PackedBatch, log: Log) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class UpdateNumbers:
    """Results of one optimizer step over all ranks of a group."""

    loss: float | None  # None: the weight was 0
    weight: float
    grad_norm: float
    lr: float  # the highest one, where parts have their own
    skipped: str | None  # why the weights were not updated
    metrics: dict[str, tuple[float, float]]  # name -> (sum, weight)
    peak_memory: int = field(default=0, compare=False)  # bytes, of the rank that has most


class Worker:
    def __init__(self, spec: WorkerSpec, world: World) -> None:
        self.spec = spec
        self.world = world
        if spec.cpu_threads is not None:
            torch.set_num_threads(spec.cpu_threads)
        if spec.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
            torch.use_deterministic_algorithms(True)
        outside = rng_state()
        seed_everything(derived_seed(spec.seed, "model"))
        self.layout = Layout.of(world, spec.parallel)
        model: Any = MLLMModelKit(spec.lora).build(spec.model)
        if spec.side_files is not None:
            model.use_side_files(Path(spec.side_files))
        model.router_replay = RouterReplay.of(model)
        kind = engine_class(spec.model.type, spec.model.backend)
        self.engine = kind(model, self.layout, spec.settings)
        if spec.optim is None:
            self.engine.initialize()
        else:
            kit = OptimKit(spec.optim, spec.seed)
            self.engine.initialize(
                kit.build_optimizer,
                lambda optimizer: kit.build_scheduler(optimizer, spec.total_steps),
            )
        seed_everything(derived_seed(spec.seed, "rank", self.layout.dropout_rank))
        self._rng = rng_state()
        set_rng_state(outside)
        self._stream: Iterator[list[tuple[str, Any]]] | None = (
            None  # of weights that are being read
        )
        self._receiver: WeightReceiver | None = None
        self._sums: dict[str, list[Tensor]] = {}  # of the metrics of a step

    @contextmanager
    def own_random_state(self) -> Iterator[None]:
        """A context with this worker's random state: dropout must not depend on what else the process draws."""
        with keep_rng_state():
            set_rng_state(self._rng)
            try:
                yield
            finally:
                self._rng = rng_state()

    # ---- Inference ------------------------------------------------------------------------------------------------

    def infer(self, *args: Any) -> dict[str, Tensor] | None:
        """Those of `outputs`, from the first of the ranks that share the batch."""
        found = self.outputs(*args)
        return found if self.engine.is_mp_src_rank_with_outputs else None

    def outputs(
        self,
        batch: PackedBatch | None,
        outputs: list[str],
        budget: int,
        temperature: float = 1.0,
        adapters: bool = True,
    ) -> dict[str, Tensor] | None:
        """Outputs per token, on the CPU of all ranks that share the batch."""
        model = self.engine.model
        split = None if batch is None else batch.split(budget)
        with self.engine.eval_mode(), nullcontext() if adapters else self.engine.disable_adapter():
            found = self.engine.infer_micro_batches(
                [] if split is None else split.parts,
                lambda one: model(one, outputs, temperature=temperature),
            )
            parts = [{name: part[name].cpu() for name in outputs} for part in found]
        if scalars := [n for part in parts[:1] for n, value in part.items() if value.ndim == 0]:
            raise UserError(
                f"infer returns outputs per token, and {scalars[0]} is one number: ask for log_probs"
            )
        if split is None:
            return None
        return {name: split.merge_tokens([part[name] for part in parts]) for name in outputs}

    def generate(
        self, prompts: PackedBatch | None, decoding: Decoding, keys: list[int]
    ) -> list[Completion] | None:
        completions = complete(self.engine, prompts, decoding, keys)
        return completions if self.engine.is_mp_src_rank_with_outputs else None

    # ---- Training -------------------------------------------------------------------------------------------------

    def update(
        self, cuts: list[PackedBatch | None], loss: Loss, budget: int, lr: float | None = None
    ) -> list[UpdateNumbers] | None:
        """One optimizer step per entry of `cuts`, which is this rank's part of it."""
        numbers = []
        with self.own_random_state(), self.engine.train_mode():
            for cut in cuts:
                self.engine.optimizer_zero_grad()
                self._sums.clear()
                self._backward(cut, loss, budget)
                numbers.append(self._step(lr))
        return numbers if self.engine.is_mp_src_rank_with_outputs else None

    def forward_backward(self, part: PackedBatch | None, loss: Loss, budget: int) -> None:
        """Accumulate gradients, from `optimizer_zero_grad` of the engine to `optimizer_step`."""
        with self.own_random_state(), self.engine.train_mode():
            self._backward(part, loss, budget)

    def optimizer_step(self, lr: float | None) -> UpdateNumbers | None:
        with self.own_random_state(), self.engine.train_mode():
            numbers = self._step(lr)
        return numbers if self.engine.is_mp_src_rank_with_outputs else None

    def call(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call a method of the model engine, or read an attribute."""
        if name == "optimizer_zero_grad":
            self._sums.clear()
        found = getattr(self.engine, name)
        return found(*args, **options) if callable(found) else found

    def _backward(self, part: PackedBatch | None, loss: Loss, budget: int) -> None:
        engine = self.engine

        def log(name: str, value: Tensor, weight: Tensor | float) -> None:
            if engine.is_dummy:
                return
            scalars = [device_scalar(one, self.world.device) for one in (value, weight)]
            self._sums.setdefault(name, []).append(torch.stack(scalars).detach())

        micro_batches = [] if part is None else part.split(budget).parts
        if hasattr(loss, "micro_batches"):
            micro_batches = loss.micro_batches(engine.model, part, budget)
        engine.forward_backward_batch(micro_batches, lambda one: loss(engine.model, one, log))

    def _step(self, lr: float | None) -> UpdateNumbers:
        engine = self.engine
        step = engine.optimizer_step(lr)
        status = engine.step_status()[-1]
        metrics = {}
        for name, pairs in self._sums.items():
            total, weight = torch.stack(pairs).sum(0).tolist()
            metrics[name] = (total, weight)
        self._sums.clear()
        metrics |= {name: (float(value), 1.0) for name, value in step.metrics.items()}
        return UpdateNumbers(
            status.loss,
            float(step.weight),
            float(step.grad_norm),
            max(engine.learning_rates.values()),
            status.reason,
            metrics,
            peak_memory(self.world.device),
        )

    # ---- Weights --------------------------------------------------------------------------------------------------

    def open_weights(
        self,
        dtype: torch.dtype | None,
        bucket_bytes: int,
        on_device: bool = False,
        what: Stream = "weights",
    ) -> None:
        """Start a stream of the weights; all ranks then call `next_weights` until it returns None."""
        engine = self.engine
        if what == "delta":
            delta = ((one.name, one) for one in engine.get_per_tensor_param_delta(dtype))
            self._stream = in_buckets(delta, bucket_bytes, keep=lambda one: one)
            return
        is_whole = what == "weights"
        weights = engine.get_per_tensor_param(dtype) if is_whole else engine.get_adapter_param()
        copy = _device_copy if on_device else host_copy
        self._stream = in_buckets(weights, bucket_bytes, copy if self.world.is_main else None)

    def next_weights(self) -> list[tuple[str, Any]] | None:
        """The next bucket on rank 0, an empty one on the others, of a delta each rank's share; None at the end."""
        assert self._stream is not None, "open_weights() comes first"
        with self.engine.eval_mode():
            bucket = next(self._stream, None)
        if bucket is None:
            self._stream = None
        return bucket

    def open_receiver(self) -> None:
        self._receiver = WeightReceiver(cast(Any, self.engine.model))

    def receive_weights(self, bucket: Bucket | None) -> None:
        """Load a bucket, which rank 0 alone is given."""
        assert self._receiver is not None, "open_receiver() comes first"
        self._receiver.add(broadcast_bucket(bucket, self.world))

    def close_receiver(self) -> None:
        receiver = self._receiver
        self._receiver = None
        assert receiver is not None, "open_receiver() comes first"
        receiver.finish()

    def checksums(self, dtype: torch.dtype | None) -> dict[str, str]:
        """A hash of each weight, by its Hugging Face name."""
        with self.engine.eval_mode():
            weights = self.engine.get_per_tensor_param(dtype)
            return {name: checksum(value) for name, value in weights if self.world.is_main}

    # ---- State ----------------------------------------------------------------------------------------------------

    def save(self, folder: str) -> None:
        """A checkpoint of weights, optimizer, schedule and random state; the folder appears when it is complete."""
        tensors = self.engine.collect({}, {"rng": self._rng})
        state.save(Path(folder), tensors, self.world, self.engine.describe)

    def load(self, folder: str) -> None:
        """Load what `save` wrote on any layout; the random state only on as many ranks."""
        if self.world.is_main:
            publish_leftover(Path(folder))
        self.world.barrier()
        saved = self.engine.restore(Path(folder))
        if len(saved.ranks) == self.world.size and "rng" in saved.ranks[self.world.rank]:
            self._rng = saved.ranks[self.world.rank]["rng"]

    def export_hf(self, folder: str, dtype: torch.dtype | None) -> None:
        self.engine.export_hf(folder, dtype)

    def export_adapter(self, folder: str) -> None:
        with self.engine.eval_mode():
            MLLMModelKit.export_adapter(self.engine, folder)

    def to(self, device: str, model: bool, optimizer: bool, grad: bool) -> None:
        self.engine.to(device, model=model, optimizer=optimizer, grad=grad)

    def shards(self) -> list[tuple[str, torch.Size, list[Shard]]]:
        """This rank's shards of all parameters, in host memory."""
        with self.engine.eval_mode():
            found = self.engine.get_per_tensor_param_shard()
            return [(n, size, [(at, host_copy(v)) for at, v in own]) for n, size, own in found]


def copy_weights(
    workers: Mapping[str, Worker], name: str, source: str, dtype: torch.dtype | None
) -> None:
    """Load the weights of another worker of the same process."""
    worker, engine = workers[name], workers[source].engine
    worker.open_receiver()
    assert worker._receiver is not None
    with engine.eval_mode():
        for bucket in in_buckets(engine.get_per_tensor_param(dtype), COPY_BYTES, keep=lambda v: v):
            worker._receiver.add(bucket)
    worker.close_receiver()

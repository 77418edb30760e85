"""WorkerGroup: one model on a group of ranks, as the controller sees it. The same code for every launcher.

A batch is divided among the data-parallel ranks by work; results come back in the order of the batch. Any number of
sequences works with any number of ranks. A group is named after its role (actor, critic, reference); what a role
computes is a loss or an output, not a class.

Which sequences of a batch go into which optimizer step, and to which data-parallel rank.

Everything here depends on the batch and the number of ranks alone, so the same call gives the same bits again.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mvp_engine.data.batch import PackedBatch
from mvp_engine.errors import UserError, did_you_mean
from mvp_engine.kit.data.pack.packer import ENCODER_VALUES_PER_TOKEN
from mvp_engine.kit.decoding import Completion, Decoding
from mvp_engine.model_engine.base import Shard
from mvp_engine.worker.launchers import (
    RUN,
    START,
    STOP,
    Launcher,
    LocalLauncher,
    Rank,
    SpawnLauncher,
    WorkerDied,
)
from mvp_engine.worker.worker import Bucket, Loss, Stream, UpdateNumbers, WorkerSpec, copy_weights


def check_budget(batch: PackedBatch, budget: int) -> None:
    """Refuse a sequence over the budget here, where its index is that of the caller's batch."""
    if batch.max_seqlen > budget:
        sequence = int(batch.lengths.argmax())
        raise UserError(
            f"sequence {sequence} has {batch.max_seqlen} tokens, more than the budget of {budget}: raise the budget or "
            "shorten the sequence"
        )


def balanced(costs: list[int], parts: int) -> list[list[int]]:
    """The items of each part: from the largest, an item goes to the part with the lowest cost. Parts may be empty."""
    members: list[list[int]] = [[] for _ in range(parts)]
    totals = [0] * parts
    for item in sorted(range(len(costs)), key=lambda i: -costs[i]):
        lowest = min(range(parts), key=totals.__getitem__)
        members[lowest].append(item)
        totals[lowest] += costs[item]
    return [sorted(part) for part in members]


def by_data_rank(batch: PackedBatch, ranks: int) -> list[list[int]]:
    """The sequences of each data-parallel rank, with about as much work each: tokens, and values that encoders read.

    Sequences that share media are on one rank, up to a quarter of its tokens: it reads the media once.
    """
    units: dict[int, list[int]] = {}
    for sequence, unit in enumerate(batch.media_units(batch.num_tokens // (4 * ranks))):
        units.setdefault(unit, []).append(sequence)
    members = list(units.values())
    lengths = batch.lengths.tolist()
    encoded = encoder_work(batch, members)
    work = [sum(lengths[s] for s in unit) + own for unit, own in zip(members, encoded, strict=True)]
    parts = balanced(work, ranks)
    return [sorted(chain.from_iterable(members[unit] for unit in part)) for part in parts]


def encoder_work(batch: PackedBatch, units: list[list[int]]) -> list[int]:
    """The work of encoders for each unit of sequences, in tokens of the language model as packs count it.

    Media that sequences of a unit share count once.
    """
    values = [0] * len(units)
    for media in batch.media.values():
        each = math.prod(media.values.shape[1:])
        of_sequence = torch.zeros(batch.num_sequences, dtype=torch.long)
        of_sequence.index_add_(0, media.sequence_ids, media.row_counts * each)
        owner = media.shared_with
        own = list(range(batch.num_sequences)) if owner is None else owner.tolist()
        for unit, sequences in enumerate(units):
            values[unit] += sum(int(of_sequence[s]) for s in {own[s] for s in sequences})
    return [value // ENCODER_VALUES_PER_TOKEN for value in values]


def select(batch: PackedBatch, sequences: list[int]) -> PackedBatch | None:
    return batch.select(sequences) if sequences else None


def merged(
    batch: PackedBatch, members: list[list[int]], results: list[dict[str, Tensor] | None]
) -> dict[str, Tensor]:
    """Per-token results of the data-parallel ranks, in the order of the batch."""
    lengths = batch.lengths.tolist()
    by_sequence: dict[str, dict[int, Tensor]] = {}
    for part, found in zip(members, results, strict=True):
        for name, value in (found or {}).items():
            values = value.split([lengths[sequence] for sequence in part])
            by_sequence.setdefault(name, {}).update(zip(part, values, strict=True))
    sequences = range(batch.num_sequences)
    return {name: torch.cat([own[s] for s in sequences]) for name, own in by_sequence.items()}


def cut(batch: PackedBatch, cuts: int, together: str | None) -> list[list[int]]:
    """The sequences of each optimizer step: in the order of the batch, steps with about as many sequences each.

    Sequences with the same value of the per-sequence field `together` are in one step. There are fewer steps than
    `cuts` if there are fewer such groups.
    """
    groups: dict[int, list[int]] = {}
    own_groups = list(range(batch.num_sequences))
    keys = own_groups if together is None else _together(batch, together)
    for sequence, key in enumerate(keys):
        groups.setdefault(key, []).append(sequence)
    units = list(groups.values())
    steps = min(cuts, len(units))
    members = []
    for step in range(steps):
        mine = units[step * len(units) // steps : (step + 1) * len(units) // steps]
        members.append(sorted(chain.from_iterable(mine)))
    return members


def _together(batch: PackedBatch, name: str) -> list[int]:
    if name not in batch.sequence_fields:
        known = ", ".join(sorted(batch.sequence_fields)) or "none"
        raise UserError(
            f"together={name!r}: the batch has no such per-sequence field; it has: {known}"
        )
    return batch.sequence_fields[name].tolist()


# After one rank raised, seconds for the others to return: they may wait in a collective that never completes.
GRACE = 5.0


def _ray() -> Launcher:
    from mvp_engine.worker.ray_launcher import RayLauncher

    return RayLauncher()


LAUNCHERS: dict[str, Callable[[], Launcher]] = {
    "local": LocalLauncher,
    "spawn": SpawnLauncher,
    "ray": _ray,
}


class Processes:
    """The ranks of one job, which several groups may share."""

    def __init__(self, launcher: Launcher, ranks: int, device: str, timeout: float) -> None:
        self.launcher = launcher
        self._options = (ranks, device, timeout)
        self.specs: dict[str, WorkerSpec] = {}  # of the groups on these ranks
        self.ended: str | None = None  # why there are no processes
        # Calls of several threads must reach all ranks in the same order, or their collectives would not match.
        self._lock = threading.Lock()
        self.ranks: list[Rank] = []
        self._start()

    def _start(self) -> None:
        try:
            self.ranks = self.launcher.start(*self._options)
        except BaseException:
            self.launcher.close()
            raise

    def restart(self) -> None:
        """New processes with the same groups, which have their first weights again."""
        self.end("it restarts")
        self._start()
        self.ended = None
        for name, spec in self.specs.items():
            self.call(name, START, [(spec,)] * len(self.ranks))

    def call(self, name: str, method: str, args: list[tuple[Any, ...]], **kwargs: Any) -> list[Any]:
        """Call a method on all ranks, each with its own `args`; returns the results in the order of the ranks."""
        with self._lock:
            if self.ended is not None:
                raise WorkerDied(
                    f"group {name} has no processes: {self.ended}. restart() starts new ones"
                )
            futures = []
            for rank, own in zip(self.ranks, args, strict=True):
                futures.append(rank.submit(name, method, *own, **kwargs))
        wait(futures, return_when=FIRST_EXCEPTION)
        if any(future.done() and future.exception() for future in futures):
            self._raise(futures)
        return [future.result() for future in futures]

    def _raise(self, futures: list[Future[Any]]) -> None:
        """Raise what happened first, after the other ranks had time to return."""
        deadline = time.monotonic() + GRACE
        while not _deaths(futures) and time.monotonic() < deadline:
            waiting = [future for future in futures if not future.done()]
            if not waiting:
                break
            wait(waiting, timeout=0.05)
        errors = _errors(futures)
        # A rank that died makes the collectives of the others fail. Of several errors, the one with the longest
        # traceback is the cause: the others say that another rank failed.
        first = next(iter(_deaths(futures)), None) or max(errors, key=lambda error: len(str(error)))
        # Ranks that all raised are in step with each other; otherwise one may wait for another.
        if isinstance(first, WorkerDied) or len(errors) < len(futures):
            self.end(str(first).partition("\n")[0])
            first.add_note("The processes of its group were ended. restart() starts new ones.")
        raise first

    def end(self, why: str) -> None:
        self.ended = why
        self.launcher.close()


def _errors(futures: list[Future[Any]]) -> list[BaseException]:
    found = [future.exception() for future in futures if future.done()]
    return [error for error in found if error is not None]


def _deaths(futures: list[Future[Any]]) -> list[BaseException]:
    return [error for error in _errors(futures) if isinstance(error, WorkerDied)]


class WorkerGroup:
    def __init__(self, spec: WorkerSpec, name: str, processes: Processes, owner: bool) -> None:
        self.spec = spec
        self.name = name
        self.processes = processes
        self.num_ranks = len(processes.ranks)
        self.data_size = spec.data_size(self.num_ranks)
        self.has_loaded = False  # weights other than those of its spec
        self._owner = owner  # closing this group ends the processes

    @classmethod
    def start(
        cls,
        spec: WorkerSpec,
        *,
        name: str = "actor",
        ranks: int = 1,
        where: str | Launcher = "local",
        on: WorkerGroup | None = None,
    ) -> WorkerGroup:
        """Start `ranks` processes and build the model there; `on` shares the processes of another group instead.

        `where` is local (this process, one rank), spawn (processes of this machine), ray, or a launcher.
        """
        if on is not None and name in on.processes.specs:
            raise UserError(f"name={name!r}: the processes have a group of this name already")
        num_ranks = ranks if on is None else on.num_ranks
        spec.data_size(num_ranks)
        processes = on.processes if on else _start_processes(where, num_ranks, spec)
        group = cls(spec, name, processes, owner=on is None)
        try:
            group._call(START, spec)
        except BaseException:
            group.close()
            raise
        processes.specs[name] = spec
        return group

    # ---- Inference ------------------------------------------------------------------------------------------------

    def infer(
        self,
        batch: PackedBatch,
        outputs: list[str],
        *,
        budget: int,
        temperature: float = 1.0,
        adapters: bool = True,
    ) -> dict[str, Tensor]:
        """Per-token outputs by name, in the order of the batch and on the CPU; at most `budget` tokens in a forward.

        `adapters=False` computes without the LoRA adapters.
        """
        check_budget(batch, budget)
        members = by_data_rank(batch, self.data_size)
        parts = [select(batch, part) for part in members]
        options = (list(outputs), budget, temperature, adapters)
        results = self._call_parts("infer", [(part, *options) for part in parts])
        return merged(batch, members, results)

    def generate(
        self, prompts: PackedBatch, decoding: Decoding, keys: list[int] | None = None
    ) -> list[Completion]:
        """Completions in the order of the prompts, the samples of one prompt next to each other.

        `keys` identify the prompts in the random numbers of sampling, by default their indices.
        """
        members = by_data_rank(prompts, self.data_size)
        keys = list(range(prompts.num_sequences)) if keys is None else keys
        parts = [(select(prompts, part), [keys[s] for s in part]) for part in members]
        results = self._call_parts("generate", [(part, decoding, own) for part, own in parts])
        found: list[Completion] = []
        for part, completions in zip(members, results, strict=True):
            for one in completions:
                found.append(dataclasses.replace(one, prompt=part[one.prompt]))
        return sorted(found, key=lambda one: one.prompt)

    # ---- Training -------------------------------------------------------------------------------------------------

    def update(
        self,
        batch: PackedBatch,
        loss: Loss,
        *,
        budget: int,
        cuts: int = 1,
        together: str | None = None,
        lr: float | None = None,
    ) -> list[UpdateNumbers]:
        """Train on a batch in `cuts` optimizer steps; at most `budget` tokens in a forward.

        Sequences with the same value of the per-sequence field `together` are in one step. A batch with fewer such
        groups than `cuts` makes fewer steps. `lr` is the learning rate of all steps in place of the schedule's.
        """
        self._check_training(batch, budget)
        steps: list[list[PackedBatch | None]] = [[] for _ in range(self.data_size)]
        for sequences in cut(batch, cuts, together):
            selected = batch.select(sequences)
            for rank, part in enumerate(by_data_rank(selected, self.data_size)):
                steps[rank].append(select(selected, part))
        results = self._call_parts("update", [(own, loss, budget, lr) for own in steps])
        return [_over_ranks(list(step)) for step in zip(*results, strict=True)]

    def forward_backward(self, batch: PackedBatch, loss: Loss, *, budget: int) -> None:
        """Accumulate the gradients of a batch: after `call("optimizer_zero_grad")`, before `optimizer_step`."""
        self._check_training(batch, budget)
        if self.spec.settings.offload_outside_steps == "all":
            raise UserError(
                "forward_backward: model.offload_outside_steps=all drops gradients between two calls. Set it to "
                "optimizer or none, or call update"
            )
        parts = [select(batch, part) for part in by_data_rank(batch, self.data_size)]
        self._call_parts("forward_backward", [(part, loss, budget) for part in parts])

    def optimizer_step(self, lr: float | None = None) -> UpdateNumbers:
        """Update the weights by the accumulated gradients; `lr` in place of the schedule's."""
        return _over_ranks(self._call_parts("optimizer_step", [(lr,)] * self.data_size))

    def call(self, name: str, *args: Any, **options: Any) -> list[Any]:
        """Call a method of the model engine on all ranks, or read an attribute; returns the results of all ranks."""
        return self._call("call", name, args, options)

    def _check_training(self, batch: PackedBatch, budget: int) -> None:
        if self.spec.optim is None:
            raise UserError(f"group {self.name} is for inference only: its spec has no optim")
        check_budget(batch, budget)

    # ---- Weights --------------------------------------------------------------------------------------------------

    def weights(
        self,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = 2**28,
        on_device: bool = False,
        what: Stream = "weights",
    ) -> WeightStream:
        """The weights as (Hugging Face name, full tensor) in host memory, adapters merged; one call per bucket.

        `dtype` is by default that of exports: the folder's. With torch.float32 the stream has the exact weights.
        `on_device`: a group in the controller's process leaves them on its device.
        `what`: adapter, for LoRA adapters alone under peft's names (`call("peft_config")` has their config); delta, for
        (name, Delta) of what has changed since the last delta, from each rank a share.
        """
        is_local = isinstance(self.processes.launcher, LocalLauncher)
        return WeightStream(self, dtype, bucket_bytes, on_device and is_local, what)

    def shards(self) -> list[list[tuple[str, torch.Size, list[Shard]]]]:
        """The shards of all parameters that each rank holds, as `get_per_tensor_param_shard` of model engines."""
        return self._call("shards")

    def load_weights(self, buckets: Iterable[Bucket]) -> None:
        """Load a stream of weights, such as another group's `weights()`; layouts may differ.

        Those of a group on the same processes are copied there, not through the controller.
        """
        self.has_loaded = True
        if isinstance(buckets, WeightStream) and buckets.what != "weights":
            raise UserError(f"load_weights takes whole weights, not a stream of {buckets.what}")
        if isinstance(buckets, WeightStream) and buckets.group.processes is self.processes:
            self.run(copy_weights, buckets.group.name, buckets.dtype)
            return
        self._call("open_receiver")
        others = [(None,)] * (self.num_ranks - 1)
        for bucket in buckets:
            self.processes.call(self.name, "receive_weights", [(bucket,), *others])
        self._call("close_receiver")

    def checksums(self, dtype: torch.dtype | None = None) -> dict[str, str]:
        """A hash of each weight by its Hugging Face name; equal ones mean equal bits."""
        hashes: dict[str, str] = self._call("checksums", dtype)[0]
        return hashes

    # ---- State ----------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """Save weights, optimizer, schedule and random state as one checkpoint."""
        self._call("save", _absolute(folder))

    def load(self, folder: str | Path) -> None:
        """Load a checkpoint of this group, or of a training, from any layout."""
        self.has_loaded = True
        self._call("load", _absolute(folder))

    def export_hf(self, folder: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write a complete Hugging Face folder, adapters merged."""
        self._call("export_hf", _absolute(folder), dtype)

    def export_adapter(self, folder: str | Path) -> None:
        """Write the adapters alone, as a folder of peft."""
        self._call("export_adapter", _absolute(folder))

    def to(
        self, device: str, *, model: bool = True, optimizer: bool = True, grad: bool = False
    ) -> None:
        """Offload to host memory ("cpu") or load back ("cuda"): groups on the same GPUs can take turns."""
        self._call("to", device, model, optimizer, grad)

    # ---- Processes ------------------------------------------------------------------------------------------------

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call a function of a module as `function(workers, name, *args)` on all ranks.

        `workers` are those of all groups there, by name; `name` is that of this group.
        """
        return self._call(RUN, function, *args)

    def restart(self) -> None:
        """Start new processes after a death. All groups on them have their first weights again: `load` a checkpoint."""
        self.processes.restart()

    def close(self) -> None:
        """Drop the model; end the processes, unless they belong to another group."""
        self.processes.specs.pop(self.name, None)
        if self._owner:
            self.processes.end("the group was closed")
        elif self.processes.ended is None:
            self._call(STOP)

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method on all ranks with the same arguments."""
        return self.processes.call(self.name, method, [args] * self.num_ranks, **kwargs)

    def _call_parts(self, method: str, args: list[tuple[Any, ...]]) -> list[Any]:
        """Call a method with arguments for each data-parallel rank; returns a result for each."""
        stages = self.spec.parallel.pipeline
        in_stage = self.num_ranks // stages
        each = self.spec.model_parallel_size // stages
        own = [args[rank % in_stage // each] for rank in range(self.num_ranks)]
        results = self.processes.call(self.name, method, own)
        return results[self.num_ranks - in_stage :: each]  # the last stage has them


class WeightStream(Iterator[list[tuple[str, Any]]]):
    """The weights of a group, read once. The first bucket is read when it is asked for."""

    def __init__(
        self,
        group: WorkerGroup,
        dtype: torch.dtype | None,
        bucket_bytes: int,
        on_device: bool,
        what: Stream,
    ) -> None:
        self.group = group
        self.dtype = dtype
        self._bucket_bytes = bucket_bytes
        self._on_device = on_device
        self.what = what
        self._is_open = False

    def __next__(self) -> Bucket:
        if not self._is_open:
            options = (self.dtype, self._bucket_bytes, self._on_device, self.what)
            self.group._call("open_weights", *options)
            self._is_open = True
        buckets = self.group._call(
            "next_weights"
        )  # those of other ranks are empty, except of a delta
        if buckets[0] is None:
            raise StopIteration
        return list(chain.from_iterable(buckets))


def _start_processes(where: str | Launcher, ranks: int, spec: WorkerSpec) -> Processes:
    if isinstance(where, str):
        if where not in LAUNCHERS:
            hint = did_you_mean(where, LAUNCHERS)
            raise UserError(f"where={where!r} is none of {', '.join(LAUNCHERS)}.{hint}")
        where = LAUNCHERS[where]()
    return Processes(where, ranks, spec.device, spec.parallel.timeout)


def _absolute(folder: str | Path) -> str:
    """Ranks may have another working directory."""
    return str(Path(folder).expanduser().resolve())


def _over_ranks(numbers: list[UpdateNumbers]) -> UpdateNumbers:
    """The numbers of a step from those of the data-parallel ranks; loss, norm and learning rate are global ones."""
    metrics: dict[str, tuple[float, float]] = {}
    for one in numbers:
        for name, (value, weight) in one.metrics.items():
            total = metrics.get(name, (0.0, 0.0))
            metrics[name] = (total[0] + value, total[1] + weight)
    weight = sum(one.weight for one in numbers)
    peak = max(one.peak_memory for one in numbers)
    return dataclasses.replace(numbers[0], weight=weight, metrics=metrics, peak_memory=peak)

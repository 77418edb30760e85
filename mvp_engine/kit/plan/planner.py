"""Planner: what a config needs on GPUs that need not be present, and what changes of the config would need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mvp_engine.data import accumulation_steps
from mvp_engine.errors import UserError
from mvp_engine.hf.model.packed_model import PackedModel
from mvp_engine.kit.auto import (
    AUTO,
    Choice,
    changed,
    check_supported,
    global_batch,
    is_open,
    with_defaults,
)
from mvp_engine.kit.data.kit import MLLMDataKit
from mvp_engine.kit.data.settings import MLLMData, data_section
from mvp_engine.kit.plan.choice import choose_sizes, data_packs
from mvp_engine.kit.plan.costs import BlockCosts, PlanSettings, facts_of, meta_model
from mvp_engine.kit.plan.hardware import GIB, Network, gpu_by_name
from mvp_engine.kit.plan.packs import (
    MEDIA_SHARE,
    DataPacks,
    Packs,
    assumed_packs,
)
from mvp_engine.kit.plan.record import Collective, find_differences, ranks_text
from mvp_engine.kit.plan.simulate import RankPlan, Simulation
from mvp_engine.kit.plan.step import estimate_step, peak_memory

COUNTED = ("weights", "gradients", "optimizer states")  # memory that a simulation counts
MOST_MICRO_BATCHES = 2  # of a step that are simulated; those after the first repeat it


@dataclass(frozen=True)
class Question:
    """What to plan: a config or a model, on which GPUs, and whether to simulate ranks."""

    what: str  # a YAML file, a model folder or a Hub id
    overrides: list[str]
    gpu: str | None = None  # None: the one of this machine, or H200
    gpus: int | None = None  # None: as many as the parallel layout needs
    tokens: int | None = None  # of an assumed pack; None: the data of the config, where it is known
    media_share: float = MEDIA_SHARE
    simulate: bool = False
    ranks: str | None = None  # more ranks to simulate, or "all"
    gpus_per_node: int = 8
    network: float = 50.0  # GB/s per GPU and direction between nodes: a card of 400 Gb/s each


class Planner:
    """A config with its model and packs, which changes of the config share as far as they can."""

    layout = "parallel"  # the config section of the parallel layout
    is_rl = False

    def __init__(
        self,
        question: Question,
        config: Any,
        data_kit: Callable[[Any], MLLMDataKit],
        is_assumed: bool,
    ) -> None:
        """`is_assumed`: the packs are, since the config names no data or the user gives the tokens."""
        if not 0 <= question.media_share <= 1:
            raise UserError(f"--media-share {question.media_share}: it is a share, from 0 to 1")
        self.question = question
        self.gpu = question.gpu or _gpu_of_machine()
        gpu_by_name(self.gpu)  # an unknown GPU is an error before the data is read
        self.config = config
        self.data_kit = data_kit
        if config.model.type == "module":
            raise UserError(
                "mvp plan supports Hugging Face models: model.type=language_model, omni_model, value_model or "
                "action_model"
            )
        self.section, data = data_section(config)
        self.is_assumed = is_assumed or any(s.stream and s.split == "train" for s in data.sources)
        self.gpus = self.default_gpus if question.gpus is None else question.gpus
        _check_gpus(self.gpus, self.parallel(config))
        self._models = dict[str, PackedModel]()
        self._packs = dict[tuple[int, int], Packs]()
        self.choice: Choice | None = None  # of `auto`
        if is_open(config, data):
            check_supported(config, data)
            self.choice = self._choose()
            self.config = changed(config, self.choice.values)

    def _choose(self) -> Choice:
        """The choice that a training would make on these GPUs."""
        config = self.config
        plain = with_defaults(config)
        batch_choice = Choice({}, "")
        if self.data(config).global_batch_tokens == AUTO:
            values = {f"{self.section}.global_batch_tokens": self.data(plain).global_batch_tokens}
            batch_choice = Choice(values, "")
            if not self.is_assumed:
                batch_choice = global_batch(config, self.data_kit(plain))
            config = changed(config, batch_choice.values)
            plain = with_defaults(config)
        if not is_open(config, self.data(config)):
            return batch_choice
        settings = self.settings(plain)
        ranks = self.gpus // settings.text_ranks
        kit = None if self.is_assumed else self.data_kit(plain)
        share = self.question.media_share
        gpu = gpu_by_name(self.gpu)
        return batch_choice + choose_sizes(config, settings, gpu, ranks, kit, media_share=share)

    # ---- Of a config ----------------------------------------------------------------------------------------------

    @property
    def default_gpus(self) -> int:
        return _replica_size(self.parallel(self.config))

    def parallel(self, config: Any) -> Any:
        return config.parallel

    def rank_values(self, gpus: int) -> dict[str, Any]:
        """Config keys that set the number of GPUs; of most configs the command line does."""
        return {}

    def settings(self, config: Any) -> PlanSettings:
        return PlanSettings.of(config, self.parallel(config), self.gpu)

    def model(self, config: Any) -> PackedModel:
        lora = getattr(config, "lora", None)
        key = f"{lora!r} {config.model.quantize}"
        if key not in self._models:
            self._models[key] = meta_model(config, self.settings(config))
        return self._models[key]

    def data(self, config: Any) -> MLLMData:
        return getattr(config, self.section)

    def packs_per_step(self, config: Any, gpus: int) -> int:
        packs = data_packs(config)
        return packs or config.data.micro_batch_size * self._data_ranks(config, gpus)

    def _data_ranks(self, config: Any, gpus: int) -> int:
        return gpus // (self.settings(config).text_ranks * self.parallel(config).pipeline)

    def packs(self, config: Any, packs_per_step: int) -> Packs:
        tokens = self.data(config).pack_tokens
        key = (tokens, 0 if self.is_assumed else packs_per_step)
        if key not in self._packs:
            if self.is_assumed:
                facts = facts_of(self.model(config), config)
                share = self.question.media_share
                self._packs[key] = assumed_packs(facts, self.data(config), tokens, share)
            else:
                self._packs[key] = DataPacks(self.data_kit(config), packs_per_step)
        return self._packs[key]

    # ---- By formulas ----------------------------------------------------------------------------------------------

    def estimate(self, config: Any, gpus: int) -> dict[str, Any]:
        """The estimate of one step (`estimate_step`) and of the whole training run.

        A pipeline of S stages is estimated as S times as many shards: a rank then has the weights of a stage, and runs
        all blocks. Of n micro-batches, a stage runs 1 / S of the blocks, keeps the activations of at most as many
        micro-batches as stages follow it, itself included, and waits for S - 1 micro-batches of the others.
        """
        settings = self.settings(config)
        stages = self.parallel(config).pipeline
        ranks = gpus // settings.text_ranks  # that share no text: data parallel ranks, and stages
        packs_per_step = self.packs_per_step(config, gpus)
        micro_batches = accumulation_steps(packs_per_step, 1, ranks)
        packs = self.packs(config, packs_per_step)
        step = [packs.sampled[i % len(packs.sampled)] for i in range(micro_batches)]
        accumulates = data_packs(config) is None  # then steps may have any number of micro-batches
        step_facts = estimate_step(self.model(config), packs.largest, step, settings, accumulates)
        activations = [step_facts["memory_gib"]["activations"]]
        slower = 1.0
        if stages > 1:
            of_rank = self.micro_batches(config, gpus)
            slower = (of_rank + stages - 1) / (stages * micro_batches)
            activations = [
                activations[0] * min(stages - stage, of_rank) / stages for stage in range(stages)
            ]
        step_s = slower * step_facts["step_s"]
        tokens = step_facts["tokens_per_step"] * packs_per_step // micro_batches
        share = packs_per_step / (micro_batches * ranks)  # some ranks may wait
        steps = _total_steps(config.loop, packs.steps_per_epoch)
        return {
            "config": self.question.what,
            "gpus": gpus,
            "packs": packs.text,
            "auto": self.choice and {**self.choice.values, "reason": self.choice.reason},
            **step_facts,
            "activations_of_stage": activations,
            "seconds": {name: slower * s for name, s in step_facts["seconds"].items()},
            "step_s": step_s,
            "tokens_per_step": tokens,
            "tokens_per_s": tokens / step_s,
            "mfu": step_facts["mfu"] * share / slower,
            "idle_ranks": max(0, ranks // stages - packs_per_step),
            "steps": steps,
            "eta_s": steps and steps * step_s,
        }

    def peak_gib(self, config: Any, gpus: int) -> float:
        """Peak memory alone, which is what a search for a fitting config needs."""
        return sum(self._training_memory(config, gpus).values())

    def _training_memory(self, config: Any, gpus: int) -> dict[str, float]:
        """GiB by kind at the peak of an update."""
        packs_per_step = self.packs_per_step(config, gpus)
        costs = BlockCosts(self.model(config), self.settings(config))
        micro_batches = accumulation_steps(packs_per_step, 1, gpus // costs.settings.text_ranks)
        micro_batches += data_packs(config) is None
        sizes = peak_memory(costs, self.packs(config, packs_per_step).largest, micro_batches)
        return {name: size / GIB for name, size in sizes.items()}

    def micro_batches(self, config: Any, gpus: int) -> int:
        """Of a rank, in a step."""
        return max(1, self.packs_per_step(config, gpus) // self._data_ranks(config, gpus))

    # ---- By a simulation ------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise the error with which a training of this config would end at its start.

        Building a rank takes up to two seconds, so a layout that supports every model is not tried: FSDP and replicas.
        """
        config = self.config
        parallel = self.parallel(config)
        model = config.model
        is_plain = parallel.context == parallel.ulysses == parallel.tensor == parallel.expert == 1
        if is_plain and model.backend == "fsdp" and not (model.fp8 or model.quantize):
            return
        if hasattr(config.optim, "offload"):
            # It would check the host memory of this machine, on which the training need not run.
            config = changed(config, {"optim.offload": False})
        Simulation(config, self.gpus, parallel=parallel).check()

    def simulate(self, facts: dict[str, Any]) -> dict[str, Any]:
        """The facts of an estimate, with what ranks hold, call and wait for in a simulated step."""
        question = self.question
        config = self.config
        model = self.model(config)
        if self.is_rl:
            raise UserError(
                "a simulation is for trainings; of an RL config, plan the training of its actor: the same model and "
                "parallel sizes in a config of sft"
            )
        if not facts_of(model, config).is_simulated:
            raise UserError(
                f"mvp plan does not simulate the loss of model.type={config.model.type}. Without --simulate, --ranks "
                "and parallel.pipeline > 1 it predicts memory and time of a rank"
            )
        number = self.micro_batches(config, self.gpus)
        sampled = self.packs(config, self.packs_per_step(config, self.gpus)).sampled
        batches = [sampled[index % len(sampled)] for index in range(number)]
        simulation = Simulation(config, self.gpus, question.gpus_per_node)
        first = batches[:MOST_MICRO_BATCHES]
        plans = [simulation.run(rank, first) for rank in simulation.ranks(question.ranks)]
        node_gb_per_s = gpu_by_name(self.gpu).node_gb_per_s
        network = Network(question.gpus_per_node, node_gb_per_s, question.network)
        differences = find_differences({plan.rank: plan.calls for plan in plans})
        kinds = []
        for ranks in _kinds(plans):
            calls = Counter(ranks[0].calls)
            if len(batches) > len(first):  # each further one adds what the last one did
                added = calls - Counter(simulation.run(ranks[0].rank, first[:-1]).calls)
                left_out = len(batches) - len(first)
                calls.update({call: n * left_out for call, n in added.items()})
            kinds.append(_kind_facts(ranks, calls, network, facts))
        largest = max(kinds, key=lambda kind: kind["peak_gib"])
        communication = max((k["communication"] for k in kinds), key=lambda c: c["exposed_s"])
        exposed = communication["exposed_s"]
        step_s = facts["step_s"] + exposed
        slower = step_s / facts["step_s"]
        return {
            **facts,
            "stages": config.parallel.pipeline,
            "micro_batches": number,  # of a rank, in a step
            "simulated_ranks": [plan.rank for plan in plans],
            "parameters": sum(param.numel() for param in model.parameters()),
            "memory_gib": largest["memory_gib"],
            "peak_gib": largest["peak_gib"],
            "fits": all(kind["fits"] for kind in kinds),
            "kinds": kinds,
            "compute_s": facts["step_s"],
            "communication": communication,
            "seconds": {**facts["seconds"], "exposed communication": exposed},
            "step_s": step_s,
            "tokens_per_s": facts["tokens_per_s"] / slower,
            "mfu": facts["mfu"] / slower,
            "eta_s": facts["eta_s"] and facts["eta_s"] * slower,
            "host_collectives": max(plan.host_calls for plan in plans),
            "hangs": [str(difference) for difference in differences],
        }


def _kinds(plans: Sequence[RankPlan]) -> list[list[RankPlan]]:
    """Ranks of one stage with equal collectives, whatever the members of their groups; most memory first."""
    kinds = dict[str, list[RankPlan]]()
    for plan in sorted(plans, key=lambda plan: -sum(plan.held.values())):
        calls = [(call.kind, len(call.ranks), call.bytes, call.dtype) for call in plan.calls]
        kinds.setdefault(f"{plan.stage} {calls}", []).append(plan)
    return sorted(kinds.values(), key=lambda kind: min(plan.rank for plan in kind))


def _kind_facts(
    plans: list[RankPlan], calls: Counter[Collective], network: Network, facts: dict[str, Any]
) -> dict[str, Any]:
    first = plans[0]
    activations = facts["activations_of_stage"]
    memory = {kind: size / GIB for kind, size in first.held.items()}
    memory |= {kind: gib for kind, gib in facts["memory_gib"].items() if kind not in COUNTED}
    memory["activations"] = activations[first.stage]
    if first.stage < len(activations) - 1:
        memory["loss"] = 0.0
    peak = sum(memory.values())
    sizes = [sum(plan.held.values()) / GIB for plan in plans]
    rows = dict[tuple[Any, ...], dict[str, Any]]()  # in the order of their first call
    for call, number in calls.items():
        key = (call.ranks, call.kind, call.dtype, call.overlaps)
        row: dict[str, Any] = {
            "group": first.groups.get(call.ranks, "other"),
            "ranks": ranks_text(call.ranks),
            "size": len(call.ranks),
            "kind": call.kind,
            "dtype": call.dtype,
            "overlaps": call.overlaps,
            **dict.fromkeys(("calls", "bytes", "seconds"), 0),
        }
        row = rows.setdefault(key, row)
        row["calls"] += number
        row["bytes"] += number * call.total_bytes
        row["seconds"] += number * network.seconds(call)
    return {
        "ranks": sorted(plan.rank for plan in plans),
        "stage": first.stage,
        "parameters": first.parameters,
        "memory_gib": memory,
        "peak_gib": peak,
        "fits": peak < facts["room_gib"] * facts["usable"],
        "held_bytes": first.held,
        "held_gib_smallest": min(sizes),
        "held_gib_largest": max(sizes),
        "collectives": list(rows.values()),
        "communication": network.communication(calls, facts["step_s"]),
    }


def _gpu_of_machine() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "H200"


def _replica_size(parallel: Any) -> int:
    """The GPUs of one replica of the model, or of all replicas where their number is set."""
    sequence_ranks = parallel.context * parallel.ulysses
    replica = parallel.pipeline * parallel.shard * sequence_ranks * parallel.tensor
    return replica * max(1, parallel.replicate)


def _check_gpus(gpus: int, parallel: Any) -> None:
    size = _replica_size(parallel)
    any_number = parallel.replicate == -1
    if gpus < 1 or gpus % size or not (any_number or gpus == size):
        needed = f"a multiple of {size}" if any_number else f"{size}"
        raise UserError(
            f"--gpus {gpus}: the parallel layout of the config needs {needed}. parallel.replicate=-1 fits any number "
            "of replicas"
        )


def _total_steps(loop: Any, steps_per_epoch: int | None) -> int | None:
    """The steps of the training run; None if its length is not known."""
    limits = [loop.total_steps]
    if loop.epochs is not None and steps_per_epoch is not None:
        limits.append(loop.epochs * steps_per_epoch)
    return min((steps for steps in limits if steps), default=None)

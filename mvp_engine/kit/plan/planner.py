"""Planner: what a config needs on GPUs that need not be present, and the cheapest change that makes it fit."""

from __future__ import annotations

import logging
import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import product
from operator import add
from typing import Any

import torch

from mvp_engine.config.schema import CHECKPOINTING_MODES
from mvp_engine.data import accumulation_steps
from mvp_engine.errors import UserError
from mvp_engine.hf.experts import moe_layers
from mvp_engine.hf.model.config_source import num_heads
from mvp_engine.hf.model.flop_costs import PlanFacts
from mvp_engine.hf.model.model_parts import blocks_by_part, by_part
from mvp_engine.hf.model.packed_model import PackedModel
from mvp_engine.kit.auto import (
    AUTO,
    CHECKPOINTING,
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
from mvp_engine.kit.plan.hardware import COMMON_GPUS, GIB, Network, gpu_by_name, usable_gib
from mvp_engine.kit.plan.packs import (
    MEDIA_SHARE,
    DataPacks,
    Packs,
    assumed_packs,
)
from mvp_engine.kit.plan.record import Collective, find_differences, ranks_text
from mvp_engine.kit.plan.simulate import RankPlan, Simulation
from mvp_engine.kit.plan.step import estimate_step, peak_memory
from mvp_engine.ops import nf4

LOGGER = logging.getLogger("mvp_engine")
COUNTED = ("weights", "gradients", "optimizer states")  # memory that a simulation counts
MOST_MICRO_BATCHES = 2  # of a step that are simulated; those after the first repeat it
MOST_GPUS = 64
GPUS_OF_NODE = 8
SMALLEST_PACK = 512  # tokens
LORA_LR = 1e-4
EXPERT_COST = 0.5  # tokens travel to their experts


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
    has_global_batch = True  # data.global_batch_size

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
        of_machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "H200"
        self.gpu = question.gpu or of_machine
        gpu_by_name(self.gpu)  # an unknown GPU is an error before the data is read
        self.config = config
        self.data_kit = data_kit
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
        tokens = self.data(config).tokens_per_pack
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
        steps = _total_steps(config.train, packs.steps_per_epoch)
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


def _replica_size(parallel: Any) -> int:
    """The GPUs of one replica of the model."""
    sequence_ranks = parallel.context * parallel.ulysses
    return int(parallel.pipeline * parallel.shard * sequence_ranks * parallel.tensor)


def _check_gpus(gpus: int, parallel: Any) -> None:
    size = _replica_size(parallel)
    if gpus < 1 or gpus % size:
        raise UserError(
            f"--gpus {gpus}: the parallel layout of the config needs a multiple of {size}; a replica takes {size} "
            "GPUs: set another parallel.shard"
        )


def _total_steps(train: Any, steps_per_epoch: int | None) -> int | None:
    """The steps of the training run; None if its length is not known."""
    limits = [train.max_steps]
    if train.epochs is not None and steps_per_epoch is not None:
        limits.append(train.epochs * steps_per_epoch)
    return min((steps for steps in limits if steps), default=None)


# ---- If it does not fit --------------------------------------------------------------------------------------------
#
# A change is a set of config keys. Changes that leave the result alone and cost little time come first; LoRA and more
# GPUs come last. The costs here only order the changes: whether one fits is estimated.


@dataclass(frozen=True)
class Change:
    """New values of config keys, and notes for the user. A cost of 1 is about a tenth of a step's time."""

    cost: float = 0.0
    values: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __add__(self, other: Change) -> Change:
        values = {**self.values, **other.values}
        return Change(self.cost + other.cost, values, self.notes + other.notes)

    @property
    def words(self) -> str:
        """The change as it is written on the command line."""
        return " ".join(shlex.quote(f"{key}={_text(value)}") for key, value in self.values.items())


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {item}" for key, item in value.items()) + "}"
    return str(value)


def advise(planner: Planner, facts: dict[str, Any]) -> dict[str, Any]:
    """Changes that fit, and common GPUs on which the config fits as it is."""
    LOGGER.addFilter(_reject)  # of what is only tried, such as LoRA on a mixture of experts
    try:
        return _advise(planner, facts)
    finally:
        LOGGER.removeFilter(_reject)


def _reject(record: logging.LogRecord) -> bool:
    return False


def _advise(planner: Planner, facts: dict[str, Any]) -> dict[str, Any]:
    gpus = facts["gpus"]
    fits_on = [gpu for gpu in COMMON_GPUS if facts["peak_gib"] < usable_gib(gpu)]
    if planner.parallel(planner.config).pipeline > 1:
        return {"advice": [], "fits_on": fits_on}
    options = [cheapest(planner, gpus)]
    if options[0] is None:
        options = [_on_more_gpus(planner, gpus)]
        lora = lora_change(planner.config)
        qlora = _qlora_change(planner, lora)
        if lora is not None and (with_lora := cheapest(planner, gpus, lora)):
            options.insert(0, with_lora)
        elif qlora is not None and (with_qlora := cheapest(planner, gpus, qlora)):
            options.insert(0, with_qlora)
        elif lora is not None:
            options.insert(0, _on_more_gpus(planner, gpus, lora))
        offload = offload_change(planner.config)
        if offload is not None and (with_offload := cheapest(planner, gpus, offload)):
            options.insert(-1, with_offload)
    return {"advice": [option for option in options if option is not None], "fits_on": fits_on}


def _on_more_gpus(
    planner: Planner, gpus: int, start: Change | None = None
) -> dict[str, Any] | None:
    while gpus < MOST_GPUS:
        gpus *= 2
        if option := cheapest(planner, gpus, start):
            return option
    return None


def cheapest(planner: Planner, gpus: int, start: Change | None = None) -> dict[str, Any] | None:
    """The cheapest change that fits on this number of GPUs, on top of `start`; None if no change does."""
    start = (start or Change()) + Change(0, planner.rank_values(gpus))
    config = changed(planner.config, start.values)
    # The last change of each list saves most memory.
    lists = [
        [start],
        [Change(), *_layouts(planner, config, gpus)],
        [Change(), *_checkpointing(planner, config)],
        [Change(), *_state_dtypes(planner, config)],
        [Change(), *_pack_sizes(planner, config, gpus)],
    ]

    def fits(change: Change) -> bool:
        peak = planner.peak_gib(changed(planner.config, change.values), gpus)
        return peak < usable_gib(planner.gpu)

    if not fits(reduce(add, [changes[-1] for changes in lists])):
        return None
    changes = [reduce(add, parts) for parts in product(*lists)]
    changes.sort(key=lambda change: change.cost)
    best = next(change for change in changes if fits(change))
    facts = planner.estimate(changed(planner.config, best.values), gpus)
    notes = list(best.notes)
    for what, size in facts["host_memory_gib"].items():
        if size:
            notes.append(f"the {what} need {size:.0f} GiB of host memory per GPU")
    keys = ("gpus", "peak_gib", "host_gib", "step_s", "tokens_per_s")
    return {"words": best.words, "notes": notes, **{key: facts[key] for key in keys}}


def offload_change(config: Any) -> Change | None:
    """Optimizer states on the host: the same results, in steps that are longer by a copy of the states."""
    if getattr(config.optim, "offload", True):
        return None  # the recipe cannot, or does already
    return Change(0, {"optim.offload": True}, ("optimizer states stay on the host: docs/optim.md",))


def lora_change(config: Any) -> Change | None:
    if getattr(config, "lora", True) is not None:
        return None  # the recipe has no LoRA, or the config has it already
    values: dict[str, Any] = {"lora.rank": 16}
    if config.optim.lr < LORA_LR:
        values["optim.lr"] = LORA_LR
    return Change(0, values, ("LoRA: adapters train, the weights are frozen, in bf16",))


def _qlora_change(planner: Planner, lora: Change | None) -> Change | None:
    """LoRA, unless the config has it, on weights of the language model in 4 bits."""
    config = planner.config
    has_lora = getattr(config, "lora", None) is not None
    is_used = config.model.quantize or config.model.fp8 or planner.parallel(config).tensor > 1
    decoder = planner.model(config).decoder()
    if is_used or not (has_lora or lora) or not any(map(nf4.fits, decoder.modules())):
        return None
    values = {**(lora.values if lora else {}), "model.quantize": {"llm": "nf4"}}
    return Change(0, values, ("QLoRA: adapters train, the weights are frozen, in 4 bits",))


def _layouts(planner: Planner, config: Any, gpus: int) -> Iterator[Change]:
    """FSDP over a node or all GPUs, then sequence parallel in place of a part of it: Ulysses, then context.

    Each also with expert parallel, which saves the all-gathers of experts; in place of the config's own layout too.
    """
    now = planner.parallel(config)
    facts = facts_of(planner.model(config), config)
    key = f"{planner.layout}.expert"
    sequence_now = now.context * now.ulysses
    experts = _expert_ranks(facts, now, now.shard * sequence_now)
    if experts > 1:
        yield Change(EXPERT_COST, {key: experts})
    heads, kv_heads = num_heads(facts.backbone.config.get_text_config())
    for context, ulysses in _sequence_sizes(now, gpus, heads, kv_heads):
        sequence = context * ulysses
        if sequence > sequence_now and not facts.splits_sequences:
            break
        every = gpus // (sequence * now.tensor)
        of_node = GPUS_OF_NODE // (sequence * now.tensor)
        sizes = {"context": context, "ulysses": ulysses}
        for shard in sorted({min(every, of_node) or 1, every}):
            values = {
                f"{planner.layout}.{name}": size
                for name, size in {"shard": shard, **sizes}.items()
                if size != getattr(now, name)
            }
            is_more = shard * sequence > now.shard * sequence_now or sequence > sequence_now
            if is_more and every % shard == 0:
                between_nodes = shard > of_node
                cost = 1.0 + between_nodes + (4.0 + sequence / 8 if sequence > sequence_now else 0)
                yield Change(cost, values)
                experts = _expert_ranks(facts, now, shard * sequence)
                if experts > 1:
                    yield Change(cost + EXPERT_COST, {**values, key: experts})


def _expert_ranks(facts: PlanFacts, now: Any, ranks: int) -> int:
    """How many of the FSDP ranks can share the experts of each layer, inside of a node; 1: the model has none."""
    stacked = moe_layers.modules(facts.model).values()
    if not stacked or now.expert > 1 or not facts.shares_experts:
        return 1
    totals = [moe_layers.num_experts(module) for module in stacked]
    return math.gcd(*totals, ranks, GPUS_OF_NODE)


def _sequence_sizes(now: Any, gpus: int, heads: int, kv_heads: int) -> Iterator[tuple[int, int]]:
    """`parallel.context` and `parallel.ulysses`: Ulysses as far as the heads go, context ranks for the rest."""
    context = now.context
    ulysses = now.ulysses
    while gpus % (context * ulysses * now.tensor) == 0:
        yield context, ulysses
        more = 2 * ulysses
        if heads % more == 0 and kv_heads % more == 0:
            ulysses = more
        else:
            context *= 2


def _checkpointing(planner: Planner, config: Any) -> Iterator[Change]:
    """More activation checkpointing: of the encoders first, where the second forward is short."""
    model = planner.model(config)
    setting = by_part(model, config.model.activation_checkpointing, CHECKPOINTING)
    parts = sorted({part for _, part in blocks_by_part(model)} - {"projector"}, reverse=True)
    now = {part: setting.get(part, "none") for part in parts}
    # Cost, of encoders, of the llm.
    levels = [(2.0, "none", "selective"), (3.7, "none", "attention"), (4.0, "none", "full")]
    levels.append((5.0, "none", "offload"))
    if len(parts) > 1:
        levels = [(1.0, "full", "none"), (3.0, "full", "selective"), (4.2, "full", "attention")]
        levels += [(4.5, "full", "full"), (5.5, "full", "offload")]
    costs = BlockCosts(model, planner.settings(config))
    keeps = any(costs.keeps_attention(block) for block in costs.blocks if block.part == "llm")
    for cost, of_encoders, of_llm in levels:
        if of_llm == "attention" and not keeps:
            continue
        modes = dict[str, str]()
        for part, mode in now.items():
            least = of_llm if part == "llm" else of_encoders
            modes[part] = max(mode, least, key=CHECKPOINTING_MODES.index)
        if modes == now:
            continue
        value: Any = {part: mode for part, mode in modes.items() if mode != "none"}
        if len(set(modes.values())) == 1:
            value = modes["llm"]
        yield Change(cost, {CHECKPOINTING: value})


def _state_dtypes(planner: Planner, config: Any) -> Iterator[Change]:
    now = getattr(config.optim, "state_dtype", None)
    note = "AdamW's moments are rounded stochastically: docs/optim.md"
    if now == "float32":
        yield Change(2.5, {"optim.state_dtype": "bfloat16"}, (note,))
    if now in ("float32", "bfloat16") and planner.parallel(config).tensor == 1:
        yield Change(3.0, {"optim.state_dtype": "int8"}, (note,))


def _pack_sizes(planner: Planner, config: Any, gpus: int) -> Iterator[Change]:
    """Smaller packs and as many more of them per step; where rows may be longer, only as a last resort."""
    data = planner.data(config)
    packs = planner.packs_per_step(config, gpus)
    longest = planner.packs(config, packs).longest_row
    for halvings in (1, 2, 3):
        tokens = data.tokens_per_pack >> halvings
        if tokens < (longest or SMALLEST_PACK):
            return
        values = {f"{planner.section}.pack_tokens": tokens}
        if data.global_batch_tokens is None and planner.has_global_batch:
            values["data.global_batch_size"] = packs << halvings
        notes = () if longest else (f"rows of more than {tokens:,} tokens are left out",)
        yield Change(0.5 * halvings if longest else 6.0 + halvings, values, notes)

"""`mvp estimate`: predicted memory and time of a training run on GPUs that need not be present, and advice."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from itertools import product
from operator import add
from typing import Any

from mvp_engine.config.schema import CHECKPOINTING_MODES
from mvp_engine.errors import EXIT_USER_ERROR, UserError
from mvp_engine.hf.actions.action_model import ActionModel
from mvp_engine.hf.experts import moe_layers as stacked_experts
from mvp_engine.hf.model.config_source import num_heads
from mvp_engine.hf.model.model_parts import blocks_by_part, by_part
from mvp_engine.hf.model.packed_model import PackedModel
from mvp_engine.kit.action_flops import language_backbone
from mvp_engine.kit.estimate.blocks import BlockCosts
from mvp_engine.kit.estimate.memory import IN_BACKWARD
from mvp_engine.kit.estimate.settings import COMMON_GPUS, usable_gib
from mvp_engine.kit.estimate.training import changed
from mvp_engine.kit.speech.flops import SPEAKING
from mvp_engine.log.format import duration, rate
from mvp_engine.ops import nf4
from mvp_engine.rl.rl_settings import RLConfig
from mvp_engine.tools.estimate_config import Estimator, Question, compose_question

OFFLOAD_KEYS = {
    "optimizer states": "optim.offload",
    "inputs of blocks": "model.activation_checkpointing=offload",
}


def print_estimate(
    question: Question,
    *,
    communication: bool = False,
    gpus_per_node: int = 8,
    network: float | None = None,
    as_json: bool,
) -> int:
    """Print the estimate with advice; the exit code is 2 if the training does not fit.

    `communication`: also simulate a rank, for the communication that a step waits for.
    """
    estimator = make_estimator(question)
    _refuse_unsupported(estimator)
    facts = estimator.estimate(estimator.config, estimator.gpus)
    if communication and estimator.is_rl:
        raise UserError("--communication is for trainings: leave it out for an RL config")
    if communication and facts["fits"] and facts["gpus"] > 1:
        facts = _with_communication(estimator, facts, gpus_per_node, network)
    advice = {} if facts["fits"] else advise(estimator, facts)
    print(json.dumps({**facts, **advice}, indent=2) if as_json else page({**facts, **advice}))
    return 0 if facts["fits"] else EXIT_USER_ERROR


def _refuse_unsupported(estimator: Estimator) -> None:
    """Raise the error with which a training of this config would end at its start.

    Building a rank takes up to two seconds, so a layout that supports every model is not tried: FSDP and replicas.
    """
    from mvp_engine.tools.plan.simulate import Simulation

    config = estimator.config
    parallel = estimator.parallel(config)
    model = config.model
    is_plain = parallel.context == parallel.ulysses == parallel.tensor == parallel.expert == 1
    if is_plain and model.backend == "fsdp" and not (model.fp8 or model.quantize):
        return
    if hasattr(config.optim, "offload"):
        # It would check the host memory of this machine, on which the training need not run.
        config = changed(config, {"optim.offload": False})
    Simulation(config, estimator.gpus, parallel=parallel).check()


def _with_communication(
    estimator: Estimator, facts: dict[str, Any], gpus_per_node: int, network: float | None
) -> dict[str, Any]:
    """The facts with the communication that a step waits for, by the simulation of `mvp plan`."""
    from mvp_engine.tools.plan.step import communication

    found = communication(estimator, facts["step_s"], gpus_per_node, network)
    step_s = facts["step_s"] + found["exposed_s"]
    slower = step_s / facts["step_s"]
    return {
        **facts,
        "compute_s": facts["step_s"],
        "communication": found,
        "seconds": {**facts["seconds"], "exposed communication": found["exposed_s"]},
        "step_s": step_s,
        "tokens_per_s": facts["tokens_per_s"] / slower,
        "mfu": facts["mfu"] / slower,
        "eta_s": facts["eta_s"] and facts["eta_s"] * slower,
    }


def make_estimator(question: Question) -> Estimator:
    """An estimator of the kind that the config needs."""
    composed = compose_question(question)
    if not isinstance(composed[0].config, RLConfig):
        return Estimator(question, composed)
    from mvp_engine.tools.estimate_rl import RLEstimator

    return RLEstimator(question, composed)


def page(facts: dict[str, Any]) -> str:
    """The estimate as text."""
    lines = [f"{facts['config']} on {facts['gpus']} x {facts['gpu']}, estimated"]
    lines.append(f"  {facts['packs']}")
    if facts["auto"]:
        lines.append(f"  auto: {facts['auto']['reason']}")
    lines.append("")
    for name, size in facts["memory_gib"].items():
        if size or name != IN_BACKWARD:
            lines.append(f"  {name:<22}{size:8.2f} GiB")
    verdict = "fits" if facts["fits"] else "does NOT fit"
    peak = f"{facts['peak_gib']:8.2f} GiB of {facts['room_gib']:.0f} GiB: {verdict}"
    lines += [f"  {'peak memory per GPU':<22}{peak}", *_host_lines(facts), ""]
    if facts["fits"]:
        lines += _time_lines(facts)
    else:
        lines += _advice_lines(facts)
    return "\n".join(lines)


def _host_lines(facts: dict[str, Any]) -> list[str]:
    """Host memory that optimizer states and inputs of blocks need."""
    lines = []
    for what, size in facts.get("host_memory_gib", {}).items():
        if size:
            text = f"{size:8.2f} GiB per GPU, pinned: {what} ({OFFLOAD_KEYS[what]})"
            lines.append(f"  {'host memory':<22}{text}")
    return lines


def _time_lines(facts: dict[str, Any]) -> list[str]:
    lines = []
    for name, seconds in facts["seconds"].items():
        lines.append(f"  {name:<22}{1e3 * seconds:8.1f} ms")
    throughput = f"{rate(facts['tokens_per_s'])} tokens/s, MFU {facts['mfu']:.1%}"
    step = f"{1e3 * facts['step_s']:8.1f} ms, {facts['tokens_per_step']:,} tokens: {throughput}"
    lines.append(f"  {'step':<22}{step}")
    if facts["idle_ranks"]:
        text = (
            f"{facts['idle_ranks']} data parallel ranks have no pack: raise data.global_batch_size"
        )
        lines.append(f"  {'idle':<22}{text}")
    if facts["steps"] is not None:
        training = f"{facts['steps']:8,} steps, about {duration(facts['eta_s'])}"
        lines.append(f"  {'training':<22}{training}")
    left_out = "Waiting for data or host is not included."
    if facts["gpus"] > 1 and "communication" not in facts:
        left_out = "Communication (--communication) and waiting for data or host are not included."
    return [*lines, "", f"{left_out} Accuracy: docs/performance.md"]


def _advice_lines(facts: dict[str, Any]) -> list[str]:
    lines = []
    for option in facts["advice"]:
        where = ""
        if option["gpus"] != facts["gpus"]:
            where = f" on {option['gpus']} GPUs"
            if "groups.actor.ranks" not in option["words"]:
                where += " (--gpus here, --nproc of mvp train)"
        lines.append(f"It fits{where} with these words on the command line:")
        lines += ["", f"  {option['words']}", ""]
        step = f"{option['peak_gib']:.1f} GiB per GPU, {1e3 * option['step_s']:,.0f} ms per step"
        lines += [f"  {step}", *(f"  {note}" for note in option["notes"]), ""]
    if any(option["gpus"] > 1 for option in facts["advice"]):
        text = "Times are without communication, which --communication adds to the estimate of a config that fits."
        lines += [text, ""]
    if not facts["advice"]:
        lines += ["No setting makes it fit, not even LoRA or 64 of these GPUs.", ""]
    if facts["fits_on"]:
        lines.append(f"Without a change it fits on: {', '.join(facts['fits_on'])}")
    return lines


# The cheapest change to a config that makes its training fit into the memory of the GPUs.
#
# A change is a set of config keys. Changes that leave the result alone and cost little time come first; LoRA and more
# GPUs come last. The costs here only order the changes: whether one fits is estimated.

MOST_GPUS = 64
GPUS_OF_NODE = 8
SMALLEST_PACK = 512  # tokens
LORA_LR = 1e-4
EXPERT_COST = 0.5  # tokens travel to their experts


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
        return "{" + ", ".join(f"{key}: {one}" for key, one in value.items()) + "}"
    return str(value)


def advise(estimator: Estimator, facts: dict[str, Any]) -> dict[str, Any]:
    """Changes that fit, and common GPUs on which the config fits as it is."""
    gpus = facts["gpus"]
    found = [cheapest(estimator, gpus)]
    if found[0] is None:
        found = [_on_more_gpus(estimator, gpus)]
        lora = lora_change(estimator.config)
        qlora = qlora_change(estimator, lora)
        if lora is not None and (with_lora := cheapest(estimator, gpus, lora)):
            found.insert(0, with_lora)
        elif qlora is not None and (with_qlora := cheapest(estimator, gpus, qlora)):
            found.insert(0, with_qlora)
        elif lora is not None:
            found.insert(0, _on_more_gpus(estimator, gpus, lora))
        offload = offload_change(estimator.config)
        if offload is not None and (with_offload := cheapest(estimator, gpus, offload)):
            found.insert(-1, with_offload)
    fits_on = [gpu for gpu in COMMON_GPUS if facts["peak_gib"] < usable_gib(gpu)]
    return {"advice": [option for option in found if option is not None], "fits_on": fits_on}


def _on_more_gpus(
    estimator: Estimator, gpus: int, start: Change | None = None
) -> dict[str, Any] | None:
    while gpus < MOST_GPUS and estimator.parallel(estimator.config).replicate == -1:
        gpus *= 2
        found = cheapest(estimator, gpus, start)
        if found is not None:
            return found
    return None


def cheapest(estimator: Estimator, gpus: int, start: Change | None = None) -> dict[str, Any] | None:
    """The cheapest change that fits on this number of GPUs, on top of `start`; None if no change does."""
    start = (start or Change()) + Change(0, estimator.rank_values(gpus))
    config = changed(estimator.config, start.values)
    # The last change of each list saves most memory.
    lists = [
        [start],
        [Change(), *_layouts(estimator, config, gpus)],
        [Change(), *_checkpointing(estimator, config)],
        [Change(), *_state_dtypes(estimator, config)],
        [Change(), *_pack_sizes(estimator, config, gpus)],
    ]
    smallest = reduce(add, [changes[-1] for changes in lists])
    if not _fits(estimator, smallest, gpus):
        return None
    changes = [reduce(add, parts) for parts in product(*lists)]
    changes.sort(key=lambda change: change.cost)
    found = next(change for change in changes if _fits(estimator, change, gpus))
    facts = estimator.estimate(changed(estimator.config, found.values), gpus)
    keys = ("gpus", "peak_gib", "host_gib", "step_s", "tokens_per_s")
    figures = {key: facts[key] for key in keys}
    notes = list(found.notes)
    for what, size in facts["host_memory_gib"].items():
        if size:
            notes.append(f"the {what} need {size:.0f} GiB of host memory per GPU")
    return {"words": found.words, "notes": notes, **figures}


def _fits(estimator: Estimator, change: Change, gpus: int) -> bool:
    config = changed(estimator.config, change.values)
    return estimator.peak_gib(config, gpus) < usable_gib(estimator.gpu)


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


def qlora_change(estimator: Estimator, lora: Change | None) -> Change | None:
    """LoRA, unless the config has it, on weights of the language model in 4 bits."""
    config = estimator.config
    has_lora = getattr(config, "lora", None) is not None
    is_used = config.model.quantize or config.model.fp8 or estimator.parallel(config).tensor > 1
    decoder = estimator.model(config).decoder()
    if is_used or not (has_lora or lora) or not any(nf4.fits(one) for one in decoder.modules()):
        return None
    values = {**(lora.values if lora else {}), "model.quantize": {"llm": "nf4"}}
    return Change(0, values, ("QLoRA: adapters train, the weights are frozen, in 4 bits",))


def _layouts(estimator: Estimator, config: Any, gpus: int) -> Iterator[Change]:
    """FSDP over a node or all GPUs, then sequence parallel in place of a part of it: Ulysses, then context.

    Each also with expert parallel, which saves the all-gathers of experts; in place of the config's own layout too.
    """
    now = estimator.parallel(config)
    model = estimator.model(config)
    key = f"{estimator.layout}.expert"
    experts = _expert_ranks(model, now, now.shard * now.context * now.ulysses)
    if experts > 1:
        yield Change(EXPERT_COST, {key: experts})
    if now.replicate != -1:
        return  # the layout of the config is for one number of GPUs
    heads, kv_heads = num_heads(language_backbone(model).config.get_text_config())
    sequence_now = now.context * now.ulysses
    for context, ulysses in _sequence_sizes(now, gpus, heads, kv_heads):
        sequence = context * ulysses
        if sequence > sequence_now and isinstance(model, ActionModel):
            break  # its sequences are short, and are not split
        every = gpus // (sequence * now.tensor)
        of_node = GPUS_OF_NODE // (sequence * now.tensor)
        for shard in sorted({min(every, of_node) or 1, every}):
            values = dict[str, Any]()
            sizes = {"shard": shard, "context": context, "ulysses": ulysses}
            for name, size in sizes.items():
                if size != getattr(now, name):
                    values[f"{estimator.layout}.{name}"] = size
            is_more = shard * sequence > now.shard * sequence_now or sequence > sequence_now
            if is_more and every % shard == 0:
                between_nodes = shard > of_node
                cost = 1.0 + between_nodes + (4.0 + sequence / 8 if sequence > sequence_now else 0)
                yield Change(cost, values)
                experts = _expert_ranks(model, now, shard * sequence)
                if experts > 1:
                    yield Change(cost + EXPERT_COST, {**values, key: experts})


def _expert_ranks(model: PackedModel, now: Any, ranks: int) -> int:
    """How many of the FSDP ranks can share the experts of each layer, inside of a node; 1: the model has none."""
    stacked = stacked_experts.modules(model).values()
    if not stacked or now.expert > 1 or isinstance(model, SPEAKING):
        return 1
    totals = [stacked_experts.num_experts(module) for module in stacked]
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


def _checkpointing(estimator: Estimator, config: Any) -> Iterator[Change]:
    """More activation checkpointing: of the encoders first, where the second forward is short."""
    model = estimator.model(config)
    key = "model.activation_checkpointing"
    setting = by_part(model, config.model.activation_checkpointing, key)
    parts = sorted({part for _, part in blocks_by_part(model)} - {"projector"}, reverse=True)
    now = {part: setting.get(part, "none") for part in parts}
    # Cost, of encoders, of the llm.
    wanted = [(2.0, "none", "selective"), (3.7, "none", "attention"), (4.0, "none", "full")]
    wanted.append((5.0, "none", "offload"))
    if len(parts) > 1:
        wanted = [(1.0, "full", "none"), (3.0, "full", "selective"), (4.2, "full", "attention")]
        wanted += [(4.5, "full", "full"), (5.5, "full", "offload")]
    keeps_attention = _keeps_attention(estimator, config)
    for cost, of_encoders, of_llm in wanted:
        if of_llm == "attention" and not keeps_attention:
            continue
        modes = dict[str, str]()
        for part, mode in now.items():
            modes[part] = max(
                mode, of_llm if part == "llm" else of_encoders, key=CHECKPOINTING_MODES.index
            )
        if modes == now:
            continue
        if len(set(modes.values())) == 1:
            yield Change(cost, {key: modes["llm"]})
        else:
            yield Change(
                cost, {key: {part: mode for part, mode in modes.items() if mode != "none"}}
            )


def _keeps_attention(estimator: Estimator, config: Any) -> bool:
    """Whether `attention` keeps something of the language model."""
    costs = BlockCosts(estimator.model(config), estimator.settings(config))
    return any(costs.keeps_attention(block) for block in costs.blocks if block.part == "llm")


def _state_dtypes(estimator: Estimator, config: Any) -> Iterator[Change]:
    now = getattr(config.optim, "state_dtype", None)
    note = "AdamW's moments are rounded stochastically: docs/optim.md"
    if now == "float32":
        yield Change(2.5, {"optim.state_dtype": "bfloat16"}, (note,))
    if now in ("float32", "bfloat16") and estimator.parallel(config).tensor == 1:
        yield Change(3.0, {"optim.state_dtype": "int8"}, (note,))


def _pack_sizes(estimator: Estimator, config: Any, gpus: int) -> Iterator[Change]:
    """Smaller packs and as many more of them per step; where rows may be longer, only as a last resort."""
    section = estimator.section
    data = estimator.data(config)
    packs = estimator.packs_per_step(config, gpus)
    longest = estimator.packs(config, packs).longest_row
    for halvings in (1, 2, 3):
        tokens = data.pack_tokens >> halvings
        if tokens < (longest or SMALLEST_PACK):
            return
        values = {f"{section}.micro_batch_tokens": tokens}
        if data.global_batch_tokens is None and not estimator.is_rl:
            values["data.global_batch_size"] = packs << halvings
        notes = () if longest else (f"rows of more than {tokens:,} tokens are left out",)
        yield Change(0.5 * halvings if longest else 6.0 + halvings, values, notes)

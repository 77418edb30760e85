"""The cheapest change to a config that makes its training fit into the memory of the GPUs.

A change is a set of config keys. Changes that leave the result alone and cost little time come first; LoRA and more
GPUs come last. The costs here only order the changes: whether one fits is estimated.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from itertools import product
from operator import add
from typing import Any

from mvp_engine.config.schema import CHECKPOINTING_MODES
from mvp_engine.hf.experts import moe_layers
from mvp_engine.hf.model.config_source import num_heads
from mvp_engine.hf.model.model_parts import blocks_by_part, by_part
from mvp_engine.kit.auto import CHECKPOINTING, changed
from mvp_engine.kit.plan.costs import BlockCosts, facts_of
from mvp_engine.kit.plan.hardware import COMMON_GPUS, usable_gib
from mvp_engine.kit.plan.planner import Planner
from mvp_engine.ops import nf4

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
        return "{" + ", ".join(f"{key}: {item}" for key, item in value.items()) + "}"
    return str(value)


def advise(planner: Planner, facts: dict[str, Any]) -> dict[str, Any]:
    """Changes that fit, and common GPUs on which the config fits as it is."""
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
    while gpus < MOST_GPUS and planner.parallel(planner.config).replicate == -1:
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
    if now.replicate != -1:
        return  # the layout of the config is for one number of GPUs
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


def _expert_ranks(facts: Any, now: Any, ranks: int) -> int:
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
        tokens = data.pack_tokens >> halvings
        if tokens < (longest or SMALLEST_PACK):
            return
        values = {f"{planner.section}.micro_batch_tokens": tokens}
        if data.global_batch_tokens is None and not planner.is_rl:
            values["data.global_batch_size"] = packs << halvings
        notes = () if longest else (f"rows of more than {tokens:,} tokens are left out",)
        yield Change(0.5 * halvings if longest else 6.0 + halvings, values, notes)

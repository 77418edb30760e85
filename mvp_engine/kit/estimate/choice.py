"""The choice of `mllm.micro_batch_tokens=auto` and `model.activation_checkpointing=auto`, from estimates.

Every pack size and every mode of activation checkpointing that the config leaves open is estimated. Of those that fit
into the GPU, the choice is the one with the shortest step; of nearly equal ones, the one with least activation
checkpointing and fewest micro-batches. Where none fits, the inputs of blocks go to the host (`offload`). The choice is
a function of the config, the data, the GPU's name and memory, and the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from mvp_engine.config.schema import CHECKPOINTING_MODES
from mvp_engine.data.batch import PackedBatch
from mvp_engine.errors import count
from mvp_engine.hf.model.packed_model import PackedModel
from mvp_engine.kit.data.settings import GLOBAL_BATCH_TOKENS, MLLMData
from mvp_engine.kit.estimate.blocks import BlockCosts
from mvp_engine.kit.estimate.memory import DYNAMIC, peak_memory
from mvp_engine.kit.estimate.settings import GIB, EstimateSettings, Gpu
from mvp_engine.kit.estimate.step import micro_batch_seconds

AUTO = "auto"
CHECKPOINTING = "model.activation_checkpointing"
LAST_RESORT = "offload"  # needs memory of the host, about which nothing is known: only where nothing else fits
USABLE = 0.9  # of the memory: estimates are within a tenth of measurements
NEARLY_EQUAL = 1.01  # times the shortest step: of these, the least activation checkpointing and the largest packs
MULTIPLE = 64  # tokens; pack sizes that do not divide the global batch are rounded down to it
# Seconds that the host needs to launch forward and backward of one compiled block: assumed. An idle GPU for 59 % of
# a step with 28 blocks and eight micro-batches suggests 4 ms.
HOST_SECONDS = 6e-3
SELECTIVE_SLOWDOWN = 0.05  # of a part whose blocks use selective activation checkpointing

Mode = str | dict[str, str]


@dataclass(frozen=True)
class Sizes:
    """A pack size and a mode of activation checkpointing, with their estimates."""

    tokens: int  # of a micro-batch
    packs: int  # of the global batch
    mode: Mode
    peak: float  # bytes
    seconds: float  # of the micro-batches of a step


@dataclass(frozen=True)
class Choice:
    """Values of config keys, and why."""

    values: dict[str, Any]
    reason: str
    peak: float = 0.0  # bytes by the estimate

    def __add__(self, other: Choice) -> Choice:
        """Both choices; the values of the other one count where both have them."""
        reasons = "; ".join(reason for reason in (self.reason, other.reason) if reason)
        return Choice({**self.values, **other.values}, reasons, other.peak)


@dataclass(frozen=True)
class Workload:
    """What a choice is for: the model on the meta device, its data, and the GPUs."""

    model: PackedModel
    settings: EstimateSettings
    batch: Callable[[int], PackedBatch]  # a micro-batch of so many tokens
    gpu: Gpu
    data_ranks: int
    # The encoder work of the heaviest micro-batch of so many tokens, as a multiple of that of `batch`.
    heaviest: Callable[[int], float] = lambda _: 1.0


def is_open(config: Any, data: MLLMData) -> bool:
    """Does the config leave something to choose?"""
    sizes = data.micro_batch_tokens, data.global_batch_tokens
    return AUTO in (*sizes, config.model.activation_checkpointing)


def default_choice(config: Any, section: str, data: MLLMData) -> Choice:
    """What `auto` stands for without a GPU."""
    values: dict[str, Any] = {}
    chosen = []
    total = max(GLOBAL_BATCH_TOKENS, data.row_tokens or 0)
    if data.global_batch_tokens != "auto":
        total = data.global_batch_tokens or 0
    if data.micro_batch_tokens == "auto":
        tokens = min(data.default_pack_tokens, total)
        values = _pack_values(section, tokens, total // tokens)
        chosen.append(f"packs of {tokens:,} tokens")
    elif data.global_batch_tokens == "auto":
        tokens = data.micro_batch_tokens
        values = _pack_values(section, tokens, max(1, total // tokens))
    if config.model.activation_checkpointing == AUTO:
        values[CHECKPOINTING] = "none"
        chosen.append("activation checkpointing none")
    return Choice(values, f"{', '.join(chosen)}: the default without a GPU" if chosen else "")


def choose(
    config: Any,
    section: str,
    data: MLLMData,
    packs_per_step: int | None,
    work: Workload,
    room: float | None = None,
) -> Choice:
    """`packs_per_step`: those of a config that fixes the pack size. `room`: the bytes to fill, by default `USABLE`."""
    if data.micro_batch_tokens == AUTO:
        sizes = list(_pack_sizes(data, work.data_ranks))
    else:
        sizes = [(data.pack_tokens, packs_per_step or work.data_ranks)]
    modes: list[Mode] = [config.model.activation_checkpointing]
    if modes[0] == AUTO:
        modes = list(_modes(work))
    room = USABLE * work.gpu.memory if room is None else room
    found = [one for mode in modes for one in _estimates(work, sizes, mode, room)]
    fitting = [one for one in found if one.peak <= room]
    if not fitting and config.model.activation_checkpointing == AUTO:
        found += _estimates(work, sizes, LAST_RESORT, room)
        fitting = [one for one in found if one.peak <= room]
    if fitting:
        fastest = min(one.seconds for one in fitting)
        nearly = [one for one in fitting if one.seconds <= NEARLY_EQUAL * fastest]
        best = min(nearly, key=lambda one: (_checkpointed(one.mode), one.packs))
    else:
        best = min(found, key=lambda one: one.peak)
    values: dict[str, Any] = {}
    if data.micro_batch_tokens == AUTO:
        values = _pack_values(section, best.tokens, best.packs)
    if config.model.activation_checkpointing == AUTO:
        values[CHECKPOINTING] = best.mode
    return Choice(values, _reason(best, work, found, bool(fitting)), best.peak)


def _checkpointed(mode: Mode) -> int:
    """How much is computed a second time in backward; it orders modes."""
    modes = mode.values() if isinstance(mode, Mapping) else [mode]
    return sum(CHECKPOINTING_MODES.index(one) for one in modes)


def _reason(best: Sizes, work: Workload, found: list[Sizes], fits: bool) -> str:
    of_rank = -(-best.packs // work.data_ranks)
    text = (
        f"{count(of_rank, 'micro-batch')} of {best.tokens:,} tokens per rank and step, activation checkpointing "
        f"{_mode_text(best.mode)}: {best.peak / GIB:.1f} of {work.gpu.memory / GIB:.0f} GiB"
    )
    if not fits:
        return f"{text} by the estimate; nothing fits, and this needs least memory"
    choices = count(len(found), "choice")
    return f"{text} and {best.seconds:.2f} s by the estimate, the fastest that fits of {choices}"


def _mode_text(mode: Mode) -> str:
    if isinstance(mode, Mapping):
        return ", ".join(f"{name} of {part}" for part, name in mode.items())
    return mode


def _pack_values(section: str, tokens: int, packs: int) -> dict[str, Any]:
    # The global batch stays a multiple of the pack size.
    return {
        f"{section}.micro_batch_tokens": tokens,
        f"{section}.global_batch_tokens": tokens * packs,
    }


def _pack_sizes(data: MLLMData, ranks: int) -> Iterator[tuple[int, int]]:
    """(tokens of a pack, packs of the global batch): one micro-batch per rank and step, then more and smaller ones."""
    assert isinstance(data.global_batch_tokens, int)
    total = data.global_batch_tokens
    least = data.row_tokens or 1
    tokens = total // ranks
    if tokens < least:  # fewer packs than ranks
        yield least, max(1, total // least)
        return
    for micro_batches in sorted([2**n for n in range(12)] + [3 * 2**n for n in range(12)]):
        packs = micro_batches * ranks
        tokens = total // packs
        if total % packs:
            tokens -= tokens % MULTIPLE
        if tokens < least:
            return
        yield tokens, packs


def _modes(work: Workload) -> Iterator[Mode]:
    """Every mode but the last resort for every part whose blocks are in backward.

    Not `attention` for encoders, whose sequences are short, and for parts where it would keep nothing.
    """
    costs = BlockCosts(work.model, work.settings)
    parts = dict[str, set[str]]()
    for block in costs.blocks:
        if block.in_backward and block.part != "projector":
            modes_of_part = parts.setdefault(
                block.part, set(CHECKPOINTING_MODES) - {LAST_RESORT, "attention"}
            )
            if block.is_text and costs.keeps_attention(block):
                modes_of_part.add("attention")
    searched = [sorted(modes, key=CHECKPOINTING_MODES.index) for modes in parts.values()]
    for modes in product(*searched):
        if len(set(modes)) == 1:
            yield modes[0]
        elif modes:
            by_part = zip(parts, modes, strict=True)
            yield {part: mode for part, mode in by_part if mode != "none"}
    if not parts:
        yield "none"


def _estimates(
    work: Workload, sizes: list[tuple[int, int]], mode: Mode, room: float
) -> Iterator[Sizes]:
    """The estimates of one mode; the time of a step only of those that fit."""
    costs = BlockCosts(work.model, replace(work.settings, activation_checkpointing=mode))
    in_backward = [block for block in costs.blocks if block.in_backward]
    selective = [b for b in in_backward if costs.checkpointing.get(b.part) == "selective"]
    slowdown = 1 + SELECTIVE_SLOWDOWN * len(selective) / max(1, len(in_backward))
    on_host = HOST_SECONDS * len(costs.blocks)
    for tokens, packs in sizes:
        batch = work.batch(tokens)
        more = tokens / batch.num_tokens  # a batch ends between two rows
        micro_batches = -(-packs // work.data_ranks)
        memory = peak_memory(costs, [batch], micro_batches)
        peak = sum(memory.values()) + (more - 1) * sum(memory[kind] for kind in DYNAMIC)
        if batch.media:
            peak += (work.heaviest(tokens) - 1) * more * costs.saved_bytes(batch).encoder
        seconds = math.inf
        if peak <= room:
            on_gpu = slowdown * more * micro_batch_seconds(costs, batch, work.gpu)
            seconds = micro_batches * max(on_gpu, on_host)
        yield Sizes(tokens, packs, mode, peak, seconds)

"""The choice of `data.pack_tokens=auto` and `model.activation_checkpointing=auto`.

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
from mvp_engine.errors import UserError, count
from mvp_engine.hf.model.packed_model import PackedModel
from mvp_engine.kit.auto import AUTO, CHECKPOINTING, Choice, pack_values, with_defaults
from mvp_engine.kit.data.kit import MLLMDataKit
from mvp_engine.kit.data.settings import MLLMData, data_section
from mvp_engine.kit.plan.costs import BlockCosts, PlanSettings, facts_of, meta_model
from mvp_engine.kit.plan.hardware import GIB, Gpu, gpu_by_name
from mvp_engine.kit.plan.packs import MEDIA_SHARE, SampledBatches, assumed_batches
from mvp_engine.kit.plan.step import DYNAMIC, micro_batch_seconds, peak_memory

LAST_RESORT = "offload"  # needs memory of the host, about which nothing is known: only where nothing else fits
USABLE = 0.9  # of the memory: estimates are within a tenth of measurements
NEARLY_EQUAL = 1.01  # times the shortest step: of these, the least activation checkpointing and the largest packs
MULTIPLE = 64  # tokens; pack sizes that do not divide the global batch are rounded down to it
# Seconds that the host needs to launch forward and backward of one compiled block: assumed. An idle GPU for 59 % of
# a step with 28 blocks and eight micro-batches suggests 4 ms.
HOST_SECONDS = 6e-3
SELECTIVE_SLOWDOWN = 0.05  # of a part whose blocks use selective activation checkpointing
UNKNOWN_GPU = "H100"  # stands for the speed of a GPU that is not in the table
LESS = 0.75  # of the estimated memory of a choice that ran out of it may be filled by the next one

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
class Workload:
    """What a choice is for: the model on the meta device, its data, and the GPUs."""

    model: PackedModel
    settings: PlanSettings
    batch: Callable[[int], PackedBatch]  # a micro-batch of so many tokens
    gpu: Gpu
    data_ranks: int
    # The encoder work of the heaviest micro-batch of so many tokens, as a multiple of that of `batch`.
    heaviest: Callable[[int], float] = lambda _: 1.0


def choose_for_gpu(
    config: Any,
    kit: MLLMDataKit,
    gpu: tuple[str, float],
    data_ranks: int,
    tried: list[dict[str, Any]],
) -> Choice:
    """The choice of a run on GPUs of this name and memory; it fills less of it than those that ran out of memory."""
    name, memory = gpu
    try:
        known = gpu_by_name(name)
    except UserError:
        known = gpu_by_name(UNKNOWN_GPU)
    settings = PlanSettings.of(with_defaults(config), config.parallel, UNKNOWN_GPU)
    rows = None if kit.is_stream() else kit
    room = LESS * min(note["peak"] for note in tried) if tried else None
    choice = choose_sizes(config, settings, replace(known, memory=memory), data_ranks, rows, room)
    if choice.values in [note["values"] for note in tried]:
        raise UserError(
            f"out of memory with the sizes that need least ({choice.reason}): `mvp plan CONFIG` prints settings that "
            "fit"
        )
    return choice


def choose_sizes(
    config: Any,
    settings: PlanSettings,
    gpu: Gpu,
    data_ranks: int,
    kit: MLLMDataKit | None,
    room: float | None = None,
    media_share: float = MEDIA_SHARE,
) -> Choice:
    """`kit`: the data whose rows are sampled; without it, they are assumed."""
    section, data = data_section(config)
    plain = with_defaults(config)
    model = meta_model(plain, settings)
    batch = assumed_batches(facts_of(model, plain), data_section(plain)[1], media_share)
    work = Workload(model, settings, batch, gpu, data_ranks)
    if kit is not None:
        rows = SampledBatches(kit)
        work = replace(work, batch=rows, heaviest=rows.heaviest)
    return choose(config, section, data, data_packs(plain), work, room)


def data_packs(config: Any) -> int | None:
    """Packs of the global batch of a config without `auto`."""
    packs: int | None = data_section(config)[1].global_batch_packs(config.data.global_batch_size)
    return packs


def choose(
    config: Any,
    section: str,
    data: MLLMData,
    packs_per_step: int | None,
    work: Workload,
    room: float | None = None,
) -> Choice:
    """`packs_per_step`: those of a config that fixes the pack size. `room`: the bytes to fill, by default `USABLE`."""
    if data.pack_tokens == AUTO:
        sizes = list(_pack_sizes(data, work.data_ranks))
    else:
        sizes = [(data.tokens_per_pack, packs_per_step or work.data_ranks)]
    modes: list[Mode] = [config.model.activation_checkpointing]
    if modes[0] == AUTO:
        modes = list(_modes(work))
    room = USABLE * work.gpu.memory if room is None else room
    estimates = [option for mode in modes for option in _estimates(work, sizes, mode, room)]
    fitting = [option for option in estimates if option.peak <= room]
    if not fitting and config.model.activation_checkpointing == AUTO:
        estimates += _estimates(work, sizes, LAST_RESORT, room)
        fitting = [option for option in estimates if option.peak <= room]
    if fitting:
        fastest = min(option.seconds for option in fitting)
        nearly = [option for option in fitting if option.seconds <= NEARLY_EQUAL * fastest]
        best = min(nearly, key=lambda option: (_checkpointed(option.mode), option.packs))
    else:
        best = min(estimates, key=lambda option: option.peak)
    values: dict[str, Any] = {}
    if data.pack_tokens == AUTO:
        values = pack_values(section, best.tokens, best.packs)
    if config.model.activation_checkpointing == AUTO:
        values[CHECKPOINTING] = best.mode
    of_rank = -(-best.packs // work.data_ranks)
    text = (
        f"{count(of_rank, 'micro-batch')} of {best.tokens:,} tokens per rank and step, activation checkpointing "
        f"{_mode_text(best.mode)}: {best.peak / GIB:.1f} of {work.gpu.memory / GIB:.0f} GiB"
    )
    if fitting:
        choices = count(len(estimates), "choice")
        text += f" and {best.seconds:.2f} s by the estimate, the fastest that fits of {choices}"
    else:
        text += " by the estimate; nothing fits, and this needs least memory"
    return Choice(values, text, best.peak)


def _checkpointed(mode: Mode) -> int:
    """How much is computed a second time in backward; it orders modes."""
    modes = mode.values() if isinstance(mode, Mapping) else [mode]
    return sum(CHECKPOINTING_MODES.index(name) for name in modes)


def _mode_text(mode: Mode) -> str:
    if isinstance(mode, Mapping):
        return ", ".join(f"{name} of {part}" for part, name in mode.items())
    return mode


def _pack_sizes(data: MLLMData, ranks: int) -> Iterator[tuple[int, int]]:
    """(tokens of a pack, packs of the global batch): one micro-batch per rank and step, then more and smaller ones."""
    assert isinstance(data.global_batch_tokens, int)
    total = data.global_batch_tokens
    least = data.max_length or 1
    if total // ranks < least:  # fewer packs than ranks
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
            usual = set(CHECKPOINTING_MODES) - {LAST_RESORT, "attention"}
            modes_of_part = parts.setdefault(block.part, usual)
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

"""`auto` in the config of an engine: chosen when a run starts, recorded in `run.json`, kept on resume.

The global batch follows from the rows; pack size and activation checkpointing follow from the GPU, by `kit/plan`, and
have a fixed default without one. A run that is resumed, or started from a checkpoint of another one, uses the recorded
choice: then its packs, its accumulation and its results are those of the run without the interruption.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from pydantic import ValidationError

from mvp_engine import plugins
from mvp_engine.config.schema import CHECKPOINTING_MODES
from mvp_engine.distributed import World
from mvp_engine.distributed.world import raise_on_all_ranks
from mvp_engine.errors import TryAgain, UserError
from mvp_engine.kit.data.kit import MLLMDataKit
from mvp_engine.kit.data.measured_sources import SAMPLED_ROWS
from mvp_engine.kit.data.settings import GLOBAL_BATCH_TOKENS, MLLMData, data_section
from mvp_engine.kit.model import with_saved_lora
from mvp_engine.runs import Run

if TYPE_CHECKING:
    from mvp_engine.kit.mllm import MLLMEngine

LOGGER = logging.getLogger("mvp_engine")
AUTO: Final = "auto"
NOTE = "auto"  # the key in run.json
CHECKPOINTING = "model.activation_checkpointing"
# The first step allocates everything, and packs are nearly full: later ones need no more.
CHECKED_STEPS = 3
EPOCH_STEPS = 30  # optimizer steps of an epoch of few rows, at least
MANY_ROWS = 2.0  # times the tokens of such an epoch, by a sample: then rows need not be measured for a choice
IN_USE = 0.95  # a GPU with less free memory than this has other processes, and only its free memory counts


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


def changed(config: Any, changes: dict[str, Any]) -> Any:
    """The config with other values of some keys, validated."""
    values = config.model_dump()
    for key, value in changes.items():
        *sections, name = key.split(".")
        section = values
        for part in sections:
            section[part] = section[part] or {}  # lora is null without adapters
            section = section[part]
        section[name] = value
    try:
        return type(config).model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"])
        raise UserError(f"{key}: {problem['msg'].removeprefix('Value error, ')}") from None


def is_open(config: Any, data: MLLMData) -> bool:
    """Whether the config leaves something to choose."""
    sizes = data.pack_tokens, data.global_batch_tokens
    return AUTO in (*sizes, config.model.activation_checkpointing)


def check_supported(config: Any, data: MLLMData) -> None:
    """Raise an error for trainings that `auto` chooses nothing for."""
    if AUTO not in (data.pack_tokens, config.model.activation_checkpointing):
        return
    if config.model.backend != "fsdp" or config.parallel.pipeline > 1:
        raise UserError(
            "data.pack_tokens=auto and model.activation_checkpointing=auto are for model.backend=fsdp without "
            f"parallel.pipeline: set a number of tokens, and one of {', '.join(CHECKPOINTING_MODES)}"
        )


# ---- Without a GPU -------------------------------------------------------------------------------------------------


def with_defaults(config: Any) -> Any:
    """The config with what `auto` stands for without a GPU, for tools that read its data."""
    section, data = data_section(config)
    if not is_open(config, data):
        return config
    return changed(config, default_choice(config, section, data).values)


def default_choice(config: Any, section: str, data: MLLMData) -> Choice:
    """What `auto` stands for without a GPU."""
    values: dict[str, Any] = {}
    chosen = []
    total = max(GLOBAL_BATCH_TOKENS, data.max_length or 0)
    if data.global_batch_tokens != AUTO:
        total = data.global_batch_tokens or 0
    if data.pack_tokens == AUTO:
        tokens = min(data.default_pack_tokens, total)
        values = pack_values(section, tokens, total // tokens)
        chosen.append(f"packs of {tokens:,} tokens")
    elif data.global_batch_tokens == AUTO:
        tokens = data.pack_tokens
        values = pack_values(section, tokens, max(1, total // tokens))
    if config.model.activation_checkpointing == AUTO:
        values[CHECKPOINTING] = "none"
        chosen.append("activation checkpointing none")
    return Choice(values, f"{', '.join(chosen)}: the default without a GPU" if chosen else "")


def pack_values(section: str, tokens: int, packs: int) -> dict[str, Any]:
    # The global batch stays a multiple of the pack size.
    return {
        f"{section}.pack_tokens": tokens,
        f"{section}.global_batch_tokens": tokens * packs,
    }


def global_batch(config: Any, kit: MLLMDataKit) -> Choice:
    """Values for `global_batch_tokens=auto`: fewer tokens where an epoch would have less than `EPOCH_STEPS` steps.

    A function of the config and the rows, not of the machine. Packs are as small then, so rows get the longest row as
    their limit.
    """
    section, data = data_section(config)
    splits = [split for split in ("train", "eval") if kit.has_split(split)]
    plain = data_section(with_defaults(config))[1].global_batch_tokens
    values: dict[str, Any] = {f"{section}.global_batch_tokens": plain}
    many = Choice(values, f"global batch of {plain:,} tokens")
    if any(kit.is_stream(split) for split in splits) or _has_many_rows(kit):
        return many
    rows = {split: _row_tokens(kit, split) for split in splits}
    total = int(rows["train"].sum())
    tokens = total // EPOCH_STEPS
    if tokens >= GLOBAL_BATCH_TOKENS:
        return many
    if data.pack_tokens == AUTO:
        longest = int(max(tokens_of_rows.max(initial=1) for tokens_of_rows in rows.values()))
        tokens = max(tokens, longest)
        values[f"{section}.max_length"] = longest
    else:
        tokens = max(1, tokens // data.tokens_per_pack) * data.tokens_per_pack
    values[f"{section}.global_batch_tokens"] = tokens
    steps = -(-total // tokens)
    return Choice(
        values,
        f"global batch of {tokens:,} tokens, so that an epoch of {total:,} tokens has about {steps} steps",
    )


def _has_many_rows(kit: MLLMDataKit) -> bool:
    """Whether an epoch surely has `EPOCH_STEPS` full steps, by a sample of its rows."""
    rows = len(kit.mixture("train"))
    if rows <= SAMPLED_ROWS:
        return False
    tokens = kit.sample_costs("train")[:, 0]
    return rows * tokens.sum() / SAMPLED_ROWS > MANY_ROWS * EPOCH_STEPS * GLOBAL_BATCH_TOKENS


def _row_tokens(kit: MLLMDataKit, split: str) -> np.ndarray:
    """The tokens of all rows of an epoch; 0 for rows that are left out."""
    _, costs = kit.measured(split)
    order = kit.mixture(split).order(0, 0, shuffle=False).tolist()  # of any data.mixture: all rows
    return np.array([costs[source].tokens[row] for source, row in order], np.int64)


# ---- When a run starts ---------------------------------------------------------------------------------------------


def with_choice(engine: MLLMEngine) -> Any:
    """The engine's config with numbers in place of `auto`. All ranks must call it."""
    engine.config = config = with_saved_lora(engine.config)
    section, data = data_section(config)
    if not is_open(config, data):
        return config
    check_supported(config, data)
    keys = ("pack_tokens", "global_batch_tokens", "max_length")
    # What the config leaves open, and the sizes that a choice keeps: a record of other sizes is of no use.
    asked = {f"{section}.{key}": getattr(data, key) for key in keys}
    asked[CHECKPOINTING] = config.model.activation_checkpointing
    choice = recorded_choice(engine.run, asked) if engine.world.is_main else None
    choice = engine.world.broadcast(choice)
    source = "as recorded"
    if choice is None:
        source = "chosen"
        choice = _choose(engine, section, data, asked)
    if engine.world.is_main:
        LOGGER.info("auto, %s: %s", source, choice.reason)
    return changed(config, choice.values)


def recorded_choice(run: Run, asked: dict[str, Any]) -> Choice | None:
    """The choice of this run, else of the run that its first checkpoint is of."""
    parent = run.info.get("parent")
    files = [run.dir / "run.json"]
    if parent:
        files.append(Path(parent).parent.parent / "run.json")
    for file in files:
        note = json.loads(file.read_text()).get(NOTE) if file.is_file() else None
        if note and note["asked"] == asked and note["values"]:
            return Choice(note["values"], note["reason"])
    return None


def _choose(engine: MLLMEngine, section: str, data: MLLMData, asked: dict[str, Any]) -> Choice:
    """Rank 0 chooses and records the choice."""
    config = engine.config
    gpu = gpu_of_ranks(engine.device, engine.world)
    by_rows = data.global_batch_tokens == AUTO
    choice: Choice | None = None
    kit = engine.data_kit(with_defaults(config)) if gpu is not None or by_rows else None
    if kit is not None and not kit.is_stream():
        kit.measure_ahead(engine.measured_splits)  # the choice needs no more than a few rows
    with raise_on_all_ranks(engine.world.host_group):
        if engine.world.is_main:
            note = engine.run.info.get(NOTE, {})
            batch_choice = Choice({}, "")
            if by_rows and kit is not None:
                batch_choice = global_batch(config, kit)
                config = changed(config, batch_choice.values)
                data = getattr(config, section)
            choice = default_choice(config, section, data)
            choose_for_gpu = plugins.load("auto", "gpu")
            if gpu is not None and choose_for_gpu is not None and is_open(config, data):
                tried = note.get("out_of_memory", [])
                choice = choose_for_gpu(config, kit, gpu, engine.layout.data_size, tried)
            choice = batch_choice + choice
            note = {**note, "asked": asked, "values": choice.values, "reason": choice.reason}
            note["peak"] = choice.peak
            engine.run.note(**{NOTE: note})
    made: Choice = engine.world.broadcast(choice)
    chosen = changed(engine.config, made.values)
    if kit is None:
        return made
    if data_section(chosen)[1].max_length != data_section(engine.config)[1].max_length:
        kit.stop_measuring()  # costs of rows that shrink to fit depend on it: they are measured again
    else:
        kit.settings = data_section(chosen)[1]
        engine.data = kit  # what it measured need not be read again
    return made


def gpu_of_ranks(device: torch.device, world: World) -> tuple[str, float] | None:
    """The name of this rank's GPU, and the memory of the rank that has least; None without a GPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    memory = min(world.all_gather(float(total if free > IN_USE * total else free)))
    return torch.cuda.get_device_name(device), memory


@contextlib.contextmanager
def smaller_after_out_of_memory(engine: MLLMEngine) -> Iterator[None]:
    """A context around the steps of a training: if the first ones run out of memory, the run starts again with less.

    Not where a checkpoint was resumed: its packs are those of the recorded choice.
    """
    first = engine.step
    try:
        yield
    except torch.OutOfMemoryError as error:
        note = engine.run.info.get(NOTE, {})
        is_early = engine.checkpoint is None and engine.step - first < CHECKED_STEPS
        if not (engine.can_start_again and is_early and note.get("values")):
            raise
        tried = [*note.get("out_of_memory", []), {"values": note["values"], "peak": note["peak"]}]
        engine.run.note(**{NOTE: {**note, "values": None, "out_of_memory": tried}})
        why = str(error).splitlines()[0]
        raise TryAgain(
            f"out of memory in step {engine.step + 1} with the sizes that auto chose ({note['reason']}): the run "
            f"starts again with less. {why}"
        ) from None

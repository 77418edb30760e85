"""What a training is set up with: `auto` intervals as numbers, and what is logged at its start and kept in `run.json`
for its report."""

from __future__ import annotations

import logging
import math
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import torch

from mvp_engine.config.schema import Config
from mvp_engine.errors import count
from mvp_engine.hf.parts import table, trained_parts

if TYPE_CHECKING:
    from mvp_engine.config.schema import Parallel
    from mvp_engine.engine.engine import Engine

LOGGER = logging.getLogger("mvp_engine")
# Of `auto`: so many in a training, and at most so many steps between two.
INTERVALS = {
    ("log", "interval"): (50, 10),
    ("loop", "eval_interval"): (10, 400),
    ("checkpoint", "interval"): (5, 200),
}


def with_intervals(config: Config, total_steps: int | None) -> Config:
    """The config with numbers in place of `auto` intervals, which follow from the number of steps, if it is known."""
    chosen = []
    for (section, key), (times, most) in INTERVALS.items():
        values = getattr(config, section)
        if getattr(values, key) == "auto":
            steps = min(most, -(-(total_steps or times * most) // times))
            update = {section: values.model_copy(update={key: steps})}
            config = config.model_copy(update=update)
            chosen.append(f"{section}.{key}={steps}")
    if chosen:
        total = f"{total_steps:,} steps" if total_steps else "an unknown number of steps"
        LOGGER.info("auto, for %s: %s", total, ", ".join(chosen))
    return config


def record_setup(engine: Engine, accumulation: int) -> None:
    """Log the setup and note it in the run folder. `accumulation`: micro-batches of a rank in one step."""
    world = engine.model_engine.world  # in RL not the controller's own
    layout = layout_text(engine.parallel, world.size)
    parts = trained_parts(engine.model, engine.model_engine.param_groups)
    setup = {
        "device": _device_name(world.device),
        "ranks": world.size,
        "layout": layout,
        "precision": engine.model_engine.settings.precision,
        "total_steps": engine.total_steps,
        "global_batch": count(engine.global_batch_size, engine.batch_unit),
        "parts": parts,
        "versions": _versions(),
    }
    if world.is_main:
        engine.run.note(setup=setup)
    division = engine.batch_division or (
        f"on {count(engine.layout.data_size, 'data-parallel rank')}, {count(accumulation, 'micro-batch')} each"
    )
    engine.logger.info(
        f"run {engine.run.dir}: {parts[-1]['trained']:,} of {parts[-1]['parameters']:,} parameters train, "
        f"{setup['precision']} on {world.size} x {world.device.type} ({layout}); steps {engine.step} to "
        f"{engine.total_steps or '?'}; global batch of {setup['global_batch']} {division}"
    )
    if text := table(parts):
        engine.logger.info(f"what trains:\n{text}")


def layout_text(parallel: Parallel, ranks: int) -> str:
    """The ranks and the dimensions of `parallel` that are not 1: `8 ranks: replicate=2, shard=4`."""
    names = ("replicate", "shard", "tensor", "context", "pipeline", "ulysses", "expert")
    sizes = {name: getattr(parallel, name) for name in names}
    if sizes["replicate"] == -1:
        sizes["replicate"] = ranks // math.prod(sizes[name] for name in names[1:-1])
    shown = ", ".join(f"{name}={size}" for name, size in sizes.items() if size != 1)
    return f"{count(ranks, 'rank')}: {shown}" if shown else count(ranks, "rank")


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        # Of the GPUs of worker processes: asking for the name would take memory there.
        return torch.cuda.get_device_name(device) if torch.cuda.is_initialized() else "GPU"
    return f"CPU, {count(torch.get_num_threads(), 'thread')}"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("mvp-engine", "torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["CUDA"] = torch.version.cuda
    return found

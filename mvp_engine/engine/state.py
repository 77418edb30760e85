"""The state of a training in a checkpoint: everything that the next step depends on, saved and restored."""

from __future__ import annotations

import contextlib
import logging
import math
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mvp_engine.checkpoint import CorruptCheckpoint, SavedState
from mvp_engine.config.schema import Config
from mvp_engine.data import derived_seed, rng_state, seed_everything, set_rng_state
from mvp_engine.errors import UserError, count
from mvp_engine.files import remove
from mvp_engine.hf.model.model_parts import table, trained_parts
from mvp_engine.runs import CORRUPT_PREFIX

if TYPE_CHECKING:
    from mvp_engine.config.schema import Parallel
    from mvp_engine.engine.engine import Engine


def collect_state(engine: Engine) -> dict[str, Tensor]:
    """This rank's tensors for a checkpoint of the current step."""
    shared = {
        "layout": _sizes(engine),
        "step": engine.step,
        "best": engine.best,
        "evals_since_best": engine.evals_since_best,
        "evaluated_at": engine.evaluated_at,
        "feed": engine.feed.state_dict(),
        "guard": engine.guard.state_dict(),
        "extra": engine.extra_state(),
    }
    saved_names = engine.model.state_dict().keys()
    buffers = dict(engine.model.named_buffers())
    own: dict[str, Any] = {
        "rng": rng_state(),
        "metrics": engine.metrics.state_dict(),
        "feed": engine.feed.rank_state_dict(),
        # Running statistics differ between ranks; other buffers are computed from the config.
        "buffers": {name: buffers[name].cpu() for name in buffers if name in saved_names},
    }
    return engine.model_engine.collect(shared, own)


def restore_state(engine: Engine, checkpoint: Path) -> None:
    """Restore the state that `checkpoint` was written with."""
    rank = engine.world.rank
    saved, checkpoint = _restore_newest_intact(engine, checkpoint)
    if "step" not in saved.shared:
        raise UserError(
            f"{checkpoint} is of a model engine, not of a training: it has no position in the data. "
            "Merge it into a Hugging Face folder (mvp merge) and start a new run from that (model.path)."
        )
    engine.step = saved.shared["step"]
    engine.best = saved.shared["best"]
    engine.evals_since_best = saved.shared.get("evals_since_best", 0)  # not in older checkpoints
    engine.evaluated_at = saved.shared["evaluated_at"]
    engine.saved_at = engine.step if _is_of_this_run(engine, checkpoint) else -1
    engine.guard.load_state_dict(saved.shared["guard"], engine.step)
    engine.feed.load_state_dict(
        saved.shared["feed"], len(saved.ranks), lambda rank: saved.ranks[rank]["feed"]
    )
    engine.epoch = engine.feed.epoch
    engine.load_extra_state(saved.shared["extra"])
    if len(saved.ranks) == engine.world.size and saved.shared["layout"] == _sizes(engine):
        own = saved.ranks[rank]
        buffers = dict(engine.model.named_buffers())
        for name, saved_buffer in own["buffers"].items():
            buffers[name].copy_(saved_buffer)
        engine.metrics.load_state_dict(own["metrics"])
        set_rng_state(own["rng"])
        return
    # On another layout one rank continues the sums of all ranks, and generators are seeded again.
    if engine.layout.is_metrics_rank:
        for other in saved.ranks:
            engine.metrics.merge(other["metrics"])
    seed_everything(
        derived_seed(engine.config.seed, "rank", engine.layout.dropout_rank, "step", engine.step)
    )


def _restore_newest_intact(engine: Engine, checkpoint: Path) -> tuple[SavedState, Path]:
    """Load a checkpoint, or, where one of this run is corrupt, the one before it."""
    while True:
        try:
            return engine.model_engine.restore(checkpoint), checkpoint
        except CorruptCheckpoint as error:
            if not _is_of_this_run(engine, checkpoint):
                raise
            older = engine.world.broadcast(_set_aside(engine, checkpoint))
            if older is None:
                raise UserError(
                    f"{error} {engine.run.dir} has no older one. Start again from step 0 with resume=null, or from "
                    "the checkpoint of another run with resume=FOLDER"
                ) from error
            text = (
                f"{error} Kept as {CORRUPT_PREFIX}{checkpoint.name}; {older.name} is used instead"
            )
            engine.logger.warning(text)
            engine.greeting = f"{engine.greeting}; {text}"
            checkpoint = older


def _set_aside(engine: Engine, checkpoint: Path) -> Path | None:
    """Rename a corrupt checkpoint on rank 0, so that no launch finds it; returns the newest one before it."""
    if not engine.world.is_main:
        return None
    older = [path for path in engine.run.checkpoint_list() if path.name < checkpoint.name]
    if older:
        with contextlib.suppress(
            OSError
        ):  # on a read-only disk it stays, and is found corrupt again
            target = checkpoint.with_name(f"{CORRUPT_PREFIX}{checkpoint.name}")
            remove(target)
            checkpoint.rename(target)
    return older[-1] if older else None


def _is_of_this_run(engine: Engine, checkpoint: Path) -> bool:
    return checkpoint.resolve().parent == engine.run.checkpoints.resolve()


def _sizes(engine: Engine) -> list[int]:
    layout = engine.layout
    sizes = [layout.replicate, layout.shard, layout.ulysses, layout.tensor]
    if layout.pipeline > 1:
        return [*sizes, layout.context, layout.pipeline]
    # Checkpoints from before context parallel have four sizes.
    return [*sizes, layout.context] if layout.context > 1 else sizes


# What a training is set up with: `auto` intervals as numbers, and what is logged at its start and kept in `run.json`
# for its report.

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
    world = engine.model_engine.world  # of the ranks that train, which may be other processes
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
    if described := engine.describe_training():
        setup["training"] = described
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

"""The state of a training in a checkpoint: everything that the next step depends on, saved and restored."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mvp_engine.checkpoint import CorruptCheckpoint, SavedState
from mvp_engine.data import derived_seed, rng_state, seed_everything, set_rng_state
from mvp_engine.errors import UserError
from mvp_engine.files import remove
from mvp_engine.runs import CORRUPT_PREFIX

if TYPE_CHECKING:
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

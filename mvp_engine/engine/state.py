"""What a checkpoint holds of a training, and putting it back: everything that the next step depends on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mvp_engine.data import derived_seed, rng_state, seed_everything, set_rng_state
from mvp_engine.errors import UserError

if TYPE_CHECKING:
    from mvp_engine.engine.engine import Engine


def collect_state(engine: Engine) -> dict[str, Tensor]:
    """This rank's part of a checkpoint of this moment."""
    shared = {
        "layout": _sizes(engine),
        "step": engine.step,
        "best": engine.best,
        "evaluated_at": engine.evaluated_at,
        "feed": engine.feed.state_dict(),
        "guard": engine.guard.state_dict(),
        "extra": engine.extra_state(),
    }
    kept = engine.model.state_dict()
    own: dict[str, Any] = {
        "rng": rng_state(),
        "metrics": engine.metrics.state_dict(),
        "feed": engine.feed.rank_state_dict(),
        # Running statistics differ between ranks; what is not saved with a model is computed from its config.
        "buffers": {
            name: buffer.cpu() for name, buffer in engine.model.named_buffers() if name in kept
        },
    }
    return engine.model_engine.collect(shared, own)


def restore_state(engine: Engine, checkpoint: Path) -> None:
    """Put everything back as it was when `checkpoint` was written."""
    rank = engine.world.rank
    saved = engine.model_engine.restore(checkpoint)
    if "step" not in saved.shared:
        raise UserError(
            f"{checkpoint} is of a model engine, not of a training: it does not say where in the data to go on. "
            "Make a Hugging Face folder of it (mvp merge) and begin with that (model.path)."
        )
    engine.step, engine.best = saved.shared["step"], saved.shared["best"]
    engine.evaluated_at = saved.shared["evaluated_at"]
    mine = checkpoint.resolve().parent == engine.run.checkpoints.resolve()
    engine.saved_at = engine.step if mine else -1
    engine.guard.load_state_dict(saved.shared["guard"], engine.step)
    engine.feed.load_state_dict(saved.shared["feed"], [own["feed"] for own in saved.ranks])
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
    if rank == 0:  # on another layout: sums go on here, generators begin anew
        for other in saved.ranks:
            engine.metrics.merge(other["metrics"])
    seed_everything(
        derived_seed(engine.config.seed, "rank", engine.layout.dropout_rank, "step", engine.step)
    )


def _sizes(engine: Engine) -> list[int]:
    layout = engine.layout
    return [layout.replicate, layout.shard, layout.ulysses, layout.tensor]

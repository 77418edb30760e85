"""Batches, loaders and random generators: what a training step is fed with. Nothing here knows of models."""

from mvp_engine.data.batch import IGNORE, Media, PackedBatch
from mvp_engine.data.loader import (
    SampleLoader,
    accumulation_steps,
    derived_seed,
    keep_rng_state,
    rng_state,
    seed_everything,
    set_rng_state,
)

__all__ = [
    "IGNORE",
    "Media",
    "PackedBatch",
    "SampleLoader",
    "accumulation_steps",
    "derived_seed",
    "keep_rng_state",
    "rng_state",
    "seed_everything",
    "set_rng_state",
]

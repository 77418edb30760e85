"""The config keys of this recipe. This module imports no torch, so a misspelt key is an error at once."""

from mvp_engine.config import Config, Model, Section


class Task(Section):
    """The digits to sort."""

    digits: int
    """How many to sort."""
    train_problems: int
    """Problems of an epoch."""
    eval_problems: int
    """Held-out problems."""


class MagicModel(Model):  # these keys, and the engine's own (compile, activation_checkpointing, ...)
    width: int
    """Hidden size."""
    heads: int
    """Attention heads."""
    layers: int
    """Transformer blocks."""


class MagicConfig(Config):
    task: Task
    model: MagicModel

"""The config keys of this recipe. This module imports no torch, so a misspelt key is an error at once."""

from mvp_engine.config import Section
from mvp_engine.kit import MLLMConfig


class Speech(Section):
    """Synthetic speech."""

    folder: str
    """Audio files, rows and processor are built into it, once."""
    sentences: int
    """Training sentences."""
    held_out: int
    """New sentences by training voices, and as many by new voices."""


class AudioConfig(MLLMConfig):
    speech: Speech | None = None  # synthetic speech with a small processor; null: rows and processor of your own

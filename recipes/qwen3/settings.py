"""The config keys of this recipe. This module imports no torch, so a misspelt key is an error at once."""

from mvp_engine.config import Section
from mvp_engine.kit import MLLMConfig


class Made(Section):
    """Synthetic texts and chats."""

    folder: str
    """Corpus, tokenizer and chats are built into it, once."""
    modules: int
    """Modules of Python's standard library; every twentieth is held out."""
    chats: int
    """Training chats of each task."""


class Qwen3Config(MLLMConfig):
    made: Made | None = None  # synthetic data; null: data.sources are files of your own

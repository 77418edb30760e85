"""The config keys of this recipe. This module imports no torch, so a misspelt key is an error at once."""

from mvp_engine.config import Section
from mvp_engine.kit.rl import RLConfig


class Made(Section):
    folder: str  # rows and tokenizer are built into it, once
    rows: int  # sums for training


class CalculatorConfig(RLConfig):
    made: Made | None = None  # synthetic data; null: data.sources are files of your own

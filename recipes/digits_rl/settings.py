"""The config keys of this recipe. This module imports no torch, so a misspelt key is an error at once."""

from mvp_engine.config import Section
from mvp_engine.kit.rl import RLConfig


class Made(Section):
    folder: str  # images, rows and processor are built into it, once
    digits: int  # how many of the 1,797 digits; a fifth is held out


class DigitsConfig(RLConfig):
    made: Made | None = None  # synthetic data; null: data.sources are files of your own

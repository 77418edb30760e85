"""The config class of this recipe. This module imports no torch, so a misspelt key is an error at once."""

from mvp_engine.kit.rl import RLConfig


class ReverseConfig(RLConfig):
    """It has no keys of its own: those of the data are in `made`."""

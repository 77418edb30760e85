"""The config class of this recipe. This module imports no torch, so a misspelt key is an error at once."""

from mvp_engine.kit.rl import RLConfig


class GridConfig(RLConfig):
    step_of = ("reinforce_pp",)  # what `train_step` computes

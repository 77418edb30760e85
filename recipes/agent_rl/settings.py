"""The config class of this recipe. This module imports no torch, so a misspelt key is an error at once."""

from mvp_engine.kit.rl import RLConfig


class AgentConfig(RLConfig):
    step_of = ("grpo", "dapo", "gspo", "gmpo", "cispo", "sapo")  # advantages of `train_step`, and a loss by name

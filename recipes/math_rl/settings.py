"""The config keys of this recipe. This module imports no torch, so a misspelt key is an error at once."""

from mvp_engine.kit.rl import RLConfig


class MathConfig(RLConfig):
    instruction: str | None = None  # the system message of every prompt; null: that of the chat template
    format_weight: float = 0.1  # of the reward for an answer on a line of its own, as the instruction asks

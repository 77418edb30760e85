"""The config keys of this recipe. This module imports no torch, so a misspelt key is an error at once."""

from mvp_engine.config import Section
from mvp_engine.kit.actions import ActionConfig, Simulation


class Demonstrations(Section):
    """Demonstrations by an expert, written as a LeRobot folder."""

    folder: str
    """Folder of the demonstrations and of the tokenizer, which are built once."""
    demonstrations: int
    """Number of episodes."""
    version: str = "v3.0"
    """Version of the LeRobot format: v2.1 or v3.0."""
    codec: str | None = None
    """libx264 or libsvtav1: images are videos; null: PNG images in parquet files."""


class TableConfig(ActionConfig):
    table: Demonstrations | None = None
    """Demonstrations on the table; null: LeRobot folders of your own, without rollouts."""
    simulation: Simulation | None = None
    """Roll out the policy in every evaluation; null: evaluations have losses only."""

"""A vision-language-action model on a table: pick up the block, put it on the plate that the instruction names."""

from typing import Any

from mvp_engine.config import Section
from mvp_engine.engine import StepContext
from mvp_engine.kit import ActionConfig, ActionEngine

from .data import prepare
from .world import Table


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


class TableEngine(ActionEngine):
    config_class = TableConfig
    config: TableConfig
    title = "What a small pi0 does on the table"

    @classmethod
    def make_processor(cls, config: Any) -> Any:
        table = config.table
        if table is None:
            return super().make_processor(config)
        return prepare(table.folder, table.demonstrations, table.version, table.codec)

    def make_env(self, num_envs: int) -> Table:
        return Table(num_envs)

    def log_rollouts(self, ctx: StepContext, episodes: Any) -> None:
        super().log_rollouts(ctx, episodes)
        # The plate is chosen by the instruction: without one, the policy can only guess.
        guesses = self.roll_out(task="")
        ctx.log("success_without_instruction", sum(one.success for one in guesses), len(guesses))

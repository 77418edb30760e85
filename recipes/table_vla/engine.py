"""A vision-language-action model on a table: pick up the block, put it on the plate that the instruction names."""

from typing import Any

from mvp_engine.engine import StepContext
from mvp_engine.kit.actions import ActionEngine

from .data import prepare
from .settings import TableConfig
from .world import Table


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

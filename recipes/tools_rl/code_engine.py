"""Reinforcement learning with code: the policy runs Python programs to solve a problem."""

from typing import Any

from mvp_engine.kit.rl import Answer, RLEngine

from . import sandbox
from .answers import is_right, with_instruction
from .code_engine_settings import CodeConfig


class CodeEngine(RLEngine):
    config_class = CodeConfig
    config: CodeConfig
    reward_columns = ("answer",)

    def python(self, code: str) -> str:
        """Run a Python program. Returns what it prints.

        Args:
            code: the program
        """
        limits = self.config.sandbox
        return sandbox.run(code, seconds=limits.seconds, memory_mib=limits.memory_mib)

    tools = (python,)  # declared in the prompts; an answer without a call is the last one

    def reward(self, row: dict[str, Any], answer: Answer) -> dict[str, float]:
        """1 for the right answer, however many programs led to it."""
        return {"right": float(is_right(answer.text, row["answer"]))}

    def before_train(self) -> None:
        if not sandbox.has_no_network():
            self.logger.warning("programs of the policy can reach the network: this machine allows no namespaces")
        super().before_train()

    @classmethod
    def make_processor(cls, config: Any) -> Any:
        return with_instruction(super().make_processor(config), config.instruction)

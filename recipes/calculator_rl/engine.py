"""Reinforcement learning with a tool: the policy learns to add three numbers by two calls of `add`."""

from typing import Any

from mvp_engine.kit.rl import Chat, RLEngine

from .data import prepare
from .settings import CalculatorConfig
from .tools import add


class CalculatorEngine(RLEngine):
    config_class = CalculatorConfig
    config: CalculatorConfig
    tools = (add,)

    def episode(self, row: dict[str, Any], chat: Chat) -> dict[str, float]:
        """1 for the right sum, and a quarter for each call that leads to it."""
        a, b, c = row["numbers"]
        useful = [{"a": a, "b": b}, {"a": a + b, "b": c}]
        answer = chat.answer()
        while answer.calls:
            chat.reward(0.25 * (useful[:1] == [answer.calls[0].arguments]))
            useful = useful[1:]
            answer = chat.call(answer, self.tools)
        return {"exact": float(answer.text == str(a + b + c))}

    @classmethod
    def data_kit(cls, config: Any) -> Any:
        if config.made is not None:
            prepare(config.made)
        return super().data_kit(config)

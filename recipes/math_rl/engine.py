"""Reinforcement learning on word problems: the reward compares the number that a completion ends with."""

import json
import re
from typing import Any

from mvp_engine.kit.rl import Answer, RLEngine

from .answers import is_right
from .settings import MathConfig

LAST_LINE = re.compile(r"#### -?[\d.,/]+\s*\Z")


class MathEngine(RLEngine):
    config_class = MathConfig
    config: MathConfig
    reward_columns = ("answer",)

    def reward(self, row: dict[str, Any], answer: Answer) -> dict[str, float]:
        """1 for the right number, wherever it stands; a little for a last line as the instruction asks for it."""
        last_line = answer.text.rstrip().rpartition("\n")[2]
        return {
            "right": float(is_right(answer.text, row["answer"])),
            "format": self.config.format_weight * bool(LAST_LINE.fullmatch(last_line)),
        }

    @classmethod
    def make_processor(cls, config: Any) -> Any:
        """The tokenizer, with the instruction in its chat template: an export asks as the training did."""
        processor = super().make_processor(config)
        if config.instruction is not None:
            system = json.dumps({"role": "system", "content": config.instruction})
            first = f"([{system}] if messages[0].role != 'system' else [])"
            processor.chat_template = f"{{%- set messages = {first} + messages %}}{processor.chat_template}"
        return processor

"""The engine of the benchmark: a reward that both sides compute alike."""

from typing import Any

from mvp_engine.kit.rl import Answer, RLEngine


def share_of_e(text: str) -> float:
    """The share of the letter e in a text."""
    return text.count("e") / max(1, len(text))


class LetterEngine(RLEngine):
    def reward(self, row: dict[str, Any], answer: Answer) -> float:
        return share_of_e(answer.text)

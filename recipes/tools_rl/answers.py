"""What is asked of the policy beyond the question, and whether its last answer is right."""

import json
import re
from typing import Any

MARK = "Answer:"


def is_right(written: str, expected: str) -> bool:
    """Whether the line after the last `Answer:` is the expected text, or the same number.

    Case, punctuation and articles do not count. Of an expected text with `####`, as in GSM8K, what follows is compared.
    """
    _, mark, last = written.rpartition(MARK)
    line = last.strip().partition("\n")[0]
    return bool(mark) and plain(line) == plain(expected.rpartition("####")[2])


def plain(text: str) -> str | float:
    """The number, or the words of a text."""
    number = re.sub(r"[,\s$%]", "", text).rstrip(".")
    try:
        return float(number)
    except ValueError:
        words = re.findall(r"\w+", text.lower())
        return " ".join(word for word in words if word not in ("a", "an", "the"))


def with_instruction(processor: Any, instruction: str | None) -> Any:
    """The tokenizer, with the instruction in its chat template: an export asks as the training did."""
    if instruction is not None:
        system = json.dumps({"role": "system", "content": instruction})
        first = f"([{system}] if messages[0].role != 'system' else [])"
        processor.chat_template = f"{{%- set messages = {first} + messages %}}{processor.chat_template}"
    return processor

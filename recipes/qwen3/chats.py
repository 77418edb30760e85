"""Chats with small tasks about numbers: a question, and an answer that is right or wrong to the letter.

A row has one to four questions, and is named after the last one. A third of the rows have a system prompt that asks for
sentences, a third one that asks for the answer alone, which is also what rows without any get.
"""

import zlib
from collections.abc import Callable
from random import Random
from typing import Any

ALONE, SENTENCE = "Give the answer alone.", "Answer in a sentence."
SYSTEM = (ALONE, SENTENCE)
Asked = tuple[str, str, str]  # a question, its answer, and the sentence around that
TASKS: dict[str, Callable[[str], Asked]] = {
    "count": lambda n: (f"How many digits has {n}?", str(len(n)), "It has {} digits."),
    "largest": lambda n: (f"What is the largest digit of {n}?", max(n), "The largest digit is {}."),
    "next": lambda n: (f"What comes after {n}?", str(int(n) + 1), "The next number is {}."),
    "reverse": lambda n: (f"What is {n} backwards?", n[::-1], "Backwards it is {}."),
}


def make_chats(rows: int, held_out: int = 60) -> dict[str, list[dict[str, Any]]]:
    """`train_<task>` and `eval_<task>`, so many rows each. A fifth of all numbers is asked about in the latter only."""
    chance = Random(0)
    return {
        f"{split}_{task}": [_row(chance, task, split) for _ in range(rows if split == "train" else held_out)]
        for split in ("train", "eval")
        for task in TASKS
    }


def split_of(number: str) -> str:
    return "eval" if zlib.crc32(number.encode()) % 5 == 0 else "train"


def _row(chance: Random, task: str, split: str) -> dict[str, Any]:
    style = chance.choice((None, *SYSTEM))
    messages = [{"role": "system", "content": style}] if style else []
    for name in [*chance.choices(list(TASKS), k=chance.randint(0, 3)), task]:
        question, answer, sentence = TASKS[name](_number(chance, split))
        messages += [{"role": "user", "content": question}]
        messages += [{"role": "assistant", "content": sentence.format(answer) if style == SENTENCE else answer}]
    return {"messages": messages}


def _number(chance: Random, split: str) -> str:
    """Of two to four digits."""
    while True:
        number = str(chance.randrange(10 ** (size := chance.randint(1, 3)), 10 ** (size + 1)))
        if split_of(number) == split:
            return number

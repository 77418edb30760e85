"""Synthetic chats: small tasks about numbers, with answers that can be checked exactly.

A row has one to four questions, and belongs to the task of the last one. A third of the rows have a system prompt that
asks for sentences, a third one that asks for the answer alone. Rows without a system prompt have the answer alone too.
"""

import zlib
from collections.abc import Callable
from random import Random
from typing import Any

ALONE = "Give the answer alone."
SENTENCE = "Answer in a sentence."
SYSTEM_PROMPTS = (ALONE, SENTENCE)
Task = Callable[[str], tuple[str, str, str]]  # number -> question, answer, and a format for the answer's sentence
TASKS: dict[str, Task] = {
    "count": lambda n: (f"How many digits has {n}?", str(len(n)), "It has {} digits."),
    "largest": lambda n: (f"What is the largest digit of {n}?", max(n), "The largest digit is {}."),
    "next": lambda n: (f"What comes after {n}?", str(int(n) + 1), "The next number is {}."),
    "reverse": lambda n: (f"What is {n} backwards?", n[::-1], "Backwards it is {}."),
}


def make_chats(rows: int, held_out: int = 60) -> dict[str, list[dict[str, Any]]]:
    """The rows of `train_<task>` and `eval_<task>`. A fifth of all numbers is held out for the latter."""
    random = Random(0)
    chats = {}
    for split in ("train", "eval"):
        for task in TASKS:
            count = rows if split == "train" else held_out
            chats[f"{split}_{task}"] = [_row(random, task, split) for _ in range(count)]
    return chats


def split_of(number: str) -> str:
    return "eval" if zlib.crc32(number.encode()) % 5 == 0 else "train"


def _row(random: Random, task: str, split: str) -> dict[str, Any]:
    system = random.choice((None, *SYSTEM_PROMPTS))
    messages = [{"role": "system", "content": system}] if system else []
    tasks = [*random.choices(list(TASKS), k=random.randint(0, 3)), task]
    for name in tasks:
        question, answer, sentence = TASKS[name](_number(random, split))
        content = sentence.format(answer) if system == SENTENCE else answer
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": content})
    return {"messages": messages}


def _number(random: Random, split: str) -> str:
    """A number of two to four digits that belongs to the split."""
    while True:
        size = random.randint(1, 3)
        number = str(random.randrange(10**size, 10 ** (size + 1)))
        if split_of(number) == split:
            return number

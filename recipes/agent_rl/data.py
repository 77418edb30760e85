"""The data of the CPU configs, built once into a folder: places and goals on a line, and chats that walk badly."""

import json
from itertools import permutations
from pathlib import Path
from random import Random
from typing import Any

from mvp_engine.kit.tiny_processors import word_tokenizer

from .agent import MOVES, SIZE, STEPS, moved, observation

WALKS_RIGHT = 0.4  # of the moves of chats
HELD_OUT = 4  # every so many of the places and goals


def build(folder: Path, chats: int) -> None:
    """Write `chats.jsonl` and `eval_chats.jsonl` for SFT, `{train,eval}.jsonl` with places for RL, a tokenizer."""
    random = Random(0)
    rows = [
        {"prompt": observation(place, goal), "place": place, "goal": goal}
        for place, goal in permutations(range(SIZE), 2)
    ]
    random.shuffle(rows)
    held_out, train = rows[::HELD_OUT], [row for i, row in enumerate(rows) if i % HELD_OUT]
    _write(folder / "eval.jsonl", held_out)
    _write(folder / "train.jsonl", train)
    _write(folder / "chats.jsonl", [chat(random.choice(train), random) for _ in range(chats)])
    _write(folder / "eval_chats.jsonl", [chat(row, random) for row in held_out])
    words = ["you", "goal", *map(str, range(SIZE)), *MOVES]
    word_tokenizer(words).save_pretrained(folder / "processor")


def chat(row: dict[str, Any], random: Random) -> dict[str, Any]:
    """A conversation whose moves lead away from the goal more often than to it."""
    place = row["place"]
    away, right = MOVES if row["goal"] > place else reversed(MOVES)
    messages = []
    for _ in range(STEPS):
        move = right if random.random() < WALKS_RIGHT else away
        messages.append({"role": "user", "content": observation(place, row["goal"])})
        messages.append({"role": "assistant", "content": move})
        place = moved(place, move)
        if place == row["goal"]:
            break
    return {"messages": messages}


def _write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

"""The data of the CPU configs, built once into a folder: seeds of grids, and walks of which few moves are good."""

import json
from pathlib import Path
from random import Random

from mvp_engine.kit.tiny_processors import word_tokenizer

from .world import MOVES, SIZE, GridWorld

HELD_OUT = 200
GOOD = 0.25  # the share of moves in walks that are good; the others are any


def build(folder: Path, rows: int) -> None:
    """Write `{train,eval}_chats.jsonl` for SFT, `{train,eval}.jsonl` with first observations and seeds, a tokenizer."""
    for split, seeds in (("eval", range(HELD_OUT)), ("train", range(HELD_OUT, HELD_OUT + rows))):
        starts = [{"prompt": GridWorld().reset(seed)[0], "seed": seed} for seed in seeds]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in starts))
        walks = [{"messages": walk(seed)} for seed in seeds]
        (folder / f"{split}_chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in walks))
    words = ["you", "goal", *map(str, range(SIZE)), *MOVES]
    word_tokenizer(words).save_pretrained(folder / "processor")


def walk(seed: int) -> list[dict[str, str]]:
    """A conversation whose moves are random but for a few that come nearer to the goal."""
    random = Random(seed)
    world = GridWorld()
    observation, _ = world.reset(seed)
    messages = []
    is_over = False
    while not is_over:
        good = [name for name in MOVES if world.comes_nearer(name)]
        move = random.choice(good if random.random() < GOOD else list(MOVES))
        messages.append({"role": "user", "content": observation})
        messages.append({"role": "assistant", "content": move})
        observation, _, is_there, is_late, _ = world.step(move)
        is_over = is_there or is_late
    return messages

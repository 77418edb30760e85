"""The data of the CPU config, built once into a folder: reviews of a meal, of which the kinder one is chosen.

A review is a list of words; its score is the number of good words minus the number of bad ones. Held-out pairs are
lists of words that no training row has.
"""

import json
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from mvp_engine.kit import build_once
from mvp_engine.kit.tiny_processors import train_tokenizer

GOOD = ("fresh", "warm", "tasty", "kind", "quick", "lovely")
BAD = ("stale", "cold", "bland", "rude", "slow", "awful")
OTHER = ("soup", "bread", "table", "waiter", "salad", "tea")
QUESTION = "How was the meal?"


def prepare(made: Any) -> None:
    """Build the folder of the config section `made`, unless it exists."""
    parameters = {"rows": made.rows, "version": 1}
    build_once(Path(made.folder), parameters, partial(build, rows=made.rows), "made.folder")


def build(folder: Path, rows: int) -> None:
    random = Random(0)
    seen: set[str] = set()
    for split, count in (("train", rows), ("eval", 400)):
        pairs: list[dict[str, Any]] = []
        while len(pairs) < count:
            texts = [" ".join(random.choices(GOOD + BAD + OTHER, k=random.randint(3, 8))) for _ in range(2)]
            scores = [score(text) for text in texts]
            if scores[0] == scores[1] or (split == "eval" and seen & set(texts)):
                continue
            seen.update(texts if split == "train" else ())
            better = scores.index(max(scores))
            row = {"prompt": QUESTION, "chosen": texts[better], "rejected": texts[1 - better]}
            pairs.append({**row, "gap": abs(scores[0] - scores[1])})
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    words = " ".join(GOOD + BAD + OTHER)
    train_tokenizer([f"user\n{QUESTION} assistant\n{words}"] * 2, 340).save_pretrained(folder / "processor")


def score(text: str) -> int:
    words = text.split()
    return sum(word in GOOD for word in words) - sum(word in BAD for word in words)

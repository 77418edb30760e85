"""The data of the CPU configs, built once into a folder: reviews of a meal, or names of handwritten digits.

A review is a list of words; its score is the number of good words minus the number of bad ones, and the kinder one is
chosen. Held-out pairs are lists of words that no training row has. Of a digit, the right name is chosen and a wrong one
rejected; every fifth digit is held out.
"""

import json
from pathlib import Path
from random import Random
from typing import Any

from mvp_engine.kit.digits import is_held_out, write_digits
from mvp_engine.kit.tiny_processors import make_qwen3_vl_processor, train_tokenizer

GOOD = ("fresh", "warm", "tasty", "kind", "quick", "lovely")
BAD = ("stale", "cold", "bland", "rude", "slow", "awful")
OTHER = ("soup", "bread", "table", "waiter", "salad", "tea")
QUESTION = "How was the meal?"
DIGIT = "Which digit is this?"


def build_reviews(folder: Path, rows: int) -> None:
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
        _write(folder / f"{split}.jsonl", pairs)
    words = " ".join(GOOD + BAD + OTHER)
    train_tokenizer([f"user\n{QUESTION} assistant\n{words}"] * 2, 340).save_pretrained(folder / "processor")


def build_digits(folder: Path, rows: int) -> None:
    random = Random(0)
    pairs: dict[str, list[dict[str, Any]]] = {"train": [], "eval": []}
    for i, (name, digit) in enumerate(write_digits(folder, rows)):
        wrong = random.choice([other for other in range(10) if other != digit])
        row = {"prompt": f"<image>{DIGIT}", "chosen": str(digit), "rejected": str(wrong), "images": [name]}
        pairs["eval" if is_held_out(i) else "train"].append(row)
    for split, made in pairs.items():
        _write(folder / f"{split}.jsonl", made)
    processor = make_qwen3_vl_processor([f"user\n{DIGIT} assistant\n0 1 2 3 4 5 6 7 8 9"] * 2, 320)
    processor.save_pretrained(folder / "processor")


def _write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def score(text: str) -> int:
    words = text.split()
    return sum(word in GOOD for word in words) - sum(word in BAD for word in words)

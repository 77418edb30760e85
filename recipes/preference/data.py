"""The data of the CPU configs, built once into a folder: chats for a short SFT, preference pairs, rows with a label.

Text: the number after a given one, as a sentence (preferred) or alone. Images: which of scikit-learn's handwritten
digits is drawn, named rightly (preferred) or wrongly. A fifth of the numbers, and of the digits, is held out.
"""

import json
import zlib
from pathlib import Path
from random import Random
from typing import Any

from mvp_engine.kit.digits import is_held_out, write_digits
from mvp_engine.kit.tiny_processors import make_qwen3_vl_processor, train_tokenizer

SENTENCE = "The next number is {}."
DIGIT = "Which digit is this?"
VOCABULARY = 320


def build(folder: Path, kind: str, rows: int) -> None:
    """Write `chats.jsonl`, `{train,eval}_pairs.jsonl`, `{train,eval}_labels.jsonl` and the processor."""
    made = _numbers(rows) if kind == "text" else _digits(folder, rows)
    for split, pairs in made.items():
        _write(folder / f"{split}_pairs.jsonl", pairs)
        _write(folder / f"{split}_labels.jsonl", [row for pair in pairs for row in _labelled(pair)])
    chats = [row for pair in made["train"] for row in _labelled(pair)]
    if kind == "images":
        chats = [row for row in chats if row["label"]]
    # Text: both kinds of answers, so that either is a choice of the model. Images: the right ones.
    _write(folder / "chats.jsonl", [{name: row[name] for name in row if name != "label"} for row in chats])
    texts = [f"user\nWhat comes after 1? assistant\n{SENTENCE.format(2)} {DIGIT}"] * 2
    processor: Any = train_tokenizer(texts, VOCABULARY)
    if kind == "images":
        processor = make_qwen3_vl_processor(texts, VOCABULARY)
    processor.save_pretrained(folder / "processor")


def _numbers(rows: int) -> dict[str, list[dict[str, Any]]]:
    random = Random(0)
    made: dict[str, list[dict[str, Any]]] = {"train": [], "eval": []}
    while len(made["train"]) < rows:
        number = random.randrange(10, 1000)
        after = str(number + 1)
        split = "eval" if zlib.crc32(str(number).encode()) % 5 == 0 else "train"
        question = f"What comes after {number}?"
        row = {"prompt": question, "chosen": SENTENCE.format(after), "rejected": after}
        if split == "train" or (len(made["eval"]) < 200 and row not in made["eval"]):
            made[split].append(row)
    return made


def _digits(folder: Path, rows: int) -> dict[str, list[dict[str, Any]]]:
    """Each digit with its name, and with a wrong one."""
    random = Random(0)
    made: dict[str, list[dict[str, Any]]] = {"train": [], "eval": []}
    for i, (name, label) in enumerate(write_digits(folder, rows)):
        wrong = random.choice([digit for digit in range(10) if digit != label])
        row = {"prompt": f"<image>{DIGIT}", "chosen": str(label), "rejected": str(wrong), "images": [name]}
        made["eval" if is_held_out(i) else "train"].append(row)
    return made


def _labelled(pair: dict[str, Any]) -> list[dict[str, Any]]:
    """The two answers of a pair as rows of their own."""
    rest = {name: value for name, value in pair.items() if name not in ("chosen", "rejected")}
    return [{**rest, "completion": pair[side], "label": int(side == "chosen")} for side in ("chosen", "rejected")]


def _write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

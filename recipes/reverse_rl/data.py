"""The data of the CPU configs, built once into a folder: numbers to write backwards. A tenth of them is held out."""

import json
import zlib
from pathlib import Path
from random import Random
from typing import Any

from mvp_engine.kit.tiny_processors import train_tokenizer

PROMPT = "Write {} backwards, digits only."
VOCABULARY = 320  # at most
HELD_OUT = 200


def build(folder: Path, digits: int, rows: int) -> None:
    """Write `chats.jsonl` for SFT, `{train,eval}.jsonl` with prompts and answers for RL, and the tokenizer."""
    random = Random(0)
    made: dict[str, list[str]] = {"train": [], "eval": []}
    while len(made["train"]) < rows or len(made["eval"]) < HELD_OUT:
        number = "".join(random.choice("0123456789") for _ in range(digits))
        split = "eval" if zlib.crc32(number.encode()) % 10 == 0 else "train"
        if len(made[split]) < (rows if split == "train" else HELD_OUT):
            made[split].append(number)
    for split, numbers in made.items():
        # The reward reads the column `answer`; the model sees the prompt alone.
        _write(folder / f"{split}.jsonl", [{"prompt": PROMPT.format(n), "answer": n[::-1]} for n in numbers])
    chats = [{"prompt": PROMPT.format(n), "completion": n[::-1]} for n in made["train"]]
    _write(folder / "chats.jsonl", chats)
    _write(folder / "eval_chats.jsonl", [{"prompt": PROMPT.format(n), "completion": n[::-1]} for n in made["eval"]])
    # No digits here: each digit stays a token of its own.
    tokenizer = train_tokenizer([f"user\n{PROMPT.format('')} assistant\n"] * 2, VOCABULARY)
    tokenizer.save_pretrained(folder / "processor")


def _write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

"""The data of the CPU configs, built once into a folder: the number after a given one, as a sentence.

A fifth of the numbers is held out.
"""

import json
import zlib
from pathlib import Path
from random import Random

from mvp_engine.kit.tiny_processors import train_tokenizer

SENTENCE = "The next number is {}."
VOCABULARY = 320


def build(folder: Path, rows: int) -> None:
    random = Random(0)
    made: dict[str, list[str]] = {"train": [], "eval": []}
    while len(made["train"]) < rows:
        number = random.randrange(10, 1000)
        split = "eval" if zlib.crc32(str(number).encode()) % 5 == 0 else "train"
        row = {"prompt": f"What comes after {number}?", "completion": SENTENCE.format(number + 1)}
        line = json.dumps(row)
        if split == "train" or (len(made["eval"]) < 150 and line not in made["eval"]):
            made[split].append(line)
    for split, lines in made.items():
        (folder / f"{split}.jsonl").write_text("".join(line + "\n" for line in lines))
    texts = [f"user\nWhat comes after 1? assistant\n{SENTENCE.format(2)}"] * 2
    train_tokenizer(texts, VOCABULARY).save_pretrained(folder / "processor")

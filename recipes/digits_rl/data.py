"""The data of the CPU configs, built once into a folder: handwritten digits to name. Every fifth digit is held out."""

import json
from pathlib import Path
from typing import Any

from mvp_engine.kit.digits import is_held_out, write_digits
from mvp_engine.kit.tiny_processors import make_qwen3_vl_processor

QUESTION = "Which digit is this?"
VOCABULARY = 320  # at most


def build(folder: Path, digits: int) -> None:
    """Write `{train,eval}_chats.jsonl` for SFT, `{train,eval}.jsonl` with prompts for RL, and the processor."""
    rows: dict[str, list[dict[str, Any]]] = {"train": [], "eval": []}
    for index, (name, digit) in enumerate(write_digits(folder, digits)):
        row = {"prompt": f"<image>{QUESTION}", "images": [name], "answer": str(digit)}
        rows["eval" if is_held_out(index) else "train"].append(row)
    for split, prompts in rows.items():
        # The reward reads the column `answer`; the model sees the prompt alone.
        _write(folder / f"{split}.jsonl", prompts)
        chats = [{"prompt": row["prompt"], "images": row["images"], "completion": row["answer"]} for row in prompts]
        _write(folder / f"{split}_chats.jsonl", chats)
    processor = make_qwen3_vl_processor([f"user\n{QUESTION} assistant\n"] * 2, VOCABULARY)
    processor.save_pretrained(folder / "processor")


def _write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

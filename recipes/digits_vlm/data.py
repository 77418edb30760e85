"""The task: look at handwritten digits, answer in a chat. Rows, pictures and processor are made once, into a folder.

scikit-learn's 1,797 digits are 8 x 8 pixels each. Here they are drawn larger, on paper of many sizes; for training
several times, each a little bent. Every fifth digit is held out: no drawing of it is ever trained on.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mvp_engine.errors import UserError
from mvp_engine.kit import build_once, load_processor
from mvp_engine.kit.tiny_processors import make_qwen3_vl_processor

ONE, TWO = "Which digit is this?", "Which is larger?"
SIDES = (20, 36)  # of a drawing, in pixels: from, to (exclusive)
BEND = 0.08  # how much drawings for training are bent, as a share


def prepare(folder: Path, count: int, drawings: int) -> Any:
    """Make the folder, if it is not there; gives its processor."""

    def make(beside: Path) -> None:
        (beside / "pictures").mkdir()
        for split in ("train", "eval"):
            _write_rows(beside, split, chosen(split, count, drawings))
        make_processor().save_pretrained(beside / "processor")

    about = {"count": count, "drawings": drawings, "version": 1}
    return load_processor(build_once(folder, about, make, "digits.folder") / "processor")


def chosen(split: str, count: int, drawings: int) -> list[int]:
    """Which of the first `count` digits are drawn for a split; for training each of them several times."""
    held_out = split == "eval"
    return [i for i in range(count) if (i % 5 == 4) == held_out for _ in range(1 if held_out else drawings)]


def _write_rows(folder: Path, split: str, indices: list[int]) -> None:
    """`<split>_one.jsonl` asks about each drawing, `<split>_two.jsonl` about as many pairs of different digits."""
    random, (images, labels) = np.random.default_rng(len(split)), _digits()
    digits = [int(labels[index]) for index in indices]
    names = [f"pictures/{split}_{i:05d}_{digit}.png" for i, digit in enumerate(digits)]
    for name, index in zip(names, indices, strict=True):
        _draw(images[index], random, BEND if split == "train" else 0.0).save(folder / name)
    ones = [_row([name], ONE, str(digit)) for name, digit in zip(names, digits, strict=True)]
    twos: list[dict[str, Any]] = []
    while len(twos) < len(ones):
        i, j = random.integers(len(digits), size=2).tolist()
        a, b = digits[i], digits[j]
        if a != b:
            answer = f"{a} and {b}: the {'first' if a > b else 'second'}"  # what is read first helps to compare
            twos.append(_row([names[i], names[j]], TWO, answer))
    for kind, rows in (("one", ones), ("two", twos)):
        (folder / f"{split}_{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def conclusion(answer: str) -> str:
    """What was asked for: "the second" of "3 and 8: the second"."""
    return answer.rpartition(": ")[2]


def _digits() -> tuple[np.ndarray, np.ndarray]:
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        raise UserError("this recipe's digits come with scikit-learn: pip install scikit-learn") from None
    digits = load_digits()
    return digits.images, digits.target


def _draw(image: np.ndarray, random: np.random.Generator, bend: float) -> Image.Image:
    """Dark ink on paper of a random size, which the digit fills; turned, sheared, stretched and moved by `bend`."""
    width, height = random.integers(*SIDES, size=2).tolist()
    ink = Image.fromarray((255 - image * 255 / 16).astype(np.uint8)).resize((width, height), Image.Resampling.BICUBIC)
    centre = np.array([width, height]) / 2
    turn = np.eye(2) + random.uniform(-bend, bend, size=(2, 2))
    shift = centre - turn @ centre + random.uniform(-bend, bend, size=2) * centre
    where = np.column_stack([turn, shift]).flatten().tolist()
    return ink.transform(
        (width, height), Image.Transform.AFFINE, where, Image.Resampling.BILINEAR, fillcolor=255
    ).convert("RGB")


def _row(pictures: list[str], question: str, answer: str) -> dict[str, Any]:
    content = [*({"type": "image", "image": name} for name in pictures), {"type": "text", "text": question}]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}


def make_processor() -> Any:
    """A vocabulary of a few hundred tokens: bytes, and the words of this task."""
    return make_qwen3_vl_processor([f"user\n{ONE} {TWO} assistant\n1 and 2: the second 3 and 4: the first"] * 2, 320)

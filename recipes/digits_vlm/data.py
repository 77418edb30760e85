"""The task: questions about images of handwritten digits. Rows, images and processor are built once, into a folder.

scikit-learn's 1,797 digits are 8 x 8 pixels each. Here they are drawn larger, in many sizes, and several times for
training, each time with a small random distortion. Every fifth digit is held out: no drawing of it is trained on.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mvp_engine.kit import build_once, load_processor
from mvp_engine.kit.data.read.media_source import require_package
from mvp_engine.kit.tiny_processors import make_qwen3_vl_processor

ONE = "Which digit is this?"
TWO = "Which is larger?"
SIDES = (20, 36)  # of a drawing, in pixels: from, to (exclusive)
BEND = 0.08  # the strength of the distortion of training images, as a share of their size


def prepare(folder: Path, count: int, drawings: int) -> Any:
    """Build the folder if it is missing, and load its processor."""

    def build(target: Path) -> None:
        (target / "pictures").mkdir()
        for split in ("train", "eval"):
            _write_rows(target, split, chosen(split, count, drawings))
        make_processor().save_pretrained(target / "processor")

    parameters = {"count": count, "drawings": drawings, "version": 1}
    return load_processor(build_once(folder, parameters, build, "digits.folder") / "processor")


def chosen(split: str, count: int, drawings: int) -> list[int]:
    """Which of the first `count` digits are drawn for a split, each of them `drawings` times for training."""
    if split == "eval":
        return [i for i in range(count) if i % 5 == 4]
    return [i for i in range(count) if i % 5 != 4 for _ in range(drawings)]


def _write_rows(folder: Path, split: str, indices: list[int]) -> None:
    """`<split>_one.jsonl` asks about each drawing, `<split>_two.jsonl` about as many pairs of different digits."""
    random = np.random.default_rng(len(split))
    images, labels = _digits()
    digits = [int(labels[index]) for index in indices]
    names = [f"pictures/{split}_{i:05d}_{digit}.png" for i, digit in enumerate(digits)]
    for name, index in zip(names, indices, strict=True):
        _draw(images[index], random, BEND if split == "train" else 0.0).save(folder / name)
    ones = [_row([name], ONE, str(digit)) for name, digit in zip(names, digits, strict=True)]
    twos: list[dict[str, Any]] = []
    while len(twos) < len(ones):
        i, j = random.integers(len(digits), size=2).tolist()
        if digits[i] != digits[j]:
            larger = "first" if digits[i] > digits[j] else "second"
            # The answer names both digits first, which makes the comparison easier to learn.
            twos.append(_row([names[i], names[j]], TWO, f"{digits[i]} and {digits[j]}: the {larger}"))
    for kind, rows in (("one", ones), ("two", twos)):
        (folder / f"{split}_{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def conclusion(answer: str) -> str:
    """The part that answers the question: "the second" of "3 and 8: the second"."""
    return answer.rpartition(": ")[2]


def _digits() -> tuple[np.ndarray, np.ndarray]:
    digits = require_package("sklearn.datasets", "this recipe's data", "demo").load_digits()
    return digits.images, digits.target


def _draw(image: np.ndarray, random: np.random.Generator, bend: float) -> Image.Image:
    """Dark ink on a light background of a random size; rotated, sheared, scaled and shifted by up to `bend`."""
    width, height = random.integers(*SIDES, size=2).tolist()
    ink = Image.fromarray((255 - image * 255 / 16).astype(np.uint8)).resize((width, height), Image.Resampling.BICUBIC)
    centre = np.array([width, height]) / 2
    matrix = np.eye(2) + random.uniform(-bend, bend, size=(2, 2))
    shift = centre - matrix @ centre + random.uniform(-bend, bend, size=2) * centre
    affine = np.column_stack([matrix, shift]).flatten().tolist()
    drawn = ink.transform((width, height), Image.Transform.AFFINE, affine, Image.Resampling.BILINEAR, fillcolor=255)
    return drawn.convert("RGB")


def _row(images: list[str], question: str, answer: str) -> dict[str, Any]:
    content = [*({"type": "image", "image": name} for name in images), {"type": "text", "text": question}]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}


def make_processor() -> Any:
    """Qwen3-VL's processor with a few hundred tokens: bytes, and the words of this task."""
    return make_qwen3_vl_processor([f"user\n{ONE} {TWO} assistant\n1 and 2: the second 3 and 4: the first"] * 2, 320)

"""Pictures with one of several classes: scikit-learn's digits, or a folder of your own with a folder for each class.

What a training changes in a picture comes from Python's generators, which the loader sets for each sample from (seed,
epoch, index): workers, ranks and resumes have no say in it. A file that is no picture is drawn blank, without a label.
"""

import json
import math
from collections.abc import Callable
from logging import Logger
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from mvp_engine.config import Section
from mvp_engine.data import derived_seed
from mvp_engine.errors import UserError
from mvp_engine.kit import Limits
from mvp_engine.kit.data.read.decode import decode
from mvp_engine.kit.data.read.probe import probe
from mvp_engine.kit.data.read.row_types import BadRow, Part

IGNORE = -100  # the label of what has none
ENDS = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm"}


class Images(Section):
    root: str | None  # a folder with a folder of pictures for each class; null: scikit-learn's digits
    eval_root: str | None = None  # one with the same classes for evaluation; null: a part of the first is held out
    held_out: int = 10  # each so many-th picture, chosen by its name
    size: int  # pixels of a side, as the model sees it
    bend: float = 0.0  # a picture of a training is turned, sheared, stretched and moved by up to this share
    crop: float = 1.0  # and cut out of the whole: at least so much of its area
    flip: bool = False  # and mirrored, half of the time


class Pictures(Dataset[dict[str, Any]]):
    """`items` are what `picture` makes a picture of, `labels` their classes, numbered as in `classes`."""

    def __init__(self, split: str, images: Images, processor: Any) -> None:
        self.images, self.processor, self.training = images, processor, split == "train"
        self.picture: Callable[[Any], Image.Image]
        if images.root is None:
            self.items, self.labels, self.classes = _digits(self.training, images.held_out)
            self.picture = Image.fromarray
        else:
            self.items, self.labels, self.classes = _files(self.training, images)
            self.picture = _read

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        bad, label = "", self.labels[index]
        try:
            picture = self.picture(self.items[index]).convert("RGB")
        except BadRow as error:
            bad, label, picture = f"{self.items[index]}: {error}", IGNORE, Image.new("RGB", (1, 1))
        if self.training:
            picture = changed(picture, self.images)
        pixels = self.processor(picture, return_tensors="pt")["pixel_values"][0]
        return {"pixel_values": pixels, "labels": label, "index": index, "bad": bad}


class LeftOut:
    """Pictures that could not be read: each is named once, in the log and in a file."""

    def __init__(self, file: Path, logger: Logger) -> None:
        self.file, self.logger, self.seen = file, logger, set[str]()

    def note(self, bad: list[str], step: int, split: str) -> None:
        for one in {*bad} - self.seen:
            self.seen.add(one)
            self.logger.warning("left out: %s", one)
            with self.file.open("a") as file:
                file.write(json.dumps({"step": step, "split": split, "image": one}) + "\n")


def collate(items: list[dict[str, Any]]) -> dict[str, Any]:
    numbers = {name: torch.tensor([item[name] for item in items]) for name in ("labels", "index")}
    pixels = torch.stack([item["pixel_values"] for item in items])
    return {"pixel_values": pixels, **numbers, "bad": [item["bad"] for item in items if item["bad"]]}


def changed(picture: Image.Image, images: Images) -> Image.Image:
    """Cut out, bent and mirrored by chance."""
    width, height = picture.size
    if images.crop < 1.0:
        area, aspect = np.random.uniform(images.crop, 1.0), math.exp(np.random.uniform(-0.3, 0.3))
        w, h = (min(1.0, math.sqrt(area * ratio)) for ratio in (aspect, 1 / aspect))
        left, top = np.random.uniform(0, 1 - w) * width, np.random.uniform(0, 1 - h) * height
        picture = picture.crop((int(left), int(top), math.ceil(left + w * width), math.ceil(top + h * height)))
        width, height = picture.size
    if images.bend > 0.0:
        centre = np.array([width, height]) / 2
        turn = np.eye(2) + np.random.uniform(-images.bend, images.bend, size=(2, 2))
        shift = centre - turn @ centre + np.random.uniform(-images.bend, images.bend, size=2) * centre
        where = np.column_stack([turn, shift]).flatten().tolist()
        picture = picture.transform(picture.size, Image.Transform.AFFINE, where, Image.Resampling.BILINEAR)
    if images.flip and np.random.uniform() < 0.5:
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return picture


def _digits(training: bool, held_out: int) -> tuple[list[Any], list[int], list[str]]:
    """1,797 handwritten digits of 8 x 8 pixels; each `held_out`-th is for evaluation. Bright ink on black."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        raise UserError("these digits come with scikit-learn: pip install scikit-learn (or set images.root)") from None
    digits = load_digits()
    chosen = [i for i in range(len(digits.target)) if (i % held_out == held_out - 1) != training]
    inks = [(digits.images[i] * (255 / 16)).astype(np.uint8).repeat(4, 0).repeat(4, 1) for i in chosen]
    return inks, [int(digits.target[i]) for i in chosen], [str(digit) for digit in range(10)]


def _files(training: bool, images: Images) -> tuple[list[Any], list[int], list[str]]:
    root = _folder(images.root, "images.root")
    classes = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if len(classes) < 2:
        raise UserError(
            f"images.root={root} has {len(classes)} folder(s); it wants one for each of two or more classes"
        )
    own = images.eval_root is not None
    home = _folder(images.eval_root, "images.eval_root") if own and not training else root
    files: list[Any] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = sorted(f for f in (home / name).rglob("*") if f.suffix.lower() in ENDS and f.is_file())
        if not own:
            found = [
                f for f in found if (derived_seed(f.relative_to(home).as_posix()) % images.held_out == 0) != training
            ]
        if training and not found:
            raise UserError(f"{home / name} has no picture to train on (files that end with {', '.join(sorted(ENDS))})")
        files, labels = files + found, labels + [label] * len(found)
    if not files:
        raise UserError(f"{home} has no picture to evaluate on: set images.eval_root, or a lower images.held_out")
    return files, labels, classes


def _folder(path: str | None, key: str) -> Path:
    folder = Path(path or "").expanduser()
    if not folder.is_dir():
        raise UserError(f"{key}={path} is no folder: name one that has a folder of pictures for each class")
    return folder


def _read(file: Path) -> Image.Image:
    """Upright, with the data kit's guards: formats, sizes, a time-out."""
    part, limits = Part("image", file.name), Limits()
    return decode(part, probe(part, limits, file.parent), limits, file.parent)

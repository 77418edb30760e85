"""Images with class labels: scikit-learn's digits, or a folder of your own with one folder per class.

Augmentation draws from Python's and numpy's generators, which the loader seeds for each sample from (seed, epoch,
index): workers, ranks and resumes do not change it. A file that is not an image becomes a blank image without a label.
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

from mvp_engine.data import derived_seed
from mvp_engine.engine import StepContext
from mvp_engine.errors import UserError, count
from mvp_engine.kit import Limits
from mvp_engine.kit.data.read.decoders import decode
from mvp_engine.kit.data.read.media_source import require_package
from mvp_engine.kit.data.read.probe import probe
from mvp_engine.kit.data.read.row_types import BadRow, Part

from .settings import Images

IGNORE = -100  # the label of an image without one
SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm"}
Labelled = tuple[list[Any], list[int], list[str]]  # items, the class index of each, class names


class ImageDataset(Dataset[dict[str, Any]]):
    """The images of a split: `open_image` opens an entry of `items`, `labels` are indices into `classes`."""

    def __init__(self, split: str, images: Images, processor: Any) -> None:
        self.images = images
        self.processor = processor
        self.training = split == "train"
        self.open_image: Callable[[Any], Image.Image]
        if images.root is None:
            self.items, self.labels, self.classes = _digits(self.training, images.held_out)
            self.open_image = Image.fromarray
        else:
            self.items, self.labels, self.classes = _files(self.training, images)
            self.open_image = _open_file

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        bad = ""
        label = self.labels[index]
        try:
            image = self.open_image(self.items[index]).convert("RGB")
        except BadRow as error:
            bad = f"{self.items[index]}: {error}"
            label = IGNORE
            image = Image.new("RGB", (1, 1))
        if self.training:
            image = augment(image, self.images)
        pixels = self.processor(image, return_tensors="pt")["pixel_values"][0]
        return {"pixel_values": pixels, "labels": label, "index": index, "bad": bad}


class BadImageLog:
    """Images that could not be read: each is listed once, in the log and in a file."""

    def __init__(self, file: Path, logger: Logger) -> None:
        self.file = file
        self.logger = logger
        self.seen: set[str] = set()

    def add(self, bad: list[str], ctx: StepContext) -> None:
        if bad:
            ctx.count("bad_images", len(bad))
        for image in {*bad} - self.seen:
            self.seen.add(image)
            self.logger.warning("left out: %s", image)
            with self.file.open("a") as file:
                file.write(json.dumps({"step": ctx.step, "split": ctx.split, "image": image}) + "\n")


def collate(items: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "pixel_values": torch.stack([item["pixel_values"] for item in items]),
        "labels": torch.tensor([item["labels"] for item in items]),
        "index": torch.tensor([item["index"] for item in items]),
        "bad": [item["bad"] for item in items if item["bad"]],
    }


def augment(image: Image.Image, images: Images) -> Image.Image:
    """A random crop, affine transform and flip, as far as `images` turns them on."""
    if images.crop < 1.0:
        image = _random_crop(image, images.crop)
    if images.bend > 0.0:
        centre = np.array(image.size) / 2
        matrix = np.eye(2) + np.random.uniform(-images.bend, images.bend, size=(2, 2))
        shift = centre - matrix @ centre + np.random.uniform(-images.bend, images.bend, size=2) * centre
        affine = np.column_stack([matrix, shift]).flatten().tolist()
        image = image.transform(image.size, Image.Transform.AFFINE, affine, Image.Resampling.BILINEAR)
    if images.flip and np.random.uniform() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return image


def _random_crop(image: Image.Image, min_area: float) -> Image.Image:
    width, height = image.size
    area = np.random.uniform(min_area, 1.0)
    aspect = math.exp(np.random.uniform(-0.3, 0.3))
    w = min(1.0, math.sqrt(area * aspect))
    h = min(1.0, math.sqrt(area * (1 / aspect)))
    left = np.random.uniform(0, 1 - w) * width
    top = np.random.uniform(0, 1 - h) * height
    return image.crop((int(left), int(top), math.ceil(left + w * width), math.ceil(top + h * height)))


def _digits(training: bool, held_out: int) -> Labelled:
    """1,797 handwritten digits of 8 x 8 pixels, white on black; every `held_out`-th is for evaluation."""
    digits = require_package("sklearn.datasets", "images.root=null, which trains on digits,", "demo").load_digits()
    items: list[Any] = []
    labels: list[int] = []
    for i, label in enumerate(digits.target):
        if (i % held_out == held_out - 1) != training:
            items.append((digits.images[i] * (255 / 16)).astype(np.uint8).repeat(4, 0).repeat(4, 1))
            labels.append(int(label))
    return items, labels, [str(digit) for digit in range(10)]


def _files(training: bool, images: Images) -> Labelled:
    root = _folder(images.root, "images.root")
    classes = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if len(classes) < 2:
        raise UserError(
            f"images.root={root} has {count(len(classes), 'folder')}; it needs one for each of two or more classes"
        )
    has_eval_root = images.eval_root is not None
    if has_eval_root and not training:
        root = _folder(images.eval_root, "images.eval_root")
    files: list[Any] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = sorted(file for file in (root / name).rglob("*") if _is_image_file(file))
        if not has_eval_root:
            found = [file for file in found if _is_held_out(file, root, images.held_out) != training]
        if training and not found:
            suffixes = ", ".join(sorted(SUFFIXES))
            raise UserError(f"{root / name} has no image to train on (files that end with {suffixes})")
        files += found
        labels += [label] * len(found)
    if not files:
        raise UserError(f"{root} has no image to evaluate on: set images.eval_root, or a lower images.held_out")
    return files, labels, classes


def _is_image_file(file: Path) -> bool:
    return file.suffix.lower() in SUFFIXES and file.is_file()


def _is_held_out(file: Path, root: Path, held_out: int) -> bool:
    return derived_seed(file.relative_to(root).as_posix()) % held_out == 0


def _folder(path: str | None, key: str) -> Path:
    folder = Path(path or "").expanduser()
    if not folder.is_dir():
        raise UserError(f"{key}={path} is not a folder: give one that has a folder of images for each class")
    return folder


def _open_file(file: Path) -> Image.Image:
    """The image with its EXIF orientation applied, under the data kit's limits: formats, sizes, a timeout."""
    part = Part("image", file.name)
    limits = Limits()
    return decode(part, probe(part, limits, file.parent), limits, file.parent)

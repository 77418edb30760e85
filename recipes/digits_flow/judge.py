"""The judge of generated digits: an SVM trained on real ones, and distances to the digits of the training."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mvp_engine.kit.data.read.media_source import require_package

HELD_OUT = 5  # every fifth digit
COPY_QUANTILE = 0.01  # a digit nearer to a training digit than this share of held-out digits is counted as a copy


def digits(split: str) -> tuple[Tensor, Tensor]:
    """Images (N, 64) from -1 to 1 and their classes (N,); every fifth digit is held out."""
    data: Any = require_package("sklearn.datasets", "this recipe's digits", "demo").load_digits()
    chosen = (np.arange(len(data.target)) % HELD_OUT == HELD_OUT - 1) == (split == "eval")
    images = torch.from_numpy(data.data[chosen] / 8.0 - 1.0).float()
    return images, torch.from_numpy(data.target[chosen])


class Judge:
    """Which digits generated images show, and how near each is to the nearest training image."""

    @cached_property
    def _svm(self) -> Any:
        from sklearn.svm import SVC

        images, classes = digits("train")
        return SVC(gamma=0.03).fit(images.numpy(), classes.numpy())

    @cached_property
    def _held_out(self) -> Tensor:
        return self.nearest(digits("eval")[0])

    def held_out_accuracy(self) -> float:
        images, classes = digits("eval")
        return float(self._svm.score(images.numpy(), classes.numpy()))

    def classes(self, images_NP: Tensor) -> Tensor:
        return torch.from_numpy(self._svm.predict(images_NP.clamp(-1, 1).numpy()))

    def nearest(self, images_NP: Tensor) -> Tensor:
        """The distance of each image to the nearest training image."""
        return torch.cdist(images_NP.clamp(-1, 1), digits("train")[0]).min(1).values

    def metrics(self, images_NP: Tensor, wanted_N: Tensor) -> Mapping[str, tuple[float, float]]:
        """(sum, weight) by name: right digits, copies, and distances relative to those of held-out digits."""
        count = float(len(images_NP))
        right = float((self.classes(images_NP) == wanted_N).sum())
        distances = self.nearest(images_NP)
        copies = float((distances < self._held_out.quantile(COPY_QUANTILE)).sum())
        ratio = float(distances.median() / self._held_out.median())
        return {"right": (right, count), "copies": (copies, count), "distance_ratio": (ratio, 1.0)}

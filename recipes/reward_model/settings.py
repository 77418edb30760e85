"""The config keys of this recipe. This module imports no torch, so a misspelt key is an error at once."""

from typing import Literal

from mvp_engine.config import Section
from mvp_engine.kit import RewardConfig


class Made(Section):
    kind: Literal["text", "images"] = "text"
    folder: str  # rows and processor are built into it, once
    rows: int  # pairs for training; of images: how many of the 1,797 digits


class ReviewsConfig(RewardConfig):
    made: Made | None = None  # synthetic data; null: mllm.sources are files of your own

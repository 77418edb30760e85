"""The config keys of this recipe. This module imports no torch, so a misspelt key is an error at once."""

from typing import Literal

from mvp_engine.config import Section
from mvp_engine.kit import PreferenceConfig


class Made(Section):
    kind: Literal["text", "images"]
    folder: str  # rows, images and processor are built into it, once
    rows: int  # pairs of text for training; of images: how many of the 1,797 digits


class PairsConfig(PreferenceConfig):
    made: Made | None = None  # synthetic data; null: mllm.sources are files of your own

"""The config keys of this recipe. This module imports no torch, so a misspelt key is an error at once."""

from mvp_engine.config import Section
from mvp_engine.kit import MLLMConfig


class Shapes(Section):
    """Synthetic images and videos of shapes."""

    folder: str
    """Images, videos, rows and a processor are built into it, once."""
    rows: int
    """Rows of captions; other files have as many or half as many."""


class VLConfig(MLLMConfig):
    shapes: Shapes | None = None  # synthetic data; null: data.sources are files of your own

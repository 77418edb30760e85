"""The config keys of this recipe. This module imports no torch, so a misspelt key is an error at once."""

from mvp_engine.config import Section
from mvp_engine.kit import MLLMConfig


class Digits(Section):
    """The handwritten digits of scikit-learn as rows with images."""

    folder: str
    """Images, rows and processor are built into it, once."""
    count: int
    """How many of the 1,797 digits; a fifth is held out."""
    drawings: int
    """Drawings of each training digit, in different sizes."""


class DigitsConfig(MLLMConfig):
    digits: Digits

"""The config keys of this recipe. This module imports no torch, so a misspelt key is an error at once."""

from mvp_engine.config import Section
from mvp_engine.config.schema import Count
from mvp_engine.kit import MLLMConfig


class Graft(Section):
    """A vision encoder and a language model, written as one model with a new projector."""

    vision: str
    """The encoder: a Hugging Face folder, or a model of the Hub. Of a model with text, its vision encoder is taken."""
    language: str
    """The language model: a Hugging Face folder, or a model of the Hub."""
    folder: str
    """The folder of the model that is written, once: `model.path` of the first stage."""
    image_token: str = "<image>"
    """The token that stands for the features of an image; it is added to a tokenizer that lacks it."""
    feature_layer: int = -2
    """The layer of the encoder whose hidden states are the features: -2 is the one before the last."""
    tiles: Count = 1
    """1: an image is resized to the size of the encoder. More: up to so many tiles of that size (LLaVA-NeXT)."""


class Digits(Section):
    """The CPU demo: handwritten digits of scikit-learn as rows, an encoder trained on them, and a tokenizer."""

    folder: str
    """All of it is built into this folder, once."""
    count: int
    """How many of the 1,797 digits; a fifth is held out."""


class GraftConfig(MLLMConfig):
    graft: Graft | None = None  # null: model.path is a model already
    digits: Digits | None = None  # synthetic data; null: data.sources are files of your own

"""The config keys of this recipe. This module imports no torch, so a misspelt key is an error at once."""

from __future__ import annotations

from typing import Literal

from mvp_engine.config import Config, Section
from mvp_engine.config.schema import Positive


class Towers(Section):
    width: int  # of hidden layers
    embedding: int  # of an embedding
    dropout: float = 0.0  # of hidden layers


class ContrastiveLoss(Section):
    """The config section of contrastive losses."""

    loss: Literal["infonce", "siglip"] = "infonce"
    """InfoNCE: softmax over all rows of the step, in both directions. SigLIP: each pair of rows by itself."""
    temperature: Positive = 0.07
    """Similarities are divided by it, unless the model learns a `log_scale`. SigLIP starts with 0.1."""
    bias: float = -10.0
    """SigLIP: added to scaled similarities, unless the model learns a `bias`."""


class NumbersConfig(Config):
    contrastive: ContrastiveLoss = ContrastiveLoss()
    """The loss on pairs of views."""
    towers: Towers

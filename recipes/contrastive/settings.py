"""The config keys of this recipe. This module imports no torch, so a misspelt key is an error at once."""

from mvp_engine.config import Section
from mvp_engine.kit import ContrastiveConfig


class Towers(Section):
    width: int  # of hidden layers
    embedding: int  # of an embedding
    dropout: float = 0.0  # of hidden layers


class NumbersConfig(ContrastiveConfig):
    towers: Towers

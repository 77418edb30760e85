"""The config keys of this recipe. This module imports no torch, so a misspelt key is an error at once."""

from mvp_engine.config import Config, Section
from mvp_engine.kit import OptimSettings
from mvp_engine.kit.flow import Flow


class DiT(Section):
    """Sizes of the diffusion transformer."""

    width: int
    """Of the residual stream."""
    depth: int
    """Blocks."""
    heads: int
    """Attention heads."""


class FlowConfig(Config):
    dit: DiT
    flow: Flow
    optim: OptimSettings
    generated: int
    """Digits that an evaluation generates, as many of each class."""

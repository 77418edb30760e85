"""Rows as users have them, to packed batches that a model can train on."""

from mvp_engine.kit.data.kit import DataSource, MLLMData, MLLMDataKit, PackLoader
from mvp_engine.kit.data.limits import Limits

__all__ = ["DataSource", "Limits", "MLLMData", "MLLMDataKit", "PackLoader"]

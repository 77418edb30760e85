"""Rows as users have them, to packed batches that a model can train on."""

from mvp_engine.kit.data.kit import MLLMDataKit
from mvp_engine.kit.data.limits import Limits
from mvp_engine.kit.data.packs import PackLoader
from mvp_engine.kit.data.settings import DataSource, MLLMData

__all__ = ["DataSource", "Limits", "MLLMData", "MLLMDataKit", "PackLoader"]

"""Rows as users have them, to packed batches that a model can train on."""

from mvp_engine.kit.data.kit import MLLMDataKit, load_processor
from mvp_engine.kit.data.limits import Limits
from mvp_engine.kit.data.packs import PackLoader
from mvp_engine.kit.data.settings import DataSource, MLLMData
from mvp_engine.kit.data.windows import StreamLoader

__all__ = ["DataSource", "Limits", "MLLMData", "MLLMDataKit", "PackLoader", "StreamLoader", "load_processor"]

"""Rows as users have them, to packed batches that a model can train on."""

from mvp_engine.kit.data.encode.limits import Limits
from mvp_engine.kit.data.kit import MLLMDataKit, load_processor
from mvp_engine.kit.data.pack.packs import PackLoader
from mvp_engine.kit.data.pack.stream_loader import StreamLoader
from mvp_engine.kit.data.settings import DataSource, MLLMData

__all__ = [
    "DataSource",
    "Limits",
    "MLLMData",
    "MLLMDataKit",
    "PackLoader",
    "StreamLoader",
    "load_processor",
]

"""The data kit: rows in files and streams are read, encoded, and packed into batches."""

from typing import TYPE_CHECKING

from mvp_engine.imports import lazy_exports

if TYPE_CHECKING:
    from mvp_engine.kit.data.encode.processor import load_processor
    from mvp_engine.kit.data.kit import MLLMDataKit
    from mvp_engine.kit.data.pack.packs import PackLoader
    from mvp_engine.kit.data.pack.stream_loader import StreamLoader
    from mvp_engine.kit.data.read.row_types import Limits
    from mvp_engine.kit.data.settings import DataSource, MLLMData
else:  # the sections of configs are here too, and `mvp config CONFIG` imports no torch
    __getattr__ = lazy_exports(__name__)

__all__ = [
    "DataSource",
    "Limits",
    "MLLMData",
    "MLLMDataKit",
    "PackLoader",
    "StreamLoader",
    "load_processor",
]

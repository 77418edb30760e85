"""Logging: metrics, the backends that show or store them, plots and the report page of a run."""

from typing import TYPE_CHECKING

from mvp_engine.imports import lazy_exports

if TYPE_CHECKING:
    from mvp_engine.log.backends import EarlyMessages, LogHub, backend_factory
    from mvp_engine.log.metrics import MetricStore
else:  # `mvp runs` formats numbers without torch
    __getattr__ = lazy_exports(__name__)

__all__ = ["EarlyMessages", "LogHub", "MetricStore", "backend_factory"]

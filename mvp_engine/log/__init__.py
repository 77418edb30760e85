"""Logging: metrics, the backends that show or store them, plots and the report page of a run."""

from mvp_engine.log.hub import EarlyMessages, LogHub, backend_factory
from mvp_engine.log.metrics import MetricStore

__all__ = ["EarlyMessages", "LogHub", "MetricStore", "backend_factory"]

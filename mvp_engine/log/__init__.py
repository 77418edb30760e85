"""Logging: metrics, the backends that show or store them, and plots."""

from mvp_engine.log.hub import EarlyMessages, LogHub
from mvp_engine.log.metrics import MetricStore

__all__ = ["EarlyMessages", "LogHub", "MetricStore"]

"""Logging: metrics, the backends that show or store them, and plots."""

from mvp_engine.log.hub import LogHub
from mvp_engine.log.metrics import MetricStore

__all__ = ["LogHub", "MetricStore"]

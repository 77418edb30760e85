"""Logging: metrics, the backends that show or store them, plots and the report page of a run."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mvp_engine.log.hub import EarlyMessages, LogHub, backend_factory
    from mvp_engine.log.metrics import MetricStore

__all__ = ["EarlyMessages", "LogHub", "MetricStore", "backend_factory"]


def __getattr__(name: str) -> Any:
    """Import on first use: `mvp runs` formats numbers without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mvp_engine.log import hub, metrics

    return getattr(hub if hasattr(hub, name) else metrics, name)

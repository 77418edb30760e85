"""AdamW and Muon on any layout, low-precision optimizer states, schedules, an EMA of the weights."""

from typing import TYPE_CHECKING

from mvp_engine.imports import lazy_exports

if TYPE_CHECKING:
    from mvp_engine.kit.optim.kit import OptimKit
    from mvp_engine.kit.optim.optimizer import KitOptimizer
    from mvp_engine.kit.optim.settings import OptimSettings
else:  # the sections of configs are here too, and `mvp config CONFIG` imports no torch
    __getattr__ = lazy_exports(__name__)

__all__ = ["KitOptimizer", "OptimKit", "OptimSettings"]

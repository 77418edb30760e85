"""AdamW and Muon on any layout, low-precision optimizer states, schedules, an EMA of the weights."""

from mvp_engine.kit.optim.kit import OptimKit
from mvp_engine.kit.optim.optimizer import KitOptimizer
from mvp_engine.kit.optim.settings import OptimSettings

__all__ = ["KitOptimizer", "OptimKit", "OptimSettings"]

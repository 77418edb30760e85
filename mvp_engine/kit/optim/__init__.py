"""AdamW and Muon on any layout, moments in few bits, schedules, an average of the weights."""

from mvp_engine.kit.optim.kit import OptimKit, OptimSettings
from mvp_engine.kit.optim.optimizer import KitOptimizer

__all__ = ["KitOptimizer", "OptimKit", "OptimSettings"]

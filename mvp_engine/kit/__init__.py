"""Kits: small suites of calls that recipes use as they like."""

from mvp_engine.kit.data import DataSource, Limits, MLLMData, MLLMDataKit, load_processor
from mvp_engine.kit.loss import TokenLoss, TokenNormedLossKit

__all__ = ["DataSource", "Limits", "MLLMData", "MLLMDataKit", "TokenLoss", "TokenNormedLossKit", "load_processor"]

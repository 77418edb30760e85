"""The engine: the loop, its hooks and its workflows."""

from mvp_engine.engine.context import StepContext
from mvp_engine.engine.engine import Engine

__all__ = ["Engine", "StepContext"]

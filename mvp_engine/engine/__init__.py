"""The engine: the loop, its hooks and its workflows."""

from mvp_engine.engine.engine import Engine
from mvp_engine.engine.hooks import StepContext

__all__ = ["Engine", "StepContext"]

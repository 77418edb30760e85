"""Processes and what they say to each other. Nothing here knows of models, data or configs."""

from mvp_engine.distributed.layout import Layout
from mvp_engine.distributed.reducer import GradientReducer
from mvp_engine.distributed.world import World

__all__ = ["GradientReducer", "Layout", "World"]

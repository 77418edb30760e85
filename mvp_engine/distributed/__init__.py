"""Processes and what they say to each other. Nothing here knows of models, data or configs."""

from mvp_engine.distributed.data_parallel import DDPReducer
from mvp_engine.distributed.layout import Layout
from mvp_engine.distributed.world import World

__all__ = ["DDPReducer", "Layout", "World"]

"""Checkpoints: complete or not there, sharded, written in the background, read without unpickling code."""

from mvp_engine.checkpoint.format import CorruptCheckpoint
from mvp_engine.checkpoint.manager import CheckpointManager
from mvp_engine.checkpoint.state import SavedState

__all__ = ["CheckpointManager", "CorruptCheckpoint", "SavedState"]

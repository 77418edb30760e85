"""Model engines: one model on one parallel layout, from building it to its optimizer step."""

from mvp_engine.model_engine.base import (
    ModelEngine,
    ModelSource,
    Outcome,
    Settings,
    StepNumbers,
    engine_class,
    precision_on,
    register,
)
from mvp_engine.model_engine.fsdp.engine import FSDPEngine
from mvp_engine.model_engine.types import LanguageModelEngine, ValueModelEngine

__all__ = [
    "FSDPEngine",
    "LanguageModelEngine",
    "ModelEngine",
    "ModelSource",
    "Outcome",
    "Settings",
    "StepNumbers",
    "ValueModelEngine",
    "engine_class",
    "precision_on",
    "register",
]

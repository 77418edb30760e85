"""Model engines: one model on one parallel layout, from building it to its optimizer step."""

from mvp_engine.model_engine.base import (
    ModelEngine,
    ModelSource,
    Settings,
    StepNumbers,
    StepStatus,
    precision_on,
)
from mvp_engine.model_engine.fsdp.engine import FSDPEngine
from mvp_engine.model_engine.registry import engine_class, register
from mvp_engine.model_engine.types import (
    LanguageModelEngine,
    ValueModelEngine,
)

__all__ = [
    "FSDPEngine",
    "LanguageModelEngine",
    "ModelEngine",
    "ModelSource",
    "Settings",
    "StepNumbers",
    "StepStatus",
    "ValueModelEngine",
    "engine_class",
    "precision_on",
    "register",
]

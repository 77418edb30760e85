"""Model engines: one model on one parallel layout, from building it to its optimizer step."""

from mvp_engine.model_engine.base import (
    ModelEngine,
    ModelSource,
    Settings,
    StepNumbers,
    StepStatus,
    engine_class,
    precision_on,
    register,
)
from mvp_engine.model_engine.fsdp.engine import (
    FSDPEngine,
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

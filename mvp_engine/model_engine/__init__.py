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
    ActionModelEngine,
    FSDPEngine,
    LanguageModelEngine,
    ValueModelEngine,
)

__all__ = [
    "ActionModelEngine",
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

"""Model engines: one model on one parallel layout, from building it to its optimizer step."""

from mvp_engine.model_engine.module import ModuleEngine, Outcome, StepNumbers

__all__ = ["ModuleEngine", "Outcome", "StepNumbers"]

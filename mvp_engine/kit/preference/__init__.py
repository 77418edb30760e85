"""Losses that compare answers or models, with their engines: preferences, reward models, distillation, contrast."""

from typing import TYPE_CHECKING

from mvp_engine.imports import lazy_exports

if TYPE_CHECKING:
    from mvp_engine.kit.preference.losses import sequence_log_probs
else:
    __getattr__ = lazy_exports(__name__)

__all__ = ["sequence_log_probs"]

"""Hugging Face models on packed batches: wrappers, loading, export, adapters.

This is the only package that imports transformers' internals.
"""

from typing import TYPE_CHECKING

from mvp_engine.imports import lazy_exports

if TYPE_CHECKING:
    from mvp_engine.hf.model.language_model import LanguageModel, ValueModel
    from mvp_engine.hf.model.packed_model import PackedModel
else:  # the sections of configs are here too, and `mvp config CONFIG` imports no torch
    __getattr__ = lazy_exports(__name__)

__all__ = ["LanguageModel", "PackedModel", "ValueModel"]

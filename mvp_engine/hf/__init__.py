"""Hugging Face models on packed batches: wrappers, loading, export, adapters.

This is the only package that imports transformers' internals.
"""

from mvp_engine.hf.language_model import LanguageModel
from mvp_engine.hf.packed_model import PackedModel
from mvp_engine.hf.value_model import ValueModel

__all__ = ["LanguageModel", "PackedModel", "ValueModel"]

"""Building a transformers model from a config, with packed attention where the model's code lets it be chosen."""

from __future__ import annotations

from typing import Any

from mvp_engine.errors import UserError
from mvp_engine.hf import attention
from mvp_engine.hf.padded_rows import own_attention


def generating_class(config: Any) -> Any:
    """The auto class that names a type's model with a language-model head."""
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForMultimodalLM,
        AutoModelForSeq2SeqLM,
    )

    # The last one also lists decoder-only models that hear audio (Audio Flamingo).
    for auto_class in (AutoModelForMultimodalLM, AutoModelForCausalLM, AutoModelForSeq2SeqLM):
        if type(config) in auto_class._model_mapping:
            return auto_class
    return AutoModelForCausalLM


def from_auto(auto_class: Any, config: Any) -> Any:
    """The model that a transformers auto class builds from a config, with packed attention."""
    model_type = config.model_type
    if type(config) not in auto_class._model_mapping:
        raise UserError(
            f"transformers has no {model_type} model for {auto_class.__name__}: "
            "choose another model.type or another model"
        )
    config._attn_implementation = attention.register()
    try:
        try:
            return auto_class.from_config(config)
        except KeyError as error:
            if attention.NAME not in error.args:
                raise
            # Encoders with attention code of their own, such as SAM, take one item per row and need no boundaries.
            attention.build_encoders_eagerly(config)
            return auto_class.from_config(config)
    except ImportError as error:
        missing = " ".join(str(error).split())
        raise UserError(f"{model_type} needs a package that is not installed: {missing}") from error
    except Exception as error:
        if isinstance(error, KeyError) and attention.NAME in error.args:
            return _with_own_attention(auto_class, config)
        raise UserError(
            f"{model_type} cannot be built from this config: {type(error).__name__}: {error}"
        ) from error


def _with_own_attention(auto_class: Any, config: Any) -> Any:
    """A model whose attention classes are chosen by name, and are not those of transformers' interface."""
    config._attn_implementation = own_attention(auto_class._model_mapping[type(config)])
    model = auto_class.from_config(config)
    model.needs_padded_rows = "it has attention code of its own"
    return model

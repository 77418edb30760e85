"""Building a transformers model from a config, with packed attention where the model's code lets it be chosen."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mvp_engine.data.batch import PackedBatch
from mvp_engine.errors import UserError
from mvp_engine.hf.model import attention
from mvp_engine.hf.model.model_inputs import media_inputs


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


# Padded rows: one sequence per row of a batch, for models that cannot run several sequences in one row.
#
# Some models build masks, positions or biases from the shape of their batch (ALiBi in BLOOM and MPT, GPT-J, CodeGen),
# or do not pass sequence boundaries to attention (StableLM). They run with transformers' own attention on rows that are
# padded on the right: a causal model's tokens do not see the padding after them, so the results are exact. It is slower
# than packing: each row is as long as the longest sequence of the micro-batch. `preflight.py` decides which models need
# it. All ranks run one forward for each micro-batch, as FSDP requires.
#
# Legend: S sequences, L tokens of the longest, T tokens of all.


def use_own_attention(hf: Any) -> None:
    """Set transformers' own attention in the text backbone of a built model: SDPA where it has that, else eager."""
    hf.config._attn_implementation = own_attention(type(hf))


def own_attention(model_class: Any) -> str:
    return "sdpa" if getattr(model_class, "_supports_sdpa", False) else "eager"


def hidden_of_rows(
    base: nn.Module, hidden_of: Callable[[Any], Tensor], batch: PackedBatch
) -> Tensor:
    """The last hidden states (T, D) of a packed batch, computed on padded rows.

    `hidden_of`: those (S, L, D) in an output of `base`.
    """
    places_SL, tokens_T = _rows(batch)
    inputs: dict[str, Any] = {
        "input_ids": batch.input_ids[places_SL],
        "use_cache": False,
        **media_inputs(base, batch),
    }
    accepted = inspect.signature(base.forward).parameters
    if "position_ids" in accepted:
        # Positions continue in the padding: repeated ones would look like a new sequence to transformers.
        last_S1 = batch.cu_seqlens[1:, None].long() - 1
        steps_1L = torch.arange(places_SL.shape[1], device=places_SL.device)[None]
        starts_S1 = batch.cu_seqlens[:-1, None].long()
        padding_SL = (starts_S1 + steps_1L - last_S1).clamp(min=0)
        inputs["position_ids"] = batch.position_ids[places_SL] + padding_SL
    hidden_SLD = hidden_of(base(**inputs))
    return hidden_SLD.flatten(0, 1)[tokens_T]


def _rows(batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """The token of each place in the rows, the last one repeated as padding; and the places without padding."""
    lengths_S1 = torch.tensor(batch.host_lengths)[:, None]
    steps_1L = torch.arange(int(lengths_S1.max()))[None]
    starts_S1 = lengths_S1.cumsum(0) - lengths_S1
    places_SL = starts_S1 + torch.minimum(steps_1L, lengths_S1 - 1)
    tokens_T = (
        (steps_1L < lengths_S1).flatten().nonzero()[:, 0]
    )  # on the host: no sync with the GPU
    device = batch.input_ids.device
    return places_SL.to(device), tokens_T.to(device)

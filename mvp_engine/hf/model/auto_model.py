"""Building a transformers model from a config, with packed attention where the model's code lets it be chosen."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.distributed.sequence_parallel import UlyssesShard
from mvp_engine.errors import RowError, UserError
from mvp_engine.hf.media.shared_media import encoder_inputs
from mvp_engine.hf.model import attention


def generating_class(config: Any) -> Any:
    """The auto class that names a type's model with a language-model head."""
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, AutoModelForSeq2SeqLM

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
    # On the host: no sync with the GPU.
    tokens_T = (steps_1L < lengths_S1).flatten().nonzero()[:, 0]
    device = batch.input_ids.device
    return places_SL.to(device), tokens_T.to(device)


# A packed batch as inputs of a transformers model: keyword arguments for media, and checks.


def check_token_range(batch: PackedBatch, field: str, layer: Any) -> None:
    """Raise for a token id outside of the vocabulary. `field`: "input_ids" or "labels".

    Without the check, such a label gets the log-probability of another token, and such an input
    ends in an index error that does not name the place. Reads values: call it on host tensors.
    """
    values = getattr(batch, field)
    vocab_size = layer.weight.shape[0]
    bad = (values < 0) | (values >= vocab_size)
    if field == "labels":
        bad &= values != IGNORE
    if not bool(bad.any()):
        return
    at = int(bad.nonzero()[0])
    sequence = int((batch.cu_seqlens <= at).sum()) - 1
    position = at - int(batch.cu_seqlens[sequence])
    hint = f" (write {IGNORE} for a position without a label)" if field == "labels" else ""
    raise RowError(
        f"{field}: {int(values[at])} at position {position} of sequence {sequence} is outside of "
        f"the model's vocabulary of {vocab_size} tokens{hint}",
        sequence,
    )


# Arguments of forward for images that are no tokens of the sequence, so sequence boundaries do not separate them.
_CROSS_ATTENTION = {"cross_attention_states", "perceiver_embeddings"}


def check_inputs(causal_lm: nn.Module) -> None:
    """Raise for a model that takes its media in another way than as features of placeholder tokens."""
    name = type(causal_lm).__name__
    config: Any = causal_lm.config
    if not hasattr(config.get_text_config(), "vocab_size"):
        raise UserError(f"{name} is no language model: its config has no vocabulary")
    if hasattr(config, "codec_config"):
        raise UserError(
            f"{name} hears audio as {config.num_codebooks} codes that are added to each token of text, not as tokens "
            "of its own: rows with a transcript for each frame are not supported. Choose another model"
        )
    if hasattr(getattr(config, "audio_config", None), "diarization_config"):
        raise UserError(
            f"{name} has a diarization encoder that reads the padding after a sound, so sounds of one pack would "
            "change each other. Choose another model"
        )
    base: Any = causal_lm.base_model
    parameters = inspect.signature(base.forward).parameters
    if _CROSS_ATTENTION & parameters.keys():
        raise UserError(
            f"{name} sees images by cross-attention, not as tokens of its sequence: packed sequences do not support it"
        )
    required = [
        parameter.name
        for parameter in parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind == parameter.POSITIONAL_OR_KEYWORD
    ]
    if set(required) - {"input_ids"}:
        raise UserError(
            f"{name} cannot run without {' and '.join(required)}: rows without media cannot be trained"
        )


def needed_media(error: Exception) -> str:
    """The input of an encoder that a forward on text alone asks for; empty for other errors."""
    names = ("pixel_values", "input_features", "input_values")
    found = [name for name in names if name in str(error)]
    return found[0] if found and isinstance(error, ValueError) else ""


def media_inputs(
    base: nn.Module, batch: PackedBatch, shard: UlyssesShard | None = None, need_types: bool = True
) -> dict[str, Any]:
    """Keyword arguments for media: values and fields of each kind with items, and token types.

    `need_types=False`: token types are passed if the batch has them.

    Raises where a model needs token types or three-axis positions for images and the batch lacks
    them: transformers would continue as if the images were text.
    """
    inputs: dict[str, Any] = {}
    for kind, media in batch.media.items():
        if len(media.row_counts) and not media.is_target:
            inputs |= encoder_inputs(base, kind, media, shard)
    has_media = bool(inputs)
    name = type(base).__name__
    has_mrope = hasattr(base, "get_rope_index")
    if has_media and has_mrope and batch.position_ids.ndim == 1:
        raise UserError(
            f"{name} has positions on three axes: "
            "build the batch's position_ids with its get_rope_index"
        )
    # With get_rope_index, mm_token_type_ids only serve to compute position_ids.
    token_types = ["token_type_ids", "moe_mm_token_type_ids"]
    if not has_mrope:
        token_types.append("mm_token_type_ids")
    taken = inspect.signature(base.forward).parameters
    for field in token_types:
        given = field in batch.token_fields
        if not (has_media or given) or field not in taken:
            continue
        if not given and not need_types:
            continue
        if not given:
            raise UserError(
                f"{name} reads {field} to see images: give them in the batch's "
                f"token_fields[{field!r}]"
            )
        inputs[field] = batch.token_fields[field][None]
    return inputs

"""A packed batch as inputs of a transformers model: keyword arguments for media, and checks."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.distributed.ulysses import UlyssesShard
from mvp_engine.errors import RowError, UserError
from mvp_engine.hf.media.shared_media import encoder_inputs


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
    base: nn.Module,
    batch: PackedBatch,
    shard: UlyssesShard | None = None,
    need_types: bool = True,
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
    for field in token_types:
        given = field in batch.token_fields
        if not (has_media or given) or not _takes(base, field):
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


def _takes(module: nn.Module, argument: str) -> bool:
    return argument in inspect.signature(module.forward).parameters

"""Configs of Omni models: which talkers can be trained."""

from __future__ import annotations

from typing import Any

from mvp_engine.errors import UserError


def check_talker(config: Any) -> None:
    """Raise `UserError` for a config without a talker that can be trained, or one whose sizes do not fit."""
    model_type = config.model_type
    if model_type.startswith("qwen2_5_omni"):
        raise UserError(
            f"model.type=omni_model: the talker of {model_type} cannot be trained. The encoder of its codec was never "
            "released, so there are no codes to learn from. Train the thinker: model.type=language_model"
        )
    if model_type != "qwen3_omni_moe":
        raise UserError(
            f"model.type=omni_model is for models with a talker (qwen3_omni_moe, csm), not for {model_type}: set "
            "model.type=language_model"
        )
    if not config.enable_audio_output:
        raise UserError(
            "model.type=omni_model: enable_audio_output of the model's config is false, so the folder has no talker. "
            "Set model.type=language_model"
        )
    talker = config.talker_config
    predictor = talker.code_predictor_config
    vocoder = config.code2wav_config
    same = {
        "talker_config.num_code_groups": talker.num_code_groups,
        "talker_config.code_predictor_config.num_code_groups": predictor.num_code_groups,
        "code2wav_config.num_quantizers": vocoder.num_quantizers,
    }
    _check_equal(same, "the number of codebooks")
    same = {
        "talker_config.text_config.hidden_size": talker.text_config.hidden_size,
        "talker_config.code_predictor_config.hidden_size": predictor.hidden_size,
    }
    _check_equal(same, "the hidden size of the talker")
    same = {
        "thinker_config.text_config.hidden_size": config.thinker_config.text_config.hidden_size,
        "talker_config.thinker_hidden_size": talker.thinker_hidden_size,
    }
    _check_equal(same, "the hidden size of the thinker")
    if vocoder.codebook_size < predictor.vocab_size:
        raise UserError(
            f"model.config.code2wav_config.codebook_size={vocoder.codebook_size}: the talker speaks codes up to "
            f"{predictor.vocab_size - 1} (talker_config.code_predictor_config.vocab_size), which the vocoder lacks"
        )
    layers = config.thinker_config.text_config.num_hidden_layers
    if not 0 < talker.accept_hidden_layer <= layers:
        raise UserError(
            f"model.config.talker_config.accept_hidden_layer={talker.accept_hidden_layer}: the thinker has {layers} "
            "layers, and the talker reads media from the output of one of them"
        )


def _check_equal(values: dict[str, int], what: str) -> None:
    if len(set(values.values())) > 1:
        listed = ", ".join(f"model.config.{name}={value}" for name, value in values.items())
        raise UserError(f"{what} must be the same: {listed}")

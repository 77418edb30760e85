"""The model of benchmarks/speech.py: Qwen3-Omni's talker in its real shape, with a tokenizer of a few words."""

from __future__ import annotations

from typing import Any

WORDS = "the a of to and in is you that it he was for on are as with his they at be this have from or one".split()  # noqa: SIM905
TTS = ("<tts_pad>", "<tts_bos>", "<tts_eos>")


def tokenizer() -> Any:
    from mvp_engine.kit.tiny_processors import word_tokenizer

    return word_tokenizer(["say", *WORDS], TTS)


def model_config(tiny: bool) -> dict[str, Any]:
    """Qwen3-Omni-30B-A3B's talker, code predictor and embeddings; the thinker's blocks are one layer."""
    ids = tokenizer().get_vocab()
    talker: dict[str, Any] = {
        "num_code_groups": 16,
        "thinker_hidden_size": 2048,
        "accept_hidden_layer": 1,
        "codec_eos_token_id": 2150,
        "codec_bos_id": 2149,
        "codec_pad_id": 2148,
        "codec_nothink_id": 2155,
        "codec_think_bos_id": 2156,
        "codec_think_eos_id": 2157,
        "speaker_id": {"ethan": 2302},
        "text_config": {"vocab_size": 3072, "shared_expert_intermediate_size": 768, "num_experts_per_tok": 6},
        "code_predictor_config": {"num_code_groups": 16},
    }
    talker["text_config"]["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": [24, 20, 20],
        "interleaved": True,
    }
    talker["text_config"]["head_dim"] = 128
    text: dict[str, Any] = {"num_hidden_layers": 1, "vocab_size": 152_064, "hidden_size": 2048, "head_dim": 128}
    text |= {"num_attention_heads": 32, "num_key_value_heads": 4}
    text["rope_parameters"] = talker["text_config"]["rope_parameters"]
    thinker = {
        "text_config": text,
        "vision_config": {"depth": 1, "deepstack_visual_indexes": [0], "out_hidden_size": 2048},
        "audio_config": {"encoder_layers": 1, "num_hidden_layers": 1, "output_dim": 2048},
    }
    vocoder: dict[str, Any] = {"num_hidden_layers": 1, "upsample_rates": [8, 5, 4, 3], "upsampling_ratios": [2, 2]}
    if tiny:
        small = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        own = {**small, **experts, "head_dim": 8, "rope_parameters": rope}
        thinker["text_config"] = {**own, "num_hidden_layers": 1, "vocab_size": 64}
        thinker["vision_config"] |= {"hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
        thinker["audio_config"] |= {"d_model": 16, "encoder_attention_heads": 2, "encoder_ffn_dim": 16}
        thinker["audio_config"] |= {"output_dim": 32, "downsample_hidden_size": 8, "num_mel_bins": 16}
        talker["text_config"] |= {**own, "num_hidden_layers": 2, "shared_expert_intermediate_size": 16}
        talker["code_predictor_config"] |= {**small, "head_dim": 8, "num_hidden_layers": 1}
        talker["thinker_hidden_size"] = 32
        vocoder |= {**small, "decoder_dim": 32}
    return {
        "model_type": "qwen3_omni_moe",
        "im_start_token_id": ids["<|im_start|>"],
        "im_end_token_id": ids["<|im_end|>"],
        "tts_pad_token_id": ids["<tts_pad>"],
        "tts_bos_token_id": ids["<tts_bos>"],
        "tts_eos_token_id": ids["<tts_eos>"],
        "system_token_id": ids["system"],
        "user_token_id": ids["user"],
        "assistant_token_id": ids["assistant"],
        "thinker_config": thinker,
        "talker_config": talker,
        "code2wav_config": vocoder,
    }

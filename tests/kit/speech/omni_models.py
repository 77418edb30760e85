"""Tiny random Omni models of transformers: whole ones, with thinker, talker and vocoder, and folders of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from conftest import recipe_step

from mvp_engine.kit.loss import TokenNormedLossKit
from mvp_engine.kit.speech.settings import SpeechLoss

IM_START, IM_END, SYSTEM, USER, ASSISTANT, NEWLINE = 1, 2, 3, 4, 5, 6
TTS_PAD, TTS_BOS, TTS_EOS = 7, 8, 9
AUDIO, IMAGE, VIDEO, VISION_START, VISION_END, AUDIO_START, AUDIO_END = 10, 11, 12, 13, 14, 15, 16
FIRST_TEXT, VOCAB = 20, 99
BOOKS, CODES = 4, 32
CODEC = {"pad": 34, "bos": 35, "eos": 36, "nothink": 37, "think_bos": 38, "think_eos": 39}
SPEAKERS = {"ethan": 40, "chelsie": 41}

_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "interleaved": True}
_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rope_parameters": _ROPE,
    "initializer_range": 0.2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
_MEDIA_TOKENS = {"audio_token_id": AUDIO, "image_token_id": IMAGE, "video_token_id": VIDEO}


def qwen3_omni_settings():
    """The settings of a tiny Qwen3-Omni, as `model.config` or as arguments of its config class."""
    tokens = {
        **_MEDIA_TOKENS,
        "vision_start_token_id": VISION_START,
        "audio_start_token_id": AUDIO_START,
    }
    vision = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "patch_size": 2,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
        "initializer_range": 0.2,
    }
    audio = {
        "num_mel_bins": 8,
        "d_model": 16,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 24,
        "output_dim": 32,
        "max_source_positions": 32,
        "n_window_infer": 100,
        "downsample_hidden_size": 8,
        "initializer_range": 0.2,
    }
    thinker = {
        "text_config": {**_TEXT, **_EXPERTS},
        "vision_config": vision,
        "audio_config": audio,
        "initializer_range": 0.2,
        "user_token_id": USER,
        **tokens,
    }
    talker = {
        "text_config": {
            **_TEXT,
            **_EXPERTS,
            "vocab_size": 48,
            "hidden_size": 24,
            "shared_expert_intermediate_size": 16,
            "num_hidden_layers": 2,
        },
        "code_predictor_config": {
            "vocab_size": CODES,
            "hidden_size": 24,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 64,
            "num_code_groups": BOOKS,
            "initializer_range": 0.2,
        },
        "num_code_groups": BOOKS,
        "thinker_hidden_size": 32,
        "accept_hidden_layer": 2,
        "spatial_merge_size": 2,
        "codec_eos_token_id": CODEC["eos"],
        "speaker_id": SPEAKERS,
        "initializer_range": 0.2,
        **{
            f"codec_{name}_id": CODEC[name]
            for name in ("pad", "bos", "nothink", "think_bos", "think_eos")
        },
        **tokens,
    }
    vocoder = {
        "codebook_size": CODES,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_quantizers": BOOKS,
        "upsample_rates": [2, 2],
        "upsampling_ratios": [2],
        "decoder_dim": 16,
        "sliding_window": 8,
    }
    return {
        "thinker_config": thinker,
        "talker_config": talker,
        "code2wav_config": vocoder,
        "im_start_token_id": IM_START,
        "im_end_token_id": IM_END,
        "tts_pad_token_id": TTS_PAD,
        "tts_bos_token_id": TTS_BOS,
        "tts_eos_token_id": TTS_EOS,
        "system_token_id": SYSTEM,
        "user_token_id": USER,
        "assistant_token_id": ASSISTANT,
    }


def qwen3_omni(seed=1):
    """A whole Qwen3-Omni of transformers. Its talker's experts get values here: transformers sets none."""
    from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

    torch.manual_seed(seed)
    model = Qwen3OmniMoeForConditionalGeneration(Qwen3OmniMoeConfig(**qwen3_omni_settings()))
    for name, param in model.named_parameters():
        if "talker" in name and (".experts." in name or ".mlp.gate." in name):
            torch.nn.init.normal_(param, std=0.2)
    return model.eval()


def qwen2_5_omni(seed=1):
    """A whole Qwen2.5-Omni of transformers."""
    from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration

    torch.manual_seed(seed)
    text = {**_TEXT, "rope_parameters": {**_ROPE, "interleaved": False}}
    text.pop("head_dim")
    vision = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "patch_size": 2,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "out_hidden_size": 32,
        "fullatt_block_indexes": [1],
        "window_size": 8,
    }
    audio = {
        "num_mel_bins": 8,
        "d_model": 16,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 24,
        "output_dim": 32,
        "max_source_positions": 32,
        "n_window": 4,
    }
    named = {"audio_token_index": AUDIO, "image_token_index": IMAGE, "video_token_index": VIDEO}
    thinker = {
        "text_config": text,
        "vision_config": vision,
        "audio_config": audio,
        "vision_start_token_id": VISION_START,
        "audio_start_token_id": AUDIO_START,
        "audio_end_token_id": AUDIO_END,
        **named,
    }
    talker = {
        **text,
        "vocab_size": 48,
        "hidden_size": 24,
        "embedding_size": 32,
        "num_hidden_layers": 2,
        **named,
    }
    dit = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 8,
        "emb_dim": 8,
        "num_embeds": 32,
        "mel_dim": 8,
        "enc_emb_dim": 8,
        "enc_dim": 8,
        "enc_channels": [8, 8, 8, 8, 16],
        "enc_attention_channels": 4,
        "enc_se_channels": 4,
        "look_ahead_layers": [1],
        "look_backward_layers": [0],
    }
    big_vgan = {
        "mel_dim": 8,
        "upsample_initial_channel": 16,
        "upsample_rates": [2],
        "upsample_kernel_sizes": [4],
    }
    vocoder = {"dit_config": dit, "bigvgan_config": big_vgan}
    config = Qwen2_5OmniConfig(
        thinker_config=thinker, talker_config=talker, token2wav_config=vocoder
    )
    return Qwen2_5OmniForConditionalGeneration(config).eval()


OMNI = {"qwen3_omni_moe": qwen3_omni, "qwen2_5_omni": qwen2_5_omni}


def omni_folder(family, where, **options):
    """Write a random pretrained folder as transformers does; returns the model."""
    model = OMNI[family]()
    model.save_pretrained(where, **options)
    if family == "qwen2_5_omni":
        torch.save({}, where / "spk_dict.pt")
    return model


def spoken_row(
    turns=1,
    media="",
    spoken=(0,),
    frames=5,
    seed=0,
    text=3,
    prompt_only=False,
):
    """Ids, media and codes of one row: a system turn, then `turns` questions and answers.

    `media` ("", or some of "image video audio") are in the last question; answers in `spoken` have codes.
    """
    g = torch.Generator().manual_seed(seed)

    def words(count):
        return torch.randint(FIRST_TEXT, VOCAB, (count,), generator=g).tolist()

    ids = [IM_START, SYSTEM, NEWLINE, *words(2), IM_END, NEWLINE]
    found: dict[str, Any] = {}
    for turn in range(turns):
        ids += [IM_START, USER, NEWLINE, *words(2)]
        if turn == turns - 1 and "image" in media:
            ids += [VISION_START, *[IMAGE] * 4, VISION_END]
            found["pixel_values"] = torch.randn(16, 24, generator=g)
            found["image_grid_thw"] = torch.tensor([[1, 4, 4]])
        if turn == turns - 1 and "video" in media:
            ids += [VISION_START, *[VIDEO] * 8, VISION_END]
            found["pixel_values_videos"] = torch.randn(32, 24, generator=g)
            found["video_grid_thw"] = torch.tensor([[2, 4, 4]])
            found["video_second_per_grid"] = torch.tensor([0.5])
        if turn == turns - 1 and "audio" in media:
            ids += [AUDIO_START, *[AUDIO] * 2, AUDIO_END]
            found["input_features"] = torch.randn(1, 8, 10, generator=g)
            found["feature_attention_mask"] = torch.ones(1, 10, dtype=torch.long)
        ids += [*words(1), IM_END, NEWLINE, IM_START, ASSISTANT, NEWLINE]
        if turn == turns - 1 and prompt_only:
            break
        ids += [*words(text), IM_END, NEWLINE]
    codes = {turn: torch.randint(0, CODES, (frames + turn, BOOKS), generator=g) for turn in spoken}
    return {"ids": torch.tensor(ids), "media": found, "codes": codes}


# Shapes of items' values and fields.
_KINDS: dict[str, Any] = {
    "pixel_values": ((24,), {"image_grid_thw": (3,)}),
    "pixel_values_videos": ((24,), {"video_grid_thw": (3,), "video_second_per_grid": ()}),
    "input_features": ((8, 10), {"feature_attention_mask": (10,)}),
}


def batch_of(config, row, speaker=None):
    """A row as the data kit makes it: a batch of one sequence, answers with loss, speech planned."""
    from mvp_engine.data.batch import Media, PackedBatch
    from mvp_engine.kit.data.encode.row_encoder import RopePositions
    from mvp_engine.kit.speech.protocol import SpeechProtocol, SpokenTurn
    from mvp_engine.kit.speech.rows import SPEECH

    ids, found = row["ids"], row["media"]
    one = torch.tensor([0])
    media: dict[str, Media] = {}
    for kind, (shape, fields) in _KINDS.items():
        if kind in found:
            count = torch.tensor([len(found[kind])])
            media[kind] = Media(
                found[kind], count, one.clone(), {name: found[name] for name in fields}
            )
        else:
            nothing = torch.zeros(0, dtype=torch.long)
            empty = {
                name: torch.zeros(0, *size, dtype=torch.long if size else None)
                for name, size in fields.items()
            }
            media[kind] = Media(torch.zeros(0, *shape), nothing, nothing, empty)
    positions = RopePositions(config)(ids, {}, media)
    protocol = SpeechProtocol.for_config(config)
    assert protocol is not None
    turns = [SpokenTurn(turn, codes, speaker) for turn, codes in row["codes"].items()]
    media[SPEECH] = protocol.plan(ids, positions, turns)
    loss, role, inside = [], None, False
    for place, token in enumerate(ids.tolist()):
        if token == IM_START:
            role, inside = int(ids[place + 1]), False
        loss.append(inside and role == ASSISTANT)
        inside = (inside or (token == NEWLINE and role is not None)) and token != IM_END
    return PackedBatch.from_sequences(
        [ids], [torch.tensor(loss)], position_ids=[positions], media=media
    )


def speech_step(model, settings=None, text=False, ctx=None):
    """The step of recipes/qwen_omni on a model. `text=False`: the thinker is frozen, so speech alone has a loss."""
    parts = {
        "model": model,
        "config": SimpleNamespace(speech_loss=settings or SpeechLoss()),
        "trains_text": text,
        "loss": TokenNormedLossKit(),
        "data": SimpleNamespace(log_sources=lambda *_: None),
    }
    return recipe_step("qwen_omni", ctx, **parts)

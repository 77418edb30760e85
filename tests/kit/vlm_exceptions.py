"""What the tiny configs and processors of single types need beyond the rules of `vlm_tiny.py`."""

from vlm_special import (
    DROP,
    FOUR_HEADS,
    GEMMA3,
    GEMMA4_AUDIO,
    IMAGE_WORDS,
    MROPE,
    QWEN2_5_OMNI,
    QWEN3_OMNI,
    SAM,
    SIGLIP,
    TOKENIZER,
    VQ,
    Special,
    glm_like,
    omni_like,
    qwen_like,
)

EXCEPTIONS = {
    "aria": Special(  # its processor fixes the size of images to 980
        options={"size_conversion": {980: 4}},
        config={
            "projector_patch_to_query_dict": {49: 4},
            "vision_config": {"image_size": 980, "patch_size": 140},
            "text_config": {"moe_num_experts": 4, "moe_topk": 2},
        },
    ),
    "aya_vision": Special(
        options={"img_size": 16, "patch_size": 4, "downsample_factor": 2},
        config={"downsample_factor": 2, "text_config": {"sliding_window_pattern": 2}},
    ),
    "cohere2_vision": Special(images={"patch_size": 2}),
    "cohere_compass": qwen_like(
        config={
            "text_config": {
                "rope_parameters": {
                    "full_attention": {
                        "rope_type": "default",
                        "rope_theta": 1e4,
                        "mrope_section": [1, 1, 2],
                    }
                }
            }
        },
        places={
            kind: f"<|VISION_START|><|{kind.upper()}_PAD|><|VISION_END|>"
            for kind in ("image", "video")
        },
        tokens=(),
        aliases={},
    ),
    "cosmos3_edge": qwen_like(),
    "cosmos3_omni": qwen_like(processor_of="qwen3_vl"),
    "deepseek_ocr2": Special(
        images={"size": {"height": 256, "width": 256}, "tile_size": 192},
        options={"patch_size": 4},
        config={
            "text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
            "vision_config": {
                "sam_config": {**SAM, "image_size": 256, "downsample_channels": [24, 32]}
            },
        },
    ),
    "unlimited_ocr": Special(
        images={"size": {"height": 64, "width": 64}, "tile_size": 48},
        config={"vision_config": {"sam_config": {**SAM, "downsample_channels": [24, 32]}}},
    ),
    "deepseek_vl_hybrid": Special(
        config={"high_res_vision_config": SAM},
        images={"high_res_size": {"height": 64, "width": 64}},
    ),
    "diffusion_gemma": Special(
        image_processor="Gemma4ImageProcessor",
        video_processor="Gemma4VideoProcessor",
        feature_extractor="Gemma4AudioFeatureExtractor",
        parts={"vision_config": {}},
        config={
            "text_config": {
                "per_layer_config": DROP,
                "num_experts": 4,
                "top_k_experts": 2,
                "moe_intermediate_size": 16,
            }
        },
        named=GEMMA4_AUDIO,
    ),
    "ernie4_5_vl_moe": Special(
        videos={"draw_on_frames": False},
        places={
            kind: f"<|{kind}_start_token|><|{kind}_token|><|{kind}_end_token|>"
            for kind in ("image", "video")
        },
        config={
            "text_config": {**MROPE, "moe_intermediate_size": [16, 16], "moe_num_shared_experts": 1}
        },
    ),
    "exaone4_5": qwen_like(config={}),
    "fast_vlm": Special(
        processor_of="llava",
        needs="timm",
        images={"size": {"shortest_edge": 64}, "crop_size": {"height": 64, "width": 64}},
        options={
            "patch_size": 32,
            "vision_feature_select_strategy": "full",
            "num_additional_image_tokens": 0,
        },
        config={
            "vision_config": {
                "architecture": "test_efficientnet_ln",
                "hidden_size": 256,
                "model_args": DROP,
            }
        },
    ),
    "perception_lm": Special(
        needs="timm",
        images={"tile_size": 16},
        options={"patch_size": 4, "pooling_ratio": 2},
        config={
            "projector_pooling_ratio": 2,
            "vision_use_cls_token": True,
            "vision_config": {
                "architecture": "vit_tiny_patch16_224",
                "hidden_size": 32,
                "model_args": {
                    "embed_dim": 32,
                    "depth": 2,
                    "num_heads": 4,
                    "img_size": [16, 16],
                    "patch_size": 4,
                },
            },
        },
    ),
    "gemma3": Special(**GEMMA3),
    "shieldgemma2": Special(processor_of="gemma3", **GEMMA3),
    "gemma4": Special(
        parts={"vision_config": {}, "audio_config": {}},
        config={"text_config": {"per_layer_config": DROP}},
        named=GEMMA4_AUDIO,
    ),
    "gemma3n": Special(
        needs="timm",
        images={"size": {"height": 64, "width": 64}},
        audio={"feature_size": 8},
        options={"image_seq_length": 4, "audio_seq_length": 4},
        config={
            "vision_soft_tokens_per_image": 4,
            "audio_soft_tokens_per_image": 4,
            "text_config": {
                "num_hidden_layers": 4,
                "num_kv_shared_layers": 2,
                "intermediate_size": 24,
                "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            "vision_config": {
                "architecture": "test_efficientnet_ln",
                "hidden_size": 256,
                "vocab_size": 10,
                "vocab_offset": 620,
            },
            "audio_config": {"input_feat_size": 8, "vocab_size": 10, "vocab_offset": 630},
        },
    ),
    **dict.fromkeys(
        ["granite_speech", "granite_speech_plus"],
        Special(needs="torchaudio", config={"window_size": 15, "downsample_rate": 5}),
    ),
    "glm4v": glm_like(),
    "glm4v_moe": glm_like(
        image_processor="Glm4vImageProcessor",
        video_processor="Glm4vVideoProcessor",
        config={
            "text_config": {
                "rope_parameters": {**MROPE["rope_parameters"], "partial_rotary_factor": 1.0}
            }
        },
    ),
    "glm46v": glm_like(),
    "glmga": glm_like(processor_of="glm46v", image_processor="GlmgaImageProcessor"),
    "glm_ocr": glm_like(processor_of="glm46v"),
    "glm5_next": glm_like(
        config={
            "text_config": {
                **MROPE,
                **FOUR_HEADS,
                "linear_head_dim": 8,
                "linear_num_heads": 4,
                "index_kpool": 2,
                "qk_rope_head_dim": 0,
                "qk_head_dim": 8,
            }
        }
    ),
    "got_ocr2": Special(  # its processor fixes the tokens of an image to 256
        images={"size": {"height": 256, "width": 256}},
        config={
            "vision_config": {"image_size": 256, "output_channels": 16, "global_attn_indexes": []}
        },
    ),
    "hunyuan_vl": Special(
        named={
            "image_token": "<image>",
            "image_start_token": "<start>",
            "image_end_token": "<end>",
        },
        places={"image": "<start><image><end>"},
        config={
            "vision_config": {"max_image_size": 64},
            "text_config": {
                "head_dim": 8,
                "rope_parameters": {
                    "rope_type": "dynamic",
                    "rope_theta": 1e4,
                    "alpha": 1000.0,
                    "factor": 1.0,
                    "mrope_section": [1, 1, 1, 1],
                },
            },
        },
    ),
    "internvl": Special(options={"image_seq_length": 4}),
    "qianfan_ocr": Special(options={"image_seq_length": 4}, places={"image": "<image>"}),
    "granite4_vision": Special(
        parts={"deepstack_layer_map": [[0, 0]], "downsample_rate": "1/2"},
        options={"downsample_rate": "1/2"},
        config={"vision_config": {"hidden_size": 64}},
    ),
    "molmo2": Special(
        images={"overlap_margins": [1, 1]},
        config={"adapter_config": {"vision_feature_layer": [1, 0]}},
        aliases={"image_patch": "<im_patch>"},
        tokens=(
            "<im_patch>",
            "<im_col>",
            "<im_start>",
            "<low_res_im_start>",
            "<im_end>",
            "<im_low>",
        ),
    ),
    "step3p7": Special(
        images={
            "size": {"height": 64, "width": 64},
            "patch_size": 32,
            "vision_patch_size": 4,
            "downsampler_stride": 4,
        },
        config={
            "text_config": {"sliding_window": 48},
            "vision_config": {"image_size": 64, "patch_size": 4},
        },
    ),
    "kimi_k25": Special(config={"text_config": FOUR_HEADS}),
    "lfm2_vl": Special(
        images={
            "encoder_patch_size": 4,
            "tile_size": 32,
            "max_image_tokens": 16,
            "min_image_tokens": 4,
        },
        config={"text_config": {"layer_types": ["conv", "full_attention"], "full_attn_idxs": DROP}},
    ),
    "llama4": Special(
        aliases={"image": "<|patch|>"}, config={"vision_config": {"intermediate_size": 128}}
    ),
    "llava_onevision": Special(**SIGLIP),
    "minimax_m3_vl": Special(
        tokens=("]<]image[>[", "]<]video[>[", "]<]start of image[>[", "]<]end of image[>["),
    ),
    "mistral3": Special(options={"spatial_merge_size": 2}),
    "mistral_large4": Special(
        options={"spatial_merge_size": 2}, config={"text_config": {**FOUR_HEADS, "index_topk": 256}}
    ),
    "ovis2": Special(
        aliases={"image": "<IMG_ATOM>"},
        tokens=tuple(f"<IMG_{n}>" for n in ("START", "ATOM", "GRID", "COL", "ROW", "END")),
    ),
    "paddleocr_vl": qwen_like(
        places={"image": "<|IMAGE_START|><|image_token|><|IMAGE_END|>"},
        tokens=("<|IMAGE_START|>", "<|IMAGE_END|>"),
        aliases={"vision_start": "<|IMAGE_START|>"},
    ),
    "qwen2_vl": qwen_like(),
    "qwen2_5_vl": qwen_like(),
    "qwen2_5_omni_thinker": omni_like("qwen2_5_omni", QWEN2_5_OMNI),
    "qwen3_omni_moe_thinker": omni_like("qwen3_omni_moe", QWEN3_OMNI),
    # Whole folders, of which a language model is the thinker.
    "qwen2_5_omni": omni_like("qwen2_5_omni", {"thinker_config": QWEN2_5_OMNI}),
    "qwen3_omni_moe": omni_like("qwen3_omni_moe", {"thinker_config": QWEN3_OMNI}),
    "qwen3_vl": qwen_like(),
    "qwen3_vl_moe": qwen_like(
        image_processor="Qwen2VLImageProcessor", video_processor="Qwen3VLVideoProcessor"
    ),
    "qwen3_5": qwen_like(),
    "qwen3_5_moe": qwen_like(),
    "qwen4_exp": qwen_like(),
    "hyperclovax_vision_v2": qwen_like(config={}),
    "video_llama_3": Special(),
    "video_llava": Special(),
    "fuyu": Special(tokens=("|SPEAKER|", "|NEWLINE|", "<0x04>")),
    "gemma4_unified": Special(
        parts={"vision_config": {}, "audio_config": {}},
        config={
            "text_config": {"per_layer_config": DROP},
            "vision_config": {"mm_embed_dim": 32, "mm_posemb_size": 64},
        },
        named=GEMMA4_AUDIO,
        noise=0.05,
    ),
    # Refused by their models, before any processor is used.
    **{
        name: Special(processor_of="llava", **({"parts": parts} if parts else {}))
        for name, parts in {
            "instructblip": {},
            "voxtral_realtime": {},
            "instructblipvideo": {},
            "evolla": {},
            "nemotron_h_omni": {},
            "vision-encoder-decoder": {
                "encoder": {"model_type": "vit"},
                "decoder": {"model_type": "gpt2"},
            },
        }.items()
    },
    "kyutai_speech_to_text": Special(
        processor_of="llava", config={"codec_config": {"upsample_groups": 32}}
    ),
    "kosmos-2": Special(processor="Kosmos2Processor", image_processor="CLIPImageProcessor"),
    "kosmos-2.5": Special(
        processor="Kosmos2_5Processor", image_processor="Kosmos2_5ImageProcessor"
    ),
    "muse_glimmer": Special(config={"out_hidden_size": 128}),
    "muse_spark": Special(
        config={
            "out_hidden_size": 128,
            "audio_config": {
                "num_hidden_layers": 4,
                "hidden_sizes": [16, 16, 16, 16],
                "depths": [1, 1, 1, 1],
            },
        }
    ),
    **dict.fromkeys(
        ["minicpm_ocr", "minicpmv4_6", "minicpmv4_7"],
        Special(
            config={
                "image_token_id": 3,
                "insert_layer_id": 1,
                "vision_config": {"insert_layer_id": 1},
                "text_config": {"layer_types": ["linear_attention", "full_attention"]},
            },
            images={"scale_resolution": 32},
        ),
    ),
    "paligemma": Special(images={"image_seq_length": 16}, template=None),
    "janus": Special(config={"vq_config": VQ}),
    "chameleon": Special(
        images={"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}},
        options={"image_seq_length": 64},
        config={"vocabulary_map": IMAGE_WORDS, "vq_config": VQ},
    ),
    "emu3": Special(
        named={"image_token": "<image>"},
        images={"min_pixels": 16 * 16, "max_pixels": 32 * 32},
        config={
            "vocabulary_map": {"<image>": 0, "<|extra_200|>": 599}
            | {f"<|visual token {code:06d}|>": 600 + code for code in range(10)},
            "vq_config": {
                "base_channels": 32,
                "channel_multiplier": [1, 1, 1, 1],
                "codebook_size": 10,
                "embed_dim": 4,
                "num_attention_heads": 1,
                "num_res_blocks": 1,
            },
        },
    ),
    "nemo_speechlm": Special(
        needs="librosa",
        audio={"feature_size": 8},
        config={
            "audio_config": {
                "asr_config": FOUR_HEADS,
                "diarization_config": {
                    "audio_config": FOUR_HEADS,
                    "head_config": {"audio_hidden_size": 32},
                },
            },
            "text_config": {
                "layers_block_type": ["linear_attention", "full_attention", "moe"],
                "mamba_num_heads": 4,
                "mamba_head_dim": 8,
                "n_groups": 2,
                "ssm_state_size": 8,
                "moe_shared_expert_intermediate_size": 16,
            },
        },
    ),
    "vibevoice_asr": Special(
        places={"audio": "<|object_ref_start|><|box_start|><|object_ref_end|>"},
        config={f"{kind}_tokenizer_encoder_config": TOKENIZER for kind in ("acoustic", "semantic")},
    ),
    "fun_asr_nano": Special(
        needs="torchaudio",
        audio={"feature_size": 8},
        config={"adaptor_config": {"intermediate_size": 8}},
    ),
    "idefics2": Special(options={"image_seq_len": 3}, images={"do_image_splitting": True}),
    "musicflamingo": Special(feature_extractor="WhisperFeatureExtractor"),
    "glmasr": Special(config={"audio_config": {"intermediate_size": 128}}),
    "phi4_multimodal": Special(  # its processor fixes the tokens of a tile to 256
        images={"size": {"height": 64, "width": 64}, "patch_size": 2},
        config={
            "vision_config": {"crop_size": 64, "image_size": 64, "patch_size": 2},
            "audio_config": {
                "nemo_conv_channels": 32,
                "ext_pw_out_channel": 32,
                "depthwise_separable_out_channel": 32,
            },
        },
    ),
}

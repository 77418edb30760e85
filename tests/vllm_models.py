"""Tiny random models of families that vLLM serves, as we export them: `test_vllm_matrix.py` compares both.

vLLM's attention on a CPU wants head sizes that are multiples of 32. Weights are large, so that answers differ.
"""

import base64
import io
import sys

import numpy as np
import torch
import transformers
from conftest import ROOT
from PIL import Image

sys.path.insert(0, str(ROOT / "tests" / "kit"))

from folders import alone
from processors import FAMILIES as FAMILIES_OF_PROCESSORS
from processors import chat_processor

from mvp_engine.kit import Lora, MLLMModelKit
from mvp_engine.kit.tiny_processors import train_tokenizer
from mvp_engine.model_engine import ModelSource, Settings, engine_class

VOCAB = 384
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
TEXT_FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 32, "sliding_window": 16},
    "gemma3_text": {"query_pre_attn_scalar": 32, "sliding_window": 16},
    "phi3": {"original_max_position_embeddings": 1024},
    "olmo2": {},
    "olmo3": {"sliding_window": 16},
    "granite": {},
    "smollm3": {},
    "starcoder2": {},
    "glm4": {},
    "stablelm": {},
    "cohere2": {"sliding_window": 16},
    "exaone4": {"sliding_window": 16},
    "ernie4_5": {},
    "seed_oss": {},
    "apertus": {},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 1024},
    "gpt_neox": {"num_key_value_heads": 2},
}
MOE_FAMILIES = {
    "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 32},
    "qwen3_moe": MOE,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_layer_start_index": 0,
        "moe_num_shared_experts": 1,
    },
}
VISION = {
    "depth": 2,
    "num_heads": 2,
    "spatial_merge_size": 2,
    "patch_size": 4,
    "temporal_patch_size": 2,
}
MROPE = {"rope_type": "default", "mrope_section": [6, 5, 5], "rope_theta": 10000.0}
QWEN_TEXT = {**TEXT, "rope_parameters": MROPE}
VLM_FAMILIES = {
    "qwen2_vl": {
        "text_config": QWEN_TEXT,
        "vision_config": {**VISION, "embed_dim": 64, "hidden_size": 64, "mlp_ratio": 2},
    },
    "qwen2_5_vl": {
        "text_config": QWEN_TEXT,
        "vision_config": {
            **VISION,
            "hidden_size": 64,
            "intermediate_size": 96,
            "out_hidden_size": 64,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
    },
    "qwen3_vl": {
        "text_config": QWEN_TEXT,
        "vision_config": {
            **VISION,
            "hidden_size": 64,
            "intermediate_size": 96,
            "out_hidden_size": 64,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
    },
    "qwen3_vl_moe": {
        # transformers always normalizes; vLLM reads the key, which the released configs have.
        "text_config": {**QWEN_TEXT, **MOE, "norm_topk_prob": True},
        "vision_config": {
            **VISION,
            "hidden_size": 64,
            "intermediate_size": 96,
            "out_hidden_size": 64,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
    },
    "llava": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 4,
            "projection_dim": 64,
        },
    },
    "gemma3": {
        "text_config": {**TEXT, "query_pre_attn_scalar": 32, "sliding_window": 16},
        "vision_config": {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 4,
        },
        "mm_tokens_per_image": 4,
    },
    "internvl": {
        "text_config": {"model_type": "qwen2", **TEXT},
        "vision_config": {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": [16, 16],
            "patch_size": [4, 4],
        },
        "downsample_ratio": 0.5,
        "image_seq_length": 4,
    },
}
PLACEHOLDERS = {
    "llava": {"image_token_index": "<image>"},
    "gemma3": {
        "image_token_index": "<image_soft_token>",
        "boi_token_index": "<start_of_image>",
        "eoi_token_index": "<end_of_image>",
    },
    "internvl": {"image_token_id": "<IMG_CONTEXT>"},
}
QWEN_PLACEHOLDERS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
PROCESSORS = {"qwen3_vl_moe": "qwen3_vl"}
# For llama.cpp, whose patches are those of the released models.
GGUF_FAMILIES = {
    "qwen2_5_vl_14": {
        "model_type": "qwen2_5_vl",
        # Not larger: llama.cpp's GELU is a table in half precision.
        "text_config": {**QWEN_TEXT, "initializer_range": 0.05},
        "vision_config": {
            **VLM_FAMILIES["qwen2_5_vl"]["vision_config"],
            "patch_size": 14,
            "window_size": 56,
            # The converter numbers the layers of the projector, up to 2, as blocks.
            "depth": 4,
            "fullatt_block_indexes": [1, 3],
        },
    }
}
FAMILIES = {**TEXT_FAMILIES, **MOE_FAMILIES, **VLM_FAMILIES}


def is_vlm(family):
    return family in VLM_FAMILIES or family in GGUF_FAMILIES


def tokenizer():
    return train_tokenizer(["what colour is this? red green blue one two three"] * 3, 300)


def config_of(family):
    known = {**FAMILIES, **GGUF_FAMILIES}[family]
    if "vision_config" not in known:
        return {"model_type": family, **TEXT, **known}
    words = processor_of(family).tokenizer
    names = PLACEHOLDERS.get(family, QWEN_PLACEHOLDERS)
    ids = {key: words.convert_tokens_to_ids(token) for key, token in names.items()}
    return {"model_type": family, **known, **ids}


def processor_of(family):
    if family == "gemma3":  # vLLM looks for the line breaks of Gemma's tokenizer
        processor = FAMILIES_OF_PROCESSORS[family]()
        processor.chat_template = chat_processor(family).chat_template
        processor.tokenizer.add_tokens(["\n" * count for count in (1, 2, 3, 4)])
        return processor
    if family not in GGUF_FAMILIES:
        return chat_processor(PROCESSORS.get(family, family))
    like = chat_processor("qwen2_5_vl")
    sizes = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
    sizes["size"] = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 64}
    images, videos = (
        transformers.Qwen2VLImageProcessor(**sizes),
        transformers.Qwen2VLVideoProcessor(**sizes),
    )
    return transformers.Qwen2_5_VLProcessor(
        images, like.tokenizer, videos, chat_template=like.chat_template
    )


def save_processor(family, folder):
    if is_vlm(family):
        processor_of(family).save_pretrained(folder)
    else:
        tokenizer().save_pretrained(folder)


def saved(family, folder):
    """A folder as transformers writes it, for our engine to read."""
    config = transformers.AutoConfig.for_model(**config_of(family))
    torch.manual_seed(0)
    kind = (
        transformers.AutoModelForImageTextToText
        if is_vlm(family)
        else transformers.AutoModelForCausalLM
    )
    kind.from_config(config).save_pretrained(folder)
    save_processor(family, folder)
    return folder


def engine_on(folder, model_type="language_model", lora=None):
    source = ModelSource(str(folder))
    if lora is None:
        model = engine_class(model_type).build_model(source)
    else:
        model = MLLMModelKit(lora).build(source, model_type)
    engine = engine_class(model_type)(model, alone(), Settings(seed=3))
    engine.initialize()
    return engine


def exported(family, work, model_type="language_model"):
    """Our export of a random model."""
    folder = work / f"{family}-{model_type}"
    engine_on(saved(family, work / f"{family}-saved"), model_type).export_hf(folder)
    save_processor(family, folder)
    return folder


def with_adapter(family, work):
    """Our folders of a model with random adapters: (the base model, the adapter, both merged)."""
    base = exported(family, work)
    engine = engine_on(base, lora=Lora(rank=8))
    torch.manual_seed(4)
    with torch.no_grad():
        for name, parameter in engine.model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(0.0, 0.1)
    adapter = work / f"{family}-adapter"
    merged = work / f"{family}-merged"
    MLLMModelKit.export_adapter(engine, adapter)
    engine.export_hf(merged)
    save_processor(family, merged)
    return base, adapter, merged


def questions(family):
    """Two chats; of a VLM with an image each, of different sizes where it takes any, and one without."""
    texts = ["what colour is this?", "one two three red"]
    found = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    if not is_vlm(family):
        return found
    for index, text in enumerate(texts):
        rng = np.random.default_rng(index)
        file = io.BytesIO()
        pixels = rng.integers(0, 255, (16 + 16 * index, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(file, "png")
        uri = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        image = {"type": "image_url", "image_url": {"url": uri}}
        content = [image, {"type": "text", "text": text}]
        found.append({"messages": [{"role": "user", "content": content}]})
    return found[1:]

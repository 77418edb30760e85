"""Shared by tests of the data kit: a tiny Qwen3-VL config with its real processor, and rows with random images."""

import json
from functools import cache

import numpy as np
import transformers as hf
from PIL import Image
from templates.tiny import FOLDER, tokenizer

from mvp_engine.kit import MLLMData, MLLMDataKit

PATCH = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
AREAS = {"shortest_edge": 8 * 8, "longest_edge": 32 * 32}
VIT = {
    **PATCH,
    "hidden_size": 16,
    "intermediate_size": 24,
    "out_hidden_size": 32,
    "depth": 2,
    "num_heads": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
TEXT = {
    "vocab_size": 400,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


@cache
def qwen3_vl():
    words = tokenizer("qwen_vl")
    videos = hf.Qwen3VLVideoProcessor(**PATCH, size=AREAS)
    template = (FOLDER / "qwen_vl.jinja").read_text()
    return hf.Qwen3VLProcessor(
        hf.Qwen2VLImageProcessor(**PATCH, size=AREAS), words, videos, chat_template=template
    )


def model_config():
    ids = {
        f"{kind}_token_id": tokenizer("qwen_vl").convert_tokens_to_ids(f"<|{kind}_pad|>")
        for kind in ("image", "video")
    }
    ids["vision_start_token_id"] = tokenizer("qwen_vl").convert_tokens_to_ids("<|vision_start|>")
    rope = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
    return hf.Qwen3VLConfig(text_config={**TEXT, **rope}, vision_config=VIT, **ids)


def chat(question, answer):
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


def write_image(file, width, height, seed=0):
    drawn = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(drawn).save(file)
    return file.name


def write(file, rows):
    file.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return file


def made(file, processor, config=None, **settings):
    """A data kit for one file; a step has two packs."""
    given = {"sources": [{"path": str(file)}], "pack_tokens": 256}
    given |= {"cache": str(file.parent / "cache"), **settings}
    given.setdefault("global_batch_tokens", 2 * given["pack_tokens"])
    return MLLMDataKit(MLLMData.model_validate(given), processor, model_config=config)


def with_images(folder, rows=12):
    found = []
    for i in range(rows):
        names = [
            write_image(folder / f"{i}_{j}.png", 16 + 8 * (i % 3), 16 + 4 * j, i)
            for j in range(i % 3)
        ]
        question = [
            *({"type": "image", "image": name} for name in names),
            {"type": "text", "text": f"How many? {i}"},
        ]
        found.append(chat(question, f"{len(names)} pictures."))
    return found


@cache
def saved_model(parent):
    """A folder with a tiny Qwen3-VL, made once."""
    hf.AutoModelForImageTextToText.from_config(model_config()).save_pretrained(parent / "model")
    qwen3_vl().save_pretrained(parent / "model")
    return parent / "model"

"""Check a graft: a vision encoder and a language model of two folders, as one folder that transformers loads.

check.py [FILE.py:NAME]        # see SKILL.md
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from PIL import Image
from transformers.utils import logging

from mvp_engine.config.engine_class import find_engine
from mvp_engine.kit.tiny_processors import train_tokenizer
from mvp_engine.tools.skill_check import given, run_check

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
QUESTION = "What is this?"


def recipe_graft(vision: Path, language: Path, folder: Path) -> None:
    """The recipe's."""
    engine_class, _ = find_engine("graft", Path.cwd() / "check.yaml")
    recipe: Any = sys.modules[engine_class.__module__]
    section = engine_class.config_class.model_fields["graft"].annotation.__args__[0]
    recipe.graft(section(vision=str(vision), language=str(language), folder=str(folder)))


def problems(graft: Any) -> list[str]:
    """The problems of `graft(vision, language, folder)`, one sentence each."""
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        _save_models(root)
        graft(root / "vision", root / "language", root / "model")
        try:
            model = hf.AutoModelForImageTextToText.from_pretrained(root / "model").eval()
            processor = hf.AutoProcessor.from_pretrained(root / "model")
        except (OSError, ValueError, KeyError) as error:
            return [f"transformers does not load the folder: {error}"]
        with torch.no_grad():
            return [*_model_problems(root, model), *_processor_problems(model, processor)]


def _save_models(root: Path) -> None:
    torch.manual_seed(0)
    encoder = hf.CLIPVisionModel(hf.CLIPVisionConfig(**SIZES, image_size=32, patch_size=8))
    encoder.save_pretrained(root / "vision")
    square = {"height": 32, "width": 32}
    hf.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=square).save_pretrained(root / "vision")
    tokenizer = train_tokenizer([f"user {QUESTION} assistant"] * 2, 270)
    tokenizer.save_pretrained(root / "language")
    config = hf.Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=16, vocab_size=len(tokenizer))
    hf.Qwen3ForCausalLM(config).save_pretrained(root / "language")


def _model_problems(root: Path, model: Any) -> list[str]:
    found = []
    language = hf.AutoModelForCausalLM.from_pretrained(root / "language").eval()
    ids = torch.arange(3, 12)[None]
    expected = language(ids).logits
    if not torch.allclose(model(input_ids=ids).logits[..., : expected.shape[-1]], expected, atol=1e-5):
        found.append("on text alone, the logits differ from those of the language model: are its weights all there?")
    encoder = hf.AutoModel.from_pretrained(root / "vision").eval()
    ours, theirs = encoder.state_dict(), dict(model.named_parameters())
    for name, value in ours.items():
        same = [other for key, other in theirs.items() if key.endswith(f".{name}")]
        if not any(torch.equal(value, other) for other in same if other.shape == value.shape):
            found.append(f"{name} of the encoder is not in the model")
            break
    return found


def _processor_problems(model: Any, processor: Any) -> list[str]:
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    image_token = processor.image_token
    if text.count(image_token) != 1:
        return [f"the chat template writes {text.count(image_token)} of {image_token!r} for one image"]
    found = []
    if QUESTION not in text or not text.rstrip().endswith("assistant"):
        found.append("the chat template loses the text of a message with an image, or the start of the answer")
    if len(processor.tokenizer.encode(image_token, add_special_tokens=False)) != 1:
        return [*found, f"{image_token!r} is no single token of the tokenizer"]
    rows = model.get_input_embeddings().weight.shape[0]
    if not max(processor.tokenizer.get_vocab().values()) < rows == model.get_output_embeddings().weight.shape[0]:
        return [*found, f"the tokenizer has tokens after the {rows} rows of the embedding, or the head has others"]
    logits = []
    for colour in ("red", "blue"):
        inputs = processor(text=[text], images=[Image.new("RGB", (40, 30), colour)], return_tensors="pt")
        tokens = int((inputs["input_ids"] == model.config.image_token_id).sum())
        # CLIP has 16 patches and a class token, which LLaVA leaves out.
        if tokens != 16:
            return [*found, f"an image of 16 patches becomes {tokens} tokens"]
        try:
            logits.append(model(**inputs).logits[0, -1])
        except (ValueError, RuntimeError) as error:
            return [*found, f"the model fails on an image: {error}"]
    if torch.allclose(logits[0], logits[1], atol=1e-6):
        found.append("another image does not change the logits: do features pass the projector?")
    return found


if __name__ == "__main__":
    run_check(lambda: problems(given(recipe_graft, "the graft", "graft")))

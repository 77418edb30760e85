"""The CPU demo, built once into a folder: rows about handwritten digits, a small encoder and a tokenizer.

`vision/` is a SigLIP encoder of 0.1 M parameters that has learnt to tell the digits apart, in place of a pretrained
one. The language model is trained by `configs/language.yaml`, on chats in which a digit stands where its image will be.
Every fifth digit is held out: neither the encoder nor a stage is trained on it.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from mvp_engine.kit import build_once, load_processor
from mvp_engine.kit.digits import SIDE, is_held_out, write_digits
from mvp_engine.kit.tiny_processors import train_tokenizer

ONE = "Which digit is this?"
TWO = "Which is larger?"
ENCODER_STEPS = 600
NUM_TEXTS = 4000


def prepare(folder: str, count: int) -> Any:
    """Build the folder if it is missing, and load its tokenizer."""
    built = build_once(folder, {"count": count, "version": 1}, partial(_build, count=count), "digits.folder")
    return load_processor(built / "tokenizer")


def _build(folder: Path, count: int) -> None:
    digits = write_digits(folder, count)
    random = np.random.default_rng(0)
    for split in ("train", "eval"):
        chosen = [digit for i, digit in enumerate(digits) if is_held_out(i) == (split == "eval")]
        _write(folder / f"{split}_one.jsonl", [_row([image], ONE, str(digit)) for image, digit in chosen])
        _write(folder / f"{split}_two.jsonl", [_pair(chosen, random) for _ in chosen])
    texts = [_as_text(_pair(digits, random) if i % 2 else _single(digits, random)) for i in range(NUM_TEXTS)]
    _write(folder / "train_text.jsonl", texts[: -NUM_TEXTS // 20])
    _write(folder / "eval_text.jsonl", texts[-NUM_TEXTS // 20 :])
    words = f"user\n{ONE} {TWO} assistant\n1 and 2: the second 3 and 4: the first"
    train_tokenizer([words] * 2, 320).save_pretrained(folder / "tokenizer")
    _train_encoder([digit for i, digit in enumerate(digits) if not is_held_out(i)], folder)


def _write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _row(images: list[str], question: str, answer: str) -> dict[str, Any]:
    content = [*({"type": "image", "image": name} for name in images), {"type": "text", "text": question}]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}


def _single(digits: list[tuple[str, int]], random: np.random.Generator) -> dict[str, Any]:
    image, digit = digits[random.integers(len(digits))]
    return _row([image], ONE, str(digit))


def _pair(digits: list[tuple[str, int]], random: np.random.Generator) -> dict[str, Any]:
    """A question about two different digits. The answer names both first, which makes it easier to learn."""
    while True:
        (first, a), (second, b) = (digits[i] for i in random.integers(len(digits), size=2))
        if a != b:
            return _row([first, second], TWO, f"{a} and {b}: the {'first' if a > b else 'second'}")


def _as_text(row: dict[str, Any]) -> dict[str, Any]:
    """The same question with the digits themselves in the places of the images, each in a line, as the graft's are."""
    question, answer = row["messages"]
    digits = [word for word in answer["content"].replace(":", "").split() if word.isdigit()]
    text = "".join(f"{digit}\n" for digit in digits) + question["content"][-1]["text"]
    return {"messages": [{"role": "user", "content": text}, answer]}


def conclusion(answer: str) -> str:
    """The part that answers the question: "the second" of "3 and 8: the second"."""
    return answer.rpartition(": ")[2]


def _train_encoder(digits: list[tuple[str, int]], folder: Path) -> None:
    """A SigLIP encoder with a linear head on its pooled output, on images that are shifted at random."""
    from PIL import Image
    from transformers import SiglipImageProcessor, SiglipVisionConfig, SiglipVisionModel

    processor = SiglipImageProcessor(size={"height": SIDE, "width": SIDE})
    images: Any = [Image.open(folder / name) for name, _ in digits]
    pixels = processor(images=images, return_tensors="pt")["pixel_values"]
    labels = torch.tensor([digit for _, digit in digits])
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        sizes: Any = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4}
        encoder = SiglipVisionModel(SiglipVisionConfig(image_size=SIDE, patch_size=8, **sizes))
        head = torch.nn.Linear(64, 10)
        optimizer = torch.optim.AdamW([*encoder.parameters(), *head.parameters()], lr=2e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=ENCODER_STEPS)
        for _ in range(ENCODER_STEPS):
            rows = torch.randint(len(labels), (64,))
            shifted = pixels[rows].roll(tuple(torch.randint(-2, 3, (2,)).tolist()), (2, 3))
            loss = F.cross_entropy(head(encoder(shifted).pooler_output), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    encoder.save_pretrained(folder / "vision")
    processor.save_pretrained(folder / "vision")

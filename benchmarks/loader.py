"""The data kit's loader against the usual choice: useful tokens per second and core, and the share of padding.

    python benchmarks/loader.py [--rows 400] [--rounds 3] [--workers 2] [--out FILE]

Chats with none to four pictures (JPEG and PNG files that are drawn first), lengths as instruction data has them. The
usual choice is `datasets`, a torch DataLoader with as many workers, and a collator that renders each chat, opens its
pictures and calls the same processor with padding; a batch has as many rows as one of our packs holds. Both go through
all rows, in turns. A core's share is told by the CPU time of all processes, so that others on the machine have no say.
What the kit does once before the first epoch (measuring rows, kept on disk) is shown by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mvp_engine.kit import MLLMData, MLLMDataKit

BUDGET = 8192
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% for p in m.content %}{% if p.type == 'text' %}"
    "{{ p.text }}{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def draw(file: Path, dice: random.Random) -> None:
    """Soft shapes with some grain, so that files are as large as photographs of that size."""
    size = int(dice.lognormvariate(6.3, 0.4)), int(dice.lognormvariate(6.1, 0.4))
    rng = np.random.default_rng(dice.randrange(2**32))
    soft = Image.fromarray(rng.integers(0, 255, (12, 16, 3), dtype=np.uint8)).resize(size, Image.Resampling.BICUBIC)
    grain = rng.normal(0, 6, (size[1], size[0], 1))
    Image.fromarray((np.asarray(soft) + grain).clip(0, 255).astype(np.uint8)).save(file)


def write_rows(folder: Path, count: int, seed: int = 0) -> tuple[Path, list[str]]:
    """The file of rows, and words to train a tokenizer with."""
    dice = random.Random(seed)
    words = ["".join(dice.choices("abcdefghijklmnopqrstuvwxyz", k=dice.randint(2, 9))) for _ in range(3000)]

    def text(median: float) -> dict[str, Any]:
        length = max(3, min(3000, int(dice.lognormvariate(np.log(median), 0.9))))
        return {"type": "text", "text": " ".join(dice.choices(words, k=length)), "image": None}

    with open(folder / "rows.jsonl", "w") as out:
        for i in range(count):
            names = [
                f"{i}_{j}.{dice.choice(['jpg', 'jpg', 'png'])}"
                for j in range(dice.choice([0, 0, 0, 1, 1, 1, 1, 1, 2, 4]))
            ]
            for name in names:
                draw(folder / name, dice)
            question = [{"type": "image", "text": None, "image": name} for name in names] + [text(30)]
            chat = [{"role": "user", "content": question}, {"role": "assistant", "content": [text(120)]}]
            out.write(json.dumps({"messages": chat}) + "\n")
    return folder / "rows.jsonl", words


def make_processor(words: list[str]) -> Any:
    import transformers as hf

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=4000, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([" ".join(words)], trainer)
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    size = {"shortest_edge": 56 * 56, "longest_edge": 640 * 640}
    pictures, films = hf.Qwen2VLImageProcessor(size=size), hf.Qwen2VLVideoProcessor()
    return hf.Qwen2_5_VLProcessor(pictures, tokenizer, films, chat_template=TEMPLATE)


class Padded:
    """Batches as collators of most trainers make them."""

    def __init__(self, processor: Any, folder: Path) -> None:
        self.processor, self.folder = processor, folder
        self.image = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        texts = [self.processor.apply_chat_template(row["messages"], tokenize=False) for row in rows]
        names = [block["image"] for row in rows for m in row["messages"] for block in m["content"] if block["image"]]
        images = [Image.open(self.folder / name).convert("RGB") for name in names]
        batch = dict(self.processor(text=texts, images=images or None, padding=True, return_tensors="pt"))
        labels = batch["input_ids"].clone()
        labels[(batch["attention_mask"] == 0) | (labels == self.image)] = -100
        return {**batch, "labels": labels}


def measured(batches: Callable[[], Iterable[Any]], count: Callable[[Any], tuple[int, int]]) -> dict[str, float]:
    """One pass: tokens that are none of padding, slots for tokens, seconds and CPU seconds."""
    who, useful, slots = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN), 0, 0
    before = sum(sum(resource.getrusage(one)[:2]) for one in who)
    started = time.monotonic()
    for batch in batches():
        found = count(batch)
        useful, slots = useful + found[0], slots + found[1]
    seconds = time.monotonic() - started
    cpu = sum(sum(resource.getrusage(one)[:2]) for one in who) - before
    return {"useful": useful, "slots": slots, "seconds": seconds, "cpu_seconds": cpu}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        rows = compare(Path(name), args.rows, args.rounds, args.workers)
    print("| loader | useful tokens / s and core | tokens / s | slots without a token |\n| --- | --- | --- | --- |")
    for row in rows:
        rates = f"{row['per_core_second']:,.0f} | {row['per_second']:,.0f}"
        print(f"| {row['loader']} | {rates} | {row['empty']:.1%} |")
    print(f"measuring the rows, once: {rows[0]['once_seconds']:.1f} s")
    if args.out:
        about = {
            "command": f"python {' '.join(sys.argv)}",
            "python": platform.python_version(),
            "cores": os.cpu_count(),
        }
        Path(args.out).write_text(json.dumps({**about, "torch": torch.__version__, "rows": rows}, indent=2) + "\n")


def compare(folder: Path, count: int, rounds: int, workers: int) -> list[dict[str, Any]]:
    import datasets

    file, words = write_rows(folder, count)
    processor = make_processor(words)
    settings = {"sources": [{"path": str(file)}], "pack_tokens": BUDGET, "global_batch_tokens": BUDGET}
    kit = MLLMDataKit(MLLMData.model_validate({**settings, "cache": str(folder)}), processor, num_workers=workers)
    once = measured(lambda: [kit.dataset()], lambda _: (0, 0))["seconds"]
    plan = kit.dataset().plan
    assert len(plan.rows) == count, kit.summary()
    batch_size = round(count / len(plan))
    table = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=str(folder / "hf"))
    usual = torch.utils.data.DataLoader(
        table, batch_size, shuffle=True, num_workers=workers, collate_fn=Padded(processor, folder)
    )
    ways: dict[str, tuple[Callable[[], Iterable[Any]], Callable[[Any], tuple[int, int]]]] = {
        "mvp_engine, packs by plan": (lambda: kit.loader(), lambda batch: (batch.num_tokens, BUDGET)),
        f"datasets, padded batches of {batch_size}": (
            lambda: usual,
            lambda batch: (int(batch["attention_mask"].sum()), batch["input_ids"].numel()),
        ),
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            found[name].append(measured(*way))
    useful = {one["useful"] for each in found.values() for one in each}
    assert len(useful) == 1, f"both must deliver the same tokens: {useful}"
    return [
        {
            "loader": name,
            "per_core_second": statistics.median(one["useful"] / one["cpu_seconds"] for one in each),
            "per_second": statistics.median(one["useful"] / one["seconds"] for one in each),
            "empty": statistics.median(1 - one["useful"] / one["slots"] for one in each),
            "workers": workers,
            "once_seconds": once if way == 0 else 0.0,
            "rounds": each,
        }
        for way, (name, each) in enumerate(found.items())
    ]


if __name__ == "__main__":
    main()

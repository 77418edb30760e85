"""The rows of `images` as people have them: JPEG files and a jsonl, read by the data kit's loader.

Each picture is a piece of one of scikit-learn's two photographs with some grain, of the size that the row's grid wants.
Tokens are words, so a row becomes the tokens that it has in memory; only its last one is the end of the answer instead.
"""

from __future__ import annotations

import importlib.util
import json
import math
import multiprocessing
import os
import random
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mvp_engine.errors import UserError
from mvp_engine.kit import MLLMData, MLLMDataKit, build_once

from .data import KNOWN, PATCH, PER_STEP, Row, rows, shape

SPECIAL = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>", "<|im_end|>")  # from KNOWN on
PIECES = "".join(
    f"{{%- if part.type == '{kind}' %}}<|vision_start|><|{kind}_pad|><|vision_end|>{{%- endif %}}"
    for kind in ("image", "video")
)
TEMPLATE = (
    "{%- for message in messages %}{%- for part in message.content %}"
    f"{PIECES}{{%- if part.type == 'text' %}}{{{{- part.text }}}}{{%- endif %}}{{%- endfor %}}"
    "{%- if message.role == 'assistant' %}<|im_end|>{%- endif %}{%- endfor %}"
)
SLACK = 1.01  # of a pack's tokens, so that all rows of a step fit into its packs


def data_kit(name: str, steps: int, packs: int, folder: Path, workers: int) -> MLLMDataKit:
    """The kit over the files of so many steps, which are made once; a step's rows fill so many packs."""
    from transformers import AutoConfig

    every = rows("images", steps)
    about = {"steps": steps, "per_step": PER_STEP["images"], "version": 1}
    build_once(folder, about, lambda empty: write(empty, every), "sft.folder")
    budget = math.ceil(SLACK * sum(len(row.ids) for row in every) / (packs * steps))
    sources = [{"path": str(folder / "rows.jsonl"), "name": "jpeg"}]
    settings = {"sources": sources, "pack_tokens": budget, "cache": str(folder / "cache")}
    config = AutoConfig.for_model(**shape(name))
    return MLLMDataKit(MLLMData.model_validate(settings), processor(), model_config=config, num_workers=workers)


def write(folder: Path, every: list[Row]) -> None:
    wanted, lines = [], []
    for i, row in enumerate(every):
        names = [f"{i:05d}_{j}.jpg" for j in range(len(row.grids))]
        wanted += [(folder / name, grid) for name, grid in zip(names, row.grids, strict=True)]
        text = " ".join(map(str, row.ids[row.learnt].tolist()[:-1]))
        lines.append(json.dumps({"images": names, "text": text} if names else {"text": text}))
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    fork = multiprocessing.get_context("fork")  # this module has no name that a fresh process could import
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), fork) as pool:
        for _ in pool.map(picture, *zip(*wanted, strict=True), chunksize=16):
            pass


def picture(file: Path, grid: tuple[int, int]) -> None:
    """A piece of a photograph with the proportions of the grid, from half of what can be cut out of it on."""
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        raise UserError("the photographs are scikit-learn's: pip install scikit-learn")
    dice = random.Random(file.name)
    high, wide = (PATCH * side for side in grid)
    with Image.open(Path(found.origin).parent / "datasets/images" / dice.choice(("china.jpg", "flower.jpg"))) as photo:
        scale = dice.uniform(0.5, 1.0) * min(photo.width / wide, photo.height / high)
        left, top = dice.uniform(0, photo.width - scale * wide), dice.uniform(0, photo.height - scale * high)
        box = (left, top, left + scale * wide, top + scale * high)
        piece = photo.resize((wide, high), Image.Resampling.BICUBIC, box)
    grain = np.random.default_rng(dice.randrange(2**32)).normal(0, 2.5, (high, wide, 1))
    Image.fromarray((np.asarray(piece) + grain).clip(0, 255).astype(np.uint8)).save(file, quality=90)


def processor() -> Any:
    """Qwen3-VL's, with a tokenizer that knows the numbers up to KNOWN as words."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2VLImageProcessor,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    words = {word: i for i, word in enumerate([*map(str, range(KNOWN)), *SPECIAL])}
    backend = Tokenizer(models.WordLevel(words, "0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=SPECIAL[-1], pad_token=SPECIAL[-1])
    how: dict[str, Any] = {"patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2}
    how |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    images = Qwen2VLImageProcessor(**how, size={"shortest_edge": 65536, "longest_edge": 16777216})
    films = Qwen3VLVideoProcessor(**how, cap_pixels_per_frame=True)
    return Qwen3VLProcessor(images, tokenizer, films, TEMPLATE)

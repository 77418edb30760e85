"""The same sequences for all sides: lengths as chats have them, or all full; tokens that follow rules one can learn."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor

LONGEST, PER_STEP, KNOWN = 4096, {"mix": 32, "full": 8}, 4096

SHAPES = {
    "qwen3_1_7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "vocab_size": 151936},
    "qwen3_8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "vocab_size": 151936},
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 4096},
}
HEADS = {"qwen3_1_7b": (16, 8, 128), "qwen3_8b": (32, 8, 128), "tiny": (4, 2, 16)}


def shape(name: str) -> dict[str, object]:
    """A Qwen3 config of transformers."""
    heads, kv_heads, size = HEADS[name]
    how = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": size, "pad_token_id": 0}
    return {"model_type": "qwen3", "tie_word_embeddings": name != "qwen3_8b", **SHAPES[name], **how}


def lengths(mix: str, count: int, longest: int = LONGEST) -> list[int]:
    """Log-normal around 720 tokens, 64 to `longest`, about 1,030 on average: a short question, a long answer."""
    dice = random.Random(0)
    if mix == "full":
        return [longest] * count
    return [min(longest, max(64, int(dice.lognormvariate(math.log(720), 0.9)))) for _ in range(count)]


def sequences(mix: str, steps: int, longest: int = LONGEST) -> list[Tensor]:
    """Each token is one of four that its predecessor allows."""
    dice = torch.Generator().manual_seed(0)
    rows = []
    for length in lengths(mix, steps * PER_STEP[mix], longest):
        noise = torch.randint(4, (length,), generator=dice).tolist()
        row = [int(torch.randint(KNOWN, (), generator=dice))]
        for n in noise[1:]:
            row.append((row[-1] * 1103 + 12345 + n * 7) % KNOWN)
        rows.append(torch.tensor(row))
    return rows

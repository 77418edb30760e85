"""The same rows for all sides: lengths as chats have them, all full, or with images; text with rules one can learn."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mvp_engine.data.batch import Media, PackedBatch
from mvp_engine.kit.data.encode.row_encoder import RopePositions

LONGEST, KNOWN = 4096, 4096
PER_STEP = {"mix": 32, "mix 64k": 64, "full": 8, "few words": 8, "images": 40, "small images": 8}
FEW = 64  # words of `few words`
IMAGE, BEGIN, END, VIDEO = range(KNOWN, KNOWN + 4)  # tokens that no text has
PAD = KNOWN + 5  # neither has this. Rows that had it would start from zeros, and each norm raises their gradients
PATCH = 16  # pixels of its side; 2 x 2 patches are a token
# Of a mix: smallest and largest side of an image in tokens, most images of a row, typical and largest length of text
IMAGES = {"images": (8, 24, 4, 300, 2000), "small images": (2, 8, 2, 150, 400)}

TEXT = {
    "qwen3_0_6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 151936},
    "qwen3_1_7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "vocab_size": 151936},
    "qwen3_8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "vocab_size": 151936},
    "small": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8, "vocab_size": 151936},
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": KNOWN + 16},
}
HEADS = {
    "qwen3_0_6b": (16, 8, 128),
    "qwen3_1_7b": (16, 8, 128),
    "qwen3_8b": (32, 8, 128),
    "small": (16, 8, 64),
    "tiny": (4, 2, 16),
}
HYBRID = {  # Qwen3.5: every fourth layer has attention, the others a gated delta net
    "qwen3_5_2b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "vocab_size": 248320}
    | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "linear_num_value_heads": 16},
    "tiny_hybrid": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": KNOWN + 16}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "linear_num_value_heads": 4}
    | {"linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
}
EXPERTS = {  # qwen3_a3b_6: six layers of Qwen3-30B-A3B
    "qwen3_a3b_6": {"hidden_size": 2048, "num_hidden_layers": 6, "vocab_size": 151936, "moe_intermediate_size": 768}
    | {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128},
    "small_moe": {"hidden_size": 768, "num_hidden_layers": 8, "vocab_size": 32768, "moe_intermediate_size": 512}
    | {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64, "num_experts": 16}
    | {"num_experts_per_tok": 4},
    "tiny_moe": {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": KNOWN + 16, "moe_intermediate_size": 32}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 16},
}
VISION: dict[str, tuple[str, dict[str, Any], list[int]]] = {  # the text, the encoder, the axes of rotary positions
    "qwen3_vl_2b": (
        "qwen3_1_7b",
        {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2048},
        [24, 20, 20],
    ),
    "small_vl": (
        "small",
        {"depth": 6, "hidden_size": 512, "intermediate_size": 2048, "num_heads": 8, "out_hidden_size": 1024},
        [12, 10, 10],
    ),
    "tiny_vl": (
        "tiny",
        {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64},
        [4, 2, 2],
    ),
}


def chat_length(dice: random.Random) -> int:
    """Tokens of a chat: 1,030 on average."""
    return min(4000, max(64, int(dice.lognormvariate(6.58, 0.9))))


def chat_pack(tokens: int) -> list[int]:
    """Lengths of chats that fill a pack; the last one is cut."""
    dice = random.Random(0)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(min(chat_length(dice), tokens - sum(lengths)))
    return lengths


@dataclass(frozen=True)
class Row:
    ids: Tensor
    learnt: Tensor  # which tokens carry loss: the text
    grids: list[tuple[int, int]] = field(default_factory=list)  # of each image: patches high and wide


def shape(name: str) -> dict[str, Any]:
    """A config of transformers: Qwen3, Qwen3-MoE, Qwen3.5 (text), or Qwen3-VL."""
    if name in HYBRID:
        return {"model_type": "qwen3_5_text", "tie_word_embeddings": True, "pad_token_id": PAD, **HYBRID[name]}
    if name in EXPERTS:
        how = {"num_experts_per_tok": 8, "norm_topk_prob": True, "pad_token_id": PAD}
        return {"model_type": "qwen3_moe", "tie_word_embeddings": False, **how, **EXPERTS[name]}
    if name not in VISION:
        heads, kv_heads, size = HEADS[name]
        how = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": size, "pad_token_id": PAD}
        return {"model_type": "qwen3", "tie_word_embeddings": name != "qwen3_8b", **TEXT[name], **how}
    text, vision, axes = VISION[name]
    inner = shape(text)
    tie = inner.pop("tie_word_embeddings")
    del inner["model_type"]
    inner["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": axes}
    vision = {**vision, "patch_size": PATCH, "deepstack_visual_indexes": [5, 11, 17] if vision["depth"] > 17 else [0]}
    tokens = {"image_token_id": IMAGE, "vision_start_token_id": BEGIN, "vision_end_token_id": END}
    tokens |= {"video_token_id": VIDEO, "tie_word_embeddings": tie}
    return {"model_type": "qwen3_vl", "text_config": inner, "vision_config": vision, **tokens}


def rows(mix: str, steps: int, longest: int = LONGEST) -> list[Row]:
    """`mix`: log-normal around 720 tokens, 64 to `longest`, about 1,030 on average, also as `mix 64k` with
    twice as many per step. `full`: nothing but `longest`; `few words`: the same with 64 words instead of 4,096, which
    a model can learn although its embeddings and head are frozen.
    `images`: text around 300 tokens, 32 to 2,000, behind none to four images of 256 to 768 pixels a side.
    `small images`: text around 150 tokens, 32 to 400, behind none to two images of 64 to 256 pixels a side."""
    dice, noise = random.Random(0), torch.Generator().manual_seed(0)
    count, made = steps * PER_STEP[mix], []
    for _ in range(count):
        if mix in IMAGES:
            low, high, images, typical, most = IMAGES[mix]
            grids = [(2 * dice.randint(low, high), 2 * dice.randint(low, high)) for _ in range(dice.randint(0, images))]
            text = _text(min(most, max(32, int(dice.lognormvariate(math.log(typical), 0.9)))), noise)
            seen = [torch.tensor([BEGIN, *[IMAGE] * (tall * wide // 4), END]) for tall, wide in grids]
            ids = torch.cat([*seen, text])
            made.append(Row(ids, torch.arange(len(ids)) >= len(ids) - len(text), grids))
        else:
            most = longest if mix in ("full", "few words") else int(dice.lognormvariate(math.log(720), 0.9))
            text = _text(min(longest, max(64, most)), noise, FEW if mix == "few words" else KNOWN)
            made.append(Row(text, torch.ones(len(text), dtype=torch.bool)))
    return made


def balanced(chosen: list[Row], count: int) -> list[list[Row]]:
    """So many packs of about the same work: the longest rows first, each to the pack that has least."""
    packs: list[list[Row]] = [[] for _ in range(count)]
    work = [0.0] * count
    for row in sorted(chosen, key=lambda row: -_work(row)):
        least = work.index(min(work))
        packs[least].append(row)
        work[least] += _work(row)
    return packs


def _work(row: Row) -> float:
    """In tokens of text; a patch of an image is a fifth of one to Qwen3-VL-2B."""
    return len(row.ids) + 0.2 * sum(high * wide for high, wide in row.grids)


def _text(length: int, dice: torch.Generator, words: int = KNOWN) -> Tensor:
    """Each token is one of four that its predecessor allows."""
    noise = torch.randint(4, (length,), generator=dice).tolist()
    found = [int(torch.randint(words, (), generator=dice))]
    for n in noise[1:]:
        found.append((found[-1] * 1103 + 12345 + n * 7) % words)
    return torch.tensor(found)


class Pixels:
    """Patches of images, as a processor gives them: 3 colours, 2 frames. Noise, cut out of one buffer."""

    def __init__(self) -> None:
        self.noise_PE = torch.randn(4 * 2304, 3 * 2 * PATCH**2, generator=torch.Generator().manual_seed(0))

    def of(self, grids: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """The patches of these images, and their grids."""
        parts = [self.noise_PE[(h * w) % 97 :][: h * w] for h, w in grids]
        return torch.cat(parts) if parts else self.noise_PE[:0], torch.tensor(
            [[1, h, w] for h, w in grids], dtype=torch.long
        ).view(-1, 3)


@cache
def _positions(name: str) -> RopePositions:
    from transformers import AutoConfig

    return RopePositions(AutoConfig.for_model(**shape(name)))


def packed(chosen: list[Row], name: str, pixels: Pixels) -> PackedBatch:
    """One micro-batch of this engine."""
    if name not in VISION:
        return PackedBatch.from_sequences([row.ids for row in chosen])
    positions, each = _positions(name), []
    for row in chosen:
        values, grids = pixels.of(row.grids)
        media = Media(values, grids.prod(-1), torch.zeros(len(grids), dtype=torch.long), {"image_grid_thw": grids})
        types = {"mm_token_type_ids": (row.ids == IMAGE).long()}
        place = positions(row.ids, types, {"pixel_values": media})
        each.append(
            PackedBatch.from_sequences([row.ids], [row.learnt], position_ids=[place], media={"pixel_values": media})
        )
    return PackedBatch.concat(each)

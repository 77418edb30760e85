"""Does the kit count what a step computes? Ends with 1 and says what is wrong, if not."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from mvp_engine.data.batch import PackedBatch
from mvp_engine.hf import LanguageModel, attention
from mvp_engine.kit import MFUKit

SHAPE = {"vocab_size": 200, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "head_dim": 32}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}


def model_of(frozen: int = 0, **more: Any) -> LanguageModel:
    """With the embeddings and the first `frozen` blocks frozen, if any are."""
    from transformers import AutoConfig

    model = LanguageModel.from_config(AutoConfig.for_model("qwen3", **{**SHAPE, **more}))
    base: Any = model.base()
    for part in [base.embed_tokens, *base.layers[:frozen]] if frozen else []:
        part.requires_grad_(False)
    return model


def counted(model: LanguageModel, ids: torch.Tensor) -> int:
    with attention.eager_attention(model.hf.config), FlopCounterMode(display=False) as counter:
        model.hf(ids[None], use_cache=False).logits.sum().backward()  # type: ignore[operator]
    return counter.get_total_flops()


def problems(kit: Any = MFUKit) -> list[str]:
    """What is wrong with a kit, in words."""
    found = []
    long = torch.randint(200, (120,), generator=torch.Generator().manual_seed(0))
    batch, halves = PackedBatch.from_sequences([long]), PackedBatch.from_sequences([long[:60], long[60:]])
    flops = {}
    for frozen in (0, 2):
        model = model_of(frozen)
        flops[frozen] = float(kit(model).flops(batch, masked=False))
        apart = flops[frozen] / counted(model, long) - 1
        if abs(apart) > 0.02:
            found.append(f"{100 * apart:+.1f} % off torch's counter with {frozen} of 4 blocks frozen")
    window = {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 0}
    plain, windowed = (float(kit(model_of(**more)).flops(batch)) for more in ({}, window))
    if not float(kit(model_of()).flops(halves)) < plain < flops[0]:
        found.append("two packed sequences must cost less than one as long, and causal attention less than full")
    if not windowed < plain:
        found.append("a sliding window must cost less than none")
    return found


if __name__ == "__main__":
    wrong = problems()
    print("\n".join(wrong) or "ok")
    sys.exit(bool(wrong))

"""Check an MFU kit: its FLOPs must match torch's counter and the cost of packed, windowed and frozen models.

check.py                       # exit code 1 and a list of problems if it fails; see SKILL.md
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from mvp_engine.data.batch import PackedBatch
from mvp_engine.hf import LanguageModel
from mvp_engine.hf.model import attention
from mvp_engine.kit import MFUKit
from mvp_engine.tools.skill_check import run_check

SHAPE = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
TOLERANCE = 0.02


def build_model(num_frozen: int = 0, **config: Any) -> LanguageModel:
    """A small model; if `num_frozen` is positive, the embeddings and that many first blocks are frozen."""
    model = LanguageModel.from_config(AutoConfig.for_model("qwen3", **{**SHAPE, **config}))
    base: Any = model.base()
    if num_frozen:
        for module in [base.embed_tokens, *base.layers[:num_frozen]]:
            module.requires_grad_(False)
    return model


def counted_flops(model: LanguageModel, ids: torch.Tensor) -> int:
    """FLOPs of forward and backward by torch's counter, which ignores attention masks."""
    with attention.eager_attention(model.hf.config), FlopCounterMode(display=False) as counter:
        model.hf(ids[None], use_cache=False).logits.sum().backward()  # type: ignore[operator]
    return counter.get_total_flops()


def problems(kit: Any = MFUKit) -> list[str]:
    """The problems of a kit, one sentence each."""
    found = []
    ids = torch.randint(200, (120,), generator=torch.Generator().manual_seed(0))
    batch = PackedBatch.from_sequences([ids])
    packed = PackedBatch.from_sequences([ids[:60], ids[60:]])
    for num_frozen in (0, 2):
        model = build_model(num_frozen)
        error = float(kit(model).flops(batch, masked=False)) / counted_flops(model, ids) - 1
        if abs(error) > TOLERANCE:
            found.append(f"{100 * error:+.1f} % off torch's counter with {num_frozen} of 4 blocks frozen")
    window = {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 0}
    full, causal, split = (
        float(kit(build_model()).flops_by_kind(one, masked=masked)[1])
        for one, masked in ((batch, False), (batch, True), (packed, True))
    )
    windowed = float(kit(build_model(**window)).flops_by_kind(batch)[1])
    if not split < causal < full:
        found.append(
            "two packed sequences must cost less than one of their total length, and causal attention less than full"
        )
    if not windowed < causal:
        found.append("sliding window attention must cost less than full causal attention")
    return found


if __name__ == "__main__":
    run_check(problems)

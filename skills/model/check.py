"""Check a model's parts and LoRA adapters: they must match the config, start as the base model, and merge.

check.py FOLDER [TARGET ...]   # see SKILL.md
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.hf.lora.lora_layers import adapted_layers
from mvp_engine.kit import Lora, MLLMModelKit
from mvp_engine.model_engine import LanguageModelEngine, ModelSource
from mvp_engine.tools.skill_check import run_check

ENCODERS = ("vision", "audio")


def problems(folder: Path, model: Any) -> list[str]:
    """The problems of a folder's model with adapters and without weights yet, one sentence each."""
    parts = MLLMModelKit.parts(model)
    found = _part_problems(model, set(parts.values()))
    torch.manual_seed(0)
    vocab_size = min(80, model.hf.config.get_text_config().vocab_size)
    batch = PackedBatch.from_sequences([torch.randint(3, vocab_size, (length,)) for length in (9, 5)])

    def log_probs(engine: LanguageModelEngine) -> Tensor:
        return engine.infer_batch(batch, ["log_probs"])["log_probs"]

    adapted = start(model)
    base = start(MLLMModelKit().build(ModelSource(str(folder))))
    if not torch.allclose(log_probs(adapted), log_probs(base), atol=1e-6):
        found.append("the model with new adapters differs from the base model")
    with torch.no_grad():
        for _, layer in adapted_layers(model):
            layer.lora_B.weight.normal_(std=0.05)
    model(batch, ["log_probs"])["log_probs"].sum().backward()
    unused = []
    for name, layer in adapted_layers(model):
        gradient = layer.lora_A.weight.grad
        if parts[f"{name}.weight"] == "llm" and (gradient is None or not gradient.any()):
            unused.append(name)
    if unused:
        found.append(f"adapters without effect on text: {len(unused)}, such as that of {unused[0]}")
    with tempfile.TemporaryDirectory() as out:
        adapted.export_hf(Path(out) / "merged", torch.float32)
        merged = start(MLLMModelKit().build(ModelSource(f"{out}/merged")))
        difference = float((log_probs(adapted) - log_probs(merged)).abs().max())
    if difference > 1e-4:
        found.append(f"log-probs of the merged weights differ by {difference:.1e}")
    return found


def _part_problems(model: Any, parts: set[str]) -> list[str]:
    found = []
    for kind in ENCODERS:
        config = getattr(model.base().config, f"{kind}_config", None)
        if config is not None and kind not in parts:
            found.append(f"the config has a {kind}_config, but no parameter belongs to the part {kind}")
    if parts.intersection(ENCODERS) and "projector" not in parts:
        found.append("the model has an encoder, but no parameter belongs to the part projector")
    return found


def start(model: Any) -> LanguageModelEngine:
    engine = LanguageModelEngine(model, Layout(World.join("cpu")))
    engine.initialize()
    return engine


def main() -> list[str]:
    folder = Path(sys.argv[1])
    lora = Lora(rank=4, target_modules=sys.argv[2:] or ["llm"])
    return problems(folder, MLLMModelKit(lora).build(ModelSource(str(folder))))


if __name__ == "__main__":
    run_check(main)

"""Do the parts and the adapters of this model hold? `check.py FOLDER [TARGET ...]`; see SKILL.md."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.hf.lora import adapted_layers
from mvp_engine.kit import Lora, MLLMModelKit
from mvp_engine.model_engine import LanguageModelEngine, ModelSource


def problems(folder: Path, model: Any) -> list[str]:
    """What is wrong with a model of a folder, with adapters but without weights yet; in words."""
    wrong = []
    parts = MLLMModelKit.parts(model)
    for kind in ("vision", "audio"):
        config = getattr(model.base().config, f"{kind}_config", None)
        if config is not None and kind not in parts.values():
            wrong.append(f"its config has a {kind}_config, but no parameter belongs to the part {kind}")
    if any(part in parts.values() for part in ("vision", "audio")) and "projector" not in parts.values():
        wrong.append("it has an encoder, but nothing that leads from there to the decoder")
    torch.manual_seed(0)
    words = min(80, model.hf.config.get_text_config().vocab_size)
    batch = PackedBatch.from_sequences([torch.randint(3, words, (n,)) for n in (9, 5)])

    def log_probs(engine: LanguageModelEngine) -> Tensor:
        return engine.infer_batch(batch, ["log_probs"])["log_probs"]

    adapted, base = start(model), start(MLLMModelKit().build(ModelSource(str(folder))))
    if not torch.allclose(log_probs(adapted), log_probs(base), atol=1e-6):
        wrong.append("training does not begin as the base model")
    with torch.no_grad():
        for _, layer in adapted_layers(model):
            layer.lora_B.weight.normal_(std=0.05)
    model(batch, ["log_probs"])["log_probs"].sum().backward()
    silent = [
        name
        for name, layer in adapted_layers(model)
        if parts[f"{name}.weight"] == "llm" and (layer.lora_A.weight.grad is None or not layer.lora_A.weight.grad.any())
    ]
    if silent:
        wrong.append(f"{len(silent)} adapter(s) have no effect on text, such as that of {silent[0]}")
    with tempfile.TemporaryDirectory() as out:
        adapted.export_hf(Path(out) / "merged", torch.float32)
        merged = start(MLLMModelKit().build(ModelSource(f"{out}/merged")))
        apart = float((log_probs(adapted) - log_probs(merged)).abs().max())
    if apart > 1e-4:
        wrong.append(f"merged weights give log-probs that differ by {apart:.1e}")
    return wrong


def start(model: Any) -> LanguageModelEngine:
    engine = LanguageModelEngine(model, Layout(World.join("cpu")))
    engine.initialize()
    return engine


if __name__ == "__main__":
    folder, targets = Path(sys.argv[1]), sys.argv[2:] or ["llm"]
    wrong = problems(folder, MLLMModelKit(Lora(rank=4, targets=targets)).build(ModelSource(str(folder))))
    print("\n".join(wrong) or "ok")
    sys.exit(bool(wrong))

"""Is this loss the same on any split of a batch, and that of full logits? `check.py [FILE.py:NAME]`; see SKILL.md."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Qwen3Config

from mvp_engine.data.batch import PackedBatch
from mvp_engine.hf import LanguageModel
from mvp_engine.imports import load_spec
from mvp_engine.kit import TokenNormedLossKit


class Silent:
    def log(self, *_: Any) -> None: ...

    def count(self, *_: Any) -> None: ...


def problems(loss: Any) -> list[str]:
    """What is wrong with a loss, in words."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 8}
    model = LanguageModel.from_config(Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=1), chunk=5)
    ids = [torch.randint(40, (n,)) for n in (11, 3, 6, 2)]
    batch = PackedBatch.from_sequences(ids, [torch.arange(len(i)) > 1 for i in ids])

    def run(parts: list[PackedBatch]) -> tuple[float, Tensor]:
        """The mean loss as an engine makes it, and the gradient of the head."""
        model.zero_grad()
        given = [loss(Silent(), model, part) for part in parts]
        total = sum(loss_sum for loss_sum, _ in given) / sum(weight for _, weight in given)
        total.backward()
        return float(total.detach()), model.hf.lm_head.weight.grad.clone()

    value, gradient = run([batch])
    wrong = []
    for budget in (11, 13):
        other, its_gradient = run(batch.split(budget).parts)
        if abs(other - value) > 1e-5 or not torch.allclose(gradient, its_gradient, rtol=1e-5, atol=1e-6):
            wrong.append(f"in parts of at most {budget} tokens the loss is {other:.6f}, in one batch {value:.6f}")
    hidden = model(batch, ["hidden_states"])["hidden_states"].detach()
    plain = float(cross_entropy(hidden @ model.hf.lm_head.weight.detach().T, batch.labels))
    if abs(plain - value) > 1e-5:
        wrong.append(f"the loss is {value:.6f}, cross-entropy on full logits {plain:.6f}: is that a term of your own?")
    return wrong


if __name__ == "__main__":
    mine: Any = TokenNormedLossKit()
    if len(sys.argv) > 1:
        module, name = load_spec(sys.argv[1], Path.cwd(), "the loss")
        mine = getattr(module, name or "loss")
    wrong = problems(mine)
    print("\n".join(wrong) or "ok")
    sys.exit(bool(wrong))

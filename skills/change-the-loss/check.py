"""Check a loss: it must not depend on the split into micro-batches, and must equal cross-entropy on full logits.

check.py [FILE.py:NAME]        # see SKILL.md
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Qwen3Config

from mvp_engine.data.batch import PackedBatch
from mvp_engine.hf import LanguageModel
from mvp_engine.kit import TokenNormedLossKit
from mvp_engine.tools.skill_check import NoLog, check_loss


def problems(loss: Any) -> list[str]:
    """The problems of a loss, one sentence each."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        head_dim=8,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = LanguageModel.from_config(config, chunk=5)
    ids = [torch.randint(40, (length,)) for length in (11, 3, 6, 2)]
    batch = PackedBatch.from_sequences(ids, [torch.arange(len(one)) > 1 for one in ids])

    def run(micro_batches: list[PackedBatch]) -> tuple[float, Tensor]:
        """The mean loss as the engine computes it, and the gradient of the output head."""
        model.zero_grad()
        results = [loss(NoLog(), model, micro_batch) for micro_batch in micro_batches]
        loss_sum = sum(result[0] for result in results)
        weight = sum(result[1] for result in results)
        mean = loss_sum / weight
        mean.backward()
        return float(mean.detach()), model.hf.lm_head.weight.grad.clone()

    value, gradient = run([batch])
    found = []
    for budget in (11, 13):
        other, its_gradient = run(batch.split(budget).parts)
        equal = torch.allclose(gradient, its_gradient, rtol=1e-5, atol=1e-6)
        if abs(other - value) > 1e-5 or not equal:
            found.append(
                f"with micro-batches of at most {budget} tokens the loss is {other:.6f}, with one it is {value:.6f}"
            )
    hidden = model(batch, ["hidden_states"])["hidden_states"].detach()
    reference = float(cross_entropy(hidden @ model.hf.lm_head.weight.detach().T, batch.labels))
    if abs(reference - value) > 1e-5:
        found.append(
            f"the loss is {value:.6f}, cross-entropy on full logits {reference:.6f}: does the loss have another term?"
        )
    return found


if __name__ == "__main__":
    check_loss(problems, TokenNormedLossKit())

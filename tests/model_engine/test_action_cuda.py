"""Action models on a GPU: bf16, compiled blocks and activation checkpointing against float32 on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_action_engine import PLAIN, micro_batches
from test_action_model import tiny_regressor
from tiny_pi0 import tiny_pi0
from torch import Tensor

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.model_engine import ActionModelEngine, Settings

pytestmark = pytest.mark.gpu
WAYS: list[dict[str, Any]] = [
    {"compile": None},
    {"compile": "inductor"},
    {"compile": "inductor", "activation_checkpointing": "selective"},
    {"compile": "inductor", "activation_checkpointing": "full"},
]


def losses_and_norm(head: str, layout: Layout, **how: Any) -> tuple[Tensor, float]:
    model = tiny_regressor() if head == "regressor" else tiny_pi0()
    batches = micro_batches(model, head)
    engine = ActionModelEngine(model, layout, Settings(**how))
    engine.initialize(lambda m: torch.optim.AdamW(m.parameters(), 1e-3))
    found = []

    def loss(batch: PackedBatch) -> tuple[Tensor, int]:
        losses = engine.model(batch, ["action_losses"])["action_losses"]
        found.append(losses.detach().flatten(1).sum(1).cpu())
        return losses.sum(), batch.num_sequences

    engine.optimizer_zero_grad()
    engine.forward_backward_batch(batches, loss)
    return torch.cat(found), float(engine.optimizer_step().grad_norm)


@pytest.mark.parametrize("head", ["pi0", "co", "regressor"])
@pytest.mark.parametrize("how", WAYS, ids=str)
def test_action_model_in_bf16_on_a_gpu_equals_float32_to_three_percent(head: str, how: dict[str, Any]) -> None:
    wanted, norm = losses_and_norm(head, PLAIN)
    layout = Layout(World(0, 1, 0, 1, torch.device("cuda", 0)))
    found, its_norm = losses_and_norm(head, layout, precision="bf16", **how)
    assert torch.allclose(found, wanted, rtol=0.03)
    assert its_norm == pytest.approx(norm, rel=0.03)

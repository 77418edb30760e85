"""Action models on a GPU: bf16, compiled blocks and activation checkpointing against float32 on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_action_engine import PLAIN, micro_batches
from test_action_model import tiny_regressor, typed, vlm_row
from tiny_pi0 import pi0_rows, tiny_pi0

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.kit.actions import ActionModelEngine
from mvp_engine.model_engine import Settings
from mvp_engine.ops import flex_attention

pytestmark = pytest.mark.gpu
WAYS: list[dict[str, Any]] = [
    {"compile": None},
    {"compile": "inductor"},
    {"compile": "inductor", "activation_checkpointing": "selective"},
    {"compile": "inductor", "activation_checkpointing": "full"},
]


def losses_and_norm(head, layout, **how):
    # Co-training packs of pi0 need FlexAttention, whose heads have at least 16 values.
    model = (
        tiny_regressor() if head == "regressor" else tiny_pi0(head_dim=32 if head == "co" else 8)
    )
    batches = micro_batches(model, head)
    if head == "co":  # rows with actions and rows with text in one pack
        rows = pi0_rows(model)
        batches[0] = PackedBatch.concat([typed(rows[1]), vlm_row(model, rows[0]), typed(rows[2])])
    engine = ActionModelEngine(model, layout, Settings(**how))
    engine.initialize(lambda m: torch.optim.AdamW(m.parameters(), 1e-3))
    names = ["action_losses", "loss"] if head == "co" else ["action_losses"]
    found = []

    def loss(batch):
        outputs = engine.model(batch, names)
        found.append(outputs["action_losses"].detach().flatten(1).sum(1).cpu())
        if "loss" in outputs:
            found.append(outputs["loss"].detach()[None].cpu())
        return sum(losses.sum() for losses in outputs.values()), batch.num_sequences  # type: ignore[return-value]

    engine.optimizer_zero_grad()
    engine.forward_backward_batch(batches, loss)
    return torch.cat(found), float(engine.optimizer_step().grad_norm)


@pytest.mark.parametrize("head", ["pi0", "co", "regressor"])
@pytest.mark.parametrize("how", WAYS, ids=str)
def test_action_model_in_bf16_on_a_gpu_equals_float32_to_three_percent(head, how, monkeypatch):
    flex_calls = []
    block_mask_of = flex_attention.block_mask_of
    monkeypatch.setattr(
        flex_attention,
        "block_mask_of",
        lambda *args: flex_calls.append(args) or block_mask_of(*args),
    )
    wanted, norm = losses_and_norm(head, PLAIN)
    layout = Layout(World(0, 1, 0, 1, torch.device("cuda", 0)))
    found, its_norm = losses_and_norm(head, layout, precision="bf16", **how)
    assert torch.allclose(found, wanted, rtol=0.03)
    assert its_norm == pytest.approx(norm, rel=0.03)
    assert bool(flex_calls) == (head == "co")


def test_pi0_on_a_gpu_compiles_nothing_after_its_first_packs():
    """Packs have other numbers of tokens, then of sequences; every layer of a kind shares its graphs."""
    model = tiny_pi0()
    engine = ActionModelEngine(
        model, Layout(World(0, 1, 0, 1, torch.device("cuda", 0))), Settings(precision="bf16")
    )
    engine.initialize(lambda m: torch.optim.AdamW(m.parameters(), 1e-3))
    rows = pi0_rows(model, draws=1)

    def loss(batch):
        return engine.model(batch, ["action_losses"])["action_losses"].sum(), batch.num_sequences

    for members in ([0, 1], [1, 2], [2, 0], [0, 1, 2, 0, 1], [1, 1, 1], [2, 1]):
        engine.optimizer_zero_grad()
        engine.forward_backward_batch([PackedBatch.concat([rows[at] for at in members])], loss)
        engine.optimizer_step()
    assert engine._recompiles.recompiles == 0

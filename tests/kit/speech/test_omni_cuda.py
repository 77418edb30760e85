"""Omni models on a GPU: bf16, compiled blocks and activation checkpointing against float32 on the CPU; no host sync."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from omni_models import speech_step
from test_omni_ranks import adamw, engine_on, micro_batch

from mvp_engine.distributed import Layout, World
from mvp_engine.kit.speech.settings import SpeechLoss

pytestmark = pytest.mark.gpu
WAYS: list[dict[str, Any]] = [
    {"compile": None},
    {"compile": "inductor"},
    {"compile": "inductor", "activation_checkpointing": "selective"},
    {"compile": "inductor", "activation_checkpointing": "full"},
]


def layout(device):
    return Layout(World(0, 1, 0, 1, torch.device(device)))


def loss_and_norm(on, **how):
    engine = engine_on(on, adamw, **how)
    batches = [micro_batch([2, 0]), micro_batch([1, 3])]
    forward_step = speech_step(engine.model, SpeechLoss(residual_weight=0.3), text=True)
    numbers = engine.train_batch(batches, forward_step)
    return float(numbers.loss_sum / numbers.weight), float(numbers.grad_norm)


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_omni_model_in_bf16_on_a_gpu_equals_float32_to_five_percent(how):
    wanted, norm = loss_and_norm(layout("cpu"))
    found, its_norm = loss_and_norm(layout("cuda:0"), precision="bf16", **how)
    assert found == pytest.approx(wanted, rel=0.05)
    assert its_norm == pytest.approx(norm, rel=0.05)


@pytest.mark.parametrize("compile", [None, "inductor"])
@pytest.mark.parametrize("text", [True, False])
@pytest.mark.parametrize("rows", [([1, 0], [1, 4]), ([2, 3, 1], [3, 2])], ids=["text", "media"])
def test_step_of_an_omni_model_has_no_host_sync(compile, text, rows):
    engine = engine_on(
        layout("cuda:0"),
        lambda model: torch.optim.AdamW(model.parameters(), 1e-3, fused=True),
        precision="bf16",
        compile=compile,
    )
    forward_step = speech_step(engine.model, text=text)
    batches = [micro_batch(members).pin_memory() for members in rows]
    for _ in range(3):  # allocate and compile
        engine.train_batch(batches, forward_step)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.train_batch(batches, forward_step)
    finally:
        torch.cuda.set_sync_debug_mode("default")

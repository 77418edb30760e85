"""The loss of ranks that share sequences: the quick way, with the gradients of one rank."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from families import overrides_of, parallel
from torch import Tensor

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.distributed.dtensor import full_tensor
from mvp_engine.hf import LanguageModel
from mvp_engine.hf.model import language_model
from mvp_engine.model_engine import LanguageModelEngine, Settings

BATCHES = [
    PackedBatch.from_sequences([torch.arange(n) % 17 for n in sizes])
    for sizes in ((7, 3, 11, 2), (1,), (2,))
]


def found(
    layout: Layout, wanted: list[str]
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor], int]:
    """Outputs of batches, one of them with fewer tokens than ranks, the gradients, and calls of the quick way."""
    engine = LanguageModelEngine(
        LanguageModel.on_meta(None, overrides_of("qwen3")), layout, Settings(seed=5)
    )
    engine.initialize(lambda model: torch.optim.SGD(model.parameters(), 0.0))
    given: list[dict[str, Tensor]] = []

    def step(batch: PackedBatch) -> tuple[Tensor, Tensor]:
        given.append(engine.model(batch, wanted))
        return given[-1]["loss"], batch.num_loss_tokens

    with patch.object(
        language_model, "linear_loss", side_effect=language_model.linear_loss
    ) as quick:
        engine.forward_backward_batch(BATCHES, step)
    grads = {
        n: full_tensor(p.grad) / layout.data_size
        for n, p in engine.model.named_parameters()
        if p.grad is not None
    }
    return [{n: v.detach() for n, v in one.items()} for one in given], grads, quick.call_count


def on_ranks(wanted: list[str]) -> Any:
    world = World.join("cpu")
    result = found(Layout.of(world, parallel(ulysses=2)), wanted)
    world.close()
    return result


def test_ulysses_ranks_compute_head_gradients_in_forward(ranks2) -> None:
    for wanted, calls in (["loss"], 3), (["loss", "losses"], 3), (["loss", "entropy"], 0):
        outs, grads, _ = found(Layout(World(0, 1, 0, 1, torch.device("cpu"))), wanted)
        for its_outs, its_grads, count in ranks2.run(on_ranks, wanted):
            assert count == calls, wanted
            for mine, one in zip(its_outs, outs, strict=True):
                assert all(
                    torch.allclose(mine[name], value, rtol=1e-5, atol=1e-5)
                    for name, value in one.items()
                )
            assert its_grads.keys() == grads.keys()
            assert all(
                torch.allclose(its_grads[n], grad, rtol=1e-5, atol=1e-5)
                for n, grad in grads.items()
            )

"""Context parallel on real ranks: outputs and every gradient of one rank, to 1e-5."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from families import layout_of
from tiny_models import build_model, packs_of
from torch import Tensor

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.distributed.dtensor import full_tensor
from mvp_engine.hf import LanguageModel
from mvp_engine.model_engine import LanguageModelEngine, Settings

Found = tuple[list[dict[str, Tensor]], dict[str, Tensor]]
OUTPUTS = ["log_probs", "entropy", "hidden_states"]

# Sequences of one token; those that end at a cut of zigzag (16 = 8 chunks of 2) or of an equal slice (4, 4, 4, 4); a
# long one with short ones, packs of fewer tokens than would give every rank a share, and as many tokens as ranks.
LENGTHS = [(16, 1, 11, 1), (4, 4, 4, 4), (37, 2, 3, 1, 1, 5), (1, 2, 1), (4,)]


def found(name: str, layout: Layout, **how: Any) -> Found:
    """Outputs of each pack, which all data ranks have, and the gradients of a step on all packs."""
    model = build_model(LanguageModel, name)
    batches = packs_of(model, name, [[2, 1], [1], [0, 2, 2, 1]], LENGTHS)
    engine = LanguageModelEngine(model, layout, Settings(**how))
    engine.initialize(lambda m: torch.optim.SGD(m.parameters(), 0.0))
    engine.model.eval()
    outs = []

    def loss(batch: PackedBatch) -> tuple[Tensor, Tensor]:
        out = engine.model(batch, OUTPUTS)
        outs.append({key: value.detach() for key, value in out.items()})
        # Uneven weights: a gradient that reached another token would show.
        weights = torch.linspace(0.5, 1.5, batch.num_tokens)
        return -(weights * out["log_probs"]).sum() - 0.1 * out[
            "entropy"
        ].sum(), batch.num_loss_tokens

    engine.optimizer_zero_grad()
    for batch in batches:
        engine.forward_backward_batch([batch], loss)
    grads = {n: p.grad for n, p in engine.model.named_parameters() if p.grad is not None}
    return outs, {n: full_tensor(grad) / layout.data_size for n, grad in grads.items()}


def on_ranks(names: list[str], sizes: dict[str, int], how: dict[str, Any]) -> dict[str, Found]:
    with layout_of(**sizes) as layout:
        return {name: found(name, layout, **how) for name in names}


@functools.cache
def expected(name: str) -> Found:
    return found(name, Layout(World.join("cpu")))


def assert_equal(result: Found, name: str) -> None:
    outs, grads = expected(name)
    for mine, one in zip(result[0], outs, strict=True):
        for key in OUTPUTS:
            assert torch.allclose(mine[key], one[key], rtol=1e-5, atol=1e-5), (name, key)
    unused = result[1].keys() - grads.keys()  # FSDP has zeros for weights that no forward uses
    assert result[1].keys() >= grads.keys()
    assert not any(bool(result[1][key].any()) for key in unused), unused
    for key, grad in grads.items():
        atol = max(
            1e-6, 1e-5 * float(grad.abs().max())
        )  # biases of keys have gradients that are rounding alone
        assert torch.allclose(result[1][key], grad, rtol=1e-5, atol=atol), (name, key)


FEW = ["qwen3", "gemma3_text", "gpt_oss", "qwen3_vl"]
LONG = pytest.mark.campaign(only=True)


@pytest.mark.parametrize(
    ("ranks", "sizes", "names"),
    [
        (2, {"context": 2}, FEW),
        pytest.param(4, {"context": 4}, FEW, marks=LONG),
        pytest.param(
            4, {"context": 2, "ulysses": 2}, ["gpt_oss", "qwen3_vl"], marks=pytest.mark.slow
        ),
        pytest.param(4, {"context": 2, "ulysses": 2}, ["qwen3", "gemma3_text"], marks=LONG),
        pytest.param(4, {"context": 2, "shard": 2}, FEW, marks=LONG),
        pytest.param(4, {"context": 2, "replicate": 2}, FEW, marks=LONG),
        pytest.param(4, {"context": 4, "expert": 2}, ["qwen3_moe", "gpt_oss"], marks=LONG),
        pytest.param(
            4, {"context": 2, "shard": 2, "expert": 4}, ["qwen3_moe", "gpt_oss"], marks=LONG
        ),
        pytest.param(
            4, {"context": 2, "ulysses": 2, "expert": 2}, ["qwen3_moe", "gpt_oss"], marks=LONG
        ),
        pytest.param(4, {"context": 2, "tensor": 2}, ["qwen3", "gemma2"], marks=LONG),
    ],
    ids=str,
)
def test_context_gives_the_outputs_and_gradients_of_one_rank(
    request, ranks: int, sizes: dict[str, int], names: list[str]
) -> None:
    for results in request.getfixturevalue(f"ranks{ranks}").run(on_ranks, names, sizes, {}):
        for name, result in results.items():
            assert_equal(result, name)

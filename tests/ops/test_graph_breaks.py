"""Compiled and uncompiled attention in one process: neither changes the other."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.model_engine import LanguageModelEngine, ModelSource, Settings
from mvp_engine.ops import (
    attention,
    cudnn_attention,
    flash_attention,
    flex_attention,
    reference_attention,
)
from mvp_engine.ops.attention import AttnSpec, varlen_attention

SHAPE: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 64,
}
SHAPE |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
MODULES = [
    attention,
    cudnn_attention,
    flash_attention,
    flex_attention,
    attention,
    reference_attention,
]
BATCH = PackedBatch.from_sequences([torch.arange(n) % 7 for n in (30, 12, 50)])


def engine_of(backend: str | None) -> LanguageModelEngine:
    torch.manual_seed(0)
    layout = Layout(World(0, 1, 0, 1, torch.device("cpu")))
    model = LanguageModelEngine.build_model(ModelSource(None, SHAPE))
    engine = LanguageModelEngine(model, layout, Settings(compile=backend, seed=3))
    engine.initialize(lambda m: torch.optim.SGD(m.parameters(), 0.0))
    return engine


def stepped(engine: LanguageModelEngine) -> dict[str, Tensor]:
    """The loss and the gradients of one step."""
    engine.optimizer_zero_grad()
    outputs = engine.train_batch(
        [BATCH], lambda b: (engine.model(b, ["loss"])["loss"], b.num_loss_tokens)
    )
    grads = {n: p.grad.clone() for n, p in engine.model.named_parameters() if p.grad is not None}
    return {"loss": outputs.loss_sum, **grads}


def attributes() -> dict[tuple[str, str], int]:
    """The identity of every attribute of the attention modules."""
    found = {}
    for module in MODULES:
        assert isinstance(module, types.ModuleType)
        for name, value in vars(module).items():
            found[module.__name__, name] = id(value)
    return found


def test_compiled_engine_in_the_same_process_leaves_uncompiled_engine_unchanged() -> None:
    torch._dynamo.reset()
    plain = engine_of(None)
    alone = stepped(plain)
    before = attributes()
    graphs = torch._dynamo.utils.counters["stats"]
    graphs.clear()
    compiled = engine_of("aot_eager")
    in_graphs = stepped(compiled)
    assert graphs["unique_graphs"] > 0
    assert (
        before.items() <= attributes().items()
    )  # Dynamo adds globals of its own, and none was rebound
    graphs.clear()
    again = stepped(plain)
    assert graphs["unique_graphs"] == 0  # the uncompiled engine stays uncompiled
    assert alone.keys() == again.keys() == in_graphs.keys()
    for name, value in alone.items():
        assert torch.equal(value, again[name]), name
        assert torch.allclose(value, in_graphs[name], rtol=1e-5, atol=1e-6), name
    repeated = stepped(compiled)
    assert graphs["unique_graphs"] == 0  # nor is the compiled one recompiled
    assert all(torch.equal(value, repeated[name]) for name, value in in_graphs.items())


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_varlen_attention_in_a_compiled_function_is_not_recompiled_per_number_of_sequences(
    softcap: float | None,
) -> None:
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]

    def layer(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
        spec = AttnSpec(cu_seqlens, 20, softcap=softcap)
        return varlen_attention(q * 2, k, v, spec) + 1

    compiled = torch.compile(layer, backend="aot_eager")
    seen = []
    for lengths in ([7, 13], [20], [5, 5, 10], [2, 3, 5, 10], [1] * 20):
        g = torch.Generator().manual_seed(0)
        qkv = [torch.randn(heads, 20, 8, generator=g) for heads in (4, 2, 2)]
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
        assert torch.equal(compiled(*qkv, cu_seqlens), layer(*qkv, cu_seqlens))
        seen.append(graphs["unique_graphs"])
    assert seen[-1] == seen[1]

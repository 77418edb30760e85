"""Compiled and uncompiled attention in one process: neither changes the other."""

import pytest
import torch
from tiny_engines import counting, engine_of, fresh_graphs, gradients, train

from mvp_engine.ops import attention, cudnn_attention, flash_attention, flex_attention
from mvp_engine.ops.attention import AttnSpec, varlen_attention

MODULES = [attention, cudnn_attention, flash_attention, flex_attention]


def stepped(engine):
    """The loss and the gradients of one step."""
    engine.optimizer_zero_grad()
    loss = train(engine, counting(30, 12, 50, modulus=7)).loss_sum
    return {"loss": loss, **gradients(engine.model)}


def attributes():
    """The identity of every attribute of the attention modules."""
    return {(m.__name__, name): id(value) for m in MODULES for name, value in vars(m).items()}


@pytest.mark.slow
def test_compiled_engine_in_the_same_process_leaves_uncompiled_engine_unchanged():
    graphs = fresh_graphs()
    plain = engine_of("qwen3", seed=3)
    alone = stepped(plain)
    before = attributes()
    graphs.clear()
    compiled = engine_of("qwen3", compile="aot_eager", seed=3)
    in_graphs = stepped(compiled)
    assert graphs["unique_graphs"] > 0
    # Dynamo adds globals of its own, and none was rebound.
    assert before.items() <= attributes().items()
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
    softcap,
):
    graphs = fresh_graphs()

    def layer(q, k, v, cu_seqlens):
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

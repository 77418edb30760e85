"""Mixture-of-experts layers run in the autocast dtype, with the gradients of transformers' own layers."""

import ast
import importlib
from pathlib import Path

import pytest
import torch
from tiny_engines import CAMPAIGN, counting, engine_of, gradients, train
from transformers import AutoConfig
from transformers.integrations import moe
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from mvp_engine.hf.experts import moe_layers
from mvp_engine.hf.experts.moe_layers import grouped_experts

BATCH = counting(30, 12, 50, modulus=7)
BASE = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SHAPES = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gpt_oss": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "head_dim": 8,
    },  # transposed weights, with biases
}


def shape_of(name):
    return {**BASE, "model_type": name, **SHAPES[name]}


def stepped(name, **settings):
    """The loss and the gradients of one step."""
    engine = engine_of(shape_of(name), **settings)
    return train(engine, BATCH).loss_sum, gradients(engine.model)


def cosine(a, b):
    return float(torch.cosine_similarity(a.flatten(), b.flatten(), dim=0))


@pytest.mark.parametrize("name", SHAPES)
def test_grouped_gemms_under_autocast_run_in_bf16(name, monkeypatch):
    dtypes = []
    plain = torch.nn.functional.grouped_mm

    def watched(a, b, **more):
        dtypes.extend((a.dtype, b.dtype))
        return plain(a, b, **more)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", watched)
    expected, grads = stepped(name)
    assert set(dtypes) == {torch.float32}
    dtypes.clear()
    loss, low = stepped(name, precision="bf16")
    assert set(dtypes) == {torch.bfloat16}
    assert float(loss) == pytest.approx(float(expected), rel=2e-3)
    for n in (n for n in grads if "experts" in n):
        assert low[n].dtype == torch.float32
        assert cosine(low[n], grads[n]) > 0.98, n


def test_grouped_experts_with_biases_equal_batched_experts():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_local_experts": 4}
    experts = GptOssExperts(AutoConfig.for_model("gpt_oss", **sizes))
    for param in experts.parameters():
        torch.nn.init.normal_(param)
    hidden, weights = torch.randn(40, 32), torch.rand(40, 2)
    index = torch.rand(40, 4).topk(2).indices
    results = []
    for forward in (moe.batched_mm_experts_forward, grouped_experts):
        experts.zero_grad()
        out = forward(experts, hidden, index, weights)
        out.square().sum().backward()
        results.append([out.detach(), *(param.grad for param in experts.parameters())])
    for one, two in zip(*results, strict=True):
        assert torch.allclose(one, two, rtol=1e-5, atol=1e-5 * float(one.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["selective", pytest.param("none", marks=CAMPAIGN)])
def test_grouped_experts_compiled_equal_uncompiled(mode):
    loss, grads = stepped("qwen3_moe", precision="bf16")
    how = {"compile": "aot_eager", "activation_checkpointing": mode}
    compiled, its = stepped("qwen3_moe", precision="bf16", **how)
    assert float(compiled) == pytest.approx(float(loss), rel=1e-3)
    for n, grad in grads.items():
        assert torch.allclose(its[n], grad, rtol=0.1, atol=0.02 * float(grad.abs().max())), n


def test_grouped_experts_size_without_bf16_kernel_stay_in_float32(monkeypatch):
    monkeypatch.setitem(SHAPES["qwen3_moe"], "moe_intermediate_size", 12)
    dtypes = list[torch.dtype]()
    plain = moe._grouped_linear
    watched = lambda x, w, *more, **how: (dtypes.append(w.dtype), plain(x, w, *more, **how))[1]  # noqa: E731
    monkeypatch.setattr(moe, "_grouped_linear", watched)
    stepped("qwen3_moe", precision="bf16")
    assert dtypes == [torch.float32] * len(dtypes) != []


def test_code_of_compiled_blocks_imports_no_lazy_module():
    """torch 2.11 breaks the graph there, and runs the layer in pieces."""
    tree = ast.parse(Path(moe_layers.__file__).read_text())
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = [name for name in modules if name.startswith("transformers")]
    assert {type(importlib.import_module(name)).__name__ for name in names} == {"module"}

"""Experts are computed in the precision of autocast, with the gradients of the plain way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.integrations import moe
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.hf.experts import grouped_experts
from mvp_engine.model_engine import LanguageModelEngine, ModelSource, Settings

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8},  # transposed, with biases
}
ALONE = Layout(World(0, 1, 0, 1, torch.device("cpu")))


def stepped(name: str, **how: Any) -> tuple[Tensor, dict[str, Tensor]]:
    shape = {"model_type": name, "vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, **SHAPES[name]}
    shape |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    engine = LanguageModelEngine(LanguageModelEngine.build_model(ModelSource(None, shape)), ALONE, Settings(**how))
    engine.initialize(lambda m: torch.optim.SGD(m.parameters(), 0.0))
    batch = PackedBatch.from_sequences([torch.arange(n) % 7 for n in (30, 12, 50)])
    numbers = engine.train_batch([batch], lambda b: (engine.model(b, ["loss"])["loss"], b.num_loss_tokens))
    return numbers.loss_sum, {n: p.grad for n, p in engine.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", SHAPES)
def test_products_of_experts_are_in_the_precision_of_autocast(name: str, monkeypatch) -> None:
    given: list[torch.dtype] = []
    plain = torch.nn.functional.grouped_mm

    def watched(a: Tensor, b: Tensor, **more: Any) -> Tensor:
        given.extend((a.dtype, b.dtype))
        return plain(a, b, **more)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", watched)
    expected, grads = stepped(name)
    assert set(given) == {torch.float32}
    given.clear()
    loss, low = stepped(name, precision="bf16")
    assert set(given) == {torch.bfloat16}
    assert float(loss) == pytest.approx(float(expected), rel=2e-3)
    for n in (n for n in grads if "experts" in n):
        assert low[n].dtype == torch.float32
        assert float(torch.cosine_similarity(low[n].flatten(), grads[n].flatten(), dim=0)) > 0.98, n


def test_biases_are_those_of_each_rows_expert() -> None:
    torch.manual_seed(0)
    experts = GptOssExperts(AutoConfig.for_model("gpt_oss", hidden_size=32, intermediate_size=24, num_local_experts=4))
    for param in experts.parameters():
        torch.nn.init.normal_(param)
    hidden, weights = torch.randn(40, 32), torch.rand(40, 2)
    index = torch.rand(40, 4).topk(2).indices
    ways = []
    for way in (moe.batched_mm_experts_forward, grouped_experts):
        experts.zero_grad()
        out = way(experts, hidden, index, weights)
        out.square().sum().backward()
        ways.append([out.detach(), *(param.grad for param in experts.parameters())])
    for one, two in zip(*ways, strict=True):
        assert torch.allclose(one, two, rtol=1e-5, atol=1e-5 * float(one.abs().max()))


@pytest.mark.parametrize("how", [{}, {"activation_checkpointing": "selective"}], ids=str)
def test_compiled_they_are_the_same(how: dict[str, Any]) -> None:
    loss, grads = stepped("qwen3_moe", precision="bf16")
    compiled, its = stepped("qwen3_moe", precision="bf16", compile="aot_eager", **how)
    assert float(compiled) == pytest.approx(float(loss), rel=1e-3)
    assert all(torch.allclose(its[n], grad, rtol=0.1, atol=0.02 * float(grad.abs().max())) for n, grad in grads.items())


def test_sizes_without_kernels_stay_as_they_are(monkeypatch) -> None:
    monkeypatch.setitem(SHAPES["qwen3_moe"], "moe_intermediate_size", 12)
    given = list[torch.dtype]()
    plain = moe.grouped_mm_experts_forward
    watched = lambda e, x, *more: (given.extend((x.dtype, e.down_proj.dtype)), plain(e, x, *more))[1]  # noqa: E731
    monkeypatch.setattr(moe, "grouped_mm_experts_forward", watched)
    stepped("qwen3_moe", precision="bf16")
    assert given[1::2] == [torch.float32] * (len(given) // 2) != []

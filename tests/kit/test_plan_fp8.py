"""What `mvp plan` counts of FP8: weight gradients as compiled blocks save them, weights as FSDP gathers them."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from conftest import CAMPAIGN, ROOT
from test_compiled import dense
from torch import Tensor

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.hf import LanguageModel
from mvp_engine.imports import import_file
from mvp_engine.kit.plan.costs import BlockCosts, PlanSettings, saved_elements
from mvp_engine.kit.plan.step import peak_memory
from mvp_engine.model_engine import LanguageModelEngine, ModelSource, Settings
from mvp_engine.ops import attention as attention_ops
from mvp_engine.ops import fp8

data: Any = import_file(ROOT / "benchmarks" / "sft" / "data.py")
SHAPE: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 384,
}
SHAPE |= {
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
}


def test_plan_counts_fp8_inputs_of_weight_gradients_in_compiled_blocks_alone():
    model = LanguageModel.on_meta(None, data.shape("qwen3_1_7b"))
    batch = PackedBatch.from_sequences([torch.zeros(1000, dtype=torch.long)])

    def saved(**how):
        return BlockCosts(model, PlanSettings(**{"fp8": True, **how})).saved_bytes(batch).text

    # Layers, tokens; attention and its output, MLP and down projection.
    less = 28 * 1000 * (2048 - 2048 + 2048 + 6144)
    assert saved() - saved(fp8="all") == pytest.approx(less)
    assert saved(compile=None) == saved(compile=None, fp8="all")
    model.requires_grad_(False)
    model.hf.model.embed_tokens.requires_grad_()  # frozen layers have no weight gradient
    assert saved() == saved(fp8="all")


@pytest.mark.parametrize("reshard", [True, False])
def test_plan_counts_gathered_fp8_weights_as_a_byte_and_a_scale_per_row(reshard):
    model = LanguageModel.on_meta(None, data.shape("qwen3_1_7b"))
    batch = PackedBatch.from_sequences([torch.zeros(1000, dtype=torch.long)])
    rows = 2048 + 2 * 1024 + 2048 + 2 * 6144 + 2048  # of the seven matrices of a layer
    elements = sum(p.numel() for p in model.hf.model.layers[0].parameters() if p.ndim == 2)

    def saved_by_fp8(ranks):
        layouts = (PlanSettings(fp8=low, shard=ranks, reshard=reshard) for low in (False, True))
        bf16, low = (
            peak_memory(BlockCosts(model, one), [batch], 2)["all-gathered weights"]
            for one in layouts
        )
        return bf16 - low

    gathered = 2 if reshard else 28  # layers
    assert saved_by_fp8(8) == pytest.approx(gathered * (elements - 4 * rows))
    assert saved_by_fp8(5) == 0  # rows do not divide evenly


@torch.library.custom_op("mvp_tests::fp8_mm", mutates_args=())
def fp8_mm(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """One operator, as on a GPU."""
    return (a.float() @ b.float().t() * a_scale * b_scale.t()).bfloat16()


@fp8_mm.register_fake
def _(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=torch.bfloat16)


def bytes_of_block(batch, weight_gradients):
    """Bytes that the one block saves, apart from parameters."""
    torch._dynamo.reset()
    layout = Layout(World(0, 1, 0, 1, torch.device("cpu")))
    how: dict[str, Any] = {
        "compile": "aot_eager",
        "fp8": "all" if weight_gradients else True,
    }
    engine = LanguageModelEngine(
        LanguageModelEngine.build_model(ModelSource(None, SHAPE)),
        layout,
        Settings(precision="bf16", **how),
    )
    engine.initialize(lambda m: torch.optim.SGD(m.parameters(), 0.0))
    seen = {param.untyped_storage().data_ptr() for param in engine.model.parameters()}
    saved: list[Tensor] = []

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in seen:
            seen.add(tensor.untyped_storage().data_ptr())
            saved.append(tensor)  # alive, so that no other gets its memory
        return tensor

    def loss(one):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            return engine.model(one, ["loss"])["loss"], one.num_loss_tokens

    engine.train_batch([batch], loss)
    return sum(tensor.nbytes for tensor in saved)


@CAMPAIGN
def test_plan_of_fp8_weight_gradients_equals_what_autograd_saves(
    monkeypatch,
):
    monkeypatch.setattr(fp8, "_matmul_transposed", lambda *both, fast=True: fp8_mm(*both))
    batch = PackedBatch.from_sequences([torch.arange(n) % 96 for n in (1000, 615)])
    with patch.multiple(
        attention_ops,
        _has_kernels=lambda *_: True,
        _torch_varlen_is_supported=lambda *_: True,
        _torch_varlen=dense,
    ):
        plain, low = (bytes_of_block(batch, weight_gradients) for weight_gradients in (False, True))
    block = LanguageModel.on_meta(None, SHAPE).hf.model.layers[0]
    inputs = 3 * 128 + 384
    # FP8 values are padded by one token; each of the four matrices has a scale.
    assert plain - low == 1615 * saved_elements(block).fp8_gradients - inputs - 4 * 4

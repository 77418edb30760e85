"""Stacked experts in FP8: close to float32 for any sizes of groups, and only where the config enables them."""

import pytest
import torch
from conftest import user_error
from test_experts import BATCH, SHAPES, cosine, shape_of, stepped
from tiny_engines import engine_of, gradients, train
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoConfig, AutoModelForCausalLM

from mvp_engine.hf.experts import fp8_layers, grouped_mm, moe_layers
from mvp_engine.hf.experts.grouped_mm import fp8_grouped_linear
from mvp_engine.hf.lora.lora_layers import add_adapters
from mvp_engine.hf.lora.lora_settings import Lora
from mvp_engine.model_engine import LanguageModelEngine, ModelSource
from mvp_engine.ops import fp8

GROUPS = {
    "even": [16, 16, 16, 16],
    "an empty one first and last": [0, 37, 20, 0],
    "very unequal": [1, 200, 0, 3],
    "all rows of one": [0, 0, 45, 0],
    "no row": [0, 0, 0, 0],
}


def inputs(sizes, transposed, device="cpu"):
    """Rows, weights, ends of groups and gradients, equal on all devices."""
    g = torch.Generator().manual_seed(1)
    rows = sum(sizes)
    x_NI, d_NO = torch.randn(rows, 64, generator=g), torch.randn(rows, 48, generator=g)
    weight = torch.randn(len(sizes), *((64, 48) if transposed else (48, 64)), generator=g)
    weight[1] *= 100.0
    x_NI[:1] *= 1e4  # an outlier
    d_NO[-1:] *= 1e-6
    ends_E = torch.tensor(sizes).cumsum(0, dtype=torch.int32)
    x_NI, d_NO = x_NI.to(device, torch.bfloat16), d_NO.to(device, torch.bfloat16)
    return x_NI.requires_grad_(), weight.to(device).requires_grad_(), ends_E.to(device), d_NO


def run(function, sizes, transposed, device="cpu"):
    x_NI, weight, ends_E, d_NO = inputs(sizes, transposed, device)
    out_NO = function(x_NI, weight, ends_E, transposed)
    assert out_NO.dtype == torch.bfloat16
    out_NO.backward(d_NO)
    assert weight.grad.dtype == torch.float32
    assert weight.grad.stride() == weight.stride()
    return {"out": out_NO.detach(), "x": x_NI.grad, "weight": weight.grad}


def in_float32(x_NI, weight, ends_E, transposed):
    """A loop over experts."""
    starts = [0, *ends_E.tolist()]
    weight_EIO = weight if transposed else weight.mT
    parts = zip(starts, starts[1:], weight_EIO, strict=False)
    return torch.cat([x_NI[a:b].float() @ w_IO for a, b, w_IO in parts])


def error(found, wanted):
    return (found.float() - wanted.float()).norm(dim=-1) / wanted.float().norm(dim=-1)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", GROUPS.values(), ids=GROUPS.keys())
def test_fp8_grouped_linear_is_close_to_float32_in_every_row(sizes, transposed):
    found = run(fp8_grouped_linear, sizes, transposed)
    x_NI, weight, ends_E, d_NO = inputs(sizes, transposed)
    wanted_NO = in_float32(x_NI, weight, ends_E, transposed)
    x_grad, weight_grad = torch.autograd.grad(wanted_NO, (x_NI, weight), d_NO.float())
    for name, wanted in (("out", wanted_NO.detach()), ("x", x_grad)):
        apart = error(found[name], wanted)
        assert len(apart) == sum(sizes)
        assert (apart < 0.07).all(), (name, apart.max())
        assert not sum(sizes) or apart.max() > 0.005, name  # FP8 was used
    atol = 1e-2 * float(weight_grad.abs().max())
    assert torch.allclose(found["weight"], weight_grad, rtol=1e-2, atol=atol)
    for size, grad in zip(sizes, found["weight"], strict=True):
        assert bool(grad.any()) == (size > 0)


def test_fp8_grouped_linear_compiled_equals_uncompiled_in_one_graph_for_any_rows():
    counter = CompileCounterWithBackend("aot_eager")

    def linear(x_NI, *more):
        torch._dynamo.maybe_mark_dynamic(x_NI, 0)
        return compiled(x_NI, *more)

    compiled = torch.compile(fp8_grouped_linear, backend=counter, fullgraph=True)
    for sizes in (GROUPS["very unequal"], GROUPS["even"], [0, 2, 0, 0]):
        eager, found = run(fp8_grouped_linear, sizes, False), run(linear, sizes, False)
        assert all(torch.equal(found[name], value) for name, value in eager.items())
    assert counter.frame_count == 1


def test_fp8_grouped_linear_of_frozen_weights_does_not_save_its_input():
    kept = []
    for trains in (True, False):
        x_NI, weight, ends_E, d_NO = inputs([5, 0, 3, 9], False)
        saved = []

        def keep(x, saved=saved):
            saved.append(x.shape)
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out_NO = fp8_grouped_linear(x_NI, weight.requires_grad_(trains), ends_E)
        out_NO.backward(d_NO)
        assert (weight.grad is not None) == trains
        kept.append((17, 64) in saved)
    assert kept == [True, False]


@pytest.mark.parametrize("transposed", [False, True])
def test_fp8_grouped_linear_of_quantized_weights_gives_bit_equal_outputs(transposed):
    x_NI, weight, ends_E, _ = inputs([5, 0, 3, 9], transposed)
    quantized = fp8.Fp8Weight(*grouped_mm.quantize_experts(weight.detach(), transposed))
    with torch.no_grad():
        expected, found = (
            fp8_grouped_linear(x_NI, one, ends_E, transposed) for one in (weight, quantized)
        )
    assert torch.equal(found, expected)


@pytest.fixture
def gemms(monkeypatch):
    """The number of rows of each grouped GEMM that runs in FP8."""
    found = []
    plain = grouped_mm.opaque_grouped_mm
    watched = lambda a, *more: (found.append(len(a)), plain(a, *more))[1]  # noqa: E731
    monkeypatch.setattr(grouped_mm, "opaque_grouped_mm", watched)
    return found


@pytest.fixture
def said(logged):
    return logged("info", "warning")


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_fp8_experts_of_a_model_have_the_gradients_of_bf16(name, checkpointing, gemms, said):
    how = {"precision": "bf16", "activation_checkpointing": checkpointing}
    loss, grads = stepped(name, **how)
    assert not gemms
    low, found = stepped(name, fp8=True, **how)
    # Two layers of two matrices: forward, the gradient of inputs, and the second forward of full checkpointing.
    assert gemms == [2 * 92] * (12 if checkpointing == "full" else 8)
    assert said == ["model.fp8: 8 linear layers and the experts of 2 layers run in FP8"]
    assert float(low) != float(loss)
    assert float(low) == pytest.approx(float(loss), rel=5e-3)
    for key in (key for key in grads if "experts" in key):
        assert cosine(found[key], grads[key]) > 0.97, key


def test_fp8_experts_of_other_sizes_stay_in_bf16(gemms, monkeypatch, said):
    monkeypatch.setitem(SHAPES["qwen3_moe"], "moe_intermediate_size", 24)
    stepped("qwen3_moe", precision="bf16", fp8=True)
    assert not gemms
    assert said == [
        "model.fp8: 8 linear layers run in FP8",
        "model.fp8: the experts of 2 layers do not run in FP8: their sizes are no multiples of 16",
    ]


def test_fp8_experts_on_a_gpu_without_fp8_grouped_gemms_stay_in_bf16(gemms, monkeypatch, said):
    monkeypatch.setattr(fp8_layers, "is_supported", lambda _: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA L40S")
    stepped("qwen3_moe", precision="bf16", fp8=True)
    assert not gemms
    message = "experts of 2 layers do not run in FP8: torch has no FP8 grouped GEMM for NVIDIA L40S"
    assert message in said[1]


def test_fp8_layers_leave_out_routers_that_are_linear_layers():
    """Other experts would be chosen."""
    gemma = {"enable_moe_block": True, "num_experts": 32, "top_k_experts": 2}
    afmoe = {"num_experts": 32, "num_dense_layers": 0}
    for name, shape, router in (
        ("afmoe", afmoe, "mlp.router.gate"),
        ("gemma4_text", {**gemma, "moe_intermediate_size": 16}, "router.proj"),
    ):
        one_layer = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
        config = AutoConfig.for_model(name, **one_layer, **shape)
        with torch.device("meta"):
            block = AutoModelForCausalLM.from_config(config).model.layers[0]
        found = moe_layers.fp8_layers(block)
        modules = block.named_modules()
        left = [key for key, module in modules if fp8.fits(module) and module not in found]
        assert left == [router]
        assert found


def test_fp8_weight_gradients_of_experts_alone_are_refused(monkeypatch):
    monkeypatch.setattr(fp8, "fits", lambda _: False)
    message = "model.fp8=all is for weight gradients of linear layers in FP8, and LanguageModel has"
    with user_error(message):
        stepped("qwen3_moe", precision="bf16", fp8="all")


def test_adapters_of_fp8_experts_stay_in_bf16(gemms):
    found = []
    for low in (False, True):
        torch.manual_seed(0)
        source = ModelSource(None, shape_of("qwen3_moe"))
        model = LanguageModelEngine.build_model(source)
        experts = ["experts.gate_up_proj", "experts.down_proj"]
        add_adapters(model, Lora(rank=8, target_modules=["llm", *experts]))
        train(engine_of(model, precision="bf16", fp8=low), BATCH)
        found.append(gradients(model))
    assert gemms == [2 * 92] * 8  # of the experts themselves, forward and backward
    assert found[1].keys() == found[0].keys()
    for name in (name for name in found[0] if "lora_B" in name):
        assert cosine(found[0][name], found[1][name]) > 0.97, name


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("sizes", GROUPS.values(), ids=GROUPS.keys())
def test_fp8_grouped_linear_on_gpu_equals_cpu(sizes, compiled, transposed):
    fp8.check(torch.device("cuda"))
    linear = torch.compile(fp8_grouped_linear, fullgraph=True) if compiled else fp8_grouped_linear
    here, there = run(fp8_grouped_linear, sizes, transposed), run(linear, sizes, transposed, "cuda")
    for name, value in here.items():
        wanted, found = value.float(), there[name].float().cpu()
        assert found.isfinite().all()
        # The GPU accumulates with fewer bits. Rows are compared by themselves: one is an outlier.
        assert not sum(sizes) or (wanted - found).norm() <= 0.01 * wanted.norm(), name
        if name != "weight":
            assert (error(found, wanted) < 0.02).all(), name
        else:
            assert found[torch.tensor(sizes) == 0].eq(0).all()

"""FP8 linear layers: close to bf16, equal on every device, and only where the config enables them."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import user_error
from families import overrides_of
from tiny_engines import adamw, counting, engine_of, fresh_graphs, train
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mvp_engine.hf.experts.fp8_layers import quantized_once
from mvp_engine.ops import fp8


def layers(device="cpu", weight_gradients=False):
    torch.manual_seed(0)
    plain = nn.Linear(64, 48).to(device)  # initialized on the CPU: equal on all devices
    low = nn.Sequential(copy.deepcopy(plain))
    fp8.use(low, weight_gradients)
    return plain, low


def run(layer, x, d):
    x = x.clone().requires_grad_()
    with torch.autocast(x.device.type, torch.bfloat16):
        out = layer(x)
    out.backward(d)
    grads = {name.split(".")[-1]: param.grad for name, param in layer.named_parameters()}
    return {"out": out.detach(), "x": x.grad, **grads}


def inputs(device="cpu"):
    g = torch.Generator().manual_seed(1)
    x, d = torch.randn(2, 40, 64, generator=g), torch.randn(2, 40, 48, generator=g)
    x[0, 0] *= 1e4  # an outlier
    d[1] *= 1e-6
    return x.to(device), d.to(device, torch.bfloat16)


def in_columns(tensors):
    """Tokens by features, with the tokens innermost in memory."""
    return tuple(one.flatten(0, 1).t().contiguous().t() for one in tensors)


def test_fp8_linear_outputs_and_gradients_are_close_to_bf16_in_every_row():
    plain, low = layers()
    expected, found = (run(layer, *inputs()) for layer in (plain, low))
    for name in ("out", "x"):
        a, b = (one[name].float().flatten(0, 1) for one in (expected, found))
        apart = (a - b).norm(dim=-1) / a.norm(dim=-1)
        # FP8 was used, and the outlier row changes no other.
        assert 0.005 < float(apart.max()) < 0.06, name
    for name in ("weight", "bias"):  # sums over tokens stay bf16 GEMMs
        assert torch.equal(expected[name], found[name])
        assert found[name].dtype == torch.float32


def test_fp8_linear_of_transposed_input_multiplies_row_major_operands(monkeypatch):
    """As after a convolution over time; GEMMs on a GPU refuse others. Sums over tokens are not of fewer bits."""
    operands = []
    is_fast = []
    real = fp8._matmul_transposed

    def multiply(a, a_scale, b, b_scale, fast=True):
        operands.extend((a, b))
        is_fast.append(fast)
        return real(a, a_scale, b, b_scale, fast)

    monkeypatch.setattr(fp8, "_matmul_transposed", multiply)
    expected = run(layers(weight_gradients=True)[1], *(one.flatten(0, 1) for one in inputs()))
    found = run(layers(weight_gradients=True)[1], *in_columns(inputs()))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert [one.is_contiguous() for one in operands] == [True] * 12
    assert is_fast == [True, True, False] * 2  # outputs, gradients of inputs and of weights


def test_fp8_quantize_scales_rows_by_the_smallest_power_of_two_that_fits():
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(200, 16, generator=g) * torch.linspace(-30, 30, 200).exp2()[:, None]
    rows[:3], rows[3] = 448 * 2.0 ** torch.arange(3)[:, None], 0
    values, scale = fp8.quantize(rows)
    assert torch.equal(scale.log2(), scale.log2().round())
    largest = (rows / scale).abs().amax(-1)
    assert ((largest > 224) & (largest <= 448))[rows.any(-1)].all()
    lost = (values.float() * scale - rows).abs()
    most = torch.maximum(rows.abs() / 16, scale * 2.0**-10)  # 3 bits; below 2^-6 steps of 2^-9
    assert (lost <= most).all()


@pytest.mark.parametrize("weight_gradients", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 16, 17])
def test_fp8_gemms_have_operands_and_scales_that_gpus_accept(tokens, weight_gradients):
    """By what torch checks of tensors without values: orders in memory, sizes, one scale or one of each row."""

    class Context:
        needs_input_grad = True, False, True
        saved_tensors: tuple[Tensor, ...] = ()

        def save_for_backward(self, *tensors):
            self.saved_tensors = tensors

    with FakeTensorMode():
        x = torch.empty(tokens, 384, device="cuda", dtype=torch.bfloat16)
        d = torch.empty(tokens, 256, device="cuda", dtype=torch.bfloat16)
        weight = torch.empty(256, 384, device="cuda")
        context = Context()
        out = fp8._Fp8Matmul.forward(context, x, weight_gradients, weight)
        d_x, _, d_weight = fp8._Fp8Matmul.backward(context, d)
    assert d_x is not None
    assert d_weight is not None
    assert (out.shape, d_x.shape, d_weight.shape) == ((tokens, 256), (tokens, 384), (256, 384))


@pytest.mark.parametrize("tokens", [16, 17, 79])
def test_fp8_weight_gradient_is_close_to_float32_in_every_output_and_input(tokens):
    """Whether or not their number is a multiple of 16; small values of one input, large ones of one output."""
    _, low = layers(weight_gradients=True)
    x, d = (one.flatten(0, 1)[1 : 1 + tokens] for one in inputs())  # without the outlier
    x[:, 5] *= 2**-8
    d[:, 7] *= 2**8
    found = run(low, x, d)
    wanted = d.float().t() @ x.bfloat16().float()
    assert found["weight"].dtype == torch.float32
    assert torch.equal(found["bias"], run(layers()[1], x, d)["bias"])
    for one in (found["weight"], wanted):
        one[:, 5] *= 2**8
        one[7] *= 2**-8
    for dim in (0, 1):
        apart = (found["weight"] - wanted).norm(dim=dim) / wanted.norm(dim=dim)
        assert 0.005 < float(apart.max()) < 0.07, dim


def test_fp8_weight_gradient_of_no_tokens_is_zero():
    _, low = layers(weight_gradients=True)
    assert not run(low, torch.zeros(0, 64), torch.zeros(0, 48, dtype=torch.bfloat16))[
        "weight"
    ].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_fp8_gradients_of_a_non_finite_gradient_are_not_finite(bad):
    """So that the step is skipped; rows of other tokens stay as they are."""
    _, low = layers(weight_gradients=True)
    x, d = (one.flatten(0, 1) for one in inputs())
    expected = run(low, x, d)["x"]
    low.zero_grad()
    d[3, 5] = bad
    found = run(low, x, d)
    assert not found["x"][3].isfinite().any()
    assert torch.equal(found["x"][4:], expected[4:])
    assert not found["weight"][5].isfinite().any()


def test_fp8_linear_without_bf16_autocast_or_with_odd_sizes_equals_linear():
    plain, low = layers()
    x = inputs()[0]
    assert torch.equal(plain(x), low(x))
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(plain(x), low(x))
    with torch.autocast("cpu", torch.bfloat16):  # one row, and no rows
        assert torch.equal(low(x[0, 0]), low(x[0])[0])
        assert low(x[:, :0]).shape == (2, 0, 48)
    assert not any(fp8.fits(odd) for odd in (nn.Linear(20, 32), nn.Linear(32, 10)))


def test_fp8_linear_compiled_equals_uncompiled_with_two_graphs():
    """For the first number of tokens, and for all others, whether or not they are multiples of 16."""
    check_compiled("cpu", "aot_eager", tolerance=0.0)


def check_compiled(device, backend, tolerance):
    _, low = layers(device, weight_gradients=True)
    stats = fresh_graphs()
    compiled = torch.compile(low, backend=backend, fullgraph=True)
    x, d = (one.flatten(0, 1) for one in inputs(device))
    for tokens in (40, 33, 48):
        results = []
        for layer in (low, compiled):
            low.zero_grad()
            results.append(run(layer, x[:tokens].bfloat16(), d[:tokens]))
        for name, value in results[0].items():
            assert (results[1][name] - value).norm() <= tolerance * value.norm(), name
    assert stats["unique_graphs"] == 2
    assert not torch._dynamo.utils.counters["graph_break"]


def test_fp8_weight_quantized_once_gives_bit_equal_outputs_until_its_context_ends():
    _, low = layers()
    x = inputs()[0]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = low(x)
        with quantized_once(low):
            low.get_parameter("0.weight").mul_(2)  # not read
            assert torch.equal(low(x), expected)
        assert not torch.equal(low(x), expected)


def test_fp8_linear_frozen_weight_does_not_save_its_input():
    kept = []
    for trains in (True, False):
        _, low = layers()
        low.requires_grad_(trains)
        sizes = []

        def keep(x, sizes=sizes):
            sizes.append(x.numel())
            return x

        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x)
        with torch.autocast("cpu", torch.bfloat16), hooks:
            out = low(inputs()[0].requires_grad_())
        out.sum().backward()
        kept.append(2 * 40 * 64 in sizes)
    assert kept == [True, False]


def engine(**how):
    return engine_of("qwen3", optimizer=lambda model: adamw(model, 3e-3), **how)


def step(part):
    numbers = train(part, counting(30, 12, 50, modulus=7))
    return float(numbers.loss_sum / numbers.weight)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_fp8_model_losses_follow_those_of_bf16(checkpointing):
    """With weight gradients in FP8 as well."""
    losses = {}
    for low in (False, True):
        part = engine(
            precision="bf16", activation_checkpointing=checkpointing, fp8="all" if low else False
        )
        kinds = {type(module) for module in part.model.modules() if isinstance(module, nn.Linear)}
        assert (fp8.Fp8Linear in kinds) == low
        assert type(part.model.hf.lm_head) is nn.Linear
        losses[low] = [step(part) for _ in range(12)]
    assert losses[True] != losses[False]
    assert losses[True] == pytest.approx(losses[False], rel=0.02)
    assert losses[True][-1] < 0.8 * losses[True][0]


def test_fp8_setting_by_part_is_applied():
    for how, has_weight_gradients in (
        ({"fp8": {"llm": True}}, False),
        ({"fp8": {"llm": "all"}}, True),
        ({"fp8": "all"}, True),
    ):
        modules = list(engine(precision="bf16", **how).model.modules())
        low = [module for module in modules if isinstance(module, fp8.Fp8Linear)]
        assert {module.fp8_weight_gradient for module in low} == {has_weight_gradients}


@pytest.mark.parametrize(
    "how, message",
    [
        ({"precision": "fp32", "fp8": True}, "is for bf16, not for fp32"),
        ({"fp8": {"vision": True}}, "no part vision"),
        ({"fp8": "some"}, "fp8='some' is none of False, True, all"),
    ],
    ids=str,
)
def test_fp8_setting_that_cannot_be_raises(how, message):
    with user_error(message):
        engine(**{"precision": "bf16", **how})


def test_fp8_of_a_model_without_layers_that_fit_raises():
    odd = {**overrides_of("qwen3"), "hidden_size": 24, "intermediate_size": 40}
    with user_error("no block of LanguageModel has linear layers"):
        engine_of(odd, precision="bf16", fp8=True)


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("weight_gradients", [False, True])
def test_fp8_linear_on_gpu_equals_cpu(weight_gradients, transposed):

    def results(device):
        given = in_columns(inputs(device)) if transposed else inputs(device)
        return run(layers(device, weight_gradients)[1], *given)

    here, there = results("cpu"), results("cuda")
    for name in here:
        a, b = here[name].float(), there[name].float().cpu()
        assert float((a - b).norm() / a.norm()) < 0.01, name  # the GPU accumulates with fewer bits


@pytest.mark.gpu
def test_fp8_linear_compiled_on_gpu_equals_uncompiled_with_two_graphs():
    check_compiled("cuda", "inductor", tolerance=0.01)

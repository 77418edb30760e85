"""FP8 linear layers: close to bf16, equal on every device, and only where the config enables them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.errors import UserError
from mvp_engine.model_engine import LanguageModelEngine, ModelSource, Settings
from mvp_engine.ops import fp8


def layers(device: str = "cpu") -> tuple[nn.Linear, nn.Sequential]:
    torch.manual_seed(0)
    plain = nn.Linear(64, 48).to(device)  # initialized on the CPU: equal on all devices
    low = nn.Sequential(copy.deepcopy(plain))
    assert fp8.use(low) == 1
    return plain, low


def run(layer: nn.Module, x: Tensor, d: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    with torch.autocast(x.device.type, torch.bfloat16):
        out = layer(x)
    out.backward(d)
    return {"out": out.detach(), "x": x.grad, **{name.split(".")[-1]: p.grad for name, p in layer.named_parameters()}}


def inputs(device: str = "cpu") -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    x, d = torch.randn(2, 40, 64, generator=g), torch.randn(2, 40, 48, generator=g)
    x[0, 0] *= 1e4  # an outlier
    d[1] *= 1e-6
    return x.to(device), d.to(device, torch.bfloat16)


def test_fp8_linear_outputs_and_gradients_are_close_to_bf16_in_every_row() -> None:
    plain, low = layers()
    expected, found = (run(layer, *inputs()) for layer in (plain, low))
    for name in ("out", "x"):
        a, b = (one[name].float().flatten(0, 1) for one in (expected, found))
        apart = (a - b).norm(dim=-1) / a.norm(dim=-1)
        assert 0.005 < float(apart.max()) < 0.06, name  # FP8 was used, and the outlier row changes no other
    for name in ("weight", "bias"):  # sums over tokens stay bf16 GEMMs
        assert torch.equal(expected[name], found[name])
        assert found[name].dtype == torch.float32


def test_fp8_linear_without_bf16_autocast_or_with_odd_sizes_equals_linear() -> None:
    plain, low = layers()
    x = inputs()[0]
    assert torch.equal(plain(x), low(x))
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(plain(x), low(x))
    with torch.autocast("cpu", torch.bfloat16):  # one row, and no rows
        assert torch.equal(low(x[0, 0]), low(x[0])[0])
        assert low(x[:, :0]).shape == (2, 0, 48)
    odd = nn.Sequential(nn.Linear(20, 32), nn.Linear(32, 10))
    assert fp8.use(odd) == 0


def test_fp8_linear_compiled_equals_uncompiled() -> None:
    _, low = layers()
    eager = run(low, *inputs())
    low.zero_grad()
    compiled = run(torch.compile(low, backend="aot_eager", fullgraph=True), *inputs())
    for name, value in eager.items():
        assert torch.allclose(value, compiled[name], rtol=1e-2, atol=1e-8), name


def test_fp8_linear_frozen_weight_does_not_save_its_input() -> None:
    kept = []
    for trains in (True, False):
        _, low = layers()
        low.requires_grad_(trains)
        sizes: list[int] = []
        keep = torch.autograd.graph.saved_tensors_hooks(
            lambda x, sizes=sizes: sizes.append(x.numel()) or x, lambda x: x
        )
        with torch.autocast("cpu", torch.bfloat16), keep:
            out = low(inputs()[0].requires_grad_())
        out.sum().backward()
        kept.append(2 * 40 * 64 in sizes)
    assert kept == [True, False]


SHAPE: dict[str, Any] = {"model_type": "qwen3", "vocab_size": 99, "hidden_size": 32, "intermediate_size": 64}
SHAPE |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def engine(shape: dict[str, Any] = SHAPE, **how: Any) -> LanguageModelEngine:
    layout = Layout(World(0, 1, 0, 1, torch.device("cpu")))
    part = LanguageModelEngine(LanguageModelEngine.build_model(ModelSource(None, shape)), layout, Settings(**how))
    part.initialize(lambda m: torch.optim.AdamW(m.parameters(), 3e-3))
    return part


def step(part: LanguageModelEngine, batch: PackedBatch) -> float:
    numbers = part.train_batch([batch], lambda b: (part.model(b, ["loss"])["loss"], b.num_loss_tokens))
    return float(numbers.loss_sum / numbers.weight)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_fp8_model_losses_follow_those_of_bf16(checkpointing: str) -> None:
    batch = PackedBatch.from_sequences([torch.arange(n) % 7 for n in (30, 12, 50)])
    losses: dict[bool, list[float]] = {}
    for low in (False, True):
        part = engine(precision="bf16", fp8=low, activation_checkpointing=checkpointing)
        kinds = {type(module) for module in part.model.modules() if isinstance(module, nn.Linear)}
        assert (fp8.Fp8Linear in kinds) == low
        assert type(part.model.hf.lm_head) is nn.Linear
        losses[low] = [step(part, batch) for _ in range(12)]
    assert losses[True] != losses[False]
    assert losses[True] == pytest.approx(losses[False], rel=0.02)
    assert losses[True][-1] < 0.8 * losses[True][0]


def test_fp8_setting_by_part_is_applied_and_invalid_ones_raise() -> None:
    part = engine(precision="bf16", fp8={"llm": True})
    assert any(isinstance(module, fp8.Fp8Linear) for module in part.model.modules())
    with pytest.raises(UserError, match="is for bf16, not for fp32"):
        engine(fp8=True)
    with pytest.raises(UserError, match="no block of LanguageModel has linear layers"):
        engine(SHAPE | {"hidden_size": 24}, precision="bf16", fp8=True)
    with pytest.raises(UserError, match="no part vision"):
        engine(precision="bf16", fp8={"vision": True})


@pytest.mark.gpu
def test_fp8_linear_on_gpu_equals_cpu() -> None:
    here, there = run(layers()[1], *inputs()), run(layers("cuda")[1], *inputs("cuda"))
    for name in here:
        a, b = here[name].float(), there[name].float().cpu()
        assert float((a - b).norm() / a.norm()) < 0.01, name  # the GPU accumulates with fewer bits

"""The optimizer kit in one process: groups, schedules, moments in few bits, Muon, averages, steps that do not count."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import yaml
from conftest import ROOT
from torch import Tensor, nn

from mvp_engine.errors import UserError
from mvp_engine.kit import OptimKit, OptimSettings
from mvp_engine.kit.optim import KitOptimizer
from mvp_engine.kit.optim.moments import flat_begin, parts
from mvp_engine.kit.optim.muon import orthogonal
from mvp_engine.kit.optim.rounding import from_codes, noise, to_bfloat16, to_codes
from mvp_engine.model_engine.optim import build_optimizer

DEFAULTS = yaml.safe_load((ROOT / "mvp_engine" / "config" / "default.yaml").read_text())["optim"]


def settings(**words: Any) -> OptimSettings:
    return OptimSettings(**{**DEFAULTS, "lr": 0.01, "weight_decay": 0.1, **words})


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.randn(3, 12, 12) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bd,edf->bf", x, self.stack)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(12, 140), nn.Linear(140, 12, bias=False), nn.LayerNorm(12)
        self.conv, self.experts = nn.Conv1d(1, 1, 3, padding=1), Experts()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        return x + 0.1 * self.experts(self.conv(x[:, None])[:, 0])


class Net(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.table, self.place_embed = nn.Embedding(11, 12), nn.Parameter(torch.zeros(1, 12))
        self.layers, self.head = nn.ModuleList(Block() for _ in range(layers)), nn.Linear(12, 11)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.place_embed
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def net(layers: int = 2) -> Net:
    torch.manual_seed(0)
    return Net(layers)


IDS = torch.arange(11)


def loss_of(model: nn.Module) -> Tensor:
    return nn.functional.cross_entropy(model(IDS), (3 * IDS + 1) % 11)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = {name: param.detach() for name, param in model.named_parameters()}
    names = {param: name for name, param in model.named_parameters()}
    kept = {f"{names[p]}/{key}": v for p, state in optimizer.state.items() for key, v in state.items()}
    return {name: value.clone() for name, value in (found | kept).items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_norms_biases_and_embeddings_do_not_decay_and_muon_takes_matrices_of_blocks() -> None:
    model = net()
    optimizer = OptimKit(settings(kind="muon", rates={"layers.1.*": 0.1}, adamw=["*.down.*"])).build_optimizer(model)
    names = {param: name for name, param in model.named_parameters()}
    groups = {g["name"]: g for g in optimizer.param_groups}
    found = {name: {names[p] for p in g["params"]} for name, g in groups.items()}
    assert found["decay"] == {"layers.0.down.weight", "layers.0.conv.weight", "head.weight"}
    assert found["muon"] == {"layers.0.up.weight", "layers.0.experts.stack"}
    assert found["layers.1.*/muon"] == {"layers.1.up.weight", "layers.1.experts.stack"}
    assert found["no_decay"] >= {"table.weight", "place_embed", "layers.0.norm.weight", "head.bias"}
    assert {name for group in found.values() for name in group} == set(names.values())
    assert all(g["weight_decay"] == (0.0 if "no_decay" in name else 0.1) for name, g in groups.items())
    assert groups["layers.1.*/muon"]["lr"] == 0.1
    with pytest.raises(UserError, match=r"optim\.kind=muon: Linear has no matrix for it"):
        OptimKit(settings(kind="muon")).build_optimizer(nn.Linear(2, 2))


def test_warm_up_by_tokens_is_that_by_steps() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), 1.0)
    by_tokens = OptimKit(settings(warmup_tokens=999, schedule="wsd")).build_scheduler(optimizer, 50, 100).lr_lambdas[0]
    by_steps = OptimKit(settings(warmup_steps=10, schedule="wsd")).build_scheduler(optimizer, 50).lr_lambdas[0]
    assert [by_tokens(step) for step in range(60)] == [by_steps(step) for step in range(60)]
    with pytest.raises(UserError, match="does not say how many tokens a step has"):
        OptimKit(settings(warmup_tokens=9)).build_scheduler(optimizer, 50)
    with pytest.raises(ValueError, match="give one of warmup_steps, warmup_ratio and warmup_tokens"):
        settings(warmup_tokens=9, warmup_steps=1)


def test_plain_settings_are_torchs_fused_adamw_to_the_bit() -> None:
    ours, theirs = net(), net()
    mine = OptimKit(settings()).build_optimizer(ours)
    other = build_optimizer(theirs, settings())
    assert train(ours, mine, 5) == train(theirs, other, 5)
    assert same(contents(ours, mine), contents(theirs, other))


def test_noise_is_even_and_a_function_of_the_place_alone() -> None:
    key = torch.tensor(12345, dtype=torch.int32)
    everything = noise(key, (64, 1000), (0, 0), (64, 1000))
    assert torch.equal(noise(key, (7, 30), (5, 900), (64, 1000)), everything[5:12, 900:930])
    low = (everything & 0xFFFF).double()
    assert abs(float(low.mean()) / 65535 - 0.5) < 0.005
    next_key = noise(key + 1, (64, 1000), (0, 0), (64, 1000))
    assert abs(float(torch.corrcoef(torch.stack([low.flatten(), (next_key & 0xFFFF).double().flatten()]))[0, 1])) < 0.02
    far = noise(key, (2,), (2**33 + 5,), (2**34,))  # an index beyond 32 bits wraps around
    assert torch.equal(far, noise(key, (2,), (5,), (2**34,)))


@pytest.mark.parametrize("form", [torch.bfloat16, torch.int8, torch.uint8])
def test_rounding_keeps_the_mean(form: torch.dtype) -> None:
    torch.manual_seed(1)
    value = torch.randn(300) * torch.logspace(-3, 0, 300)
    value = value.abs() if form is torch.uint8 else value
    many, bits = value.expand(2000, 300), noise(torch.tensor(7, dtype=torch.int32), (2000, 300), (0, 0), (2000, 300))
    rounded = to_bfloat16(many, bits).float() if form is torch.bfloat16 else from_codes(*to_codes(many, form, bits))
    rounded, many, value = rounded.double(), many.double(), value.double()
    spread = (rounded - many).abs().amax(0)
    assert bool((spread < 0.032 * value.abs().max()).all())  # a step of the largest code
    assert bool(((rounded.mean(0) - value).abs() < 0.15 * spread + 1e-6 * value.abs()).all())
    assert float((rounded.mean(0) - value).sum().abs()) < 1e-3 * float(value.abs().sum())


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "int8"])
def test_moments_fade_when_gradients_stay_away(moments: str) -> None:
    """Rounded to the nearest, 0.999 of a number in few bits is that number, for ever."""
    weight = nn.Parameter(torch.zeros(8, 256))
    module = nn.ParameterDict({"weight": weight})
    optimizer = OptimKit(settings(betas=[0.9, 0.999], state_dtype=moments)).build_optimizer(module)
    weight.grad = torch.randn(8, 256, generator=torch.Generator().manual_seed(2))
    optimizer.step()
    before = _moment(optimizer, weight, 1)
    weight.grad = torch.zeros(8, 256)
    for _ in range(300):
        optimizer.step()
    assert float(_moment(optimizer, weight, 1).sum() / before.sum()) == pytest.approx(0.999**300, rel=0.02)


def test_a_small_element_beside_a_large_one_does_not_jump() -> None:
    """Its second moment is below the smallest code; as 0 it would make the first one an endless step."""
    weight = nn.Parameter(torch.zeros(4, 128))
    optimizer = OptimKit(settings(state_dtype="int8")).build_optimizer(nn.ParameterDict({"weight": weight}))
    weight.grad = torch.full((4, 128), 1e-5).index_fill_(1, torch.tensor(7), 1.0)
    for _ in range(5):
        optimizer.step()
        weight.grad = torch.zeros(4, 128)
    assert float(weight.detach().abs().max()) < 6 * 0.01


def _moment(optimizer: Any, param: Tensor, which: int) -> Tensor:
    (part,) = parts(param)
    return optimizer._moments_of(param, optimizer.param_groups[0])[which].read(part)


def test_losses_with_few_bits_are_near_and_the_state_is_small() -> None:
    curves, sizes = {}, {}
    for moments in ("float32", "bfloat16", "int8"):
        model = net(layers=1)
        optimizer = OptimKit(settings(state_dtype=moments, lr=0.003)).build_optimizer(model)
        curves[moments] = torch.tensor(train(model, optimizer, 100))
        weights = sum(p.numel() for p in model.parameters())
        states = (v for state in optimizer.state.values() for key, v in state.items() if key != "step")
        sizes[moments] = sum(value.nbytes for value in states) / weights
    for moments, off in (("bfloat16", 2e-4), ("int8", 1e-3)):
        assert float((curves[moments] - curves["float32"]).abs().max()) < off * float(curves["float32"][0]), moments
    assert curves["float32"][-1] < 0.5 * curves["float32"][0]
    assert sizes["float32"] == 8
    assert sizes["bfloat16"] == 4
    assert 2 < sizes["int8"] < 2.9  # rows of 12 have a scale each here; of 4096 there would be 2.06


def test_orthogonal_brings_singular_values_near_one() -> None:
    torch.manual_seed(3)
    for shape in ((40, 12), (12, 40), (3, 16, 16)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
        assert 0.6 < float(values.min()) <= float(values.max()) < 1.2
    stack = torch.randn(2, 6, 9)
    assert torch.allclose(orthogonal(stack)[1], orthogonal(stack[1]), atol=1e-5)


@pytest.mark.parametrize("moments", ["float32", "int8"])
def test_muon_learns_and_moves_matrices_as_far_as_adamw_would(moments: str) -> None:
    model = net()
    optimizer = OptimKit(settings(kind="muon", weight_decay=0.0, state_dtype=moments)).build_optimizer(model)
    before = model.layers[0].up.weight.detach().clone()
    losses = train(model, optimizer, 1)
    step = (model.layers[0].up.weight.detach() - before) / 0.01
    assert float(step.square().mean().sqrt()) == pytest.approx(0.2, rel=0.15)  # AdamW's, as measured by others
    losses += train(model, optimizer, 39)
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize("words", [{}, {"state_dtype": "bfloat16"}, {"state_dtype": "int8"}, {"kind": "muon"}], ids=str)
def test_a_step_that_is_not_to_count_changes_nothing(words: dict[str, Any]) -> None:
    """As the engine asks for on a GPU: by a flag on the device, with gradients that are not finite, or not scaled."""
    model = net()
    optimizer: Any = OptimKit(settings(ema=0.9, **words)).build_optimizer(model)
    train(model, optimizer, 3)
    before = contents(model, optimizer)
    loss_of(model).backward()
    for param in model.parameters():
        assert param.grad is not None
        param.grad *= float("nan")
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert same(contents(model, optimizer), before)
    optimizer.found_inf, optimizer.grad_scale = torch.zeros(()), torch.tensor(4.0)
    optimizer.zero_grad()
    (4 * loss_of(model)).backward()
    optimizer.step()
    flagged = contents(model, optimizer)
    again = net()
    other = OptimKit(settings(ema=0.9, **words)).build_optimizer(again)
    train(again, other, 4)
    for name, value in contents(again, other).items():
        assert torch.allclose(value.float(), flagged[name].float(), atol=1e-6), name


def test_averages_follow_the_weights_and_change_places_with_them() -> None:
    model = net()
    optimizer = OptimKit(settings(ema=0.75)).build_optimizer(model)
    weight, mean = model.head.weight, model.head.weight.detach().clone()
    for step in range(1, 13):
        train(model, optimizer, 1)
        share = 1 - min(0.75, (1 + step) / (10 + step))
        mean += share * (weight.detach() - mean)
    before = contents(model, optimizer)
    with optimizer.averaged():
        assert torch.allclose(weight, mean, atol=1e-6)
        assert not torch.allclose(weight, before["head.weight"], atol=1e-4)
        with pytest.raises(RuntimeError, match="the averaged weights are in place"):
            optimizer.step()
    assert same(contents(model, optimizer), before)
    with (
        pytest.raises(UserError, match="no average of the weights is kept"),
        OptimKit(settings()).build_optimizer(net()).averaged(),
    ):
        pass


@pytest.mark.parametrize("old", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("new", ["float32", "bfloat16", "int8"])
def test_moments_of_another_form_are_converted(old: str, new: str) -> None:
    model = net(layers=1)
    first = OptimKit(settings(state_dtype=old)).build_optimizer(model)
    train(model, first, 3)
    second = OptimKit(settings(state_dtype=new)).build_optimizer(model)
    second.load_state_dict(first.state_dict())
    if old == new:
        assert same(contents(model, second), contents(model, first))
    weight = model.layers[0].up.weight
    for which in (0, 1):
        before, after = (_moment(made, weight, which) for made in (first, second))
        assert torch.allclose(before, after, atol=0.02 * float(before.abs().max()))
    train(model, second, 1)


def test_moments_of_another_optimizer_begin_anew_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    first = OptimKit(settings(ema=0.9)).build_optimizer(model)
    train(model, first, 3)
    packed = first.state_dict()
    second = OptimKit(settings(kind="muon", ema=0.9)).build_optimizer(model)
    order = [p for group in first.param_groups for p in group["params"]]
    states = {p: packed["state"][i] for i, p in enumerate(order)}
    mine = second.state_dict()
    flat = [p for group in second.param_groups for p in group["params"]]
    mine["state"] = {i: states[p] for i, p in enumerate(flat)}
    told: list[str] = []
    monkeypatch.setattr("mvp_engine.kit.optim.optimizer.LOGGER.warning", lambda text, *words: told.append(text % words))
    second.load_state_dict(mine)
    assert told == ["moments of 6 parameters begin anew, such as of layers.0.up.weight"]
    assert torch.equal(second.state[model.layers[0].up.weight]["ema"], first.state[model.layers[0].up.weight]["ema"])
    train(model, second, 1)
    assert float(second.state[model.layers[0].up.weight]["step"]) == 1
    assert float(second.state[model.head.weight]["step"]) == 4


def test_a_kernel_that_goes_through_numbers_in_their_order_is_for_those_that_lie_so() -> None:
    assert flat_begin(torch.nn.Parameter(torch.zeros(3, 4))) == 0
    assert flat_begin(torch.nn.Parameter(torch.zeros(4, 3).t())) is None
    assert flat_begin(torch.nn.Parameter(torch.zeros(()))) is None


def kernel_and_plain(device: str) -> None:
    """Five steps, one of which does not count, by the kernel and by plain operations."""
    for moments in ("bfloat16", "int8"):
        compare_ways(moments, device)


def compare_ways(moments: str, device: str) -> None:
    seen = []
    for way in (by_kernel, lambda part, params, group: [plain(part, p, group) for p in params]):
        torch.manual_seed(0)
        params: list[Tensor] = [0.02 * torch.randn(*shape, device=device) for shape in ((9, 200), (4, 3, 130))]
        how: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "moments": moments, "seed": 3}
        names = {param: str(i) for i, param in enumerate(params)}
        part = KitOptimizer([{"params": params, "weight_decay": 0.1}], names, **how)
        (group,) = part.param_groups
        for step in range(5):
            for param in params:
                param.grad = 0.3 * torch.randn_like(param)
                part._begin(param, group)
            part.grad_scale = torch.full((), 2.0, device=device)
            part.found_inf = torch.full((), float(step == 3), device=device)
            with torch.no_grad():
                way(part, params, group)
        seen.append([{"weight": param, **part.state[param]} for param in params])
    for one, two in zip(*seen, strict=True):
        assert float(one["step"]) == 4
        for key, value in one.items():
            same = torch.isclose(value.float(), two[key].float(), rtol=1e-4, atol=1e-7)
            assert float(same.float().mean()) > 0.99, key  # a rounding in a hundred may fall to the other side


def by_kernel(part: KitOptimizer, params: list[Tensor], group: dict[str, Any]) -> None:
    part._adamw_by_kernel({param: begin for param in params if (begin := flat_begin(param)) is not None}, group)


plain = KitOptimizer._adamw_in_few_bits
INTERPRETED = """
import contextlib, torch
torch.cuda.device = lambda device: contextlib.nullcontext()
from test_optim import kernel_and_plain
kernel_and_plain("cpu")
"""


@pytest.mark.gpu(required=False)
def test_one_kernel_gives_what_many_operations_give() -> None:
    """On a CPU by Triton's interpreter, which a process must be told of before it imports it."""
    if torch.cuda.is_available():
        kernel_and_plain("cuda")
        return
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

"""The numbers of one step: sums, weights, skips, precision."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from families import parallel
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from mvp_engine.config.schema import Optim
from mvp_engine.distributed import Layout, World
from mvp_engine.distributed.dtensor import full_tensor
from mvp_engine.errors import UserError
from mvp_engine.model_engine import FSDPEngine, Settings
from mvp_engine.model_engine.fsdp.loss_scale import LossScale
from mvp_engine.model_engine.fsdp.prefetch import to_device
from mvp_engine.model_engine.fsdp.spike_detector import SpikeDetector
from mvp_engine.model_engine.optim import build_optimizer, build_scheduler, lr_factor

OPTIM = Optim(
    lr=0.1,
    betas=[0.9, 0.95],
    eps=1e-8,
    weight_decay=0.1,
    lr_by_part={},
    schedule="cosine",
    warmup_steps=0,
    warmup_ratio=None,
    decay_ratio=0.2,
    min_lr_ratio=0.0,
)
ALONE = World(0, 1, 0, 1, torch.device("cpu"))
ranks_may_differ = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"),
    reason="needs torch 2.13: ranks use other parameters",
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(8, 6)
        self.norm = nn.LayerNorm(6)
        self.out = nn.Linear(6, 3)
        self.spare = nn.Linear(2, 2)  # gets no gradient unless a batch asks for it
        self.scale = nn.Parameter(torch.tensor(0.3))  # FSDP2 cannot shard it

    def forward(self, tokens: Tensor, spare: bool) -> Tensor:
        out = self.out(self.norm(self.token(tokens))) * self.scale.exp()
        return out + self.spare.weight.sum() if spare else out


def engine(
    world: World = ALONE, optim: Optim = OPTIM, shard: int = 1, **options: Any
) -> FSDPEngine:
    torch.manual_seed(3)
    part = FSDPEngine(Net(), Layout.of(world, parallel(shard=shard)), Settings(**options))
    part.initialize(
        lambda model: build_optimizer(model, optim), lambda made: build_scheduler(made, optim, 10)
    )
    return part


def batches(count: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(4)
    sizes = torch.randint(1, 5, (count,), generator=generator).tolist()
    return [
        {"tokens": torch.randint(8, (n,), generator=generator), "spare": i == 1}
        for i, n in enumerate(sizes)
    ]


def forward(model: nn.Module) -> Any:
    def step(batch: dict[str, Any]) -> tuple[Tensor, int]:
        return model(**batch).square().sum(), len(batch["tokens"])

    return step


def gradients(part: FSDPEngine) -> dict[str, Tensor]:
    return {
        name: full_tensor(p.grad).clone()
        for name, p in part.model.named_parameters()
        if p.grad is not None
    }


def test_gradients_are_those_of_the_mean_over_all_micro_batches() -> None:
    part, data = engine(), batches(5)
    part.train_batch(data, forward(part.model))
    reference = engine().model
    weight = sum(len(b["tokens"]) for b in data)
    (sum(reference(**b).square().sum() for b in data) / weight).backward()
    expected = {
        name: param.grad for name, param in reference.named_parameters() if param.grad is not None
    }
    assert expected.keys() == gradients(part).keys()
    for name, gradient in expected.items():
        assert torch.allclose(gradients(part)[name], gradient, rtol=1e-5, atol=1e-7), name


@pytest.mark.parametrize("shard", [1, pytest.param(2, marks=ranks_may_differ)])
def test_gradients_with_uneven_micro_batches_on_two_ranks_equal_one_rank(
    ranks2, shard: int
) -> None:
    """Only one micro-batch uses `spare`, so on one rank it has no gradient of its own."""
    one = engine()
    numbers = one.train_batch(batches(5), forward(one.model))
    for share in ([4, 1], [5, 0], [0, 5], [1, 4]):
        for result in ranks2.run(_share, share, shard):
            assert result["norm"] == pytest.approx(float(numbers.grad_norm), rel=1e-5)
            assert result["gradients"].keys() == gradients(one).keys()
            for name, gradient in gradients(one).items():
                assert torch.allclose(result["gradients"][name], gradient, rtol=1e-5, atol=1e-7), (
                    share,
                    name,
                )


def _share(share: list[int], shard: int) -> dict[str, Any]:
    world = World.join("cpu")
    part = engine(world, shard=shard)
    data = batches(5)
    mine = data[: share[0]] if world.rank == 0 else data[share[0] :]
    numbers = part.train_batch(mine, forward(part.model))
    result = {"norm": float(numbers.grad_norm), "gradients": gradients(part)}
    world.close()
    return result


def test_gradients_of_several_calls_add_up(ranks2) -> None:
    one, data = engine(), batches(5)
    expected = one.train_batch(data, forward(one.model))
    alone = engine()
    alone.optimizer_zero_grad()
    for batch in data:
        alone.forward_backward_batch([batch], forward(alone.model))
    assert float(alone.optimizer_step().grad_norm) == pytest.approx(
        float(expected.grad_norm), rel=1e-5
    )
    for result in ranks2.run(_several_calls):
        assert result["norm"] == pytest.approx(float(expected.grad_norm), rel=1e-5)
        assert result["gradients"].keys() == gradients(one).keys()
        for name, gradient in gradients(one).items():
            assert torch.allclose(result["gradients"][name], gradient, rtol=1e-5, atol=1e-7), name


def _several_calls() -> dict[str, Any]:
    world = World.join("cpu")
    part, data = engine(world), batches(5)
    part.optimizer_zero_grad()
    for first in (data[:2], data[2:4], data[4:]):  # in the last call rank 1 has nothing to do
        part.forward_backward_batch(first[world.rank :: 2], forward(part.model))
    norm = part.optimizer_step().grad_norm
    result = {"norm": float(norm), "gradients": gradients(part)}
    world.close()
    return result


def test_frozen_parts_get_no_gradient_and_no_update() -> None:
    part = engine(freeze=("token.*", "out.bias"))
    before = {n: p.clone() for n, p in part.model.named_parameters()}
    part.train_batch(batches(5), forward(part.model))
    changed = {n for n, p in part.model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {"norm.weight", "norm.bias", "out.weight", "spare.weight", "scale"}
    with pytest.raises(
        UserError,
        match=r"model\.freeze: no parameter name matches 'tokens.*'. Similar names: token.weight",
    ):
        engine(freeze=("tokens.*",))


def test_lr_by_part_gives_each_part_its_learning_rate() -> None:
    part = engine(optim=OPTIM.model_copy(update={"lr_by_part": {"out.*": 0.01, "*.bias": 0.0}}))
    names = {p: n for n, p in part.model.named_parameters()}
    rates = {names[p]: g["lr"] for g in part.optimizer.param_groups for p in g["params"]}
    assert rates["out.weight"] == rates["out.bias"] == 0.01
    assert rates["norm.bias"] == 0.0
    assert rates["token.weight"] == 0.1
    part.train_batch(batches(3), forward(part.model))
    assert part.learning_rates["lr/out.*/decay"] == 0.01
    with pytest.raises(UserError, match=r"optim\.lr_by_part: no parameter name matches 'head"):
        engine(optim=OPTIM.model_copy(update={"lr_by_part": {"head": 0.1}}))


@pytest.mark.parametrize("shard", [1, 2])
def test_unused_parameter_has_no_gradient_on_any_layout(ranks2, shard: int) -> None:
    for names in ranks2.run(_untouched, shard):
        assert "spare.weight" not in names
        assert "out.weight" in names


def _untouched(shard: int) -> list[str]:
    world = World.join("cpu")
    part = engine(world, shard=shard)
    data = [{**b, "spare": False} for b in batches(4)]
    for _ in range(2):
        part.train_batch(data[world.rank :: 2], forward(part.model))
    names = list(gradients(part))
    world.close()
    return names


@ranks_may_differ
def test_rank_with_fewer_micro_batches_runs_dummy_forwards(ranks2) -> None:
    assert ranks2.run(_forwards) == [(3, 0), (1, 2)]


def _forwards() -> tuple[int, int]:
    world = World.join("cpu")
    part, data, calls = engine(world, shard=2), batches(4), [0, 0]

    def step(batch: Any) -> tuple[Tensor, int]:
        calls[part.is_dummy] += 1
        return forward(part.model)(batch)

    part.train_batch(data[:3] if world.rank == 0 else data[3:], step)
    assert not part.is_dummy
    world.close()
    return calls[0], calls[1]


@pytest.mark.parametrize("order", ["never before", "torch's own", "nobody"])
def test_replicas_stay_equal_when_a_user_clears_gradients(ranks2, order: str) -> None:
    one, two = ranks2.run(_cleared, order)
    alone = _cleared("always", ALONE)
    for name, value in one.items():
        assert torch.equal(value, two[name]), name
        assert torch.allclose(value, alone[name], rtol=1e-5, atol=1e-6), name


def _cleared(order: str, world: World | None = None) -> dict[str, Tensor]:
    world = world or World.join("cpu")
    part, data = engine(world), batches(5)
    for batch in (data[:2], data[2:4]):
        if order == "always":
            part.optimizer_zero_grad()
        part.forward_backward_batch(batch[world.rank :: world.size], forward(part.model))
        part.optimizer_step()
        if order != "nobody":
            part.optimizer.zero_grad() if order == "torch's own" else part.optimizer_zero_grad()
    result = {name: param.detach().clone() for name, param in part.model.named_parameters()}
    world.close()
    return result


def test_model_in_bf16_is_trained_in_float32() -> None:
    half = FSDPEngine(
        Net().bfloat16(), Layout(ALONE), Settings(freeze=("token.*",), precision="bf16")
    )
    half.initialize(
        lambda model: build_optimizer(model, OPTIM), lambda made: build_scheduler(made, OPTIM, 10)
    )
    kept = {name: param.dtype for name, param in half.model.named_parameters()}
    assert kept.pop("token.weight") == torch.bfloat16
    assert set(kept.values()) == {torch.float32}
    half.train_batch(batches(2), forward(half.model))
    full = FSDPEngine(Net().bfloat16(), Layout(ALONE), Settings(freeze=("token.*",)))
    full.initialize()
    assert {param.dtype for param in full.model.parameters()} == {torch.float32}


def test_gradient_clipping_bounds_the_norm_and_reports_the_unclipped_one() -> None:
    free, clipped = engine(), engine(clip_grad_norm=0.01)
    norms = [float(e.train_batch(batches(3), forward(e.model)).grad_norm) for e in (free, clipped)]
    assert norms[0] == norms[1] > 0.01
    total = torch.nn.utils.get_total_norm(gradients(clipped).values())
    assert float(total) == pytest.approx(0.01, rel=1e-3)


def test_skipped_step_keeps_weights_optimizer_states_and_schedule() -> None:
    part = engine()
    part.train_batch(batches(3), forward(part.model))
    weights = {n: p.clone() for n, p in part.model.named_parameters()}
    moments = [s["exp_avg"].clone() for s in part.optimizer.state.values()]
    lr = part.optimizer.param_groups[0]["lr"]
    part.step_status()
    part.train_batch(batches(3), lambda b: (part.model(**b).sum() * float("nan"), 1))
    assert [o.reason for o in part.step_status()] == ["the loss is not finite"]
    assert all(torch.equal(p, weights[n]) for n, p in part.model.named_parameters())
    assert all(
        torch.equal(s["exp_avg"], m)
        for s, m in zip(part.optimizer.state.values(), moments, strict=True)
    )
    assert part.optimizer.param_groups[0]["lr"] == lr


def test_weight_decay_excludes_norms_biases_and_embeddings() -> None:
    part = engine()
    names = {p: n for n, p in part.model.named_parameters()}
    decayed = {
        names[p] for g in part.optimizer.param_groups if g["weight_decay"] for p in g["params"]
    }
    assert decayed == {"out.weight", "spare.weight"}


def test_bf16_autocast_computes_in_bf16_with_fp32_weights() -> None:
    part = engine(precision="bf16")
    seen: list[torch.dtype] = []

    def step(batch: dict[str, Any]) -> tuple[Tensor, int]:
        out = part.model.out(part.model.token(batch["tokens"]))
        seen.append(out.dtype)
        return out.float().square().sum(), 1

    part.train_batch(batches(1), step)
    assert seen == [torch.bfloat16]
    assert all(p.dtype == torch.float32 for p in part.model.parameters())


def test_fp16_loss_scale_falls_on_overflow_and_grows_after_good_steps() -> None:
    scale = LossScale(torch.device("cpu"), start=8.0, interval=2)
    values = []
    for bad in (True, False, False, True, False, False, False):
        scale.update(torch.tensor(bad))
        values.append(float(scale.value))
    assert values == [4.0, 4.0, 8.0, 4.0, 4.0, 8.0, 8.0]


def test_fp16_overflow_skips_the_step_and_differs_from_a_nan() -> None:
    part = engine(precision="fp16")
    assert part.loss_scale is not None
    part.train_batch(batches(2), lambda b: (part.model(**b).float().sum() * 1e34, 1))
    [status] = part.step_status()
    assert status.overflow
    assert "loss scale 64" in str(status.reason)
    assert part.scheduler.last_epoch == 0
    assert float(part.loss_scale.value) == 32.0
    part.train_batch(batches(2), lambda b: (part.model(**b).float().sum() * float("nan"), 1))
    assert not part.step_status()[0].overflow
    part.train_batch(batches(2), forward(part.model))
    assert part.step_status()[0].reason is None
    assert part.scheduler.last_epoch == 1
    state = part.state_dict()
    again = engine(precision="fp16")
    again.load_state_dict(state)
    assert float(again.loss_scale.value) == float(part.loss_scale.value)  # type: ignore[union-attr]


def test_eval_mode_restores_the_mode_of_every_module() -> None:
    part = engine()
    part.model.train()
    part.model.norm.eval()
    with part.eval_mode():
        assert not part.model.training
        assert not torch.is_grad_enabled()
    assert part.model.training
    assert not part.model.norm.training


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_schedules_start_end_and_never_rise_after_warmup(schedule: str) -> None:
    config = OPTIM.model_copy(update={"schedule": schedule, "warmup_steps": 4, "min_lr_ratio": 0.1})
    factors = [lr_factor(step, config, 20) for step in range(25)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert all(a >= b for a, b in pairwise(factors[3:]))
    assert factors[20] == pytest.approx(1.0 if schedule == "constant" else 0.1)
    if schedule == "wsd":
        assert factors[4:17] == [1.0] * 13
        assert factors[17:19] == pytest.approx([0.1 + 0.9 * (1 - 0.5), 0.1 + 0.9 * (1 - 0.5**0.5)])
    share = config.model_copy(update={"warmup_steps": 0, "warmup_ratio": 0.2})
    assert factors == [lr_factor(step, share, 20) for step in range(25)]


def test_nested_batches_are_moved_to_the_device() -> None:
    from collections import namedtuple

    Pair = namedtuple("Pair", "a b")
    moved = to_device(
        {"x": [torch.ones(1), (torch.ones(1), "text")], "y": Pair(torch.ones(2), 3)},
        torch.device("meta"),
    )
    assert moved["x"][1][0].device.type == "meta"
    assert moved["y"].a.device.type == "meta"
    assert moved["x"][1][1] == "text"


@pytest.mark.parametrize("fault", [1000.0, float("nan")])
def test_loss_spike_or_nan_on_one_rank_is_skipped_on_both(ranks2, fault: float) -> None:
    one, two = ranks2.run(_faulty, fault)
    assert one == two
    reasons, again = one
    why = "the loss is not finite" if fault != fault else "the loss is far above those before it"
    assert reasons == [None] * 25 + [why] + [None] * 3
    assert again == [why, None]  # an engine that took over its state knows what is usual


def _faulty(fault: float) -> tuple[list[str | None], list[str | None]]:
    world = World.join("cpu")
    mine = batches(5)[world.rank]

    def run(part: FSDPEngine, factors: list[float]) -> list[str | None]:
        for factor in factors:
            broken = factor if world.rank == 1 else 1.0
            part.train_batch(
                [mine], lambda b, x=broken: ((given := forward(part.model)(b))[0] * x, given[1])
            )
        return [status.reason for status in part.step_status()]

    calm = OPTIM.model_copy(update={"lr": 1e-3})
    first, second = (engine(world, calm, spike_sigmas=6.0) for _ in range(2))
    reasons = run(first, [1.0] * 25 + [fault] + [1.0] * 3)
    second.model.load_state_dict(first.model.state_dict())
    second.load_state_dict(first.state_dict())
    again = run(second, [fault, 1.0])
    world.close()
    return reasons, again


def test_loss_that_stays_high_is_no_longer_a_spike() -> None:
    watch = SpikeDetector(6.0, torch.device("cpu"))
    noise = torch.randn(200, generator=torch.Generator().manual_seed(0)).double()
    told = [bool(watch.is_spike(2.0 + 0.1 * x)) for x in noise[:100]]
    assert not any(told)
    told = [bool(watch.is_spike(9.0 + 0.1 * x)) for x in noise[100:]]
    assert told == [True] * SpikeDetector.PATIENCE + [False] * (100 - SpikeDetector.PATIENCE)
    before = watch.state
    assert not bool(watch.is_spike(torch.tensor(float("nan"), dtype=torch.float64)))
    assert torch.equal(watch.state, before)

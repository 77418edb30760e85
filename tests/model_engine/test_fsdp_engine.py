"""The numbers of one step: sums, weights, skips, precision."""

from collections import namedtuple
from itertools import pairwise

import pytest
import torch
from conftest import user_error
from tiny_engines import ALONE, assert_close, assert_equal, gradients, share_of, weights
from torch import nn
from torch.distributed.fsdp import FSDPModule

from mvp_engine.config.schema import Optim
from mvp_engine.model_engine import FSDPEngine, Settings
from mvp_engine.model_engine.fsdp.base_engine import to_device
from mvp_engine.model_engine.fsdp.step_status import LossScale, SpikeDetector
from mvp_engine.model_engine.optim import build_optimizer, build_scheduler, lr_factor

OPTIM = Optim(
    lr=0.1,
    betas=[0.9, 0.95],
    eps=1e-8,
    weight_decay=0.1,
    lr_by_part={},
    schedule="cosine",
    warmup=0,
    decay_ratio=0.2,
    min_lr_ratio=0.0,
)
ranks_may_differ = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"),
    reason="needs torch 2.13: ranks use other parameters",
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(8, 6)
        self.norm = nn.LayerNorm(6)
        self.out = nn.Linear(6, 3)
        self.spare = nn.Linear(2, 2)  # gets no gradient unless a batch asks for it
        self.scale = nn.Parameter(torch.tensor(0.3))  # FSDP2 cannot shard it

    def forward(self, tokens, spare):
        out = self.out(self.norm(self.token(tokens))) * self.scale.exp()
        return out + self.spare.weight.sum() if spare else out


def engine_on(layout=ALONE, optim=OPTIM, **options):
    torch.manual_seed(3)
    made = FSDPEngine(Net(), layout, Settings(**options))
    made.initialize(
        lambda model: build_optimizer(model, optim), lambda made: build_scheduler(made, optim, 10)
    )
    return made


def batches(count):
    """Only the second uses `spare`, so on one of two ranks it has no gradient of its own."""
    generator = torch.Generator().manual_seed(4)
    sizes = torch.randint(1, 5, (count,), generator=generator).tolist()
    return [
        {"tokens": torch.randint(8, (n,), generator=generator), "spare": i == 1}
        for i, n in enumerate(sizes)
    ]


def forward(model, scale=1.0):
    def step(batch):
        return scale * model(**batch).float().square().sum(), len(batch["tokens"])

    return step


def train(part, data, scale=1.0):
    """One step; returns the norm of its gradients."""
    return float(part.train_batch(data, forward(part.model, scale)).grad_norm)


def reasons(part):
    return [status.reason for status in part.step_status()]


def test_gradients_are_those_of_the_mean_over_all_micro_batches():
    part, data = engine_on(), batches(5)
    train(part, data)
    reference = engine_on().model
    weight = sum(len(b["tokens"]) for b in data)
    (sum(reference(**b).square().sum() for b in data) / weight).backward()
    assert_close(gradients(part.model), gradients(reference), floor=0.01)


@pytest.mark.parametrize(
    "sizes", [{"replicate": 2}, pytest.param({"shard": 2}, marks=ranks_may_differ)], ids=str
)
def test_gradients_with_uneven_micro_batches_on_two_ranks_equal_one_rank(on_ranks, sizes):
    one = engine_on()
    expected = train(one, batches(5))
    for share in (4, 5, 0, 1):
        for norm, grads in on_ranks(sizes, on_share, share):
            assert norm == pytest.approx(expected, rel=1e-5)
            assert_close(grads, gradients(one.model), floor=0.01, what=share)


def on_share(layout, share):
    """The first rank has the first micro-batches."""
    part, data = engine_on(layout), batches(5)
    norm = train(part, data[share:] if layout.world.rank else data[:share])
    return norm, gradients(part.model)


def several_calls(layout):
    part, data = engine_on(layout), batches(5)
    part.optimizer_zero_grad()
    for some in (data[:2], data[2:4], data[4:]):  # in the last call rank 1 has nothing to do
        part.forward_backward_batch(share_of(layout, some), forward(part.model))
    return float(part.optimizer_step().grad_norm), gradients(part.model)


def test_gradients_of_several_calls_add_up(on_ranks):
    one = engine_on()
    expected = train(one, batches(5))
    for norm, grads in (several_calls(ALONE), *on_ranks({"replicate": 2}, several_calls)):
        assert norm == pytest.approx(expected, rel=1e-5)
        assert_close(grads, gradients(one.model), floor=0.01)


def test_frozen_parts_get_no_gradient_and_no_update():
    part = engine_on(freeze=("token.*", "out.bias"))
    before = weights(part.model)
    train(part, batches(5))
    changed = {n for n, p in part.model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {"norm.weight", "norm.bias", "out.weight", "spare.weight", "scale"}
    with user_error(
        r"model\.freeze: no parameter name matches 'tokens.*'. Similar names: token.weight"
    ):
        engine_on(freeze=("tokens.*",))


def test_lr_by_part_gives_each_part_its_learning_rate():
    part = engine_on(optim=OPTIM.model_copy(update={"lr_by_part": {"out.*": 0.01, "*.bias": 0.0}}))
    names = {p: n for n, p in part.model.named_parameters()}
    rates = {names[p]: g["lr"] for g in part.optimizer.param_groups for p in g["params"]}
    assert rates["out.weight"] == rates["out.bias"] == 0.01
    assert rates["norm.bias"] == 0.0
    assert rates["token.weight"] == 0.1
    train(part, batches(3))
    assert part.learning_rates["lr/out.*/decay"] == 0.01
    with user_error(r"optim\.lr_by_part: no parameter name matches 'head"):
        engine_on(optim=OPTIM.model_copy(update={"lr_by_part": {"head": 0.1}}))


@pytest.mark.parametrize("sizes", [{"replicate": 2}, {"shard": 2}], ids=str)
def test_unused_parameter_has_no_gradient_on_any_layout(on_ranks, sizes):
    for names in on_ranks(sizes, without_spare):
        assert "spare.weight" not in names
        assert "out.weight" in names


def without_spare(layout):
    part = engine_on(layout)
    for _ in range(2):
        train(part, share_of(layout, [{**b, "spare": False} for b in batches(4)]))
    return set(gradients(part.model))


@ranks_may_differ
def test_rank_with_fewer_micro_batches_runs_dummy_forwards(on_ranks):
    assert on_ranks({"shard": 2}, forwards) == [(3, 0), (1, 2)]


def forwards(layout):
    part, data, calls = engine_on(layout), batches(4), [0, 0]

    def step(batch):
        calls[part.is_dummy] += 1
        return forward(part.model)(batch)

    part.train_batch(data[3:] if layout.world.rank else data[:3], step)
    assert not part.is_dummy
    return calls[0], calls[1]


@pytest.mark.parametrize("order", ["never before", "torch's own", "nobody"])
def test_replicas_stay_equal_when_a_user_clears_gradients(on_ranks, order):
    one, two = on_ranks({"replicate": 2}, cleared, order)
    assert_equal(one, two)
    assert_close(one, cleared(ALONE, "always"), floor=0.1)


def cleared(layout, order):
    part, data = engine_on(layout), batches(5)
    for some in (data[:2], data[2:4]):
        if order == "always":
            part.optimizer_zero_grad()
        part.forward_backward_batch(share_of(layout, some), forward(part.model))
        part.optimizer_step()
        if order != "nobody":
            part.optimizer.zero_grad() if order == "torch's own" else part.optimizer_zero_grad()
    return weights(part.model)


def test_model_in_bf16_is_trained_in_float32():
    settings = Settings(freeze=("token.*",), precision="bf16")
    half = FSDPEngine(Net().bfloat16(), ALONE, settings)
    half.initialize(lambda model: build_optimizer(model, OPTIM))
    kept = {name: param.dtype for name, param in half.model.named_parameters()}
    assert kept.pop("token.weight") == torch.bfloat16
    assert set(kept.values()) == {torch.float32}
    train(half, batches(2))
    full = FSDPEngine(Net().bfloat16(), ALONE, Settings(freeze=("token.*",)))
    full.initialize()
    assert {param.dtype for param in full.model.parameters()} == {torch.float32}


def test_gradient_clipping_bounds_the_norm_and_reports_the_unclipped_one():
    plain, clipped, loose = (engine_on(clip_grad_norm=bound) for bound in (None, 0.01, 1e6))
    for other in (clipped, loose):
        assert train(engine_on(), batches(3)) == train(other, batches(3)) > 0.01
    train(plain, batches(3))
    assert_equal(gradients(loose.model), gradients(plain.model))
    total = torch.nn.utils.get_total_norm(gradients(clipped.model).values())
    assert float(total) == pytest.approx(0.01, rel=1e-3)


def test_skipped_step_keeps_weights_optimizer_states_and_schedule():
    part = engine_on()
    train(part, batches(3))
    before = weights(part.model)
    moments = [s["exp_avg"].clone() for s in part.optimizer.state.values()]
    lr = part.optimizer.param_groups[0]["lr"]
    part.step_status()
    train(part, batches(3), float("nan"))
    assert reasons(part) == ["the loss is not finite"]
    assert_equal(weights(part.model), before)
    states = [s["exp_avg"] for s in part.optimizer.state.values()]
    assert all(map(torch.equal, states, moments))
    assert part.optimizer.param_groups[0]["lr"] == lr


def test_weight_decay_excludes_norms_biases_and_embeddings():
    part = engine_on()
    names = {p: n for n, p in part.model.named_parameters()}
    groups = [group for group in part.optimizer.param_groups if group["weight_decay"]]
    decayed = {names[param] for group in groups for param in group["params"]}
    assert decayed == {"out.weight", "spare.weight"}


def test_bf16_autocast_computes_in_bf16_with_fp32_weights():
    part = engine_on(precision="bf16")
    seen = []

    def step(batch):
        out = part.model.out(part.model.token(batch["tokens"]))
        seen.append(out.dtype)
        return out.float().square().sum(), 1

    part.train_batch(batches(1), step)
    assert seen == [torch.bfloat16]
    assert all(p.dtype == torch.float32 for p in part.model.parameters())


def test_fp16_loss_scale_falls_on_overflow_and_grows_after_good_steps():
    scale = LossScale(torch.device("cpu"), start=8.0, interval=2)
    values = []
    for bad in (True, False, False, True, False, False, False):
        scale.update(torch.tensor(bad))
        values.append(float(scale.value))
    assert values == [4.0, 4.0, 8.0, 4.0, 4.0, 8.0, 8.0]


def test_fp16_overflow_skips_the_step_and_differs_from_a_nan():
    part = engine_on(precision="fp16")
    assert part.loss_scale is not None
    train(part, batches(2), 1e34)
    [status] = part.step_status()
    assert status.overflow
    assert "loss scale 64" in str(status.reason)
    assert part.scheduler.last_epoch == 0
    assert float(part.loss_scale.value) == 32.0
    train(part, batches(2), float("nan"))
    assert not part.step_status()[0].overflow
    train(part, batches(2))
    assert reasons(part) == [None]
    assert part.scheduler.last_epoch == 1
    again = engine_on(precision="fp16")
    again.load_state_dict(part.state_dict())
    assert float(again.loss_scale.value) == float(part.loss_scale.value)


def test_eval_mode_restores_the_mode_of_every_module():
    part = engine_on()
    part.model.train()
    part.model.norm.eval()
    with part.eval_mode():
        assert not part.model.training
        assert not torch.is_grad_enabled()
    assert part.model.training
    assert not part.model.norm.training


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_schedules_start_end_and_never_rise_after_warmup(schedule):
    config = OPTIM.model_copy(update={"schedule": schedule, "warmup": 4, "min_lr_ratio": 0.1})
    factors = [lr_factor(step, config, 20) for step in range(25)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert all(a >= b for a, b in pairwise(factors[3:]))
    assert factors[20] == pytest.approx(1.0 if schedule == "constant" else 0.1)
    if schedule == "wsd":
        assert factors[4:17] == [1.0] * 13
        assert factors[17:19] == pytest.approx([0.1 + 0.9 * (1 - 0.5), 0.1 + 0.9 * (1 - 0.5**0.5)])
    share = config.model_copy(update={"warmup": 0.2})
    assert factors == [lr_factor(step, share, 20) for step in range(25)]


def test_nested_batches_are_moved_to_the_device():
    Pair = namedtuple("Pair", "a b")
    nested = {"x": [torch.ones(1), (torch.ones(1), "text")], "y": Pair(torch.ones(2), 3)}
    moved = to_device(nested, torch.device("meta"))
    assert moved["x"][1][0].device.type == "meta"
    assert moved["y"].a.device.type == "meta"
    assert moved["x"][1][1] == "text"


@pytest.mark.parametrize("fault", [1000.0, float("nan")])
def test_loss_spike_or_nan_on_one_rank_is_skipped_on_both(on_ranks, fault):
    one, two = on_ranks({"replicate": 2}, faulty, fault)
    assert one == two
    first, again = one
    why = "the loss is not finite" if fault != fault else "the loss is far above those before it"
    assert first == [None] * 25 + [why] + [None] * 3
    assert again == [why, None]  # an engine that took over its state knows what is usual


def faulty(layout, fault):
    """Why steps were skipped, of which rank 1 has a faulty loss."""
    rank = layout.world.rank

    def run(part, factors):
        for factor in factors:
            train(part, [batches(5)[rank]], factor if rank == 1 else 1.0)
        return reasons(part)

    calm = OPTIM.model_copy(update={"lr": 1e-3})
    first, second = (engine_on(layout, calm, spike_sigmas=6.0) for _ in range(2))
    of_first = run(first, [1.0] * 25 + [fault] + [1.0] * 3)
    second.model.load_state_dict(first.model.state_dict())
    second.load_state_dict(first.state_dict())
    return of_first, run(second, [fault, 1.0])


def test_loss_that_stays_high_is_no_longer_a_spike():
    watch = SpikeDetector(6.0, torch.device("cpu"))
    noise = torch.randn(200, generator=torch.Generator().manual_seed(0)).double()
    told = [bool(watch.is_spike(2.0 + 0.1 * x)) for x in noise[:100]]
    assert not any(told)
    told = [bool(watch.is_spike(9.0 + 0.1 * x)) for x in noise[100:]]
    assert told == [True] * SpikeDetector.PATIENCE + [False] * (100 - SpikeDetector.PATIENCE)
    before = watch.state
    assert not bool(watch.is_spike(torch.tensor(float("nan"), dtype=torch.float64)))
    assert torch.equal(watch.state, before)

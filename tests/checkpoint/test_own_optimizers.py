"""Optimizers of one's own: every state comes back from a checkpoint as it was, or the first save raises an error."""

from __future__ import annotations

import pytest
import torch
from tiny_engines import ALONE, assert_equal, engine_of, message_of, weights
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from mvp_engine.checkpoint.format import Reader
from mvp_engine.distributed.dtensor import full_tensor, local_tensor
from mvp_engine.model_engine import FSDPEngine
from mvp_engine.tools.check.engine import optimizer_differences


def replicated(tensor, param):
    return DTensor.from_local(tensor, param.device_mesh, [Replicate()], run_check=False)


class Odd(torch.optim.Optimizer):
    """Keeps state of every kind, as optimizers of papers do: numbers in param_groups, full matrices, other dtypes."""

    def __init__(self, params, lr=0.05, beta=0.9, kind=""):
        super().__init__(params, {"lr": lr, "beta": beta, "d": 1e-3, "scale": torch.ones(2)})
        self.kind = kind

    @torch.no_grad()
    def step(self, closure: None = None):
        for group in self.param_groups:
            group["d"] *= 1.5
            group["weight_sum"] = group.get("weight_sum", 0) + 1
            group["scale"] = group["scale"] * 2
            for param in group["params"]:
                self.update(param, group)

    def update(self, param, group):
        grad = full_tensor(param.grad)
        state = self.state[param]
        if not state:
            state["moment"] = torch.zeros_like(param)
            state["step"] = torch.tensor(0.0)
            state["calls"] = 0
            state["half"] = torch.zeros_like(param, dtype=torch.bfloat16)
            state["seen"] = torch.zeros(2, 3, dtype=torch.int64)
            state["ring"] = [grad.clone(), None]
            state["above"] = torch.zeros(grad.shape, dtype=torch.bool)
        state["step"] += 1
        state["calls"] += 1
        state["seen"] += 2**33 + 1
        state["moment"].mul_(group["beta"]).add_(param.grad)
        state["half"].copy_(param.grad)
        state["above"] = grad > 0
        state["ring"] = [state["ring"][1], grad.clone()]
        if param.ndim == 2:
            square = grad @ grad.T
            state["basis"] = torch.linalg.qr(square + torch.eye(len(grad)))[0].T  # column-major
            state["wide"] = square.double()[:, ::2]  # with gaps
            if isinstance(param, DTensor):
                state["whole"] = replicated(grad.clone(), param)
        if self.kind:
            self.add_unsaved(param, state, grad)
        direction = state["basis"] @ state["basis"].T @ grad if param.ndim == 2 else grad
        mean = full_tensor(state["moment"]) * group["scale"][0] * group["d"]
        update = group["lr"] * (direction + mean)
        if isinstance(param, DTensor):
            update = replicated(update, param).redistribute(param.device_mesh, param.placements)
        param.sub_(update)

    def add_unsaved(self, param, state, grad):
        if self.kind == "dot":
            state["a.b"] = grad
        elif self.kind == "expanded":
            state["flat"] = torch.zeros(1).expand(5)
        elif self.kind == "ema":
            state["ema"] = grad.clone()
        elif self.kind == "global":
            self.state["clock"] = {"time": 1}
        elif self.kind == "local":
            state["mine"] = local_tensor(param.grad).abs().sum()[None]
        elif self.kind == "owner" and torch.distributed.get_rank() == 0:
            state["owned"] = grad.clone()
        elif self.kind == "attribute":
            self.clock = getattr(self, "clock", 0) + 1


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 5)])

    def forward(self, x):
        return self.layers[1](torch.tanh(self.layers[0](x)))


def engine(layout=ALONE, kind="", beta=0.9, **options):
    torch.manual_seed(3)
    optimizer = lambda model: Odd(model.parameters(), beta=beta, kind=kind)  # noqa: E731
    return engine_of(Net(), layout, optimizer, FSDPEngine, **options)


def train(made, steps, first=0):
    for step in range(first, first + steps):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        made.train_batch([x], lambda batch: (made.model(batch).square().sum(), float(len(batch))))
    made.step_status()


def round_trip(layout, folder):
    """Differences after a save and a load, and whether training continues with the same weights."""
    made, again = engine(layout), engine(layout)
    train(made, 2)
    made.save_checkpoint(folder)
    again.load_checkpoint(folder)
    names = {param: name for name, param in again.model.named_parameters()}
    # The same states under the parameters of the other model.
    for ours, theirs in zip(list(made.model.parameters()), names, strict=True):
        made.optimizer.state[theirs] = made.optimizer.state.pop(ours)
    made.optimizer.param_groups[0]["params"] = again.optimizer.param_groups[0]["params"]
    return optimizer_differences(made.optimizer, again.optimizer, names)


def test_every_kind_of_state_comes_back_on_one_rank(tmp_path):
    made = engine()
    train(made, 2)
    made.save_checkpoint(tmp_path / "saved")
    again = engine()
    again.load_checkpoint(tmp_path / "saved")
    old, new = made.optimizer.param_groups[0], again.optimizer.param_groups[0]
    assert new["d"] == old["d"] == 1e-3 * 1.5**2
    assert new["weight_sum"] == 2
    assert new["scale"].tolist() == [4, 4]
    for ours, theirs in zip(made.model.parameters(), again.model.parameters(), strict=True):
        state, loaded = made.optimizer.state[ours], again.optimizer.state[theirs]
        assert state.keys() == loaded.keys()
        for key, value in state.items():
            if isinstance(value, Tensor):
                assert loaded[key].dtype == value.dtype, key
                assert loaded[key].stride() == value.stride(), key
                assert torch.equal(loaded[key], value), key
        assert loaded["calls"] == 2
        for a, b in zip(state["ring"], loaded["ring"], strict=True):
            assert a is None or torch.equal(a, b)
    train(made, 2, first=2)
    train(again, 2, first=2)
    assert_equal(weights(made.model), weights(again.model))


@pytest.mark.parametrize("sizes", [{"replicate": 2}, {"shard": 2}], ids=["replicas", "FSDP"])
def test_every_kind_of_state_comes_back_on_two_ranks(on_ranks, tmp_path, sizes):
    assert on_ranks(sizes, round_trip, tmp_path / "saved") == [[], []]
    if "shard" in sizes:  # on another layout the values are the same
        again = engine()
        again.load_checkpoint(tmp_path / "saved")
        saved = Reader(tmp_path / "saved")
        state = again.optimizer.state[again.model.get_parameter("layers.0.weight")]
        for key in ("basis", "half", "seen", "whole", "moment"):
            assert torch.equal(state[key], saved.read(f"optim.layers.0.weight.{key}")), key


def test_option_of_a_group_that_the_config_changes_is_not_restored(tmp_path):
    made, again = engine(), engine(beta=0.5)
    train(made, 1)
    made.save_checkpoint(tmp_path / "saved")
    again.load_checkpoint(tmp_path / "saved")
    (group,) = again.optimizer.param_groups
    assert (group["beta"], group["d"]) == (0.5, 1e-3 * 1.5)


INEXACT = "of layers.0.weight cannot be saved exactly: it"


@pytest.mark.parametrize(
    "kind, text",
    [
        ("dot", f"'a.b' {INEXACT} has a key that is no string without dots"),
        ("expanded", f"'flat' {INEXACT} is a view with gaps or overlaps"),
        ("ema", f"'ema' {INEXACT} has the name of the EMA of the weights"),
        ("global", "keeps state that belongs to no parameter ('clock')"),
    ],
)
def test_state_that_cannot_be_saved_exactly_is_refused_at_the_first_save(tmp_path, kind, text):
    assert text in message_of(ALONE, save, tmp_path / "saved", kind)
    assert not (tmp_path / "saved").exists()


def save(layout, folder, kind):
    made = engine(layout, kind=kind, ema=0.9 if kind == "ema" else None)
    train(made, 1)
    made.save_checkpoint(folder)


@pytest.mark.parametrize(
    "kind, sizes, key",
    [("local", {"shard": 2}, "mine"), ("owner", {"replicate": 2}, "owned")],
)
def test_state_that_differs_between_ranks_is_refused_at_the_first_save(
    on_ranks, tmp_path, kind, sizes, key
):
    for text in on_ranks(sizes, message_of, save, tmp_path / "saved", kind):
        assert f"Odd: the state '{key}' of layers.0." in text
        assert "is not the same on all ranks" in text

"""Optimizers of one's own: every state comes back from a checkpoint as it was, or the first save raises an error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from families import layout_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from mvp_engine.checkpoint.format import Reader
from mvp_engine.distributed import Layout, World
from mvp_engine.distributed.dtensor import full_tensor, local_tensor
from mvp_engine.errors import UserError
from mvp_engine.model_engine import FSDPEngine, Settings
from mvp_engine.tools.check.model_checks import optimizer_differences

ALONE = Layout(World(0, 1, 0, 1, torch.device("cpu")))


class Odd(torch.optim.Optimizer):
    """Keeps state of every kind, as optimizers of papers do: numbers in param_groups, full matrices, other dtypes."""

    def __init__(self, params: Any, lr: float = 0.05, beta: float = 0.9, kind: str = "") -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "d": 1e-3, "scale": torch.ones(2)})
        self.kind = kind

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["d"] *= 1.5
            group["weight_sum"] = group.get("weight_sum", 0) + 1
            group["scale"] = group["scale"] * 2
            for param in group["params"]:
                self.update(param, group)

    def update(self, param: Tensor, group: dict[str, Any]) -> None:
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
            state["basis"] = torch.linalg.qr(grad @ grad.T + torch.eye(len(grad)))[
                0
            ].T  # column-major
            state["wide"] = (grad @ grad.T).double()[:, ::2]  # with gaps
            if isinstance(param, DTensor):
                state["whole"] = DTensor.from_local(
                    grad.clone(), param.device_mesh, [Replicate()], run_check=False
                )
        if self.kind:
            self.add_unsaved(param, state, grad)
        direction = state["basis"] @ state["basis"].T @ grad if param.ndim == 2 else grad
        mean = full_tensor(state["moment"]) * group["scale"][0] * group["d"]
        update = group["lr"] * (direction + mean)
        if isinstance(param, DTensor):
            mesh = param.device_mesh
            update = DTensor.from_local(update, mesh, [Replicate()], run_check=False).redistribute(
                mesh, param.placements
            )
        param.sub_(update)

    def add_unsaved(self, param: Tensor, state: dict[str, Any], grad: Tensor) -> None:
        if self.kind == "dot":
            state["a.b"] = grad
        elif self.kind == "expanded":
            state["flat"] = torch.zeros(1).expand(5)
        elif self.kind == "ema":
            state["ema"] = grad.clone()
        elif self.kind == "global":
            self.state["clock"] = {"time": 1}  # type: ignore[index]
        elif self.kind == "local":
            state["mine"] = local_tensor(param.grad).abs().sum()[None]
        elif self.kind == "owner" and torch.distributed.get_rank() == 0:
            state["owned"] = grad.clone()
        elif self.kind == "attribute":
            self.clock = getattr(self, "clock", 0) + 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 5)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](torch.tanh(self.layers[0](x)))


def engine(layout: Layout = ALONE, kind: str = "", **options: Any) -> FSDPEngine:
    torch.manual_seed(3)
    made = FSDPEngine(Net(), layout, Settings(**options))
    made.initialize(lambda model: Odd(model.parameters(), kind=kind))
    return made


def train(made: FSDPEngine, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        made.train_batch([x], lambda batch: (made.model(batch).square().sum(), float(len(batch))))
    made.step_status()


def weights(made: FSDPEngine) -> list[Tensor]:
    return [full_tensor(param.detach()).clone() for param in made.model.parameters()]


def round_trip(folder: str, shard: int) -> list[str]:
    """Differences after a save and a load, and whether training continues with the same weights."""
    with layout_of(shard=shard) as layout:
        made = engine(layout)
        train(made, 2)
        made.save_checkpoint(folder)
        again = engine(layout)
        again.load_checkpoint(folder)
        names = {param: name for name, param in again.model.named_parameters()}
        by_name = {name: param for param, name in names.items()}
        # The same states under the parameters of the other model.
        for param, name in zip(list(made.model.parameters()), by_name, strict=True):
            made.optimizer.state[by_name[name]] = made.optimizer.state.pop(param)
        made.optimizer.param_groups[0]["params"] = again.optimizer.param_groups[0]["params"]
        return optimizer_differences(made.optimizer, again.optimizer, names)


def test_every_kind_of_state_comes_back_on_one_rank(tmp_path: Path) -> None:
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
        assert all(
            torch.equal(a, b)
            for a, b in zip(state["ring"], loaded["ring"], strict=True)
            if a is not None
        )
    train(made, 2, first=2)
    train(again, 2, first=2)
    assert all(torch.equal(a, b) for a, b in zip(weights(made), weights(again), strict=True))


@pytest.mark.parametrize("shard", [1, 2], ids=["replicas", "FSDP"])
def test_every_kind_of_state_comes_back_on_two_ranks(ranks2, tmp_path: Path, shard: int) -> None:
    assert ranks2.run(round_trip, str(tmp_path / "saved"), shard) == [[], []]
    if shard == 2:  # on another layout the values are the same
        again = engine()
        again.load_checkpoint(tmp_path / "saved")
        saved = Reader(tmp_path / "saved")
        state = again.optimizer.state[again.model.get_parameter("layers.0.weight")]
        for key in ("basis", "half", "seen", "whole", "moment"):
            assert torch.equal(state[key], saved.read(f"optim.layers.0.weight.{key}")), key


def test_option_of_a_group_that_the_config_changes_is_not_restored(tmp_path: Path) -> None:
    made = engine()
    train(made, 1)
    made.save_checkpoint(tmp_path / "saved")
    torch.manual_seed(3)
    again = FSDPEngine(Net(), ALONE)
    again.initialize(lambda model: Odd(model.parameters(), beta=0.5))
    again.load_checkpoint(tmp_path / "saved")
    (group,) = again.optimizer.param_groups
    assert (group["beta"], group["d"]) == (0.5, 1e-3 * 1.5)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            "dot",
            "'a.b' of layers.0.weight cannot be saved exactly: it has a key that is no string without dots",
        ),
        (
            "expanded",
            "'flat' of layers.0.weight cannot be saved exactly: it is a view with gaps or overlaps",
        ),
        (
            "ema",
            "'ema' of layers.0.weight cannot be saved exactly: it has the name of the EMA of the weights",
        ),
        ("global", "keeps state that belongs to no parameter ('clock')"),
    ],
)
def test_state_that_cannot_be_saved_exactly_is_refused_at_the_first_save(
    tmp_path: Path, kind: str, text: str
) -> None:
    made = engine(kind=kind, ema=0.9)
    train(made, 1)
    with pytest.raises(UserError, match=re.escape(text)):
        made.save_checkpoint(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def refused(folder: str, kind: str, shard: int) -> str:
    with layout_of(shard=shard) as layout:
        made = engine(layout, kind=kind)
        train(made, 1)
        try:
            made.save_checkpoint(folder)
        except UserError as error:
            return str(error)
        return ""


@pytest.mark.parametrize(("kind", "shard", "key"), [("local", 2, "mine"), ("owner", 1, "owned")])
def test_state_that_differs_between_ranks_is_refused_at_the_first_save(
    ranks2, tmp_path: Path, kind: str, shard: int, key: str
) -> None:
    for text in ranks2.run(refused, str(tmp_path / "saved"), kind, shard):
        assert f"Odd: the state '{key}' of layers.0." in text
        assert "is not the same on all ranks" in text

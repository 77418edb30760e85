"""Check an optimizer: weight decay on matrices only, bit-exact resume, skipped steps without effect, a falling loss.

check.py [FILE.py:NAME]        # see SKILL.md
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

import mvp_engine.config
from mvp_engine.distributed import Layout, World
from mvp_engine.kit import OptimKit, OptimSettings
from mvp_engine.model_engine import FSDPEngine
from mvp_engine.tools.skill_check import given, run_check

Make = Callable[[nn.Module], Any]
SETTINGS: list[dict[str, Any]] = [
    {"name": "adamw", "state_dtype": "float32"},
    {"name": "adamw", "state_dtype": "int8"},
    {"name": "muon", "state_dtype": "float32"},
    {"name": "muon", "state_dtype": "int8"},
    {"state_dtype": "bfloat16", "ema": 0.9},
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 16)])
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 9)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.table(ids)
        return self.head(self.norm(hidden + torch.tanh(self.layers[0](hidden))))


def build_engine(make: Make) -> FSDPEngine:
    torch.manual_seed(0)
    engine = FSDPEngine(Net(), Layout(World(0, 1, 0, 1, torch.device("cpu"))))
    engine.initialize(make)
    return engine


def train(engine: FSDPEngine, steps: int) -> list[float]:
    ids = torch.arange(9)

    def forward_step(ids: Tensor) -> tuple[Tensor, int]:
        logits = engine.model(ids)
        loss_sum = nn.functional.cross_entropy(logits, (ids + 1) % 9, reduction="sum")
        return loss_sum, len(ids)

    losses = []
    for _ in range(steps):
        result = engine.train_batch([ids], forward_step)
        losses.append(float(result.loss_sum / result.weight))
    return losses


def tensors_of(engine: FSDPEngine) -> dict[str, Tensor]:
    """Copies of all parameters and optimizer states, by name."""
    found = {}
    for name, param in engine.model.named_parameters():
        found[name] = param.detach().clone()
        for key, value in engine.optimizer.state[param].items():
            if isinstance(value, Tensor):
                found[f"{name}/{key}"] = value.clone()
    return found


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def problems(make: Make) -> list[str]:
    """The problems of an optimizer, one sentence each."""
    found = _decay_problems(make)
    engine = build_engine(make)
    losses = train(engine, 12)
    if losses[-1] > 0.9 * losses[0]:
        found.append(f"12 steps reduce the loss only from {losses[0]:.3f} to {losses[-1]:.3f}")
    if not equal(tensors_of(_resumed(make)), tensors_of(engine)):
        found.append(
            "5 steps, a checkpoint and 7 more steps do not equal 12 steps bit by bit: is all state in optimizer.state?"
        )
    if getattr(engine.optimizer, "_step_supports_amp_scaling", False):
        before = tensors_of(engine)
        for param in engine.model.parameters():
            param.grad = torch.full_like(param, torch.nan)
        engine.optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
        engine.optimizer.step()
        if not equal(tensors_of(engine), before):
            found.append("a step with found_inf set changes weights or state, although the class supports skipping")
    return found


def _decay_problems(make: Make) -> list[str]:
    """With zero gradients only weight decay changes parameters."""
    engine = build_engine(make)
    before = {name: param.detach().clone() for name, param in engine.model.named_parameters()}
    for param in engine.model.parameters():
        param.grad = torch.zeros_like(param)
    engine.optimizer.step()
    found = []
    for name, param in engine.model.named_parameters():
        excluded = param.ndim < 2 or "table" in name
        if excluded and not torch.equal(param, before[name]):
            found.append(f"{name} decays: exclude norms, biases and embeddings from weight decay")
    return found


def _resumed(make: Make) -> FSDPEngine:
    """An engine after 5 steps, a checkpoint in a new engine, and 7 more steps."""
    with tempfile.TemporaryDirectory() as folder:
        first = build_engine(make)
        train(first, 5)
        first.save_checkpoint(Path(folder) / "saved")
        second = build_engine(make)
        second.load_checkpoint(Path(folder) / "saved")
    train(second, 7)
    return second


def kit_optimizer(**settings: Any) -> Make:
    defaults = Path(mvp_engine.config.__file__).parent / "default.yaml"
    optim = yaml.safe_load(defaults.read_text())["optim"]
    return OptimKit(OptimSettings(**{**optim, "lr": 0.03, **settings})).build_optimizer


def main() -> list[str]:
    optimizers = {str(settings): kit_optimizer(**settings) for settings in SETTINGS}
    if len(sys.argv) > 1:
        optimizers = {sys.argv[1]: given(None, "the optimizer", "optimizer")}
    return [f"{label}: {problem}" for label, make in optimizers.items() for problem in problems(make)]


if __name__ == "__main__":
    run_check(main)

"""Does this optimizer decay only matrices, resume to the bit, skip without a trace, and learn? See SKILL.md."""

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
from mvp_engine.imports import load_spec
from mvp_engine.kit import OptimKit, OptimSettings
from mvp_engine.model_engine import FSDPEngine

Make = Callable[[nn.Module], Any]
FORMS: list[dict[str, Any]] = [{"kind": k, "moments": m} for k in ("adamw", "muon") for m in ("float32", "int8")]
FORMS += [{"state_dtype": "bfloat16", "ema": 0.9}]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(9, 16), nn.ModuleList([nn.Linear(16, 16)])
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 9)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.table(ids) + torch.tanh(self.layers[0](self.table(ids)))))


def engine(make: Make) -> FSDPEngine:
    torch.manual_seed(0)
    made = FSDPEngine(Net(), Layout(World(0, 1, 0, 1, torch.device("cpu"))))
    made.initialize(make)
    return made


def train(made: FSDPEngine, steps: int) -> list[float]:
    ids, losses = torch.arange(9), []
    for _ in range(steps):
        given = made.train_batch(
            [ids], lambda ids: (nn.functional.cross_entropy(made.model(ids), (ids + 1) % 9, reduction="sum"), len(ids))
        )
        losses.append(float(given.loss_sum / given.weight))
    return losses


def contents(made: FSDPEngine) -> dict[str, Tensor]:
    found = {name: param.detach().clone() for name, param in made.model.named_parameters()}
    for name, param in made.model.named_parameters():
        kept = {f"{name}/{key}": value for key, value in made.optimizer.state[param].items()}
        found |= {key: value.clone() for key, value in kept.items() if isinstance(value, Tensor)}
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def problems(make: Make) -> list[str]:
    """What is wrong with an optimizer, in words."""
    wrong = []
    still = engine(make)
    before = {name: param.detach().clone() for name, param in still.model.named_parameters()}
    for param in still.model.parameters():
        param.grad = torch.zeros_like(param)
    still.optimizer.step()
    for name, param in still.model.named_parameters():
        if not torch.equal(param, before[name]) and (param.ndim < 2 or "table" in name):
            wrong.append(f"{name} decays: leave norms, biases and embeddings alone")
    straight, cut = engine(make), engine(make)
    losses = train(straight, 12)
    if losses[-1] > 0.9 * losses[0]:
        wrong.append(f"12 steps take the loss from {losses[0]:.3f} to {losses[-1]:.3f}: it does not learn")
    with tempfile.TemporaryDirectory() as folder:
        train(cut, 5)
        cut.save_checkpoint(Path(folder) / "saved")
        again = engine(make)
        again.load_checkpoint(Path(folder) / "saved")
    train(again, 7)
    if not same(contents(again), contents(straight)):
        wrong.append("5 steps, a checkpoint and 7 more are not 12 steps to the bit: is all state in optimizer.state?")
    if getattr(straight.optimizer, "_step_supports_amp_scaling", False):
        kept = contents(straight)
        for param in straight.model.parameters():
            param.grad = torch.full_like(param, torch.nan)
        straight.optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
        straight.optimizer.step()
        if not same(contents(straight), kept):
            wrong.append("a step with found_inf set leaves a trace, though the class says that it can skip")
    return wrong


def of_the_kit(**words: Any) -> Make:
    defaults = yaml.safe_load((Path(mvp_engine.config.__file__).parent / "default.yaml").read_text())["optim"]
    return OptimKit(OptimSettings(**{**defaults, "lr": 0.03, **words})).build_optimizer


if __name__ == "__main__":
    makes = {str(words): of_the_kit(**words) for words in FORMS}
    if len(sys.argv) > 1:
        module, name = load_spec(sys.argv[1], Path.cwd(), "the optimizer")
        makes = {sys.argv[1]: getattr(module, name or "optimizer")}
    found = [f"{label}: {problem}" for label, make in makes.items() for problem in problems(make)]
    print("\n".join(found) or "ok")
    sys.exit(bool(found))

"""Check a reward loss: it reads last tokens only, raises chosen scores, and does not depend on the split.

check.py [FILE.py:NAME]        # an engine class, or a function: see SKILL.md
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mvp_engine.config.engine_class import SHIPPED
from mvp_engine.data.batch import PackedBatch
from mvp_engine.imports import import_file
from mvp_engine.tools.skill_check import NoLog, check_loss

LENGTHS = (5, 2, 4, 3, 6, 1)


class Table:
    """A model with values that are parameters, one per token: its gradients are those of the loss alone."""

    def __init__(self, values_T: Tensor) -> None:
        self.values_T = values_T.clone().requires_grad_()

    def __call__(self, batch: PackedBatch, outputs: Any) -> dict[str, Tensor]:
        return {"values": self.values_T}


def loss_of(engine_class: Any) -> Any:
    """The loss of an engine class such as that of the recipe, with the default settings, as a function."""
    settings = engine_class.config_class.model_fields["reward_loss"].default

    def loss(ctx: Any, model: Any, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        engine = object.__new__(engine_class)
        engine.config = SimpleNamespace(reward_loss=settings)
        engine.model = model
        result: tuple[Tensor, Tensor] = engine.forward_step(ctx, batch)
        return result

    return loss


def problems(loss: Any) -> list[str]:
    """The problems of a loss, or of the loss of an engine class, one sentence each."""
    if isinstance(loss, type):
        loss = loss_of(loss)
    torch.manual_seed(0)
    ids = [torch.randint(40, (length,)) for length in LENGTHS]
    fields = {"side": torch.tensor([1, -1] * 3), "sample": torch.tensor([0, 0, 1, 1, 2, 2])}
    batch = PackedBatch.from_sequences(ids, sequence_fields=fields)
    values = [torch.randn(length) for length in LENGTHS]
    table = Table(torch.cat(values))
    loss_sum, weight = loss(NoLog(), table, batch)
    whole = float(loss_sum.detach()) / float(weight)
    loss_sum.backward()
    grads = table.values_T.grad.split(list(LENGTHS))
    found = []
    if any(bool((grad[:-1] != 0).any()) for grad in grads):
        found.append("the loss reads values of other tokens than the last ones")
    if not all(float(grad[-1]) < 0 for grad in grads[::2]):
        found.append("the loss does not raise the scores of chosen answers")
    if not all(float(grad[-1]) > 0 for grad in grads[1::2]):
        found.append("the loss does not lower the scores of rejected answers")
    sums, weights = 0.0, 0.0
    for members in ([0, 1], [2, 3, 4, 5]):
        part = Table(torch.cat([values[i] for i in members]))
        loss_sum, weight = loss(NoLog(), part, batch.select(members))
        sums += float(loss_sum.detach())
        weights += float(weight)
    if abs(sums / weights - whole) > 1e-5:
        found.append(f"in two micro-batches the loss is {sums / weights:.6f}, in one it is {whole:.6f}: return sums")
    return found


if __name__ == "__main__":
    check_loss(problems, import_file(SHIPPED / "reward_model" / "engine.py").ReviewsEngine)

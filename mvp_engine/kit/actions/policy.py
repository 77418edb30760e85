"""Actions of an action model, on every layout: what a closed loop asks for at each step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mvp_engine.data.batch import PackedBatch
from mvp_engine.kit.actions.action_model import with_noise
from mvp_engine.model_engine import ModelEngine


def sample_actions(
    engine: ModelEngine,
    batch: PackedBatch,
    noise: Tensor | None = None,
    steps: int | None = None,
    budget: int | None = None,
) -> Tensor:
    """Normalized actions (S, C, A) on the CPU. Where ranks share a forward, all of them call it.

    `noise` (S, C, A): where a flow head starts; None: the first draw of the batch. `steps`: Euler steps, by default
    those of the model's config. `budget`: tokens of a micro-batch; None: all sequences in one.
    """
    batch = with_noise(batch, noise)
    split = batch.split(batch.num_tokens if budget is None else budget)
    model: Any = engine.model

    def act(part: PackedBatch) -> Tensor:
        actions: Tensor = model(part, ["actions"], steps=steps)["actions"]
        return actions.cpu()

    with engine.eval_mode():
        parts = list(engine.infer_micro_batches(split.parts, act))
    order = torch.tensor([sequence for members in split.members for sequence in members])
    return torch.cat(parts)[order.argsort()]

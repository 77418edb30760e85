"""Check a DPO loss: it raises the chosen side, reads answers only, starts at ln 2, and does not depend on the split.

check.py [FILE.py:NAME]        # an engine class, or a function: see SKILL.md
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config

from mvp_engine.config.engine_class import SHIPPED
from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.hf import LanguageModel
from mvp_engine.imports import import_file
from mvp_engine.kit.loss import sequence_log_probs
from mvp_engine.tools.skill_check import NoLog, check_loss

PROMPT = 3  # tokens
LENGTHS = (5, 2, 4, 3, 6, 1)  # of answers


class Table:
    """A model with log-probs that are parameters, one per token: its gradients are those of the loss alone."""

    def __init__(self, log_probs_T: Tensor) -> None:
        self.log_probs_T = log_probs_T.clone().requires_grad_()

    def __call__(self, batch: PackedBatch, outputs: Any) -> dict[str, Tensor]:
        return {"log_probs": self.log_probs_T}


def loss_of(engine_class: Any) -> Any:
    """The loss of an engine class such as that of the recipe, with the default settings, as a function."""
    settings = engine_class.config_class.model_fields["preference"].default

    def loss(ctx: Any, model: Any, batch: PackedBatch, reference_S: Tensor) -> tuple[Tensor, Tensor]:
        engine = object.__new__(engine_class)
        engine.config = SimpleNamespace(preference=settings)
        engine.model = model
        engine.reference = SimpleNamespace(log_probs=lambda batch, split: reference_S)
        ctx.split = "train"
        result: tuple[Tensor, Tensor] = engine.forward_step(ctx, batch)
        return result

    return loss


def pairs() -> PackedBatch:
    torch.manual_seed(0)
    prompts = [torch.randint(40, (PROMPT,)) for _ in range(3)]
    ids = [torch.cat([prompt, torch.randint(40, (n,))]) for prompt, n in zip(prompts * 2, LENGTHS, strict=True)]
    ids = [ids[i] for i in (0, 3, 1, 4, 2, 5)]
    fields = {"side": torch.tensor([1, -1] * 3), "sample": torch.tensor([0, 0, 1, 1, 2, 2])}
    return PackedBatch.from_sequences(ids, [torch.arange(len(one)) >= PROMPT for one in ids], sequence_fields=fields)


def problems(loss: Any) -> list[str]:
    """The problems of a loss, or of the loss of an engine class, one sentence each."""
    if isinstance(loss, type):
        loss = loss_of(loss)
    batch = pairs()
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 8}
    model = LanguageModel.from_config(Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=1))
    with torch.no_grad():
        log_probs_T = model(batch, ["log_probs"])["log_probs"]
    found = []
    table = Table(log_probs_T)
    same = sequence_log_probs(log_probs_T, batch)
    loss_sum, weight = loss(NoLog(), table, batch, same)
    mean = float(loss_sum.detach()) / float(weight)
    if abs(mean - math.log(2)) > 1e-5:
        found.append(f"where policy and reference agree the loss is {mean:.6f}, not ln 2 = {math.log(2):.6f}")
    loss_sum.backward()
    grads = table.log_probs_T.grad.split(batch.lengths.tolist())
    labels = batch.labels.split(batch.lengths.tolist())
    for name, place, sign in (("chosen", 0, -1), ("rejected", 1, 1)):
        answers = [grad[label != IGNORE] for grad, label in zip(grads[place::2], labels[place::2], strict=True)]
        if not all(bool((sign * one > 0).all()) for one in answers):
            found.append(f"the loss does not {'raise' if sign < 0 else 'lower'} the log-probs of {name} answers")
    if any(bool((grad[label == IGNORE] != 0).any()) for grad, label in zip(grads, labels, strict=True)):
        found.append("the loss has a gradient at prompt tokens: only answers count")
    reference = same + torch.tensor([-3.0, 2.0, 5.0, -1.0, 0.0, 4.0])
    whole = _mean(loss, log_probs_T, batch, reference, [[0, 1, 2, 3, 4, 5]])
    parts = _mean(loss, log_probs_T, batch, reference, [[0, 1], [2, 3, 4, 5]])
    if abs(whole - parts) > 1e-5:
        found.append(f"in two micro-batches the loss is {parts:.6f}, in one it is {whole:.6f}: return a sum and pairs")
    return found


def _mean(loss: Any, log_probs_T: Tensor, batch: PackedBatch, reference: Tensor, split: list[list[int]]) -> float:
    """The mean loss as the engine computes it."""
    sequences = log_probs_T.split(batch.lengths.tolist())
    sums, weights = 0.0, 0.0
    for members in split:
        table = Table(torch.cat([sequences[i] for i in members]))
        loss_sum, weight = loss(NoLog(), table, batch.select(members), reference[torch.tensor(members)])
        sums += float(loss_sum.detach())
        weights += float(weight)
    return sums / weights


if __name__ == "__main__":
    check_loss(problems, import_file(SHIPPED / "preference" / "engine.py").PairsEngine)

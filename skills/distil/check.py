"""Check a distillation loss: 0 for equal models, towards the teacher, at answers only, independent of the split.

check.py [FILE.py:NAME]        # see SKILL.md
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.kit.preference import Head, linear_kl
from mvp_engine.tools.skill_check import check_loss

LENGTHS = (6, 3, 5, 4)
VOCABULARY = 11


def kit_loss(logits_TV: Tensor, teacher_TV: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """The kit's forward KL, with heads that give logits as they are."""
    head = Head(torch.eye(VOCABULARY), None)
    kl_T = linear_kl(logits_TV, head, teacher_TV, head, chunk=4)
    return torch.where(batch.labels == IGNORE, 0.0, kl_T).sum(), batch.num_loss_tokens


def divergence(logits_TV: Tensor, teacher_TV: Tensor, is_answer_T: Tensor) -> float:
    log_p_TV = logits_TV.detach().log_softmax(-1)
    log_q_TV = teacher_TV.detach().log_softmax(-1)
    return float((log_q_TV.exp() * (log_q_TV - log_p_TV)).sum(-1)[is_answer_T].mean())


def problems(loss: Any) -> list[str]:
    """The problems of a loss, one sentence each."""
    torch.manual_seed(0)
    ids = [torch.randint(VOCABULARY, (length,)) for length in LENGTHS]
    batch = PackedBatch.from_sequences(ids, [torch.arange(length) > 1 for length in LENGTHS])
    is_answer_T = batch.labels != IGNORE
    logits_TV = torch.randn(batch.num_tokens, VOCABULARY, requires_grad=True)
    teacher_TV = torch.randn(batch.num_tokens, VOCABULARY, requires_grad=True)
    found = []
    same, _ = loss(teacher_TV.detach(), teacher_TV.detach(), batch)
    if abs(float(same)) > 1e-5:
        found.append(f"the loss is {float(same):.4f}, not 0, where student and teacher agree")
    loss_sum, weight = loss(logits_TV, teacher_TV, batch)
    whole = float(loss_sum.detach()) / float(weight)
    loss_sum.backward()
    assert logits_TV.grad is not None
    if bool((logits_TV.grad[~is_answer_T] != 0).any()):
        found.append("the loss has a gradient at tokens without a label")
    if teacher_TV.grad is not None and bool((teacher_TV.grad != 0).any()):
        found.append("the loss has a gradient with respect to the teacher")
    moved_TV = logits_TV - 0.1 * logits_TV.grad
    before = divergence(logits_TV, teacher_TV, is_answer_T)
    if divergence(moved_TV, teacher_TV, is_answer_T) >= before:
        found.append("a step against the gradient does not bring the student closer to the teacher")
    sums, weights = 0.0, 0.0
    rows = torch.arange(batch.num_tokens).split(list(LENGTHS))
    for members in ([0], [1, 2, 3]):
        tokens = torch.cat([rows[member] for member in members])
        part, part_weight = loss(logits_TV.detach()[tokens], teacher_TV.detach()[tokens], batch.select(members))
        sums += float(part)
        weights += float(part_weight)
    if abs(sums / weights - whole) > 1e-5:
        found.append(f"in two micro-batches the loss is {sums / weights:.6f}, in one it is {whole:.6f}: return sums")
    return found


if __name__ == "__main__":
    check_loss(problems, kit_loss)

"""Check a contrastive loss: one value per row, own views attract, views of other rows repel.

check.py [FILE.py:NAME]        # see SKILL.md
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from mvp_engine.kit.preference import info_nce
from mvp_engine.tools.skill_check import check_loss

ROWS = 6


def kit_loss(views_B2D: torch.Tensor) -> torch.Tensor:
    """InfoNCE of the kit, with the default temperature of the recipe."""
    first_BD, second_BD = views_B2D.unbind(1)
    return info_nce(first_BD @ second_BD.T / 0.07)


def problems(loss: Any) -> list[str]:
    """The problems of a loss, one sentence each."""
    torch.manual_seed(0)
    views_B2D = F.normalize(torch.randn(ROWS, 2, 8), dim=-1).requires_grad_()
    loss_B = loss(views_B2D)
    if loss_B.shape != (ROWS,):
        return [f"the loss of {ROWS} rows has the shape {tuple(loss_B.shape)}: return one value per row, no mean"]
    found = []
    (grad_B2D,) = torch.autograd.grad(loss_B.sum(), views_B2D)
    first_BD, second_BD = views_B2D.detach().unbind(1)
    # How the loss of a row changes when its first view moves towards the second view of each row.
    towards_BB = grad_B2D[:, 0] @ second_BD.T - (grad_B2D[:, 0] * first_BD).sum(1, keepdim=True)
    if not bool((towards_BB.diagonal() < 0).all()):
        found.append("moving a view towards the other view of its row does not lower the loss")
    alone = torch.stack([loss(views_B2D[i : i + 1].detach())[0] for i in range(ROWS)])
    if torch.allclose(alone, loss_B.detach(), atol=1e-4):
        found.append("the loss of a row does not depend on other rows: there are no negatives")
    order = torch.randperm(ROWS)
    if not torch.allclose(loss(views_B2D.detach()[order]), loss_B.detach()[order], atol=1e-4):
        found.append("the losses depend on the order of the rows")
    return found


if __name__ == "__main__":
    check_loss(problems, kit_loss)

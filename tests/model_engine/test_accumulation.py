"""Several micro-batches on sharded ranks: the gradients of one rank, and at no time those of the whole model on any."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import parallel
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from mvp_engine.distributed import Layout, World
from mvp_engine.distributed.dtensor import full_tensor
from mvp_engine.model_engine import FSDPEngine, Settings

ALONE = World(0, 1, 0, 1, torch.device("cpu"))
USED = [(0, 1)] * 4 + [
    (0, 2)
] * 4  # blocks of each micro-batch, the same on all ranks in a pass; 3 is for nobody
BESIDE = [False, True, False, False, False, False, True, False]


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.beside = nn.Linear(4, 6)  # of the same group as the first, and not used by all
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor, used: tuple[int, ...], beside: bool) -> Tensor:
        out = self.first(x) + self.beside(x) if beside else self.first(x)
        for index in used:
            out = out + self.blocks[index](out).tanh()
        return out


def stepped(world: World, **sizes: int) -> tuple[dict[str, Tensor], list[int]]:
    """Gradients of a step over eight micro-batches, and how many numbers of whole gradients were held in its passes."""
    torch.manual_seed(0)
    engine = FSDPEngine(Stack(), Layout.of(world, parallel(**sizes)), Settings(clip_grad_norm=None))
    engine.initialize(lambda model: torch.optim.SGD(model.parameters(), 0.1))
    rows = torch.randn(8, 3, 4, generator=torch.Generator().manual_seed(1))
    held = []

    def forward(batch: Any) -> tuple[Tensor, int]:
        groups = [g for m in engine.sharded for g in m._get_fsdp_state()._fsdp_param_groups]
        params = [
            p for group in groups for p in group.fsdp_params if hasattr(p, "_unsharded_param")
        ]
        grads = [
            grad for p in params for grad in (p.unsharded_accumulated_grad, p.unsharded_param.grad)
        ]
        held.append(sum(grad.numel() for grad in grads if grad is not None))
        return engine.model(*batch).square().sum(), len(batch[0])

    mine = list(zip(rows, USED, BESIDE, strict=True))[world.rank :: world.size]
    for _ in range(2):
        engine.train_batch(mine, forward)
    found = {
        n: full_tensor(p.grad).clone()
        for n, p in engine.model.named_parameters()
        if p.grad is not None
    }
    world.close()
    return found, held


def on_ranks(shard: int) -> tuple[dict[str, Tensor], list[int]]:
    return stepped(World.join("cpu"), shard=shard)


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="torch 2.13 can"
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_gradient_accumulation_reduces_after_every_backward_and_equals_one_rank(
    request, ranks: int
) -> None:
    expected, _ = stepped(ALONE)
    assert "blocks.3.weight" not in expected
    for found, held in request.getfixturevalue(f"ranks{ranks}").run(on_ranks, 2):
        assert found.keys() == expected.keys()
        assert all(
            torch.allclose(found[n], grad, rtol=1e-5, atol=1e-6) for n, grad in expected.items()
        )
        assert held == [0] * (16 // ranks)


def gathers(reshard: bool) -> tuple[list[Tensor], list[int]]:
    """Gradients and weights after two steps of three micro-batches; the all-gathers of a step and an evaluation."""
    world = World.join("cpu")
    torch.manual_seed(0)
    sizes = {"shard": 2, "reshard": reshard}
    engine = FSDPEngine(Stack(), Layout.of(world, parallel(**sizes)), Settings(precision="bf16"))
    engine.initialize(lambda model: torch.optim.SGD(model.parameters(), 0.1))
    rows = torch.randn(3, 3, 4, generator=torch.Generator().manual_seed(world.rank))
    batches = [(row, (0, 1, 2, 3), True) for row in rows]

    def forward(batch: Any) -> tuple[Tensor, int]:
        return engine.model(*batch).float().square().sum(), len(batch[0])

    engine.train_batch(batches, forward)
    with torch.profiler.profile() as step:
        engine.train_batch(batches, forward)
    with torch.profiler.profile() as evaluation, engine.eval_mode(), engine.autocast():
        for batch in batches[:2]:
            engine.model(*batch)
    groups = [g for m in engine.sharded for g in m._get_fsdp_state()._fsdp_param_groups]
    assert all(group.is_sharded for group in groups)
    names = [[event.name for event in one.events()] for one in (step, evaluation)]
    counts = [of_one.count("c10d::_allgather_base_") for of_one in names]
    found = [
        full_tensor(tensor).clone()
        for p in engine.model.parameters()
        for tensor in (p.grad, p.detach())
    ]
    world.close()
    return found, counts


def test_without_resharding_parameters_are_gathered_once_a_step_and_nothing_else_changes(
    ranks2,
) -> None:
    for (resharded, many), (kept, once) in zip(
        ranks2.run(gathers, True), ranks2.run(gathers, False), strict=True
    ):
        assert all(one.equal(two) for one, two in zip(resharded, kept, strict=True))
        assert once == [5, 5]  # four blocks, and the rest
        assert many == [3 * (5 + 4), 5 + 4]  # the rest is kept after a forward in any case

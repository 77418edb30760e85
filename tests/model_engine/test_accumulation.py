"""Several micro-batches on sharded ranks: the gradients of one rank, and at no time those of the whole model on any."""

import pytest
import torch
from tiny_engines import (
    ALONE,
    assert_close,
    assert_equal,
    engine_of,
    gradients,
    sgd,
    share_of,
    weights,
)
from torch import nn
from torch.distributed.fsdp import FSDPModule

from mvp_engine.model_engine import FSDPEngine

# Blocks of each micro-batch, the same on all ranks in a pass; 3 is for nobody.
USED = [(0, 1)] * 4 + [(0, 2)] * 4
BESIDE = [False, True, False, False, False, False, True, False]


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(4, 6)  # of the same group as the first, and not used by all
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x, used, with_second):
        out = self.first(x) + self.second(x) if with_second else self.first(x)
        for index in used:
            out = out + self.blocks[index](out).tanh()
        return out


def stack_engine(layout, **how):
    torch.manual_seed(0)
    return engine_of(Stack(), layout, lambda model: sgd(model, 0.1), FSDPEngine, **how)


def rows(count, seed):
    return torch.randn(count, 3, 4, generator=torch.Generator().manual_seed(seed))


def groups_of(engine):
    return [g for m in engine.sharded for g in m._get_fsdp_state()._fsdp_param_groups]


def stepped(layout):
    """Gradients of a step over eight micro-batches, and how many numbers of whole gradients were held in its passes."""
    engine = stack_engine(layout, clip_grad_norm=None)
    held = []

    def forward(batch):
        params = [param for group in groups_of(engine) for param in group.fsdp_params]
        whole = [param for param in params if hasattr(param, "_unsharded_param")]
        grads = [param.unsharded_accumulated_grad for param in whole]
        grads += [param.unsharded_param.grad for param in whole]
        held.append(sum(grad.numel() for grad in grads if grad is not None))
        return engine.model(*batch).square().sum(), len(batch[0])

    mine = share_of(layout, list(zip(rows(8, seed=1), USED, BESIDE, strict=True)))
    for _ in range(2):
        engine.train_batch(mine, forward)
    return gradients(engine.model), held


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="torch 2.13 can"
)
@pytest.mark.parametrize("sizes", [{"shard": 2}, {"shard": 2, "replicate": 2}], ids=str)
def test_gradient_accumulation_reduces_after_every_backward_and_equals_one_rank(on_ranks, sizes):
    expected, _ = stepped(ALONE)
    assert "blocks.3.weight" not in expected
    results = on_ranks(sizes, stepped)
    for found, held in results:
        assert_close(found, expected, floor=0.1)
        assert held == [0] * (16 // len(results))


def gathers(layout):
    """Gradients and weights after two steps of three micro-batches; the all-gathers of a step and an evaluation."""
    engine = stack_engine(layout, precision="bf16")
    batches = [(row, (0, 1, 2, 3), True) for row in rows(3, seed=layout.world.rank)]

    def forward(batch):
        return engine.model(*batch).float().square().sum(), len(batch[0])

    engine.train_batch(batches, forward)
    with torch.profiler.profile() as step:
        engine.train_batch(batches, forward)
    with torch.profiler.profile() as evaluation, engine.eval_mode(), engine.autocast():
        for batch in batches[:2]:
            engine.model(*batch)
    assert all(group.is_sharded for group in groups_of(engine))
    names = [[event.name for event in each.events()] for each in (step, evaluation)]
    counts = [of_each.count("c10d::_allgather_base_") for of_each in names]
    return gradients(engine.model), weights(engine.model), counts


@pytest.mark.slow
def test_without_resharding_parameters_are_gathered_once_a_step_and_nothing_else_changes(
    on_ranks,
):
    resharded = on_ranks({"shard": 2}, gathers)
    kept = on_ranks({"shard": 2, "reshard": False}, gathers)
    for (grads, state, many), (same_grads, same_state, once) in zip(resharded, kept, strict=True):
        assert_equal(grads, same_grads)
        assert_equal(state, same_state)
        assert once == [5, 5]  # four blocks, and the rest
        assert many == [3 * (5 + 4), 5 + 4]  # the rest is kept after a forward in any case

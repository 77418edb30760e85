"""Worker groups: the same results for every number of ranks, layout and launcher."""

from __future__ import annotations

import pytest
import torch
from worker_cases import TokenLoss, batch_of, spec_of

from mvp_engine.worker import WorkerGroup

LENGTHS = (7, 3, 12, 5, 9, 4, 2)


def test_group_local_update_lowers_loss_and_infer_keeps_order() -> None:
    batch = batch_of(*LENGTHS)
    with WorkerGroup.start(spec_of()) as group:
        before = group.infer(batch, ["log_probs"], budget=12)["log_probs"]
        alone = [group.infer(batch.select([s]), ["log_probs"], budget=12) for s in range(len(LENGTHS))]
        joined = torch.cat([one["log_probs"] for one in alone])
        torch.testing.assert_close(before, joined, atol=1e-5, rtol=0)
        numbers = group.update(batch, TokenLoss(), budget=16, cuts=3)
        assert [one.metrics["tokens"][0] for one in numbers] == [one.weight for one in numbers]
        assert sum(one.weight for one in numbers) == int(batch.num_loss_tokens)
        again = group.update(batch, TokenLoss(), budget=16, cuts=3)
    assert again[0].loss < numbers[0].loss


@pytest.mark.slow
def test_group_spawn_gives_what_local_gives() -> None:
    batch = batch_of(*LENGTHS)
    results = {}
    for where, ranks, layout in [("local", 1, {}), ("spawn", 2, {"shard": 2})]:
        with WorkerGroup.start(spec_of(parallel=layout), ranks=ranks, where=where) as group:
            numbers = group.update(batch, TokenLoss(), budget=16, cuts=2)
            results[where] = numbers, group.infer(batch, ["log_probs"], budget=64)["log_probs"]
    local, spawn = results["local"], results["spawn"]
    torch.testing.assert_close(local[1], spawn[1], atol=1e-5, rtol=0)
    for one, two in zip(local[0], spawn[0], strict=True):
        assert one.loss == pytest.approx(two.loss, abs=1e-5)
        assert one.metrics == two.metrics

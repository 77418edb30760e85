"""Worker groups: the same results for every number of ranks and layout; batches of any size."""

from collections import Counter

import pytest
import torch
from conftest import CAMPAIGN, user_error
from pool_launcher import PoolLauncher
from worker_cases import TokenLoss, batch_of, spec_of

from mvp_engine.kit.decoding import Decoding
from mvp_engine.worker import WorkerGroup, WorkerUserError
from mvp_engine.worker.launchers import devices_of_node

LENGTHS = (7, 3, 12, 5, 9, 4, 2)
SAMPLED = Decoding(max_new_tokens=4, temperature=1.0, samples=2, seed=5)


def run(group):
    batch = batch_of(*LENGTHS)
    first = group.infer(batch, ["log_probs"], budget=12)["log_probs"]
    sampled = group.generate(batch, SAMPLED)
    numbers = group.update(batch, TokenLoss(), budget=16, cuts=3, together="group")
    # More ranks than sequences: one has no data.
    one = group.update(batch_of(5), TokenLoss(), budget=5)
    sampled += group.generate(batch_of(6), SAMPLED, keys=[11])
    last = group.infer(batch_of(6), ["log_probs", "entropy"], budget=64)
    return {
        "first": first,
        "sampled": [(c.prompt, c.tokens) for c in sampled],
        "log_probs": torch.tensor([p for c in sampled for p in c.log_probs]),
        "losses": torch.tensor([n.loss for n in numbers + one]),
        "norms": torch.tensor([n.grad_norm for n in numbers + one]),
        "metrics": [n.metrics for n in numbers + one],
        "weights": [n.weight for n in numbers + one],
        **last,
    }


@pytest.fixture(scope="module")
def local():
    with WorkerGroup.start(spec_of()) as group:
        return run(group)


def test_infer_local_returns_what_each_sequence_gives_alone():
    batch = batch_of(*LENGTHS)
    with WorkerGroup.start(spec_of()) as group:
        packed = group.infer(batch, ["log_probs"], budget=12)["log_probs"]
        alone = [
            group.infer(batch.select([s]), ["log_probs"], budget=12) for s in range(len(LENGTHS))
        ]
        torch.testing.assert_close(
            packed, torch.cat([one["log_probs"] for one in alone]), atol=1e-5, rtol=0
        )
        warm = group.infer(batch, ["log_probs"], budget=12, temperature=2.0)["log_probs"]
    assert not torch.allclose(packed, warm, atol=1e-3)


def test_update_local_counts_every_token_once_and_learns(local):
    assert sum(local["weights"][:3]) == int(batch_of(*LENGTHS).num_loss_tokens)
    assert [m["tokens"][0] for m in local["metrics"]] == local["weights"]
    with WorkerGroup.start(spec_of()) as group:
        steps = [group.update(batch_of(*LENGTHS), TokenLoss(), budget=64)[0].loss for _ in range(3)]
    assert steps == sorted(steps, reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"shard": 2},
        {"tensor": 2},
        {"pipeline": 2},
        *(pytest.param(size, marks=CAMPAIGN) for size in ({}, {"ulysses": 2})),
    ],
    ids=str,
)
def test_group_on_two_ranks_gives_what_local_gives(ranks2, layout, local):
    spec = spec_of(parallel=layout)
    with WorkerGroup.start(spec, ranks=2, where=PoolLauncher(ranks2)) as group:
        found = run(group)
    for name in ("first", "losses", "norms", "log_probs", "entropy"):
        torch.testing.assert_close(found[name], local[name], atol=2e-5, rtol=1e-5, msg=name)
    assert found["sampled"] == local["sampled"]
    assert found["weights"] == local["weights"]
    # A metric is a sum over the micro-batches, whose number depends on the ranks.
    assert [m["tokens"][0] for m in found["metrics"]] == [m["tokens"][0] for m in local["metrics"]]


def test_update_with_together_keeps_groups_in_one_step():
    batch = batch_of(3, 3, 3, 3, 3, 3)
    batch.sequence_fields["group"] = torch.tensor([4, 7, 4, 9, 7, 7])
    with WorkerGroup.start(spec_of()) as group:
        numbers = group.update(batch, TokenLoss(), budget=64, cuts=3, together="group")
        assert [n.weight for n in numbers] == [4.0, 6.0, 2.0]
        assert len(group.update(batch, TokenLoss(), budget=64, cuts=9, together="group")) == 3
        with user_error("no such per-sequence field; it has: group"):
            group.update(batch, TokenLoss(), budget=64, together="groups")


def test_group_user_errors_name_the_fix_and_leave_the_group_usable():
    with WorkerGroup.start(spec_of(optim=None)) as group:
        with user_error("sequence 1 has 9 tokens, more than the budget of 8"):
            group.infer(batch_of(3, 9), ["log_probs"], budget=8)
        with user_error("inference only"):
            group.update(batch_of(3), TokenLoss(), budget=8)
        with pytest.raises(
            WorkerUserError,
            match=r"rank 0 of group actor, in infer: .*does not provide \['values'\]",
        ):
            group.infer(batch_of(3), ["values"], budget=8)
        with pytest.raises(WorkerUserError, match="outputs per token, and loss is one number"):
            group.infer(batch_of(3), ["loss"], budget=8)
        with user_error("of this name already"):
            WorkerGroup.start(spec_of(), on=group)
        assert len(group.infer(batch_of(3), ["log_probs"], budget=8)["log_probs"]) == 3
    with user_error("does not divide the 3 ranks of the group: use 4"):
        WorkerGroup.start(spec_of(parallel={"tensor": 2}), ranks=3, where="spawn")
    with user_error(r"set workers\.where=spawn"):
        WorkerGroup.start(spec_of(), ranks=2)
    with user_error(r"none of local, spawn, ray\. Did you mean spawn\?"):
        WorkerGroup.start(spec_of(), where="spwan")


def test_devices_of_groups_with_processes_of_their_own_are_apart(
    monkeypatch,
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    actor = devices_of_node("auto", 2)
    assert actor == ["cuda:0", "cuda:1"]
    assert devices_of_node("auto", 2, Counter(actor)) == ["cuda:2", "cuda:3"]
    assert devices_of_node("auto", 3, Counter(actor)) == ["cuda:2", "cuda:3", "cuda:0"]
    assert devices_of_node("cpu", 2) == ["cpu", "cpu"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert devices_of_node("auto", 1) == ["cpu"]
    with user_error("torch sees no GPU here"):
        devices_of_node("cuda", 1)


def test_spec_of_a_folder_has_the_settings_of_its_model_keys():
    spec = spec_of(model={"freeze": ["*.embed_tokens.*"]}, precision="bf16", seed=4)
    assert (spec.settings.freeze, spec.settings.precision) == (("*.embed_tokens.*",), "bf16")
    assert (spec.settings.seed, spec.seed) == (4, 4)

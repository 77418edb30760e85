"""Weight streams between groups, checkpoints, and several groups on the same processes."""

import pytest
import torch
from conftest import user_error
from pool_launcher import PoolLauncher
from worker_cases import TINY, TokenLoss, ValueLossOne, batch_of, spec_of

from mvp_engine.hf.lora.lora_settings import Lora
from mvp_engine.worker import WorkerGroup

BATCH = batch_of(7, 3, 12, 5)
MOE = {
    **TINY,
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}


@pytest.fixture
def start_two(ranks2):
    """start_two(KEY=value, ...): a group on two ranks with this spec."""
    return lambda **spec: WorkerGroup.start(spec_of(**spec), ranks=2, where=PoolLauncher(ranks2))


def assert_near(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def log_probs(group):
    return group.infer(BATCH, ["log_probs"], budget=64)["log_probs"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout, config",
    [({"tensor": 2}, TINY), ({"shard": 2, "expert": 2}, MOE)],
    ids=["tensor", "expert_parallel"],
)
def test_weights_of_one_layout_arrive_on_another_with_equal_checksums(start_two, layout, config):
    with (
        start_two(model={"config": config}, parallel=layout) as actor,
        WorkerGroup.start(spec_of(model={"config": config}, optim=None, seed=9)) as other,
    ):
        actor.update(BATCH, TokenLoss(), budget=64)
        assert other.checksums() != actor.checksums()
        buckets = list(actor.weights(bucket_bytes=8000))
        sizes = [sum(value.nbytes for _, value in bucket) for bucket in buckets]
        assert len(buckets) > 3
        assert all(size <= 8000 or len(b) == 1 for size, b in zip(sizes, buckets, strict=True))
        other.load_weights(buckets)
        assert other.checksums() == actor.checksums()
        assert_near(log_probs(other), log_probs(actor))
        # And back, in another order, into the other layout.
        actor.update(BATCH, TokenLoss(), budget=64)
        actor.load_weights([bucket[::-1] for bucket in buckets[::-1]])
        assert actor.checksums() == other.checksums()


def test_weights_with_lora_are_merged(start_two):
    with (
        start_two(lora=Lora(rank=4), parallel={"shard": 2}) as actor,
        WorkerGroup.start(spec_of(optim=None)) as other,
    ):
        before = log_probs(actor)
        actor.update(BATCH, TokenLoss(), budget=64)
        other.load_weights(actor.weights())
        assert other.checksums() == actor.checksums()
        assert_near(log_probs(other), log_probs(actor))
        assert not torch.allclose(log_probs(other), before, atol=1e-3)
        base = actor.infer(BATCH, ["log_probs"], budget=64, adapters=False)["log_probs"]
        assert_near(base, before)
        with user_error("a model with LoRA adapters cannot receive weights"):
            actor.load_weights(other.weights())


def test_weights_of_a_value_model_arrive_with_its_head():
    critic = spec_of(model={"type": "value_model"})
    with WorkerGroup.start(critic) as one, WorkerGroup.start(critic) as two:
        one.update(BATCH, ValueLossOne(), budget=64)
        two.load_weights(one.weights())
        assert one.checksums() == two.checksums()
        assert torch.equal(
            *(group.infer(BATCH, ["values"], budget=64)["values"] for group in (one, two))
        )


def test_load_weights_refuses_what_is_missing_or_unknown():
    with WorkerGroup.start(spec_of()) as group:
        buckets = list(group.weights())
        with user_error(r"lacks 1 weight of the model, such as lm_head\.weight"):
            group.load_weights([[pair for pair in buckets[0] if pair[0] != "lm_head.weight"]])
        with user_error("the model has no weight other: is it the same"):
            group.load_weights([[("other", torch.zeros(1))]])
        with user_error(r"lm_head\.weight has the shape \(1, 2\) there"):
            group.load_weights([[("lm_head.weight", torch.zeros(1, 2))]])


@pytest.mark.parametrize("on_device", [False, True])
def test_weights_are_copies_that_a_later_update_does_not_change(on_device):
    with WorkerGroup.start(spec_of()) as group:
        [bucket] = group.weights(on_device=on_device)
        before = {name: value.clone() for name, value in bucket}
        group.update(BATCH, TokenLoss(), budget=64)
        assert all(torch.equal(value, before[name]) for name, value in bucket)


def test_checkpoint_continues_bit_for_bit_and_loads_on_another_layout(tmp_path, start_two):
    dropout = {**TINY, "attention_dropout": 0.0}
    spec = spec_of(model={"config": dropout}, lora=Lora(rank=4, dropout=0.5), total_steps=8)
    with WorkerGroup.start(spec) as group:
        group.update(BATCH, TokenLoss(), budget=64, cuts=2)
        group.save(tmp_path / "actor")
        torch.rand(7)  # numbers that the controller draws are no part of a worker's
        after = group.update(BATCH, TokenLoss(), budget=64, cuts=2)
        expected = group.checksums(torch.float32)
    with WorkerGroup.start(spec) as group:
        group.load(tmp_path / "actor")
        weights = group.checksums(torch.float32)
        assert group.update(BATCH, TokenLoss(), budget=64, cuts=2) == after
        assert group.checksums(torch.float32) == expected
    sharded = {"model": {"config": dropout}, "lora": Lora(rank=4), "parallel": {"shard": 2}}
    with start_two(**sharded) as group:
        group.load(tmp_path / "actor")
        assert group.checksums(torch.float32) == weights


def test_groups_with_pipeline_stages_send_and_receive_weights(start_two):
    with start_two(parallel={"shard": 2}) as actor:
        stages = WorkerGroup.start(spec_of(parallel={"pipeline": 2}), name="reference", on=actor)
        actor.update(BATCH, TokenLoss(), budget=64)
        stages.load_weights(actor.weights())
        assert stages.checksums() == actor.checksums()
        stages.update(BATCH, TokenLoss(), budget=64)
        actor.load_weights(iter(list(stages.weights())))
        assert stages.checksums() == actor.checksums()


@pytest.mark.slow
def test_groups_share_processes_with_other_layouts(start_two, tmp_path):
    with start_two(parallel={"shard": 2}) as actor:
        critic_spec = spec_of(model={"type": "value_model"}, parallel={"ulysses": 2})
        critic = WorkerGroup.start(critic_spec, name="critic", on=actor)
        reference = WorkerGroup.start(spec_of(optim=None), name="reference", on=actor)
        assert_near(log_probs(reference), log_probs(actor))
        critic.update(BATCH, ValueLossOne(), budget=64)
        actor.update(BATCH, TokenLoss(), budget=64)
        assert reference.checksums() != actor.checksums()
        reference.load_weights(actor.weights())  # copied by the ranks
        assert reference.checksums() == actor.checksums()
        actor.update(BATCH, TokenLoss(), budget=64)
        reference.load_weights(iter(list(actor.weights())))  # through the controller
        assert reference.checksums() == actor.checksums()
        with user_error("the model has no weight"):
            critic.load_weights(actor.weights())
        actor.export_hf(tmp_path / "hf")
        reference.close()
        critic.infer(BATCH, ["values"], budget=64)
    with WorkerGroup.start(
        spec_of(model={"config": {}, "path": str(tmp_path / "hf")}, optim=None)
    ) as exported:
        assert len(exported.checksums()) > 3

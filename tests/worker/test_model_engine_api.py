"""The model engine's API through worker groups: streams of weights, single calls of a step, adapters alone."""

from itertools import chain

import pytest
import torch
from conftest import user_error
from pool_launcher import PoolLauncher
from run_files import read_json
from safetensors.torch import load_file
from worker_cases import TINY, TokenLoss, batch_of, spec_of

from mvp_engine.distributed.data_parallel import DDPReducer
from mvp_engine.hf.lora.lora_settings import Lora
from mvp_engine.hf.weights.pretrained import Deltas, applied_delta
from mvp_engine.kit.model import MLLMModelKit
from mvp_engine.worker import WorkerGroup

BATCH = batch_of(7, 3, 12, 5)
SGD = {"lr": 1e-2, "schedule": "constant", "weight_decay": 0.0}


@pytest.fixture(params=[1, 2], ids=["one_rank", "two_ranks"])
def start(request, ranks2):
    """start(**spec): a group on one rank of this process, or on two that shard the model."""

    def start(**spec):
        if request.param == 1:
            return WorkerGroup.start(spec_of(**spec))
        where = PoolLauncher(ranks2)
        return WorkerGroup.start(spec_of(parallel={"shard": 2}, **spec), ranks=2, where=where)

    return start


def of_stream(group, **options):
    return list(chain.from_iterable(group.weights(torch.float32, **options)))


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_deltas_put_together_are_the_weights_bit_by_bit_and_leave_out_what_did_not_change(start):
    received = {}
    frozen = {"freeze": ["*.embed_tokens.*"]}
    with start(model=frozen) as group:
        for step in range(3):
            if step:
                group.update(BATCH, TokenLoss(), budget=64)
            delta = [one for _, one in of_stream(group, what="delta", bucket_bytes=8000)]
            assert_equal(applied_delta(received, delta), dict(of_stream(group)))
            sent = {one.name for one in delta if len(one.indices)}
            assert ("model.embed_tokens.weight" in sent) == (step == 0)
            assert "model.norm.weight" in sent
        again = of_stream(group, what="delta")
        assert not any(len(one.indices) for _, one in again)
        with user_error("not a stream of delta"):
            group.load_weights(group.weights(what="delta"))


def test_deltas_of_a_weight_with_fewer_elements_than_ranks():
    values = {"scale": torch.tensor(1.0), "bias": torch.tensor([1.0, 2.0])}

    senders = [Deltas() for _ in range(3)]
    received = {}
    for _ in range(2):
        for rank, sender in enumerate(senders):
            applied_delta(received, sender.of(values.items(), rank, len(senders)))
        assert_equal(received, values)
        values["scale"] = values["scale"] + 1


def test_shards_of_all_ranks_cover_each_parameter(start):
    with start() as group:
        expected = dict(of_stream(group))
        found = {}
        for name, shape, shards in chain.from_iterable(group.shards()):
            full = found.setdefault(name.removeprefix("hf."), torch.full(shape, torch.nan))
            for offset, value in shards:
                index = [slice(at, at + size) for at, size in zip(offset, value.shape, strict=True)]
                full[tuple(index)] = value
    assert_equal(found, expected)


def test_adapter_stream_has_names_tensors_and_config_of_the_exported_adapter(tmp_path):
    with WorkerGroup.start(spec_of(lora=Lora(rank=4, target_modules=["q_proj"]))) as group:
        group.update(BATCH, TokenLoss(), budget=64)
        adapter = dict(of_stream(group, what="adapter"))
        worker = group.processes.ranks[0].host.workers["actor"]
        MLLMModelKit.export_adapter(worker.engine, tmp_path)
        assert_equal(adapter, load_file(tmp_path / "adapter_model.safetensors"))
        assert group.call("peft_config") == [read_json(tmp_path / "adapter_config.json")]
        assert len(adapter) == 2 * TINY["num_hidden_layers"]
        with worker.engine.disable_adapter(), worker.engine.eval_mode():
            without = worker.engine.model(BATCH, ["log_probs"])["log_probs"]
        base = group.infer(BATCH, ["log_probs"], budget=64, adapters=False)["log_probs"]
        torch.testing.assert_close(without, base)
    with WorkerGroup.start(spec_of()) as group:
        assert group.call("peft_config") == [None]
        with user_error("has no adapters to export"):
            of_stream(group, what="adapter")


def test_single_calls_of_a_step_equal_one_update(start):
    with start() as one, WorkerGroup.start(spec_of()) as other:
        [expected] = other.update(BATCH, TokenLoss(), budget=64)
        one.call("optimizer_zero_grad")
        one.forward_backward(BATCH, TokenLoss(), budget=64)  # given up
        one.call("optimizer_zero_grad")
        one.forward_backward(BATCH.select([0, 1]), TokenLoss(), budget=64)
        one.forward_backward(BATCH.select([2, 3]), TokenLoss(), budget=64)
        found = one.optimizer_step()
        assert found.loss == pytest.approx(expected.loss, abs=1e-5)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
        assert found.weight == expected.weight
        assert found.metrics["tokens"][0] == expected.metrics["tokens"][0]


def test_learning_rate_of_a_call_replaces_that_of_the_schedule_for_this_step(start):
    alone = spec_of(optim={**SGD, "lr": 3e-3})
    with start(optim=SGD) as one, WorkerGroup.start(alone) as other:
        before = dict(of_stream(one))
        [numbers] = one.update(BATCH, TokenLoss(), budget=64, lr=3e-3)
        other.update(BATCH, TokenLoss(), budget=64)
        assert numbers.lr == 3e-3
        expected = dict(of_stream(other))
        for name, weight in of_stream(one):
            assert not torch.equal(weight, before[name])
            torch.testing.assert_close(weight, expected[name], atol=1e-5, rtol=0)
        one.call("optimizer_zero_grad")
        one.forward_backward(BATCH, TokenLoss(), budget=64)
        assert one.optimizer_step().lr == 1e-2  # that of the schedule again


def test_learning_rate_of_a_step_holds_while_the_schedule_advances_by_the_step_before():
    with WorkerGroup.start(spec_of(optim={**SGD, "schedule": "cosine"}, total_steps=9)) as group:
        engine = group.processes.ranks[0].host.workers["actor"].engine

        def step(**options):
            micro_batches = [(BATCH, lambda *_: None)]
            with engine.train_mode():
                engine.train_batch(
                    micro_batches, lambda one: TokenLoss()(engine.model, *one), **options
                )
            return list(engine.learning_rates.values())

        expected = [step() for _ in range(4)][3]
    with WorkerGroup.start(spec_of(optim={**SGD, "schedule": "cosine"}, total_steps=9)) as group:
        engine = group.processes.ranks[0].host.workers["actor"].engine
        for _ in range(3):
            assert set(step(lr=3e-3)) == {3e-3}
        assert step() == expected


def test_learning_rate_of_a_call_keeps_the_ratios_of_parts():
    optim = {**SGD, "lr_by_part": {"*.norm.weight": 1e-3}}
    with WorkerGroup.start(spec_of(optim=optim)) as group:
        group.update(BATCH, TokenLoss(), budget=64, lr=1e-1)
        [rates] = group.call("learning_rates")
        assert sorted(set(rates.values())) == pytest.approx([1e-2, 1e-1])


def test_offload_is_told_and_calls_that_would_lose_gradients_are_refused():
    model = {"offload_outside_steps": "optimizer"}
    with WorkerGroup.start(spec_of(model=model)) as group:
        assert group.call("is_optimizer_offload_enabled") == [True]
        assert group.call("is_param_offload_enabled") == [False]
        with user_error("gradients move with the weights"):
            group.to("cpu", model=False, grad=True)
    with WorkerGroup.start(spec_of(model={"offload_outside_steps": "all"})) as group:
        assert group.call("is_param_offload_enabled") == [True]
        with user_error("offload_outside_steps=all drops gradients"):
            group.forward_backward(BATCH, TokenLoss(), budget=64)


def test_buckets_of_gradients_come_back_from_the_host_only_if_kept():
    for keep in (True, False):
        layer = torch.nn.Linear(3, 2)
        reducer = DDPReducer(list(layer.parameters()))
        reducer.zero_grad()
        layer.weight.grad += 5.0
        reducer.release(keep=keep)
        assert layer.weight.grad is None
        reducer.allocate()
        assert (layer.weight.grad is not None and bool((layer.weight.grad == 5.0).all())) == keep

"""On a GPU: no wait inside a step, skipping on the device, precision, bit-equal resume."""

import pytest
import torch
from conftest import MAGIC, TINY, losses, read_metrics
from test_fsdp_engine import batches, engine_on, forward, reasons
from test_fsdp_engine import train as train_step
from tiny_engines import LM, assert_equal, no_host_sync, weights

from mvp_engine.distributed import Layout, World
from mvp_engine.errors import EXIT_INTERRUPTED
from mvp_engine.log import MetricStore

pytestmark = pytest.mark.gpu


def gpu():
    return Layout(World(0, 1, 0, 1, torch.device("cuda", 0)))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_step_on_gpu_has_no_host_sync(precision):
    part = engine_on(gpu(), precision=precision, clip_grad_norm=1.0)
    store = MetricStore(part.world)
    data = [{**b, "tokens": b["tokens"].pin_memory()} for b in batches(3)]

    def step():
        store.begin_step()
        numbers = part.train_batch(data, forward(part.model))
        store.add("loss", numbers.loss_sum, numbers.weight)
        store.add("grad_norm", numbers.grad_norm)
        store.add("one", 1.0)
        store.end_step(numbers.skipped)

    step()  # allocates and compiles
    with no_host_sync():
        for _ in range(3):
            step()
    assert [o.reason for o in part.step_status() if not o.overflow] == [None] * 4


def test_skipped_step_on_gpu_changes_neither_weights_nor_schedule():
    part = engine_on(gpu())
    train_step(part, batches(3))
    part.step_status()
    before = weights(part.model)
    steps = [s["step"].clone() for s in part.optimizer.state.values()]
    train_step(part, batches(3), float("nan"))
    assert reasons(part) == ["the loss is not finite"]
    assert_equal(weights(part.model), before)
    assert all(map(torch.equal, (s["step"] for s in part.optimizer.state.values()), steps))
    assert part.scheduler.last_epoch == 1
    train_step(part, batches(3))
    assert reasons(part) == [None]
    assert part.scheduler.last_epoch == 2


def test_training_on_gpu_gives_the_losses_of_the_cpu(train, tmp_path):
    words = ["train.max_steps=6", "log.interval=1", "log.backends=[jsonl]"]
    words += ["data.micro_batch_size=32", "data.global_batch_size=64"]
    words += ["eval.steps=null", "train.precision=fp32"]
    for device in ("cpu", "cuda"):
        assert train(*words, f"device={device}", config=MAGIC, dir=tmp_path / device) == 0
    assert losses(tmp_path / "cpu") == pytest.approx(losses(tmp_path / "cuda"), rel=1e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_on_gpu_is_close_to_fp32(train, tmp_path, precision):
    words = "train.max_steps=60 log.interval=20 log.backends=[jsonl] eval.steps=null".split()
    for name in ("fp32", precision):
        assert train(*words, f"train.precision={name}", config=MAGIC, dir=tmp_path / name) == 0
    assert losses(tmp_path / "fp32") == pytest.approx(losses(tmp_path / precision), rel=0.1)


def test_resumed_run_on_gpu_is_bit_equal(train, tmp_path):
    words = "tiny.dropout=0.3 tiny.noise=0.1 log.interval=3 deterministic=true".split()
    try:
        assert train(*words, dir=tmp_path / "straight") == 0
        cut = [*words, "resume=auto", "tiny.fault=sigterm", "tiny.fault_step=5"]
        assert train(*cut, dir=tmp_path / "cut") == EXIT_INTERRUPTED
        assert train(*words, "resume=auto", dir=tmp_path / "cut") == 0
    finally:
        torch.use_deterministic_algorithms(False)
    assert read_metrics(tmp_path / "straight") == read_metrics(tmp_path / "cut")


def test_two_ranks_on_one_gpu_give_the_losses_of_one(train, ranks2, tmp_path):
    words = ["log.interval=1", "log.backends=[jsonl]", "train.precision=fp32"]
    assert train(*words, "data.micro_batch_size=8", dir=tmp_path / "one") == 0
    assert ranks2.launch(
        TINY, *words, "data.micro_batch_size=2", f"output_dir={tmp_path / 'two'}"
    ) == [0, 0]
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "two"), rel=1e-5)


EXACT = ["train.precision=fp32", "model.compile=null"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_packed_language_model_on_gpu_is_close_to_cpu(train, tmp_path, precision):
    assert train("device=cpu", config=LM, dir=tmp_path / "cpu") == 0
    assert (
        train("device=cuda", f"train.precision={precision}", config=LM, dir=tmp_path / "gpu") == 0
    )
    tolerance = 1e-3 if precision == "fp32" else 2e-2
    assert losses(tmp_path / "cpu") == pytest.approx(losses(tmp_path / "gpu"), rel=tolerance)


@pytest.mark.parametrize(
    "layout, micro_batch", [("shard", 2), ("ulysses", 2), ("pipeline", 2), ("tensor", 8)]
)
def test_packed_language_model_on_two_ranks_of_one_gpu_equals_one_rank(
    train, ranks2, tmp_path, layout, micro_batch
):
    assert train("data.micro_batch_size=8", *EXACT, config=LM, dir=tmp_path / "one") == 0
    words = [*EXACT, f"parallel.{layout}=2", f"data.micro_batch_size={micro_batch}"]
    assert ranks2.launch(LM, *words, f"output_dir={tmp_path / 'two'}") == [0, 0]
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "two"), rel=1e-4)

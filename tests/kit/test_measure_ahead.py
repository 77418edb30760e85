"""Rows that are measured while the model is built: the same costs, the same errors, and blocks compiled meanwhile."""

import os
import signal

import pytest
from conftest import is_gone, losses, mvp, user_error
from test_measure import assert_same_costs, image_rows
from tiny_vlm import made, qwen3_vl, write

from mvp_engine.engine import Engine
from mvp_engine.kit.data.measured_sources import MeasuredSources
from mvp_engine.kit.data.pack.costs import CHUNK_ROWS, Measure
from mvp_engine.kit.data.read import decoders

CONFIG = """
engine: mvp_engine.kit:MLLMEngine
run_name: tiny
output_dir: outputs
model: {type: language_model, path: model, compile: {llm: eager}}
data:
  pack_tokens: 256
  sources:
    images: {path: rows.jsonl}
  global_batch_size: 2
  num_workers: 1
optim: {lr: 0.01}
train: {max_steps: 2, precision: fp32}
checkpoint: {best_metric: null, interval: null}
log: {backends: [jsonl], interval: 1}
"""


def kit_of(folder, workers, cache="cache", rows=2 * CHUNK_ROWS + 3):
    found = image_rows(folder, rows)
    found[5]["messages"][0]["content"][0]["image"] = "missing.png"
    kit = made(write(folder / "rows.jsonl", found), qwen3_vl(), cache=str(folder / cache))
    kit.num_workers = workers
    return kit


def test_measure_ahead_finds_the_costs_of_measured_and_leaves_it_nothing_to_do(
    tmp_path, monkeypatch
):
    expected = kit_of(tmp_path, 0, "other").measured("train")[1][0]
    kit = kit_of(tmp_path, 2)
    assert kit.measure_ahead(["train"])
    monkeypatch.setattr(Measure, "__call__", lambda *_: pytest.fail("measured again"))
    found = kit.measured("train")[1][0]
    assert_same_costs(found, expected)
    assert list(found.bad) == [5]
    assert not kit_of(tmp_path, 2).measure_ahead(["train"])  # from the cache
    assert not kit_of(tmp_path, 0, "third").measure_ahead(["train"])  # without processes


def test_sample_costs_are_those_of_the_measured_rows_in_the_order_of_the_sample(
    tmp_path,
):
    kit = kit_of(tmp_path, 0, rows=12)
    found = kit.sample_costs()
    mixture, (costs,) = kit.measured("train")
    rows = [row for _, row in mixture.order(0, 0).tolist() if row != 5]  # which is bad
    assert found.tolist() == [[costs.tokens[row], costs.encoder[row]] for row in rows]
    assert found.all()


def test_measure_ahead_in_which_a_process_dies_leaves_the_error_to_measured(tmp_path, monkeypatch):
    kit = kit_of(tmp_path, 2)
    with monkeypatch.context() as patched:
        patched.setattr(decoders, "open_image", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        assert kit.measure_ahead(["train"])
        with user_error(r"a process died while it measured the rows from rows.jsonl:\d+ to"):
            kit.measured("train")
    assert (kit.measured("train")[1][0].tokens > 0).sum() == 2 * CHUNK_ROWS + 2


def test_stop_measuring_ends_the_processes_and_releases_the_lock(tmp_path, monkeypatch):
    kit = kit_of(tmp_path, 2)
    with monkeypatch.context() as patched:
        patched.setattr(decoders, "open_image", lambda *_: signal.pause())
        kit.measure_ahead(["train"])
    workers = [process.pid for process in kit._ahead._workers._processes]
    assert not any(map(is_gone, workers))
    kit.stop_measuring()
    assert all(map(is_gone, workers))
    assert (kit.measured("train")[1][0].tokens > 0).any()


@pytest.mark.slow
def test_train_compiles_blocks_while_rows_are_measured_and_changes_no_loss(vlm_folder, monkeypatch):
    from torch._dynamo.utils import counters

    write(vlm_folder / "rows.jsonl", image_rows(vlm_folder, CHUNK_ROWS + 1))
    (vlm_folder / "train.yaml").write_text(CONFIG)
    monkeypatch.setattr(MeasuredSources, "is_measuring", True)  # however fast this machine is
    graphs = []
    opened = Engine.open_data

    def counted(engine):
        graphs.append(counters["stats"]["unique_graphs"])
        opened(engine)

    monkeypatch.setattr(Engine, "open_data", counted)
    found = []
    for words in ([], ["model.compile=null"]):
        counters.clear()
        assert mvp("train train.yaml", *words) == 0
        found.append(losses(vlm_folder / "outputs"))
    assert graphs[0] > 0
    assert found[0] == found[1]

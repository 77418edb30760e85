"""Elastic jobs: `--nnodes 1:2` continues with one node after the other was lost."""

import os
import signal
import time

import pytest
from conftest import CAMPAIGN, TINY, read_metrics, spawn, user_error, wait_until
from run_files import read_json
from test_nodes import resolve  # noqa: F401 - a fixture

from mvp_engine.errors import JOB_ID
from mvp_engine.runs import launcher_id, list_runs

WORDS = (
    "log.interval=1 log.backends=[file,jsonl] checkpoint.interval=5 data.micro_batch_size=2".split()
)


def test_nodes_of_a_range_are_elastic(resolve):  # noqa: F811
    nodes = resolve("--nnodes", "1:4", "--node-rank", "2", "--master-addr", "gpu07", "--nproc", "8")
    assert (nodes.least, nodes.count, nodes.rank) == (1, 4, 2)
    options = nodes.torchrun_options(600)
    assert "--nnodes=1:4" in options
    assert "--rdzv-endpoint=gpu07:29500" in options
    [waits] = [option for option in options if "is_host" in option]
    assert "is_host=False" in waits
    for wrong, text in (
        ("2:2", "less than the second"),
        ("0:2", "at least 1"),
        ("two", "LEAST:MOST"),
    ):
        with user_error(text):
            resolve("--nnodes", wrong, "--node-rank", "0", "--master-addr", "a")


def test_restarted_elastic_job_continues_its_own_run(train, tmp_path, monkeypatch):
    """Its ranks may be those of another launcher; a job of another id is a new run."""
    monkeypatch.setenv(JOB_ID, "first")
    assert launcher_id() == "first"
    assert train("train.max_steps=3 optim.schedule=constant", dir=tmp_path) == 0
    assert train("train.max_steps=6 optim.schedule=constant", dir=tmp_path) == 0
    assert len(list_runs(tmp_path)) == 1
    monkeypatch.setenv(JOB_ID, "second")
    assert train("train.max_steps=6 optim.schedule=constant", dir=tmp_path) == 0
    assert len(list_runs(tmp_path)) == 2


@pytest.mark.slow
@CAMPAIGN
def test_killed_launcher_of_one_node_is_survived_by_the_other(train, tmp_path, port):
    """The other node continues within a minute, with the losses and the samples of an undisturbed training."""
    steps = "train.max_steps=60"
    assert train(*WORDS, steps, dir=tmp_path / "straight") == 0
    nodes = []
    for rank in ("0", "1"):
        place = [
            "--nnodes",
            "1:2",
            "--node-rank",
            rank,
            "--master-addr",
            "127.0.0.1",
            "--master-port",
            str(port),
        ]
        words = [*WORDS, steps, "tiny.step_seconds=0.1", f"output_dir={tmp_path / 'elastic'}"]
        nodes.append(
            spawn("-m", "mvp_engine.cli", "train", str(TINY), *place, *words, fresh_workers=True)
        )
    metrics = tmp_path / "elastic"
    wait_until(lambda: len(_lines(metrics)) > 12, 120)
    assert read_json(list_runs(metrics)[0].dir / "run.json")["setup"]["ranks"] == 2
    os.kill(nodes[1].pid, signal.SIGKILL)
    killed = time.monotonic()
    wait_until(
        lambda: "restarted by torchrun" in (list_runs(metrics)[0].dir / "log.txt").read_text(), 60
    )
    continued = time.monotonic() - killed
    print(f"continued after {continued:.1f} s")
    output = nodes[0].communicate(timeout=200)[0]
    assert nodes[0].returncode == 0, output
    nodes[1].communicate(timeout=120)
    assert len(list_runs(metrics)) == 1
    expected, found = read_metrics(tmp_path / "straight"), read_metrics(metrics)
    assert [record["step"] for record in found] == list(range(1, 61))
    assert [record["loss"] for record in found] == pytest.approx(
        [record["loss"] for record in expected], rel=1e-5
    )
    # Samples have different weights, which the log counts as tokens: equal counts are equal samples.
    assert [record["totals"] for record in found] == [record["totals"] for record in expected]
    assert read_json(list_runs(metrics)[0].dir / "run.json")["setup"]["ranks"] == 1


def _lines(folder):
    return [
        line for file in folder.glob("*/metrics.jsonl") for line in file.read_text().splitlines()
    ]

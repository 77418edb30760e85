"""Metric stores, log backends, the hub and the terminal."""

from __future__ import annotations

import io
import json
import logging
import math
import sys
import threading
import time
import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, read_metrics
from rich.console import Console

from mvp_engine.distributed import World
from mvp_engine.errors import EXIT_USER_ERROR
from mvp_engine.log import EarlyMessages, LogHub, MetricStore, format
from mvp_engine.log.backends import Backend, RunInfo, Terminal, TerminalBackend, sparkline
from mvp_engine.runs import Run, list_runs

ALONE = World(0, 1, 0, 1, torch.device("cpu"))
RECORD = {
    "step": 20,
    "epoch": 1,
    "split": "train",
    "loss": 0.51234,
    "grad_norm": 1.5,
    "lr": 1e-3,
    "skipped": 0,
}
PERF = {
    "step_s": 0.1,
    "tokens_per_s": 51234.0,
    "data_wait": 0.013,
    "memory_gib": 1.25,
    "eta_s": 3725.0,
}


def test_metric_store_weights_means_and_sums_totals():
    store = MetricStore(ALONE)
    for value, weight in ((2.0, 1), (torch.tensor(9.0), 3)):
        store.add("loss", value, weight)
    store.add("nothing", 0.0, 0.0)
    store.count("tokens", 5)
    store.count("tokens", torch.tensor(7))
    assert store.reduce() == ({"loss": 11 / 4, "nothing": None}, {"tokens": 12.0})
    assert store.empty


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), torch.tensor(float("nan"))])
def test_metric_store_skips_nonfinite_values(bad):
    store = MetricStore(ALONE)
    for value in (1.0, bad, torch.tensor(3.0)):
        store.add("loss", value)
    assert store.reduce()[0] == {"loss": 2.0}


def test_metric_store_state_dict_restores_host_and_device_sums():
    store, again = MetricStore(ALONE), MetricStore(ALONE)
    for part in (store, again):
        part.add("a", 0.1)
        part.add("b", torch.tensor(0.1, dtype=torch.float64), 3)
    again = MetricStore(ALONE)
    again.load_state_dict(store.state_dict())
    for part in (store, again):
        part.add("a", 0.7)
        part.add("b", torch.tensor(0.7, dtype=torch.float64))
    assert store.reduce() == again.reduce()


def test_metric_store_reduce_with_different_names_per_rank(ranks2):
    results = ranks2.run(_uneven_metrics)
    assert results[0] == results[1] == ({"both": 1.5, "only0": 0.0, "only1": 1.0}, {"n": 4.0})


def _uneven_metrics():
    world = World.join("cpu")
    store = MetricStore(world)
    store.add("both", torch.tensor(1.0 + world.rank))
    store.add(f"only{world.rank}", float(world.rank))
    if world.rank == 1:
        store.count("n", 4)
    means, totals = store.reduce()
    world.close()
    return dict(sorted(means.items())), totals


def test_log_line_contains_the_main_metrics():
    line = format.line({**RECORD, "fill": 0.975, "perf": PERF}, 100)
    for part in (
        "step 20/100",
        "loss 0.5123",
        "grad 1.5",
        "lr 1.00e-03",
        "tokens/s 51.2k",
        "fill 97.5%",
        "data 1.3%",
        "mem 1.25 GiB",
    ):
        assert part in line
    assert "eta 1:02:05" in line
    assert "skipped" not in line
    assert "skipped 2" in format.line({**RECORD, "skipped": 2, "perf": PERF}, None)


@pytest.mark.parametrize(
    "seconds, text", [(0, "0:00"), (59.6, "1:00"), (3600, "1:00:00"), (90000, "1d 1:00:00")]
)
def test_duration_is_formatted_as_clock(seconds, text):
    assert format.duration(seconds) == text


def test_terminal_panel_on_a_tty_and_plain_lines_otherwise():
    plain = io.StringIO()
    terminal = Terminal("run", 100, live=True, console=Console(file=plain, width=100))
    terminal.show({**RECORD, "perf": PERF})
    terminal.close()
    assert plain.getvalue().startswith("train step 20/100")
    assert "\x1b" not in plain.getvalue()
    tty = io.StringIO()
    terminal = Terminal(
        "run-7", 100, live=True, console=Console(file=tty, width=100, force_terminal=True)
    )
    terminal.show({**RECORD, "perf": PERF})
    panel = terminal._panel()
    terminal.close()
    Console(file=(drawn := io.StringIO()), width=100).print(panel)
    for part in ("run-7", "step 20/100", "1:02:05 left", "loss ▁", "tokens/s", "━"):
        assert part in drawn.getvalue(), drawn.getvalue()


def test_terminal_bar_moves_with_every_step_and_the_panel_leaves_room_for_an_echo(
    monkeypatch,
):
    """A `^C` that the terminal echoes after a line of full width would wrap, and the panel stay on the screen."""
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    backend = TerminalBackend()
    monkeypatch.setattr("mvp_engine.log.backends.Terminal", partial(Terminal, console=console))
    backend.start(RunInfo(Run(Path("run-7")), "tests", "train", {}, start_step=5, total_steps=100))
    shown = []
    for step, doing in ((5, ""), (6, ""), (7, "evaluating")):
        backend.progress(step, doing)
        Console(file=(out := io.StringIO()), width=80).print(backend.terminal._panel())
        shown.append(out.getvalue())
        assert max(map(len, out.getvalue().splitlines())) <= 76
    backend.close(None)
    assert ["step 5/100" in shown[0], "step 6/100" in shown[1], "evaluating" in shown[2]] == [
        True
    ] * 3


@pytest.mark.parametrize("interval, says", [(10, True), (1, False)])
def test_terminal_without_a_tty_shows_the_eta_after_the_second_step(interval, says, monkeypatch):
    console = Console(file=(out := io.StringIO()), width=80)
    monkeypatch.setattr("mvp_engine.log.backends.Terminal", partial(Terminal, console=console))
    clock = iter([0.0, 10.0, 70.0, 80.0])
    monkeypatch.setattr("mvp_engine.log.backends.time.monotonic", lambda: next(clock))
    backend = TerminalBackend()
    backend.start(
        RunInfo(
            Run(Path("run-7")), "tests", "train", {"log": {"interval": interval}}, total_steps=62
        )
    )
    for step in (1, 2, 3):
        backend.progress(step, "")
    backend.close(None)
    assert (out.getvalue() == "step 2/62: about 1:00:00 left\n") == says
    assert says or not out.getvalue()


def test_sparkline_of_a_falling_loss_falls():
    assert sparkline([math.exp(-i / 10) for i in range(80)], 8) == "█▇▆▅▄▃▂▁"
    assert sparkline([], 8) == ""
    assert sparkline([1.0], 8) == "▁"


def test_backends_write_all_files_of_a_run(train, tmp_path, capsys):
    assert (
        train("log.backends=[terminal,file,jsonl,tensorboard,plot] eval.steps=6", dir=tmp_path) == 0
    )
    [run] = list_runs(tmp_path)
    assert (run.dir / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((run.dir / "tensorboard").iterdir())
    assert "<svg " in (run.dir / "report.html").read_text()
    assert f"{run.id}: finished at step 12 of 12" in capsys.readouterr().out
    log = (run.dir / "log.txt").read_text()
    assert "INFO train step 12/12" in log
    assert "INFO  eval step 12/12" in log
    first, second = list(run.records("train"))[:2]
    assert {
        "step",
        "epoch",
        "split",
        "loss",
        "grad_norm",
        "lr",
        "skipped",
        "totals",
        "perf",
    } <= set(first)
    assert {"step_s", "samples_per_s", "tokens_per_s", "data_wait", "memory_gib", "eta_s"} == set(
        second["perf"]
    )
    assert first["step"] == 1
    # The first step warms up: it predicts nothing.
    assert set(second["perf"]) - set(first["perf"]) == {"eta_s"}


def test_tensorboard_after_resume_has_each_step_once(train, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words = ["log.backends=[tensorboard,jsonl]", "log.interval=1"]
    assert train(*words, "tiny.fault=sigterm", "tiny.fault_step=5", dir=tmp_path) == 75
    time.sleep(1)  # event files are read in the order of their names, which have whole seconds
    assert train(*words, "resume=auto", dir=tmp_path) == 0
    events = EventAccumulator(str(list_runs(tmp_path)[0].dir / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("train/loss")] == list(range(1, 13))


def test_log_file_after_resume_is_appended(train, tmp_path):
    assert train("train.max_steps=4", dir=tmp_path) == 0
    before = (list_runs(tmp_path)[0].dir / "log.txt").read_text()
    assert train("resume=auto train.max_steps=6", dir=tmp_path) == 0
    after = (list_runs(tmp_path)[0].dir / "log.txt").read_text()
    assert after.startswith(before)
    assert "resume=auto: continuing" in after[len(before) :]


def test_rewind_metrics_moves_later_records_and_a_partial_line(tmp_path):
    run = Run(tmp_path)
    lines = [json.dumps({"step": n, "split": "train"}) + "\n" for n in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + '{"step": 4, "spl')
    assert len(list(run.records())) == 3
    run.rewind_metrics(2)
    assert [r["step"] for r in run.records()] == [1, 2]
    assert (tmp_path / "metrics.dropped.jsonl").read_text() == lines[2] + '{"step": 4, "spl\n'


class Recorder(Backend):
    seen: list[Any] = []  # noqa: RUF012

    def metrics(self, record):
        self.seen.append(record["step"])

    def close(self, failure):
        self.seen.append(failure)


def test_custom_backend_by_module_and_class_gets_records(train, tmp_path):
    sys.modules.setdefault("test_log", sys.modules[__name__])
    Recorder.seen.clear()
    assert train("log.backends=['test_log:Recorder']", dir=tmp_path) == 0
    assert sys.modules["test_log"].Recorder.seen == [1, 2, 4, 6, 8, 10, 12, None]


BOARD = """
import sqlite3
from mvp_engine.log.backends import Backend

class Board(Backend):
    def __init__(self, file, fails="never"):
        self.file, self.fails = file, fails

    def start(self, info):
        super().start(info)
        self.note("start")

    def metrics(self, record):
        self.note("metrics")

    def close(self, failure):
        self.note("close")

    def note(self, method):
        with open(self.file, "a") as file:
            file.write(method + " ")
        if method == self.fails:
            raise sqlite3.OperationalError("database is locked")

class Mute(Backend):
    pass
"""


@pytest.fixture
def board(tmp_path):
    """A config whose recipe folder has a log backend of its own."""
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "board.py").write_text(BOARD)
    (tmp_path / "recipe" / "engine.py").write_text((TINY.parent / "engine.py").read_text())
    config = tmp_path / "recipe" / "train.yaml"
    config.write_text((TINY.parent / "base.yaml").read_text())
    return config


@pytest.mark.parametrize(
    "fails, calls",
    [
        ("never", "start " + "metrics " * 4 + "close "),
        ("start", "start "),
        ("metrics", "start metrics close "),
    ],
)
def test_backend_of_the_recipe_folder_that_raises_is_disabled_with_a_warning(
    train, board, tmp_path, fails, calls
):
    file = tmp_path / "calls"
    entry = f"{{name:'board.py:Board',file:{file},fails:{fails}}}"
    assert (
        train(f"log.backends=[file,{entry}] train.max_steps=4", config=board, dir=tmp_path / "out")
        == 0
    )
    assert file.read_text() == calls
    text = (list_runs(tmp_path / "out")[0].dir / "log.txt").read_text()
    warning = (
        f"WARNING the log backend Board is disabled, since its {fails} failed. Training continues."
    )
    assert (
        (warning in text) == ("OperationalError: database is locked" in text) == (fails != "never")
    )


@pytest.mark.parametrize(
    "entry, expected",
    [
        ("'board.py:Mute'", "'board.py:Mute' must define metrics(self, record)"),
        ("'board.py:Board'", "missing a required argument: 'file'"),
        (
            "{name:'board.py:Board',file:a,colour:red}",
            "got an unexpected keyword argument 'colour'",
        ),
        (
            "{name:jsonl,file:a}",
            "settings of 'jsonl', which JsonlBackend() takes: got an unexpected keyword",
        ),
        ("{file:a}", "has no name: write {name: wandb, ...}"),
        ("'board.py:Bord'", "'board.py:Bord' is not a subclass of"),
        ("wandb", "names 'wandb', but wandb is not installed: pip install wandb, or leave it out"),
    ],
)
def test_wrong_backend_is_refused_before_the_run_folder_exists(
    train, board, tmp_path, capsys, entry, expected
):
    assert train(f"log.backends=[{entry}]", config=board, dir=tmp_path / "out") == EXIT_USER_ERROR
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["wandb", "trackio", "swanlab"])
def test_tracker_backends_log_every_record(train, tmp_path, monkeypatch, name):
    calls: list[Any] = []
    run = types.SimpleNamespace(
        log=lambda values, step: calls.append((step, values)),
        finish=lambda *_, **k: calls.append("finish"),
    )
    fake = types.SimpleNamespace(__spec__="fake", init=lambda **k: calls.append(k) or run)
    monkeypatch.setitem(sys.modules, name, fake)
    assert train(f"log.backends=[{{name:{name},entity:team}}] train.max_steps=4", dir=tmp_path) == 0
    assert calls[0]["project"] == "tiny"
    assert calls[0]["entity"] == "team"
    assert [c[0] for c in calls[1:-1]] == [1, 2, 4]
    assert {"train/loss", "train/lr", "perf/tokens_per_s"} <= set(calls[1][1])
    assert calls[-1] == "finish"


class FakeTracker(types.SimpleNamespace):
    """trackio, of which one function fails or hangs; `calls` are those that it got."""

    def __init__(self, wrong, how):
        super().__init__(__spec__="fake", calls=[], released=threading.Event())
        for name in ("init", "log", "finish"):
            setattr(self, name, partial(self._call, name, how if name == wrong else "works"))

    def _call(self, name, how, /, *_, step=None, **options):
        if how == "hangs":
            assert self.released.wait(60)
        if how == "raises":
            raise RuntimeError("the tracker is broken")
        if how == "is away":
            raise ConnectionError("no route to the tracker")
        if how == "exits":
            sys.exit("no key")
        self.calls.append(name if step is None else (name, step))
        return self


ALL_CALLS = ["init", ("log", 1), ("log", 2), ("log", 4), "finish"]
START_STOPS = "trackio has not started after 0.2 s. Training continues"
END_STOPS = "trackio has not ended after 0.2 s, and misses records"
DISABLED = "the log backend TrackioBackend is disabled, since its {} failed. Training continues"


@pytest.mark.parametrize(
    "wrong, how, calls, said",
    [
        ("init", "raises", [], DISABLED.format("start")),
        ("init", "is away", [], DISABLED.format("start")),
        ("init", "exits", [], DISABLED.format("start")),
        ("init", "hangs", [], START_STOPS),
        ("log", "raises", ["init", "finish"], "the tracker is broken"),
        ("log", "is away", ["init", "finish"], "cannot write: no route to the tracker. Training"),
        ("log", "hangs", ["init"], END_STOPS),
        ("finish", "raises", ALL_CALLS[:-1], DISABLED.format("close")),
        ("finish", "hangs", ALL_CALLS[:-1], END_STOPS),
    ],
)
def test_tracker_that_fails_or_hangs_stops_no_training(
    train, tmp_path, monkeypatch, capsys, wrong, how, calls, said
):
    fake = FakeTracker(wrong, how)
    monkeypatch.setitem(sys.modules, "trackio", fake)
    if how == "hangs":
        monkeypatch.setattr("mvp_engine.log.trackers.TRACKER_SECONDS", 0.2)
    assert train("log.backends=[file,jsonl,trackio] train.max_steps=4", dir=tmp_path) == 0
    [run] = list_runs(tmp_path)
    assert run.info["status"] == "finished"
    assert [record["step"] for record in run.records("train")] == [1, 2, 4]
    assert fake.calls == calls
    log = (run.dir / "log.txt").read_text()
    if said != END_STOPS and wrong != "finish":  # what is said after the file is closed is printed
        assert said in log
    else:
        assert said in " ".join(capsys.readouterr().err.split())
    fake.released.set()
    ended = [one for one in threading.enumerate() if one.name == "mvp-trackio"]
    for thread in ended:
        thread.join(10)
        assert not thread.is_alive()
    if how == "hangs":  # nothing was lost: it got all of them late
        assert fake.calls == ALL_CALLS


class MlflowServer:
    """MLflow's client with runs in memory, which is away for the calls whose numbers are `away`."""

    def __init__(self):
        self.runs, self.batches, self.away, self.sent = [], [], set(), 0

    def install(self, monkeypatch):
        plain = types.SimpleNamespace
        error = type("MlflowException", (Exception,), {})
        entities = plain(Metric=lambda *of: of, Param=lambda *of: of)
        fake = plain(__spec__="fake", entities=entities, MlflowClient=lambda uri: self)
        monkeypatch.setitem(sys.modules, "mlflow", fake)
        monkeypatch.setitem(sys.modules, "mlflow.exceptions", plain(MlflowException=error))
        self.error = error

    def get_experiment_by_name(self, name):
        return types.SimpleNamespace(experiment_id=name)

    def search_runs(self, experiments, text, max_results):
        return [run for run in self.runs if run.tags["mvp_engine.run"] in text]

    def create_run(self, experiment, run_name, tags):
        run = types.SimpleNamespace(
            info=types.SimpleNamespace(run_id=run_name), tags=tags, status="RUNNING"
        )
        self.runs.append(run)
        return run

    def update_run(self, run_id, status):
        self.runs[0].status = status

    def log_dict(self, run_id, config, file):
        self.config = config

    def log_batch(self, run_id, metrics=(), params=()):
        self.sent += bool(metrics)
        if metrics and self.sent in self.away:
            raise self.error("503")
        self.batches.append((list(metrics), list(params)))

    def set_terminated(self, run_id, status):
        self.runs[0].status = status

    def steps(self):
        return [
            metric[3] for batch, _ in self.batches for metric in batch if metric[0] == "train/loss"
        ]


def test_mlflow_gets_config_git_and_each_record_once_also_after_an_outage(
    train, tmp_path, monkeypatch
):
    server = MlflowServer()
    server.away = {1, 2}
    server.install(monkeypatch)
    words = ["log.backends=[file,{name:mlflow,team:vision}]", "train.max_steps=4", "run_id=one"]
    assert train(*words, dir=tmp_path) == 0
    assert server.steps() == [1, 2, 4]
    params = dict(pair for _, batch in server.batches for pair in batch)
    assert params["train.max_steps"] == "4"
    [run] = server.runs
    assert run.tags.items() >= {"mvp_engine.run": "one", "team": "vision"}.items()
    assert run.tags.get("mlflow.source.git.commit") == list_runs(tmp_path)[0].info["git"]
    assert run.status == "FINISHED"
    log = (list_runs(tmp_path)[0].dir / "log.txt").read_text()
    assert log.count("MlflowBackend cannot write: 503. Training continues.") == 1

    assert train(*words, "train.max_steps=6", "resume=auto", dir=tmp_path) == 0
    assert server.steps() == [1, 2, 4, 6]
    assert len(server.runs) == 1
    assert server.config["train"]["max_steps"] == 6


def test_only_rank_0_writes_files(ranks2, tmp_path):
    words = [f"output_dir={tmp_path}", "log.backends=[file,jsonl]", "data.micro_batch_size=4"]
    assert ranks2.launch(TINY, *words) == [0, 0]
    assert len(list_runs(tmp_path)) == 1
    assert len(read_metrics(tmp_path)) == 7


def test_early_messages_are_printed_at_once_and_written_to_the_log_file(tmp_path, capsys):
    logger, names = logging.getLogger("mvp_engine"), ["terminal", "file"]
    with EarlyMessages(names):
        logger.info("early")
        assert capsys.readouterr().out == "INFO early\n"
        with LogHub(RunInfo(Run(tmp_path), "tests", "train", {}), names):
            logger.info("later")
            assert capsys.readouterr().out == "INFO later\n"
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == ["INFO early", "INFO later"]
    with EarlyMessages(["jsonl"]):
        logger.info("not shown")
        logger.warning("careful")
    assert capsys.readouterr() == ("", "WARNING careful\n")
    assert not logger.handlers

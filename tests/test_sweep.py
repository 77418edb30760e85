"""`mvp sweep`: which runs it starts, what it makes of their ends, and how it continues."""

import json
import math
import os
import signal
import subprocess
import time
from typing import ClassVar

import pytest
from conftest import TINY, mvp, spawn, user_error

from mvp_engine.runs import Run, list_runs
from mvp_engine.tools import sweep as module
from mvp_engine.tools.sweep import read_sweep


class FakeRun:
    """A training whose loss after `steps` evaluations is the distance of its learning rate from 0.01 in decades."""

    started: ClassVar = []
    fails = ()

    def __init__(self, sweep, trial):
        self.run = sweep.run(trial)
        self.lr = float(trial.values["optim.lr"])
        self.code, self.step = None, 0
        self.run.dir.mkdir(exist_ok=True)
        sweep.output(trial).write_text("")
        (self.run.dir / "run.json").write_text(
            json.dumps({"name": "tiny", "created": time.time(), "status": "?"})
        )
        (self.run.dir / "metrics.jsonl").write_text("")
        self.started.append(self.lr)

    def poll(self):
        if self.code is None and self.lr in self.fails:
            self.run.note(error="Boom: it broke\n")
            self.code = 1
        elif self.code is None:
            self.step += 2
            loss = abs(math.log10(self.lr) + 2) + 1 / self.step
            with (self.run.dir / "metrics.jsonl").open("a") as out:
                out.write(json.dumps({"split": "eval", "step": self.step, "loss": loss}) + "\n")
            if self.step == 8:
                self.code = 0
            return None
        return self.code

    def send_signal(self, number):
        self.code = 75


@pytest.fixture
def fake_runs(tmp_path, monkeypatch):
    """sweep(words) -> exit code, with trainings that take no time; `FakeRun.started` are their learning rates."""
    monkeypatch.setattr(FakeRun, "started", [])
    monkeypatch.setattr(module, "POLL_SECONDS", 0)
    monkeypatch.setattr(module, "start", lambda sweep, trial, *_: FakeRun(sweep, trial))
    return lambda words: mvp(f"sweep {TINY} eval.steps=2 output_dir={tmp_path} {words}")


def trials(tmp_path):
    (file,) = tmp_path.glob("*/sweep.json")
    return {trial["values"]["optim.lr"]: trial for trial in json.loads(file.read_text())["trials"]}


def test_grid_runs_all_combinations_and_names_the_best(tmp_path, fake_runs, capsys):
    assert fake_runs("optim.lr=0.1,0.01 optim.warmup=range(0,2) --jobs 3") == 0
    assert sorted(FakeRun.started) == [0.01, 0.01, 0.1, 0.1]
    text = capsys.readouterr().out
    assert "best: optim.lr=0.01 optim.warmup=0" in text
    lines = [line.split() for line in text.partition("state")[2].splitlines() if "finished" in line]
    assert [float(line[3]) for line in lines] == [0.125, 0.125, 1.125, 1.125]
    (plot,) = tmp_path.glob("*/sweep.png")
    assert plot.stat().st_size > 5000


def test_failed_run_does_not_end_the_sweep_and_is_repeated_alone(
    tmp_path, fake_runs, monkeypatch, capsys
):
    monkeypatch.setattr(FakeRun, "fails", (0.01,))
    assert fake_runs("optim.lr=0.1,0.01,0.001") == 0
    assert trials(tmp_path)["0.01"]["state"] == "failed"
    assert "exit code 1: Boom: it broke" in capsys.readouterr().out
    monkeypatch.setattr(FakeRun, "fails", ())
    FakeRun.started.clear()
    assert fake_runs("optim.lr=0.1,0.01,0.001") == 0
    assert FakeRun.started == [0.01]
    assert {trial["state"] for trial in trials(tmp_path).values()} == {"finished"}


def test_sweep_without_a_finished_run_exits_with_2(fake_runs, monkeypatch):
    monkeypatch.setattr(FakeRun, "fails", (0.1, 0.01))
    assert fake_runs("optim.lr=0.1,0.01") == 2


def test_prune_ends_runs_below_the_median_and_only_with_the_option(tmp_path, fake_runs):
    values = "0.01,0.02,0.03,1.0"
    assert fake_runs(f"optim.lr={values}") == 0
    assert [trial["state"] for trial in trials(tmp_path).values()] == ["finished"] * 4
    (tmp_path / "again").mkdir()
    assert fake_runs(f"optim.lr={values} --prune output_dir={tmp_path}/again") == 0
    states = [trial["state"] for trial in trials(tmp_path / "again").values()]
    assert states == ["finished"] * 3 + ["pruned"]


def test_optuna_searches_an_interval_and_continues_its_study(tmp_path, fake_runs, capsys):
    words = "optim.lr=tag(log,interval(1e-5,1)) --optuna"
    assert fake_runs(f"{words} 5 --json") == 0
    first = json.loads(capsys.readouterr().out)["trials"]
    assert len({trial["values"]["optim.lr"] for trial in first}) == 5
    assert all(1e-5 <= float(trial["values"]["optim.lr"]) <= 1 for trial in first)
    assert [trial["value"] for trial in first] == sorted(trial["value"] for trial in first)
    FakeRun.started.clear()
    assert fake_runs(f"{words} 30 --prune --jobs 2") == 0
    assert len(FakeRun.started) == 25
    found = trials(tmp_path).values()
    assert len(found) == 30
    assert "pruned" in {trial["state"] for trial in found}
    assert (
        min(trial["value"] for trial in found) < 0.5
    )  # 5 random ones of 5 decades would be about 0.6


def test_interrupted_sweep_is_continued_by_the_same_command(tmp_path, fake_runs, monkeypatch):
    """A signal stops the runs, which save; so does the end of the sweep's own process."""
    polls = []
    original = FakeRun.poll

    def poll(self):
        polls.append(self.lr)
        if len(polls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)
        return original(self)

    monkeypatch.setattr(FakeRun, "poll", poll)
    assert fake_runs("optim.lr=0.1,0.01") == 75
    assert [trial["state"] for trial in trials(tmp_path).values()] == ["waiting", "waiting"]
    assert fake_runs("optim.lr=0.1,0.01") == 0
    assert FakeRun.started == [0.1, 0.1, 0.01]


@pytest.mark.parametrize(
    "words, message",
    [
        ("optim.lr=0.1", "no key has several values"),
        ("optim.lr=1,2 run_id=x", "a sweep sets run_id"),
        ("optim.lr=1,2 eval.steps=null", "eval.steps is null"),
        ("optim.lr=1,2 checkpoint.best_metric=null", "checkpoint.best_metric is null"),
        ("optim.lrr=1,2", "Did you mean 'optim.lr'"),
        ("optim.lr=1,two", "two"),
        ("optim.lr=interval(0,1)", "give --optuna N"),
        ("optim.lr=1,2 --jobs 0", "at least 1"),
    ],
)
def test_words_that_no_run_could_use_are_user_errors(fake_runs, capsys, words, message):
    assert fake_runs(words) == 2
    assert message in capsys.readouterr().err
    assert FakeRun.started == []


def test_name_follows_from_the_words_in_any_order(tmp_path):
    def name(*words):
        return read_sweep(str(TINY), ["eval.steps=2", *words]).folder.name

    assert name("seed=1,2", "optim.lr=1") == name("optim.lr=1", "seed=1,2")
    assert name("seed=1,2") != name("seed=1,3")
    with user_error("several values"):
        name()


@pytest.mark.slow
def test_runs_are_ordinary_runs_and_one_that_was_stopped_resumes(tmp_path, monkeypatch, train):
    """The run with the fault gets SIGTERM at step 3, saves, and is resumed by the sweep."""
    assert train("eval.steps=4 tiny.fault=stop tiny.fault_step=99", dir=tmp_path / "alone") == 0
    started = []

    def popen(words, env, **_):
        started.append(words)
        return spawn(*words[1:], env=env)

    monkeypatch.setattr(subprocess, "Popen", popen)
    words = f"sweep {TINY} eval.steps=4 tiny.fault=sigterm,raise_everywhere output_dir={tmp_path}/sweep --jobs 2"
    assert mvp(words) == 0
    assert len(started) == 3
    finished, failed = list_runs(tmp_path / "sweep")
    assert (finished.status(), failed.status()) == ("finished", "failed")
    (alone,) = list_runs(tmp_path / "alone")
    losses = [[record["loss"] for record in run.records("eval")] for run in (finished, alone)]
    assert losses[0] == losses[1]
    assert isinstance(finished, Run)

"""The slowest steps of a run: which hook, row or rank took the time. Most tests have a clock of their own."""

import json
import time

import pytest
import torch
from conftest import TINY, mvp
from run_files import printed_json

from mvp_engine.data import SampleLoader
from mvp_engine.data.loader import KeepLastBatches
from mvp_engine.distributed import World
from mvp_engine.engine.monitor import Meter, StepTimes, _slow_rank
from mvp_engine.kit.data.pack.packs import WorkerWatchdog
from mvp_engine.report.facts import RunFacts
from mvp_engine.runs import list_runs

ALONE = World(0, 1, 0, 1, torch.device("cpu"))


class Clock:
    """A clock that moves by a millisecond when it is read, and by what is slept."""

    now = 0.0

    def __call__(self):
        self.now += 0.001
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    own = Clock()
    monkeypatch.setattr(time, "perf_counter", own)
    monkeypatch.setattr(time, "sleep", own.sleep)
    return own


def slow_records(folder):
    """The slow steps of the newest run."""
    return {one["step"]: one for one in RunFacts(list_runs(folder)[-1]).slow_steps}


@pytest.mark.slow
def test_slow_hook_and_slow_row_are_named_and_evaluations_are_not_slow(
    train, clock, tmp_path, capsys
):
    words = "tiny.fault=slow_hook tiny.fault_step=12 tiny.slow_row=17 tiny.slow_seconds=3 tiny.samples=200".split()
    words += "eval.steps=4 tiny.load_seconds=0.01 checkpoint.interval=10 data.num_workers=0".split()
    words += ["log.backends=[terminal,file,jsonl,plot]"]
    assert train(*words, "train.max_steps=25") == 0
    found = slow_records(tmp_path)
    hook = found.pop(12)
    assert (hook["phase"], hook["rank"]) == ("train_post_step", 0)
    assert hook["split"]["train_post_step"] > 0.8 * hook["seconds"]
    assert hook["usual_split"]["train_post_step"] < 0.1 * hook["usual_seconds"]
    [(step, row)] = found.items()
    assert (row["phase"], row["row"], row["worker"]) == ("data", 17, None)
    assert row["split"]["data"] > 0.8 * row["seconds"]
    assert row["row_seconds"] > 0.9 * row["batch_seconds"]

    text = capsys.readouterr().out
    run = list_runs(tmp_path)[-1]
    assert " in train_post_step\n" in text.partition("slow steps")[2]
    assert "in the wait for data: row 17 took 3" in text
    assert f"mvp profile {run.dir} --step" in text
    assert (run.dir / "report.html").read_text().count("in the wait for data: row 17") == 1
    assert mvp(f"runs {run.id} --dir {tmp_path}") == 0
    assert "in the wait for data: row 17" in capsys.readouterr().out
    assert mvp(f"runs {run.id} --dir {tmp_path} --json") == 0
    assert {one["step"] for one in printed_json(capsys)["slow_steps"]} == {12, step}

    # A resumed run keeps them.
    assert train(*words, "train.max_steps=30", "resume=auto") == 0
    assert slow_records(tmp_path).keys() == {12, step}


def test_run_of_equal_steps_prints_no_slow_steps(train, clock, tmp_path, capsys):
    assert train("tiny.load_seconds=0.01 train.max_steps=20 data.num_workers=0") == 0
    assert "slow steps" not in capsys.readouterr().out
    assert not slow_records(tmp_path)
    assert len(RunFacts(list_runs(tmp_path)[-1]).slowest) <= 10


def test_records_after_the_checkpoint_are_removed_at_a_resume(tmp_path):
    lines = [
        json.dumps({"step": step, "seconds": 9.0, "usual_seconds": 1.0}) for step in (30, 20, 10)
    ]
    (tmp_path / "slow_steps.jsonl").write_text("\n".join(lines) + "\n")
    meter = Meter(ALONE, tmp_path, 20)
    assert [one["step"] for one in meter.slowest] == [20, 10]
    assert (tmp_path / "slow_steps.jsonl").read_text() == "\n".join(lines[1:]) + "\n"


def test_slow_steps_are_bounded_and_hold_the_slowest(clock, tmp_path):
    meter = Meter(ALONE, tmp_path, 0)
    for step in range(1, 1001):
        meter.begin(step)
        clock.sleep(1.0 + step if step % 25 == 0 or step == 2 else 1.0)  # step 2 warms up
        assert len(meter._ended) <= 50
    meter.begin(1001)  # for which there is no data
    clock.sleep(10_000.0)
    meter.end(1000)
    assert [one["step"] for one in meter.slowest] == list(range(1000, 750, -25))
    assert len((tmp_path / "slow_steps.jsonl").read_text().splitlines()) == 10


@pytest.mark.slow
def test_slow_rank_is_named_and_not_the_one_that_waits(ranks2, tmp_path):
    words = "tiny.fault=slow_hook tiny.fault_rank=1 tiny.fault_step=12 tiny.slow_seconds=1".split()
    assert ranks2.launch(TINY, f"output_dir={tmp_path}", *words, "train.max_steps=20") == [0, 0]
    record = slow_records(tmp_path)[12]
    assert (record["rank"], record["phase"]) == (1, "train_post_step")


def test_slow_rank_of_a_step_is_the_one_with_the_earliest_slow_phase():
    def record(phase, lost=5.0):
        return {"phase": phase, "seconds": 1.0 + lost, "usual_seconds": 1.0}

    late_data = _slow_rank([record("optimizer"), record("data", 4.9), record("backward", 5.1)])
    assert late_data is not None
    assert (late_data["rank"], late_data["phase"]) == (1, "data")
    # Rank 1 waits for rank 0, which wrote a log between two steps.
    assert _slow_rank([record("forward", 0.1), record("backward")]) is None
    own = _slow_rank([record("logging"), record("forward", 0.1)])
    assert own is not None
    assert own["phase"] == "logging"


class Event:
    """A CUDA event at a time of the GPU in milliseconds."""

    def __init__(self, at, is_past=True):
        self.at, self.is_past = at, is_past

    def query(self):
        return self.is_past

    def elapsed_time(self, later):
        return later.at - self.at


def test_split_of_a_step_on_a_gpu_is_that_of_its_events_once_it_has_passed_them():
    last = Event(900.0, is_past=False)
    marks = [
        ("data", 0.0, Event(0.0)),
        ("forward", 9.0, Event(100.0)),
        ("backward", 9.1, Event(300.0)),
    ]
    times = StepTimes(5, [*marks, ("forward", 9.2, Event(600.0)), ("", 9.3, last)])
    assert not times.read()
    last.is_past = True
    assert times.read()
    assert times.split == pytest.approx({"data": 0.1, "forward": 0.5, "backward": 0.3})


class Rows(torch.utils.data.Dataset[int]):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        time.sleep(5.0 if index in (2, 7) else 0.1)
        return index


def test_loader_with_workers_names_the_slow_row_and_its_worker(clock):
    loader = SampleLoader(Rows(), micro_batch_size=4, shuffle=False, num_workers=2)
    found = [loader.slow_row for _ in loader]
    assert [(one.row, one.worker) for one in found if one] == [(2, 0), (7, 1)]
    assert all(one.row_seconds > 0.9 * one.batch_seconds for one in found if one)


def test_rows_of_packs_are_named_by_their_place(clock):
    watchdog = WorkerWatchdog()
    for row in range(3):
        watchdog.set_position(f"chats.jsonl:{row}")
        clock.sleep(1.0 + row % 2)
    assert KeepLastBatches(sum)([1, 2]).slow_row.row == "chats.jsonl:1"

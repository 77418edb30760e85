"""HangWatch: a step that does not end is reported with the rank that it waits for, and the stacks of all."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import CAMPAIGN, TINY, spawn, wait_until
from kill_resume import child_pids

from mvp_engine.distributed import World, world
from mvp_engine.distributed.world import HangWatch, describe
from mvp_engine.worker.launchers import Place, WorkerHost

ALONE = World(0, 1, 0, 1, torch.device("cpu"))


@pytest.fixture
def reports():
    found = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    logger = logging.getLogger("mvp_engine")
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


class Clock:
    """The seconds of HangWatch, which pass when a test says so: a busy machine makes no step slow."""

    def __init__(self):
        self.now = 0.0
        self.looks = 0  # of the watching thread, and one for each beat

    def monotonic(self):
        self.looks += 1
        return self.now

    def let_watch(self):
        """Wait until the watching thread has looked at the step: once, and after that."""
        before = self.looks
        wait_until(lambda: self.looks >= before + 2)


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(
        world, "time", SimpleNamespace(monotonic=made.monotonic, time=lambda: made.now)
    )
    return made


def test_hang_watch_reports_a_slow_step_once_and_a_quick_one_never(reports, clock):
    with HangWatch(0.2, ALONE) as watch:
        for step in range(1, 6):
            watch.beat(step)
            clock.now += 0.1
            clock.let_watch()
        assert not reports
        watch.beat(12)
        clock.now += 0.3
        wait_until(lambda: bool(reports))
        clock.let_watch()
        [text] = reports
        assert text.startswith("step 12 takes longer than 0.2 s, half of parallel.timeout")
        assert "in wait_until" in text
        watch.beat(13)
        clock.now += 0.3
        wait_until(lambda: len(reports) == 2)
    assert not [
        thread for thread in threading.enumerate() if thread.name == "mvp-hang" and thread.join(60)
    ]


class Store:
    """The part of a TCPStore that HangWatch uses."""

    def __init__(self):
        self.values: dict[str, str] = {}
        self.set = self.values.__setitem__
        self.get = self.values.__getitem__

    def check(self, keys):
        return all(key in self.values for key in keys)


def test_hang_watch_rank_that_is_late_long_after_another_still_gets_its_answer(reports, clock):
    store = Store()
    rank_0, rank_1 = (World(rank, 2, 0, 1, torch.device("cpu"), store=store) for rank in range(2))
    with HangWatch(0.2, rank_1) as first, HangWatch(0.2, rank_0) as second:
        first.beat(7)
        clock.now += 0.3
        wait_until(lambda: store.check(["hang/1"]))
        clock.now += (
            9.0  # rank 0 has not begun its step: rank 1 does not wait for its answer any longer
        )
        wait_until(lambda: bool(reports))
        assert "rank 0 did not answer" in reports[0]
        second.beat(7)
        clock.now += 0.3
        wait_until(lambda: len(reports) == 2)
    assert "did not answer" not in reports[1]
    assert "2 ranks (0, 1)" in reports[1]


def answer(step, *frames):
    return {
        "time": 0.0,
        "step": step,
        "what": "step",
        "stack": [f'  File "{frame}", line 1, in f\n' for frame in frames],
    }


COLLECTIVE = ("engine.py", "/x/mvp_engine/distributed/world.py", "/x/torch/distributed/c10d.py")


def test_describe_names_the_rank_that_is_not_in_a_collective():
    text = describe(
        {0: answer(7, *COLLECTIVE), 1: answer(7, "rows.py"), 2: answer(7, *COLLECTIVE)}, 3, 60.0
    )
    assert (
        "step 7 takes longer than 60 s, half of parallel.timeout; rank 1 did not arrive where the others wait"
        in text
    )
    assert text.index("rank 1 in step 7, at:") < text.index(
        "2 ranks (0, 2) in step 7, in a collective:"
    )
    assert 'File "rows.py"' in text


def test_describe_names_ranks_that_do_not_answer_and_collectives_that_differ():
    assert "rank 1 did not answer" in describe({0: answer(7, *COLLECTIVE)}, 2, 60.0)
    other = answer(
        7, "engine.py", "/x/torch/distributed/data_parallel.py", "/x/torch/distributed/c10d.py"
    )
    assert "all ranks wait in collectives, which differ" in describe(
        {0: answer(7, *COLLECTIVE), 1: other}, 2, 60.0
    )


@pytest.mark.slow
@pytest.mark.parametrize("how", ["hangs", pytest.param("is stopped", marks=CAMPAIGN)])
def test_training_names_the_rank_that_hangs_with_its_stack(tmp_path, how):
    words = "train.max_steps=100000 tiny.step_seconds=0.02 data.micro_batch_size=4 parallel.timeout=16".split()
    words += [f"output_dir={tmp_path}", "tiny.fault_rank=1"]
    words += ["tiny.fault=hang"] if how == "hangs" else []
    process = spawn(
        "-m",
        "mvp_engine.cli",
        "train",
        str(TINY),
        "--nproc",
        "2",
        *words,
        fresh_workers=how != "hangs",
    )
    lines = []
    for line in process.stdout:
        lines.append(line)
        if how != "hangs" and "step 4/" in line:
            os.kill(child_pids(process.pid)[1], signal.SIGSTOP)
        # A report of a first step that is slow on a busy machine may come before.
        if "in a collective:" in line and (
            "time.sleep(600)" if how == "hangs" else "did not answer"
        ) in "".join(lines):
            break
    process.kill()
    process.wait(60)
    text = "".join(lines)
    if how == "hangs":
        assert "rank 1 did not arrive where the others wait" in text, text
        assert "time.sleep(600)" in text
        assert "rank 0 in step" in text
    else:
        assert "rank 1 did not answer" in text, text


# ---- Worker groups ------------------------------------------------------------------------------------------------


class Sleeper:
    def update(self, hang_here):
        hang_here()
        return "done"


def test_worker_host_reports_a_call_that_hangs_and_not_the_time_between_calls(reports, clock):
    def until_reported():
        clock.now += 0.3
        wait_until(lambda: bool(reports))

    host = WorkerHost(Place(0, 1, "cpu"))
    host.workers["actor"] = Sleeper()
    with HangWatch(0.2, ALONE) as host.hang:
        assert host.call("actor", "update", clock.let_watch) == "done"
        clock.now += 0.6
        time.sleep(0.2)  # some looks of the watching thread, which need no clock
        assert not reports
        assert host.call("actor", "update", until_reported) == "done"
    [text] = reports
    assert text.startswith(
        "update of group actor, call 2 takes longer than 0.2 s, half of parallel.timeout"
    )
    assert "hang_here()" in text

"""Workers of every kind end with the process that started them, also by kill -9 and in the middle of anything."""

import itertools
import multiprocessing
import os
import re
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from conftest import is_gone, wait_until
from torch.utils.data import Dataset

from mvp_engine.data.loader import SampleLoader
from mvp_engine.kit.data.pack import stream_loader
from mvp_engine.kit.data.pack.costs import MeasureWorkers
from mvp_engine.kit.rl.episodes import Episodes, Task
from mvp_engine.kit.rl.settings import RewardSettings
from mvp_engine.process.watchdog import descendants, end_with_this_process
from mvp_engine.worker import launchers

SECONDS = 15.0


class Large(Dataset[Any]):
    """Tensors that fill the pipe of a worker, though each is sent by value."""

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return torch.zeros(2**17)


class LargeStream(torch.utils.data.IterableDataset[Any]):
    lanes = 2

    def __iter__(self):
        return (torch.zeros(2**17) for _ in itertools.count())


def sample_loader():
    return SampleLoader(Large(), micro_batch_size=1, num_workers=2)._items()


def sample_loader_in_a_thread():
    """The thread ends before its loader does."""
    made = []
    thread = threading.Thread(target=lambda: made.append(sample_loader()))
    thread.start()
    thread.join()
    return made[0]


def stream_loader_of_packs():
    loader = stream_loader.StreamLoader.__new__(stream_loader.StreamLoader)
    loader.dataset, loader.max_workers, loader.stall_seconds = LargeStream(), 2, 60.0
    return loader._start()


def hold_the_gil(_=None, __=None):
    """For longer than the universe lasts, without a chance for other threads."""
    return re.match(r"(a+)+$", 60 * "a" + "b")


def measuring():
    return MeasureWorkers(hold_the_gil, [[1], [2]], 2)


def rewards_of(reward):
    episodes = Episodes(reward, None, RewardSettings(timeout=1000.0))
    row = b"\x80\x04N."  # None, pickled
    episodes._processes._give(deque([Task(0, 0, row), Task(1, 0, row)]), {})
    return episodes


def rewards_with_the_gil():
    return rewards_of(hold_the_gil)


def rewards_with_sessions():
    return rewards_of(lambda row, answer: subprocess.run(["setsid", "sleep", "600"], check=False))


def spawned_workers():
    """A process that the controller forks later holds the controller's end of the pipe open."""
    launcher = launchers.SpawnLauncher()
    multiprocessing.get_context = lambda _: multiprocessing.context.ForkContext()
    ranks = launcher.start(2, "cpu", 60.0)
    return ranks, MeasureWorkers(hold_the_gil, [[1], [2]], 2)


def hold(start, ready, end_with_test):
    end_with_test()
    held = start()
    if isinstance(held, Iterator):
        next(held)
    ready.touch()
    signal.pause()


KINDS = {sample_loader: 2, sample_loader_in_a_thread: 2, stream_loader_of_packs: 2, measuring: 2}
KINDS |= {rewards_with_the_gil: 3, rewards_with_sessions: 5, spawned_workers: 4}


@pytest.mark.parametrize("start", KINDS, ids=lambda start: start.__name__)
def test_workers_after_kill_9_of_their_rank_are_gone(start, tmp_path):
    end_with_test = end_with_this_process()
    rank = os.fork()
    if rank == 0:
        try:
            hold(start, tmp_path / "ready", end_with_test)
        finally:
            os._exit(1)
    wait_until(lambda: (tmp_path / "ready").exists() and len(descendants(rank)) >= KINDS[start])
    workers = descendants(rank)
    os.kill(rank, signal.SIGKILL)
    os.waitpid(rank, 0)
    try:
        wait_until(lambda: all(map(is_gone, workers)), SECONDS)
    finally:
        for pid in workers:
            if not is_gone(pid):
                os.kill(pid, signal.SIGKILL)


def test_worker_of_a_thread_that_ended_lives_as_long_as_its_process():
    """The kernel's signal would come at the end of the thread."""
    batches = sample_loader_in_a_thread()
    time.sleep(0.1)
    assert len(list(itertools.islice(batches, 20))) == 20


def test_worker_of_a_fork_server_ends_with_the_process_that_asked_for_it():
    """Its parent is the fork server, which lives on."""
    reader, writer = os.pipe()
    rank = os.fork()
    if rank == 0:
        signal.pause()
    worker = os.fork()
    if worker == 0:
        end = end_with_this_process()
        partial(end.func, rank, *end.args[1:])()
        os.write(writer, b"runs")
        time.sleep(600)
        os._exit(0)
    os.close(writer)
    assert os.read(reader, 100) == b"runs"
    assert not is_gone(worker)
    os.kill(rank, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == -signal.SIGKILL
    os.waitpid(rank, 0)


def test_worker_whose_rank_ended_before_it_looked_ends_at_once():
    reader, writer = os.pipe()
    rank = os.fork()
    if rank == 0:
        end = end_with_this_process()
        if os.fork() == 0:
            while os.getppid() == end.args[0]:
                time.sleep(0.01)
            end()
            time.sleep(60)
            os.write(writer, b"still there")
        os._exit(0)
    os.close(writer)
    os.waitpid(rank, 0)
    assert os.read(reader, 100) == b""

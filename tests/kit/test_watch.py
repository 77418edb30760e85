"""The watchdog: a worker that dies or hangs raises an error with its row; an exception in a worker is unchanged."""

import os
import signal
import time
from multiprocessing.connection import Connection

import pytest
from conftest import run_process, user_error
from templates.tiny import tokenizer
from test_kit import made, write

from mvp_engine.kit import MLLMData
from mvp_engine.kit.data.pack import packs
from mvp_engine.kit.data.pack.packs import WorkerWatchdog


def broken_at(kit, row, what):
    """Call `what` when the row with this number is loaded."""
    load = kit.row_encoder.load

    def replaced(sides, root, fields):
        if fields["sample"] == row:
            what()
        return load(sides, root, fields)

    kit.row_encoder.load = replaced


@pytest.fixture
def kit(tmp_path):
    rows = [{"text": f"hello {'very ' * 40}{i}"} for i in range(20)]
    return made(write(tmp_path / "a.jsonl", rows), tokenizer("zephyr"))


def test_watchdog_killed_worker_raises_with_its_row_long_before_a_stall(kit, monkeypatch):
    broken_at(kit, 7, lambda: os.kill(os.getpid(), signal.SIGKILL))
    monkeypatch.setattr(packs, "CHECK_SECONDS", 1.0)
    with user_error(r"(?s)DataLoader worker \(pid.*\. What was being.*worker \d at a.jsonl:8"):
        list(kit.loader("train", num_workers=2))


@pytest.mark.slow
def test_watchdog_worker_killed_in_the_middle_of_a_message_raises(kit, monkeypatch):
    """The other worker holds the pipe open, so that the reader alone would wait for ever."""

    def send_half(connection, message, *_):
        os.write(connection.fileno(), bytes(message[: len(message) // 2]))
        os.kill(os.getpid(), signal.SIGKILL)

    broken_at(kit, 7, lambda: setattr(Connection, "_send", send_half))
    monkeypatch.setattr(packs, "CHECK_SECONDS", 1.0)
    with user_error(r"(?s)DataLoader worker \(pid"):
        list(kit.loader("train", num_workers=2))


def test_watchdog_death_reported_during_another_error_raises_with_its_row(monkeypatch):
    def fetching():
        raise EOFError  # the worker is dead; torch reports it a moment later
        yield

    deaths = iter([RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed. ")])

    def positions(_):
        for error in deaths:
            raise error
        return ["worker 0 at a.jsonl:8"]

    monkeypatch.setattr(WorkerWatchdog, "positions", positions)
    with user_error(r"worker \(pid 1\) is killed.*worker 0 at a.jsonl:8"):
        list(WorkerWatchdog().iterate(fetching, 1.0))


@pytest.mark.slow
def test_watchdog_hanging_worker_raises_with_its_row(kit, monkeypatch):
    # Until it is ended.
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.5)
    broken_at(kit, 7, lambda: time.sleep(600))
    monkeypatch.setattr(MLLMData, "stall_seconds", 1.0)
    with user_error(r"nothing came from the workers .*worker . at a.jsonl:8"):
        list(kit.loader("train", num_workers=1))


@pytest.mark.slow
def test_watchdog_slow_worker_is_waited_for(kit, monkeypatch):
    load = kit.row_encoder.load
    kit.row_encoder.load = lambda *given: time.sleep(0.15) or load(*given)
    monkeypatch.setattr(MLLMData, "stall_seconds", 0.5)
    assert sum(batch.num_sequences for batch in kit.loader("train", num_workers=1)) == 20


def test_watchdog_exception_in_a_worker_is_raised_unchanged(kit):
    broken_at(kit, 7, lambda: [][0])
    with pytest.raises(IndexError, match=r"while reading a.jsonl:8"):
        list(kit.loader("train", num_workers=1))


@pytest.mark.slow
def test_measure_costs_forked_process_does_not_wait_for_parent_threads():
    """Audio processors compute with torch; a forked process has none of the threads that torch started before."""
    code = """
import torch
from mvp_engine.kit.data.pack.costs import map_chunks
torch.set_num_threads(4)
big = torch.ones(1 << 20)
big + 1
print(sorted(map_chunks(lambda rows: float((big + 1).sum()), [[0], [1]], 2)))
"""
    assert run_process("-c", code) == (0, "[([0], 2097152.0), ([1], 2097152.0)]\n")

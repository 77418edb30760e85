"""A worker that dies or hangs is an error that names the row, soon; a bug in one is still itself."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import run_process
from templates.tiny import tokenizer
from test_kit import made, write

from mvp_engine.errors import UserError
from mvp_engine.kit.data.pack.worker_watchdog import WorkerWatchdog


def broken_at(kit: Any, row: int, what: Any) -> None:
    """Something happens when the row with this number is loaded."""
    load = kit.row_encoder.load

    def replaced(sides: Any, root: Path, fields: dict[str, int]) -> Any:
        if fields["sample"] == row:
            what()
        return load(sides, root, fields)

    kit.row_encoder.load = replaced


@pytest.fixture
def kit(tmp_path: Path) -> Any:
    rows = [{"text": f"hello {'very ' * 40}{i}"} for i in range(20)]
    return made(write(tmp_path / "a.jsonl", rows), tokenizer("zephyr"), stall_seconds=1.0)


def test_a_worker_that_dies_names_the_row_it_was_at(kit: Any) -> None:
    broken_at(kit, 7, lambda: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(UserError, match=r"(?s)DataLoader worker \(pid.*worker \d at a.jsonl:8"):
        list(kit.loader("train", num_workers=2))


def test_a_death_that_is_told_while_another_error_is_looked_at_is_named(monkeypatch) -> None:
    def fetching() -> Any:
        raise EOFError  # the worker has gone; torch hears of it a moment later
        yield

    told = iter([RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed. ")])

    def positions(_: WorkerWatchdog) -> list[str]:
        for error in told:
            raise error
        return ["worker 0 at a.jsonl:8"]

    monkeypatch.setattr(WorkerWatchdog, "positions", positions)
    with pytest.raises(UserError, match=r"worker \(pid 1\) is killed.*worker 0 at a.jsonl:8"):
        list(WorkerWatchdog().iterate(fetching, 1.0))


def test_a_worker_that_hangs_names_the_row_it_was_at(kit: Any) -> None:
    broken_at(kit, 7, lambda: time.sleep(60))
    begun = time.monotonic()
    with pytest.raises(UserError, match=r"nothing came from the workers .*worker . at a.jsonl:8"):
        list(kit.loader("train", num_workers=1))
    assert time.monotonic() - begun < 30


def test_a_worker_that_is_slow_but_goes_on_is_waited_for(kit: Any) -> None:
    load = kit.row_encoder.load
    kit.row_encoder.load = lambda *given: time.sleep(0.15) or load(*given)
    kit.settings = kit.settings.model_copy(update={"stall_seconds": 0.2})
    assert sum(batch.num_sequences for batch in kit.loader("train", num_workers=1)) == 20


def test_a_bug_in_a_worker_is_shown_as_itself(kit: Any) -> None:
    broken_at(kit, 7, lambda: [][0])
    with pytest.raises(IndexError, match=r"while reading a.jsonl:8"):
        list(kit.loader("train", num_workers=1))


def test_measuring_in_processes_does_not_wait_for_threads_of_the_parent() -> None:
    """Processors of sounds compute with torch, which may have started threads before: these do not come along."""
    code = """
import torch
from mvp_engine.kit.data.pack import costs
torch.set_num_threads(4)
big = torch.ones(1 << 20)
big + 1
print(list(costs._map_chunks(lambda rows: float((big + 1).sum()), [[0], [1]], 2)))
"""
    assert run_process("-c", code) == (0, "[2097152.0, 2097152.0]\n")

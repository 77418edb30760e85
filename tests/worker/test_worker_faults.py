"""What fails in a rank is named with its rank, in seconds; the group is ended, and restarts from a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import spawn
from forked_launcher import ForkedLauncher
from worker_cases import FailingLoss, TokenLoss, batch_of, spec_of

from mvp_engine.worker import WorkerDied, WorkerError, WorkerGroup, WorkerUserError
from mvp_engine.worker import group as group_module

BATCH = batch_of(7, 3, 12, 5)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def group() -> Iterator[WorkerGroup]:
    with WorkerGroup.start(spec_of(parallel={"shard": 2}), ranks=2, where=ForkedLauncher()) as started:
        yield started


@pytest.fixture
def running(group: WorkerGroup) -> WorkerGroup:
    if group.processes.ended is not None:
        group.restart()
    return group


def pids(group: WorkerGroup) -> list[int]:
    return [rank.process.pid for rank in group.processes.ranks]  # type: ignore[attr-defined]


def is_gone(pid: int) -> bool:
    """Ended, or a zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until_gone(gone: list[int], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not all(map(is_gone, gone)):
        assert time.monotonic() < deadline, "processes are left"
        time.sleep(0.05)


CALLS: dict[str, Callable[[WorkerGroup, Path], Any]] = {
    "infer": lambda group, _: group.infer(BATCH, ["log_probs"], budget=64),
    "update": lambda group, _: group.update(BATCH, TokenLoss(), budget=64),
    "save": lambda group, folder: group.save(folder / "second"),
    "open_weights": lambda group, _: list(group.weights()),
    "receive_weights": lambda group, _: group.load_weights(_stop_before_bucket(group)),
}


def _stop_before_bucket(group: WorkerGroup) -> Iterator[Any]:
    """A stream whose receiving rank 1 stops before the first bucket arrives."""
    os.kill(pids(group)[1], signal.SIGSTOP)
    yield [("lm_head.weight", torch.zeros(64, 32))]


IN_CAMPAIGN = pytest.mark.campaign(only=True)  # each restarts two processes
METHODS = [pytest.param(name, marks=() if name in ("update", "receive_weights") else IN_CAMPAIGN) for name in CALLS]


@pytest.mark.parametrize("method", METHODS)
def test_rank_killed_in_a_call_is_named_and_the_group_restarts_from_its_checkpoint(
    running: WorkerGroup, tmp_path: Path, method: str
) -> None:
    group = running
    group.update(BATCH, TokenLoss(), budget=64)
    group.save(tmp_path / "actor")
    before = group.checksums()
    expected = group.update(BATCH, TokenLoss(), budget=64)
    started = pids(group)
    if method != "receive_weights":
        os.kill(started[1], signal.SIGSTOP)  # so that the call is under way when the rank dies
    threading.Timer(0.3, os.kill, (started[1], signal.SIGKILL)).start()
    begin = time.monotonic()
    with pytest.raises(WorkerDied, match=rf"rank 1 of group actor died in {method}: signal SIGKILL"):
        CALLS[method](group, tmp_path)
    assert time.monotonic() - begin < 10
    wait_until_gone(started)
    with pytest.raises(WorkerDied, match=r"has no processes: .* died in .*restart\(\) starts new ones"):
        group.checksums()
    group.restart()
    group.load(tmp_path / "actor")
    assert group.checksums() == before
    assert group.update(BATCH, TokenLoss(), budget=64) == expected
    assert not (tmp_path / "second").exists()


def test_error_on_one_rank_is_named_with_its_traceback_and_ends_the_group(
    running: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_module, "GRACE", 0.5)  # the other rank waits for this one
    started = pids(running)
    with pytest.raises(WorkerError) as caught:
        running.update(BATCH, FailingLoss(rank=1), budget=64)
    error = caught.value
    assert (error.group, error.rank, error.method) == ("actor", 1, "update")
    assert "ZeroDivisionError" in error.reason
    assert "worker_cases.py" in error.remote
    wait_until_gone(started)


def test_error_on_all_ranks_leaves_the_group_usable(running: WorkerGroup, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="ZeroDivisionError"):
        running.update(BATCH, FailingLoss(rank=None), budget=64)
    with pytest.raises(WorkerUserError, match=f"{tmp_path}/missing") as caught:
        running.load(tmp_path / "missing")
    assert "Traceback" not in str(caught.value)
    assert running.update(BATCH, TokenLoss(), budget=64)[0].skipped is None


def test_calls_that_do_not_pickle_are_refused_before_they_are_sent(running: WorkerGroup) -> None:
    with pytest.raises(Exception, match="pickle"):
        running.update(BATCH, lambda *_: None, budget=64)  # type: ignore[arg-type, return-value]
    assert running.update(BATCH, TokenLoss(), budget=64)[0].skipped is None


def test_controller_killed_leaves_no_process(tmp_path: Path) -> None:
    """With processes that start from nothing, as in a training."""
    controller = spawn(str(Path(__file__).parent / "controller.py"))
    assert controller.stdout is not None
    lines = [controller.stdout.readline() for _ in range(2)]
    assert lines[0].startswith("loss "), lines[0] + controller.stdout.read()
    ranks = [int(pid) for pid in lines[1].split()[1:]]
    assert len(ranks) == 2
    assert not any(map(is_gone, ranks))
    controller.kill()
    controller.wait()
    wait_until_gone(ranks)

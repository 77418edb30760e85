"""What fails in a rank is named with its rank, in seconds; the group is ended, and restarts from a checkpoint."""

import time
from pathlib import Path

import pytest
from conftest import CAMPAIGN, is_gone, spawn, user_error
from fault_cases import BATCH, CALLS, check_rank_killed_in_call, wait_until_gone
from forked_launcher import ForkedLauncher
from worker_cases import FailingLoss, TokenLoss, pids, spec_of

from mvp_engine.imports import import_file
from mvp_engine.worker import WorkerError, WorkerGroup, WorkerUserError
from mvp_engine.worker import group as group_module

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def group():
    with WorkerGroup.start(
        spec_of(parallel={"shard": 2}), ranks=2, where=ForkedLauncher()
    ) as started:
        yield started


@pytest.fixture
def running(group):
    if group.processes.ended is not None:
        group.restart()
    return group


CAMPAIGN = CAMPAIGN  # each restarts two processes
METHODS = [
    pytest.param(name, marks=() if name in ("update", "receive_weights") else CAMPAIGN)
    for name in CALLS
]


@pytest.mark.parametrize("method", METHODS)
def test_rank_killed_in_a_call_is_named_and_the_group_restarts_from_its_checkpoint(
    running, tmp_path, method
):
    check_rank_killed_in_call(running, tmp_path, method, "signal SIGKILL")


def test_error_on_one_rank_is_named_with_its_traceback_and_ends_the_group(running, monkeypatch):
    monkeypatch.setattr(group_module, "GRACE", 0.5)  # the other rank waits for this one
    started = pids(running)
    with pytest.raises(WorkerError) as caught:
        running.update(BATCH, FailingLoss(rank=1), budget=64)
    error = caught.value
    assert (error.group, error.rank, error.method) == ("actor", 1, "update")
    assert "ZeroDivisionError" in error.reason
    assert "worker_cases.py" in error.remote
    wait_until_gone(started)


def test_error_on_all_ranks_leaves_the_group_usable(running, tmp_path):
    with pytest.raises(WorkerError, match="ZeroDivisionError"):
        running.update(BATCH, FailingLoss(rank=None), budget=64)
    with pytest.raises(WorkerUserError, match=f"{tmp_path}/missing") as caught:
        running.load(tmp_path / "missing")
    assert "Traceback" not in str(caught.value)
    assert running.update(BATCH, TokenLoss(), budget=64)[0].skipped is None


def test_calls_that_do_not_pickle_are_refused_before_they_are_sent(running):
    with user_error("arguments of update cannot be sent to the ranks of group actor"):
        running.update(BATCH, lambda *_: None, budget=64)
    assert running.update(BATCH, TokenLoss(), budget=64)[0].skipped is None


def test_loss_of_a_recipe_file_is_imported_by_the_ranks(tmp_path):
    loss = import_file(_recipe(tmp_path)).RecipeLoss()
    with WorkerGroup.start(spec_of(), where=ForkedLauncher()) as group:
        assert group.update(BATCH, loss, budget=64)[0].metrics["recipe"] == (1.0, 1.0)


def _recipe(folder):
    """A recipe's file that imports another one."""
    (folder / "my-recipe").mkdir()
    (folder / "my-recipe" / "names.py").write_text("NAME = 'recipe'")
    file = folder / "my-recipe" / "losses.py"
    file.write_text("""
from dataclasses import dataclass
import torch
from .names import NAME

@dataclass(frozen=True)
class RecipeLoss:
    def __call__(self, model, batch, log):
        log(NAME, torch.ones(()), 1.0)
        return model(batch, ["loss"])["loss"], batch.num_loss_tokens
""")
    return file


@CAMPAIGN
def test_controller_killed_leaves_no_process(tmp_path):
    """With processes that start from nothing, as in a training."""
    controller = spawn(str(Path(__file__).parent / "controller.py"), "spawn", fresh=True)
    lines = [controller.stdout.readline() for _ in range(2)]
    assert lines[0].startswith("loss "), lines[0] + controller.stdout.read()
    ranks = [int(pid) for pid in lines[1].split()[1:]]
    assert len(ranks) == 2
    assert not any(map(is_gone, ranks))
    controller.kill()
    controller.wait()
    begin = time.monotonic()
    wait_until_gone(ranks)
    print(f"controller killed: all gone after {time.monotonic() - begin:.1f} s")

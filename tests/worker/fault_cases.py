"""Deaths of ranks in each call, for every launcher that has processes."""

import os
import signal
import threading
import time

import pytest
import torch
from conftest import is_gone, wait_until
from worker_cases import TokenLoss, batch_of, pids

from mvp_engine.worker import WorkerDied

BATCH = batch_of(7, 3, 12, 5)


def wait_until_gone(pids):
    wait_until(lambda: all(map(is_gone, pids)))


CALLS = {
    "infer": lambda group, _: group.infer(BATCH, ["log_probs"], budget=64),
    "update": lambda group, _: group.update(BATCH, TokenLoss(), budget=64),
    "save": lambda group, folder: group.save(folder / "second"),
    "open_weights": lambda group, _: list(group.weights()),
    "receive_weights": lambda group, _: group.load_weights(_stop_before_bucket(group)),
}


def _stop_before_bucket(group):
    """A stream whose receiving rank 1 stops before the first bucket arrives."""
    _stop_and_kill(pids(group)[1])
    yield [("lm_head.weight", torch.zeros(64, 32))]


def _stop_and_kill(pid):
    """Stop a rank, so that the next call is under way when it is killed a moment later."""
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()


def check_rank_killed_in_call(group, folder, method, how):
    """The death is named with `how` in seconds, and the group restarts from its checkpoint."""
    group.update(BATCH, TokenLoss(), budget=64)
    group.save(folder / "actor")
    before = group.checksums()
    expected = group.update(BATCH, TokenLoss(), budget=64)
    started = pids(group)
    if method != "receive_weights":
        _stop_and_kill(started[1])
    begin = time.monotonic()
    with pytest.raises(WorkerDied, match=rf"rank 1 of group actor died in {method}: {how}"):
        CALLS[method](group, folder)
    named = time.monotonic() - begin
    assert named < 60
    wait_until_gone(started)
    print(
        f"killed in {method}: named after {named:.1f} s, all gone after {time.monotonic() - begin:.1f} s"
    )
    with pytest.raises(
        WorkerDied, match=r"has no processes: .* died in .*restart\(\) starts new ones"
    ):
        group.checksums()
    group.restart()
    group.load(folder / "actor")
    assert group.checksums() == before
    assert group.update(BATCH, TokenLoss(), budget=64) == expected
    assert not (folder / "second").exists()

"""Ranks killed at random moments: a run that restarts from its checkpoints ends with the bits of an undisturbed one."""

import contextlib
import os
import random
import signal
import threading
import time

import pytest
from conftest import CAMPAIGN
from forked_launcher import ForkedLauncher
from worker_cases import TokenLoss, batch_of, spec_of

from mvp_engine.hf.lora.lora_settings import Lora
from mvp_engine.worker import WorkerDied, WorkerGroup

STEPS = 9
SPEC = spec_of(parallel={"shard": 2}, lora=Lora(rank=4, dropout=0.2), total_steps=STEPS)


def step(group, number, folder):
    batch = batch_of(7, 3, 12, 5, seed=number)
    group.infer(batch, ["log_probs"], budget=16)
    group.update(batch, TokenLoss(), budget=16)
    list(group.weights(bucket_bytes=4000))
    group.save(folder / f"{number}")


@pytest.mark.slow
@CAMPAIGN
def test_ranks_killed_at_random_moments_end_with_the_bits_of_an_undisturbed_run(
    tmp_path,
):
    with WorkerGroup.start(SPEC, ranks=2, where=ForkedLauncher()) as group:
        seconds = []
        for number in range(STEPS):
            begin = time.monotonic()
            step(group, number, tmp_path / "calm")
            seconds.append(time.monotonic() - begin)
        expected = group.checksums()
    draws = random.Random(0)
    deaths = []
    number = 0
    with WorkerGroup.start(SPEC, ranks=2, where=ForkedLauncher()) as group:
        while number < STEPS:
            ranks = group.processes.ranks
            victim = draws.choice(ranks).process.pid
            killer = threading.Timer(
                draws.uniform(0.0, 1.3 * min(seconds)), os.kill, (victim, signal.SIGKILL)
            )
            if len(deaths) < 20:
                killer.start()
            begin = time.monotonic()
            with contextlib.suppress(WorkerDied):
                step(group, number, tmp_path / "killed")
            assert time.monotonic() - begin < 60
            killer.cancel()
            number += 1
            if any(not rank.process.is_alive() for rank in ranks):
                deaths.append(str(group.processes.ended))  # None: after the last call
                group.restart()
                saved = [int(folder.name) for folder in (tmp_path / "killed").glob("?")]
                number = max(saved, default=-1) + 1
                if saved:
                    group.load(tmp_path / "killed" / str(max(saved)))
        assert group.checksums() == expected
    assert len(deaths) >= 5
    assert all("signal SIGKILL" in death for death in deaths if death != "None")

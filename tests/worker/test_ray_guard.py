"""The guard of a Ray instance: what the instance's processes have started ends with a controller that is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from conftest import is_gone, spawn
from fault_cases import wait_until_gone

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")

# Has a child of the session, which has a child whose command does not name it, and another child.
CONTROLLER = """
import os, subprocess, sys, time
sys.path.insert(0, {worker!r})
import ray_guard
sleep = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
raylet = "import subprocess, time; print(subprocess.Popen(" + repr(sleep) + ").pid, flush=True); time.sleep(60)"
raylet = subprocess.Popen([sys.executable, "-S", "-c", raylet, "session_1"], stdout=subprocess.PIPE, text=True)
agent = int(raylet.stdout.readline())
other = subprocess.Popen(sleep)
guard = ray_guard.start("session_1")
while len(ray_guard.of_session("session_1", os.getpid())) < 3:
    time.sleep(0.05)
time.sleep(3 * ray_guard.POLL)
print(guard.pid, raylet.pid, agent, other.pid, flush=True)
time.sleep(60)
"""


def test_ray_guard_controller_killed_ends_the_processes_of_its_session_alone() -> None:
    worker = Path(__file__).parents[2] / "mvp_engine" / "worker"
    controller = spawn("-c", CONTROLLER.format(worker=str(worker)))
    assert controller.stdout is not None
    guard, raylet, agent, other = (int(pid) for pid in controller.stdout.readline().split())
    assert not any(map(is_gone, (guard, raylet, agent, other)))
    controller.kill()
    controller.wait()
    wait_until_gone([raylet, agent, guard])
    assert not is_gone(other)
    os.kill(other, signal.SIGKILL)

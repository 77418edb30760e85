"""The start of a Ray instance; and its guard: what its processes have started ends with a controller that is killed."""

import importlib
import os
import signal
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from conftest import is_gone, spawn, user_error
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


def test_ray_guard_controller_killed_ends_the_processes_of_its_session_alone():
    worker = Path(__file__).parents[2] / "mvp_engine" / "worker"
    controller = spawn("-c", CONTROLLER.format(worker=str(worker)))
    guard, raylet, agent, other = (int(pid) for pid in controller.stdout.readline().split())
    assert not any(map(is_gone, (guard, raylet, agent, other)))
    controller.kill()
    controller.wait()
    wait_until_gone([raylet, agent, guard])
    assert not is_gone(other)
    os.kill(other, signal.SIGKILL)


def test_ray_that_does_not_start_is_a_user_error_after_a_line_that_says_what_is_waited_for(
    monkeypatch, logged
):
    """With a stand-in for Ray, which need not be installed."""

    def init(**_):
        raise Exception("The current node timed out during startup.")

    name = "mvp_engine.worker.ray_launcher"
    for module in ("ray", "ray.util", "ray.util.placement_group", "ray.util.scheduling_strategies"):
        monkeypatch.setitem(sys.modules, module, MagicMock())
    sys.modules["ray"].is_initialized.return_value = False
    sys.modules["ray"].init = init
    sys.modules["ray"].cloudpickle.CloudPickler = object
    monkeypatch.setitem(sys.modules, name, sys)  # is removed again, also if it is not imported yet
    del sys.modules[name]
    launcher = importlib.import_module(name)
    said = logged("info")
    with user_error(r"node timed out during startup.*run `ray start --head` before"):
        launcher.RayLauncher().start(2, "cpu", 9.0)
    assert said[0].startswith("waiting for Ray: the cluster of RAY_ADDRESS or of this machine")

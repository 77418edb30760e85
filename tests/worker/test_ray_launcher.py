"""Worker groups in Ray actors: the bits of the other launchers, errors and deaths by name, nothing left behind."""

import signal
import time
from pathlib import Path

import psutil
import pytest
import torch
from conftest import CAMPAIGN, run_process, spawn, user_error
from fault_cases import BATCH, CALLS, check_rank_killed_in_call, wait_until_gone
from run_files import read_json
from ten_updates import train_by_groups
from worker_cases import FailingLoss, TokenLoss, batch_of, pids, spec_of

from mvp_engine.worker import WorkerDied, WorkerError, WorkerGroup

ray = pytest.importorskip("ray")
from mvp_engine.worker.ray_launcher import Home, RayLauncher, by_node, places_of  # noqa: E402

HERE = Path(__file__).parent


def _on_sigterm(*_):
    """The handler of a training, which ray.init must not replace."""


@pytest.mark.slow
def test_ray_group_updates_and_names_the_rank_of_an_error():
    batch = batch_of(7, 3, 12, 5)
    with WorkerGroup.start(spec_of()) as local:
        expected = local.update(batch, TokenLoss(), budget=16)
        log_probs_T = local.infer(batch, ["log_probs"], budget=64)["log_probs"]
    before = signal.signal(signal.SIGTERM, _on_sigterm)
    with WorkerGroup.start(spec_of(parallel={"shard": 2}), ranks=2, where="ray") as group:
        assert signal.signal(signal.SIGTERM, before) is _on_sigterm
        numbers = group.update(batch, TokenLoss(), budget=16)
        assert numbers[0].loss == pytest.approx(expected[0].loss, abs=1e-5)
        found_T = group.infer(batch, ["log_probs"], budget=64)["log_probs"]
        torch.testing.assert_close(found_T, log_probs_T, atol=1e-5, rtol=0)
        with pytest.raises(
            WorkerError, match="rank 0 of group actor, in nothing: AttributeError"
        ) as caught:
            group._call("nothing")
        assert "launchers.py" in caught.value.remote
    assert not ray.is_initialized()


@CAMPAIGN
@pytest.mark.parametrize("ranks", [1, 2])
def test_ten_updates_of_actor_and_critic_are_bit_equal_on_every_launcher(tmp_path, ranks):
    out = tmp_path / "torchrun.json"
    words = f"-m torch.distributed.run --nproc-per-node={ranks} --standalone".split()
    code, output = run_process(*words, str(HERE / "ten_updates.py"), str(out), fresh=True)
    assert code == 0, output
    expected = read_json(out)
    assert expected["actor"] != expected["critic"]
    assert len({loss for loss, _ in expected["steps"]}) == 20
    launchers = ["local", "spawn", "ray"] if ranks == 1 else ["spawn", "ray"]
    for where in launchers:
        assert train_by_groups(where, ranks) == expected, where


def test_places_on_two_nodes_have_adjacent_ranks_and_count_those_of_each_node():
    nodes = ["a", "b", "a", "b", "b"]
    homes = [(i, Home(node, node, i, (str(i),))) for i, node in enumerate(nodes)]
    actors = by_node(homes)
    assert [actor for actor, _ in actors] == [0, 2, 1, 3, 4]
    places = places_of([home for _, home in actors], "cuda:0", ("a", 1), 9.0)
    assert [place.rank for place in places] == [0, 1, 2, 3, 4]
    assert [(place.local_rank, place.local_size) for place in places] == [
        (0, 2),
        (1, 2),
        (0, 3),
        (1, 3),
        (2, 3),
    ]
    assert all(place.own_gpu and place.size == 5 and place.store == ("a", 1) for place in places)
    shared = [Home("a", "a", 1, ("0",)), Home("a", "a", 2, ("0",))]
    assert not any(place.own_gpu for place in places_of(shared, "cuda:0", ("a", 1), 9.0))


# ---- Faults, in an instance that the controller is connected to -----------------------------------------------------


@pytest.fixture(scope="module")
def instance():
    """Three CPUs and two GPUs by name: nothing here computes on them."""
    ray.init("local", num_cpus=3, num_gpus=2, include_dashboard=False, logging_level="WARNING")
    yield
    assert ray.is_initialized(), "groups must not end an instance of somebody else"
    ray.shutdown()


@pytest.fixture(scope="module")
def group(instance):
    with WorkerGroup.start(spec_of(parallel={"shard": 2}), ranks=2, where="ray") as started:
        yield started


@pytest.fixture
def running(group):
    if group.processes.ended is not None:
        group.restart()
    return group


@CAMPAIGN
@pytest.mark.parametrize("method", CALLS)
def test_ray_rank_killed_in_a_call_is_named_and_the_group_restarts_from_its_checkpoint(
    running, tmp_path, method
):
    check_rank_killed_in_call(
        running, tmp_path, method, r"process \d+ on [\d.]+: The actor is dead"
    )


@CAMPAIGN
def test_ray_error_on_one_rank_is_named_with_its_traceback_and_ends_the_group(
    running,
):
    started = pids(running)
    begin = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        running.update(BATCH, FailingLoss(rank=1), budget=64)
    print(f"raised in update: named after {time.monotonic() - begin:.1f} s")
    assert time.monotonic() - begin < 60
    error = caught.value
    assert (error.group, error.rank, error.method) == ("actor", 1, "update")
    assert "ZeroDivisionError" in error.reason
    assert "worker_cases.py" in error.remote
    wait_until_gone(started)


@CAMPAIGN
def test_ray_without_free_resources_is_a_user_error_and_leaves_the_group_usable(
    running,
):
    begin = time.monotonic()
    with user_error("the Ray cluster has 1 CPU free, and 2 ranks need 1 CPU each"):
        WorkerGroup.start(spec_of(), ranks=2, where=RayLauncher(wait=1.0))
    assert time.monotonic() - begin < 60
    assert running.update(BATCH, TokenLoss(), budget=64)[0].skipped is None


@CAMPAIGN
def test_ray_actors_see_one_gpu_each(running):
    launcher = RayLauncher(cpus=0.5)
    try:
        ranks = launcher.start(2, "auto", 300.0)
        assert sorted(rank.home.gpus for rank in ranks) == [("0",), ("1",)]
        assert len({rank.home.pid for rank in ranks}) == 2
    finally:
        launcher.close()
    with pytest.raises(WorkerDied, match=r"actors of 1 rank did not start within 0\.001 seconds"):
        WorkerGroup.start(spec_of(parallel={"timeout": 0.001}), where=RayLauncher(cpus=0.5))
    wait_until_gone([rank.home.pid for rank in ranks])
    assert running.update(BATCH, TokenLoss(), budget=64)[0].skipped is None


@CAMPAIGN
def test_ray_controller_killed_leaves_no_process():
    controller = spawn(str(HERE / "controller.py"), "ray", fresh=True)
    lines = []
    while not lines or not lines[-1].startswith("ranks "):
        lines.append(controller.stdout.readline())
        assert lines[-1], lines
    ranks = [int(pid) for pid in lines[-1].split()[1:]]
    children = [child.pid for child in psutil.Process(controller.pid).children(recursive=True)]
    assert set(ranks) < set(children)
    controller.kill()
    controller.wait()
    begin = time.monotonic()
    wait_until_gone(ranks)
    print(f"controller killed: ranks gone after {time.monotonic() - begin:.1f} s")
    # With those of Ray: two of its agents would wait 60 s for its dead control service.
    wait_until_gone(children)
    print(f"all processes gone after {time.monotonic() - begin:.1f} s")

"""Several nodes: options and SLURM's variables, two launchers on one host, and the sbatch script with a fake SLURM."""

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
import urllib.request
from types import SimpleNamespace

import pytest
import yaml
from conftest import CAMPAIGN, MAGIC, TINY, losses, mvp, spawn, user_error
from kill_resume import child_pids

from mvp_engine.cli import build_parser
from mvp_engine.distributed import World
from mvp_engine.errors import EXIT_INTERRUPTED, EXIT_USER_ERROR
from mvp_engine.runs import list_runs
from mvp_engine.tools import launcher
from mvp_engine.tools.nodes import Nodes, first_host, nodes_of, use_interface_to

LONG = ["train.max_steps=100000", "tiny.step_seconds=0.02", "log.interval=1"]


def slurm(nodes, tasks, task, **others):
    """The variables that srun sets for one of its tasks, with equal numbers of tasks on all nodes."""
    here = tasks // nodes
    variables = {
        "SLURM_JOB_ID": 4711,
        "SLURM_STEP_ID": 0,
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_STEP_NUM_NODES": nodes,
        "SLURM_STEP_NUM_TASKS": tasks,
        "SLURM_STEP_NODELIST": "gpu[07-08]" if nodes > 1 else "gpu07",
        "SLURM_STEP_TASKS_PER_NODE": f"{here}(x{nodes})" if nodes > 1 else here,
        "SLURM_PROCID": task,
        "SLURM_NODEID": task // here,
        "SLURM_LOCALID": task % here,
    }
    return {name: str(value) for name, value in {**variables, **others}.items()}


def node_options(rank, port, address="127.0.0.1"):
    return f"--nnodes 2 --node-rank {rank} --master-addr {address} --master-port {port}".split()


def start(*words, **options):
    return spawn("-m", "mvp_engine.cli", "train", str(TINY), *words, **options)


def wait_for(node, text):
    """Read the output of a node up to a line with this text."""
    assert node.stdout is not None
    seen = ""
    while text not in seen:
        line = node.stdout.readline()
        assert line, seen
        seen += line


def outputs_of(nodes, code):
    """The outputs of nodes that all end with this exit code."""
    outputs = [node.communicate(timeout=120)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [code] * len(nodes), outputs
    return outputs


@pytest.fixture
def resolve(monkeypatch):
    """resolve("--nproc", "2", NAME=value): the nodes of `mvp train` with these options and variables alone."""

    def run(*options, **variables):
        monkeypatch.setattr(os, "environ", variables)
        return nodes_of(build_parser().parse_args(["train", "x.yaml", *options]))

    return run


def test_options_describe_the_node(resolve):
    assert resolve() == Nodes(1)
    assert resolve("--nproc", "4") == Nodes(4)
    words = "--nnodes 2 --node-rank 1 --master-addr gpu07".split()
    assert resolve(*words, "--nproc", "8") == Nodes(8, 2, 1, "gpu07", 29500)
    assert resolve(*words[:4], MASTER_ADDR="a", MASTER_PORT="5") == Nodes(1, 2, 1, "a", 5)


@pytest.mark.parametrize(
    "words, message",
    [
        ("--nnodes 2 --node-rank 0", "the same --master-addr, the host name of node 0"),
        ("--nnodes 2 --master-addr a", "with --node-rank 0 to 1"),
        ("--nnodes 2 --node-rank 2 --master-addr a", "it is 0 to 1"),
        ("--node-rank 1", "give --nnodes as well"),
        ("--nnodes 0", "at least one node"),
        ("--nproc 0", "at least one process"),
    ],
)
def test_wrong_node_options_are_user_errors(resolve, words, message):
    with user_error(message):
        resolve(*words.split())


TORCHRUN = {"WORLD_SIZE": "4", "RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "5"}


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"RANK": None, "MASTER_ADDR": None},
            "WORLD_SIZE=4 is set in the environment, and not RANK, MASTER_ADDR",
        ),
        ({"RANK": "4"}, "RANK=4: with WORLD_SIZE=4 it is 0 to 3"),
        ({"RANK": "x"}, "the environment variable RANK=x is not a number"),
        ({"MASTER_PORT": "p"}, "MASTER_PORT=p is not a number"),
    ],
)
def test_variables_of_no_rank_are_user_errors(resolve, changes, message):
    variables = {
        name: value for name, value in {**TORCHRUN, **changes}.items() if value is not None
    }
    with user_error(message):
        resolve(**variables)
    with user_error(r"is one of 4 ranks\. Remove --nproc"):
        resolve("--nproc", "2", **TORCHRUN)
    assert resolve("--nproc", "2", WORLD_SIZE="1") == Nodes(2)


def test_srun_with_a_task_per_node_starts_a_rank_per_gpu(resolve):
    port = 10_000 + 4711
    assert resolve(**slurm(2, 2, 1, SLURM_GPUS_ON_NODE=8)) == Nodes(8, 2, 1, "gpu07", port)
    assert resolve("--nproc", "4", **slurm(2, 2, 0, SLURM_GPUS_ON_NODE=8)) == Nodes(
        4, 2, 0, "gpu07", port
    )
    assert resolve(**slurm(1, 1, 0, SLURM_GPUS_ON_NODE=8)).nproc == 8
    assert resolve(**slurm(1, 1, 0, SLURM_GPUS_ON_NODE=8, SLURM_PTY_PORT=1)).nproc == 1
    assert resolve(**slurm(2, 2, 1)).nproc == 1


def test_srun_with_a_task_per_rank_sets_the_variables_of_a_rank(
    resolve,
):
    assert resolve(**slurm(2, 8, 5)) == Nodes(1)
    found = {
        name: os.environ[name]
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    }
    assert list(found.values()) == ["5", "8", "1", "4", "gpu07"]
    with user_error("srun already starts 8 tasks on 2 nodes"):
        resolve("--nproc", "4", **slurm(2, 8, 5))


def test_nodes_of_a_job_without_srun_is_one_with_a_warning(resolve, capsys):
    assert resolve("--nproc", "8", SLURM_JOB_NUM_NODES="2", SLURM_PROCID="0") == Nodes(8)
    assert "srun mvp" in capsys.readouterr().err
    assert resolve(**TORCHRUN, **slurm(2, 2, 1)) == Nodes(1)  # torchrun under srun


@pytest.mark.parametrize(
    "nodelist, host",
    [
        ("a1", "a1"),
        ("gpu[003-005,9],b", "gpu003"),
        ("b,gpu[1-2]", "b"),
        ("r[1,3]-n[08-09].x", "r1-n08.x"),
    ],
)
def test_first_host_of_a_slurm_nodelist(nodelist, host):
    assert first_host(nodelist) == host


def test_interface_of_gloo_is_the_one_that_reaches_node_0(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    use_interface_to("127.0.0.1")
    use_interface_to("no.such.host.invalid")
    assert os.environ == {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("no network interface")
    use_interface_to("192.0.2.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] in [name for _, name in socket.if_nameindex()]


def test_node_without_the_others_is_a_user_error(monkeypatch, capsys, port):
    monkeypatch.setattr(launcher, "JOIN_SECONDS", 0)
    for address, message in {
        "127.0.0.1": "the nodes did not meet at 127.0.0.1",
        "no.such.host.invalid": "--master-addr no.such.host.invalid: ",
    }.items():
        assert mvp(f"train {TINY}", *node_options(1, port, address)) == EXIT_USER_ERROR
        assert message in capsys.readouterr().err


def test_first_failure_is_the_killed_rank_among_those_of_one_second():
    def failures(*ends):
        return {
            rank: SimpleNamespace(timestamp=at, exitcode=code)
            for rank, (at, code) in enumerate(ends)
        }

    assert launcher.first_failure(failures((7, 1), (7, -signal.SIGKILL))) == (1, -signal.SIGKILL)
    # By torchrun, after ten minutes.
    assert launcher.first_failure(failures((7, 1), (607, -signal.SIGKILL))) == (
        0,
        1,
    )
    assert launcher.first_failure(failures((7, 2), (7, -signal.SIGTERM))) == (0, 2)
    # NCCL, after rank 0.
    assert launcher.first_failure(failures((7, 1), (7, -signal.SIGABRT))) == (
        0,
        1,
    )


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_while_waiting_for_the_other_nodes_exits_75_at_once(tmp_path, port, rank):
    node = start(*node_options(rank, port), f"output_dir={tmp_path}")
    wait_for(node, "the nodes meet at")
    node.send_signal(signal.SIGTERM)  # the others are waited for ten minutes
    assert outputs_of([node], EXIT_INTERRUPTED) == [f"mvp: SIGTERM: {launcher.NOT_STARTED}\n"]


@pytest.mark.slow
def test_two_launchers_of_two_ranks_train_one_run_and_stop_together(tmp_path, train, port):
    """Node 0 has options, node 1 SLURM's variables. A SIGTERM to node 1 alone stops, saves and ends both with 75."""
    words = [*LONG, f"output_dir={tmp_path / 'nodes'}"]
    variables = slurm(2, 2, 1, SLURM_GPUS_ON_NODE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    nodes = [start(*words, "--nproc", "2", *node_options(0, port)), start(*words, env=variables)]
    wait_for(nodes[0], "step 3/")
    nodes[1].send_signal(signal.SIGTERM)
    outputs = outputs_of(nodes, EXIT_INTERRUPTED)
    [run] = list_runs(tmp_path / "nodes")
    [checkpoint] = run.checkpoint_list()
    assert len(list(checkpoint.glob("rank_*.safetensors"))) == 4
    assert (
        f"resume={run.dir} --nproc 2 --nnodes 2 --node-rank 0 --master-addr 127.0.0.1" in outputs[0]
    )
    assert train("train.max_steps=3 log.interval=1", dir=tmp_path / "one") == 0
    assert losses(tmp_path / "nodes")[:2] == pytest.approx(losses(tmp_path / "one")[:2], rel=1e-4)


@pytest.mark.slow
def test_srun_tasks_as_ranks_train_one_run(tmp_path, port):
    words = ["train.max_steps=2", f"output_dir={tmp_path}"]
    others = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    outputs_of([start(*words, env=slurm(1, 2, task, **others)) for task in (0, 1)], 0)
    [run] = list_runs(tmp_path)
    assert len(list(run.checkpoint_list()[0].glob("rank_*.safetensors"))) == 2


@pytest.mark.slow
@CAMPAIGN
def test_run_folder_that_nodes_do_not_share_is_a_user_error_on_each(tmp_path, port):
    folders = [tmp_path / str(rank) for rank in (0, 1)]
    for folder in folders:
        folder.mkdir()
    nodes = [start("output_dir=out", *node_options(i, port), cwd=f) for i, f in enumerate(folders)]
    for output in outputs_of(nodes, EXIT_USER_ERROR):
        assert "set output_dir to a folder that all nodes share" in output


@pytest.mark.slow
@CAMPAIGN
def test_killed_rank_ends_a_hanging_rank_of_another_node(tmp_path, port):
    words = [*LONG, "tiny.fault=hang", f"output_dir={tmp_path}"]
    nodes = [start(*node_options(rank, port), *words, fresh_workers=True) for rank in (0, 1)]
    wait_for(nodes[0], "hanging")
    [rank1] = child_pids(nodes[1].pid)
    started = time.monotonic()
    os.kill(rank1, signal.SIGKILL)
    assert "a rank on another node of this job died" in outputs_of(nodes[:1], 1)[0]
    assert time.monotonic() - started < 60
    assert "was killed by SIGKILL" in nodes[1].communicate(timeout=120)[0]


def test_slurm_script_is_valid_bash_with_the_command_and_the_options(tmp_path, capsys):
    words = f"launch slurm {MAGIC} --nodes 2 --gpus 4 '--sbatch=--partition=long gpu' optim.lr=1e-3"
    assert mvp(words, "optim.betas=[0.9, 0.95]") == 0
    text = capsys.readouterr().out
    for line in (
        "--nodes=2",
        "--gpus-per-node=4",
        "--ntasks-per-node=1",
        "--signal=TERM@600",
        "--requeue",
    ):
        assert f"#SBATCH {line}\n" in text
    assert "#SBATCH --partition=long gpu\n" in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize(
    "words, message",
    [
        (["--gpus", "3", "parallel.shard=4"], "2 nodes with 3 GPUs are 6 ranks"),
        (["resume=auto"], "the script sets resume=auto itself"),
        (["optim.lrr=1"], "Did you mean 'optim.lr'?"),
    ],
)
def test_slurm_script_of_a_wrong_config_is_a_user_error(words, message, capsys):
    assert mvp(f"launch slurm {MAGIC} --nodes 2", *words) == EXIT_USER_ERROR
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "code, state, requeued",
    [
        (75, "RUNNING", True),
        (75, "COMPLETING", False),
        (0, "RUNNING", False),
        (2, "RUNNING", False),
    ],
)
def test_slurm_script_requeues_a_running_job_on_exit_75(tmp_path, capsys, code, state, requeued):
    assert mvp(f"launch slurm {MAGIC} 'optim.betas=[0.9, 0.95]'") == 0
    text = capsys.readouterr().out
    for name, body in {
        "srun": f'printf "%s\\n" "$@" > {tmp_path}/srun.txt; exit {code}',
        "squeue": f"echo {state}",
        "scontrol": f'echo "$@" > {tmp_path}/scontrol.txt',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "4711"}
    answer = subprocess.run(["bash"], input=text, text=True, env=environment, check=False)
    assert answer.returncode == code
    words = (tmp_path / "srun.txt").read_text().splitlines()
    run_id = f"run_id={run_name()}-4711"
    assert words[3:] == [
        "mvp_engine.cli",
        "train",
        str(MAGIC),
        "resume=auto",
        run_id,
        "optim.betas=[0.9, 0.95]",
    ]
    assert (tmp_path / "scontrol.txt").exists() == requeued
    if requeued:
        assert (tmp_path / "scontrol.txt").read_text() == "requeue 4711\n"


CLUSTER = {
    "k8s": "--image me/mvp --volume runs:/outputs output_dir=/outputs",
    "skypilot": "--accelerator H100 --volume s3://me/runs:/outputs output_dir=/outputs",
    "ray": "output_dir=/shared/outputs",
}
WORDS = ["train", str(MAGIC), "resume=auto", "run_id=mine"]


def job_of(kind, capsys, more=""):
    """The job file of a training on two nodes with four GPUs, under the run id `mine`."""
    words = f"launch {kind} {MAGIC} --nodes 2 --gpus 4 {CLUSTER[kind]} run_id=mine"
    assert mvp(f"{words} {more}", "optim.betas=[0.9, 0.95]") == 0
    return capsys.readouterr().out


def test_jobset_starts_all_pods_again_after_a_preemption_and_only_then(capsys):
    job = yaml.safe_load(job_of("k8s", capsys))
    assert (job["kind"], job["metadata"]["name"]) == ("JobSet", "mine")
    [node] = job["spec"]["replicatedJobs"]
    spec = node["template"]["spec"]
    assert spec["parallelism"] == spec["completions"] == 2
    assert spec["backoffLimit"] == 0
    exited, disrupted = spec["podFailurePolicy"]["rules"]
    assert exited["action"] == disrupted["action"] == "FailJob"
    assert exited["onExitCodes"]["values"] == [EXIT_INTERRUPTED]
    assert disrupted["onPodConditions"][0]["type"] == "DisruptionTarget"
    policy = job["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 0
    assert policy["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]
    pod = spec["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 600
    [container] = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    args = container["args"]
    assert args[:4] == WORDS
    assert "optim.betas=[0.9, 0.95]" in args
    index = args.index("--nproc")
    nodes = ["--nnodes", "2", "--node-rank", "$(JOB_COMPLETION_INDEX)"]
    assert args[index:] == ["--nproc", "4", *nodes, "--master-addr", "mine-node-0-0.mine"]
    claims = {volume.get("persistentVolumeClaim", {}).get("claimName") for volume in pod["volumes"]}
    assert claims == {None, "runs"}


def test_words_that_look_like_a_variable_stay_as_they_are_in_a_pod(capsys):
    job = yaml.safe_load(job_of("k8s", capsys, "output_dir=\\'/outputs/$(HOME)\\'"))
    [node] = job["spec"]["replicatedJobs"]
    [container] = node["template"]["spec"]["template"]["spec"]["containers"]
    assert "output_dir='/outputs/$$(HOME)'" in container["args"]


def test_sky_task_runs_the_command_on_each_node(capsys, tmp_path):
    task = yaml.safe_load(job_of("skypilot", capsys))
    assert task["num_nodes"] == 2
    assert task["resources"]["accelerators"] == "H100:4"
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [EXIT_INTERRUPTED]
    assert task["file_mounts"]["/outputs"]["source"] == "s3://me/runs"
    (tmp_path / "mvp").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "mvp").chmod(0o755)
    variables = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    variables["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash"], input=task["run"], env=variables, text=True, capture_output=True, check=True
    )
    words = done.stdout.splitlines()
    assert words[:4] == WORDS
    assert words[-6:] == "--nnodes 2 --node-rank 1 --master-addr 10.0.0.1".split()


RAY = """
import types
answers = ANSWERS
started = []

class Remote:
    def __init__(self, function): self.function = function
    def options(self, **_): return self
    def remote(self, *values): return lambda: self.function(*values)

class util:
    class placement_group:
        def __init__(self, bundles, strategy): self.bundles = bundles
        def ready(self): return lambda: None
    def remove_placement_group(group): pass
    def get_node_ip_address(): return "10.0.0.1"

class exceptions:
    class WorkerCrashedError(Exception): pass
    class NodeDiedError(Exception): pass

def init(): pass
def remote(function): return Remote(function)
def get(task):
    return task()
"""


@pytest.mark.parametrize(
    "codes, expected",
    [([75, 75, 0, 0], 0), ([75, 75, 2, 1], 2), (["lost", 1, 0, 0], 0), ([1, 0], 1)],
)
def test_ray_job_trains_again_after_a_preemption_and_only_then(
    capsys, monkeypatch, codes, expected
):
    fake = types.ModuleType("ray")
    exec(RAY.replace("ANSWERS", "[]"), fake.__dict__)
    strategies = types.ModuleType("strategies")
    strategies.PlacementGroupSchedulingStrategy = lambda *_, **__: None
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)
    commands = []

    def run(words):
        commands.append(words)
        code = codes[len(commands) - 1]
        if code == "lost":
            raise fake.exceptions.NodeDiedError("gone")
        return SimpleNamespace(returncode=code)

    monkeypatch.setattr(subprocess, "run", run)
    text = job_of("ray", capsys)
    with pytest.raises(SystemExit) as ended:
        exec(compile(text, "job.py", "exec"), {"__name__": "__main__"})
    assert ended.value.code == expected
    assert len(commands) == len(codes)
    assert commands[0][1:7] == ["-m", "mvp_engine.cli", *WORDS]
    assert commands[1][-6:] == "--nnodes 2 --node-rank 1 --master-addr 10.0.0.1".split()


@CAMPAIGN
def test_preempted_ray_job_on_a_local_cluster_continues_bit_equal(tmp_path, port, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # of this cluster, on the loopback interface
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as Ray sets it in a task with one CPU
    outputs = tmp_path / "outputs"
    words = ["run_id=one", "log.interval=1", "train.max_steps=40"]
    slow = [*words, "tiny.step_seconds=0.2", f"output_dir={outputs}"]
    job = launcher.script("ray", str(TINY), slow, launcher.ClusterJob(gpus=0))
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "job.py").write_text(job)
    ray = ["-m", "ray.scripts.scripts"]
    server, local = "127.0.0.1:8278", "--node-ip-address 127.0.0.1 --dashboard-host 127.0.0.1"
    more = f"--head --block --num-cpus 2 --port {port} --dashboard-port 8278 --disable-usage-stats"
    folder = ["--temp-dir", f"/tmp/ray-{port}"]  # short: it holds sockets
    head = spawn(*ray, "start", *local.split(), *more.split(), *folder, fresh=True)
    try:
        wait_until(lambda: answers(f"http://{server}/api/version"), 90)
        submit = ["job", "submit", "--address", f"http://{server}", "--working-dir"]
        words_of_job = [str(tmp_path / "job"), "--", sys.executable, "job.py"]
        submitted = spawn(*ray, *submit, *words_of_job, fresh=True)
        lock, metrics = outputs / "one" / ".lock", outputs / "one" / "metrics.jsonl"
        wait_until(lambda: metrics.is_file() and '"step": 8' in metrics.read_text(), 90)
        os.kill(int(lock.read_text().split()[1]), signal.SIGTERM)
        output, _ = submitted.communicate(timeout=120)
        assert submitted.returncode == 0, output
        assert "preempted: the training continues" in output
    finally:
        os.killpg(head.pid, signal.SIGTERM)
        head.communicate(timeout=60)
        shutil.rmtree(f"/tmp/ray-{port}", ignore_errors=True)
    outputs_of([start(*words, f"output_dir={tmp_path / 'straight'}")], 0)
    assert losses(tmp_path / "straight") == losses(outputs)


def answers(url):
    try:
        return urllib.request.urlopen(url, timeout=2).status == 200
    except OSError:
        return False


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.parametrize(
    "words, message",
    [
        ("k8s --image me/mvp", "is on no volume"),
        ("k8s --image me/mvp --volume runs:/data output_dir=/outputs", "is on no volume"),
        ("k8s --volume runs:/outputs output_dir=/outputs", "--image: a container image"),
        ("k8s --image a --volume /outputs", "--volume /outputs: write SOURCE:/path"),
        ("k8s --image a --sbatch=-x", "--sbatch is of mvp launch slurm, not of k8s"),
        ("skypilot --volume a:/outputs output_dir=/outputs", "--accelerator: which GPU"),
        ("ray", "Give the absolute path of a folder that all nodes share"),
        ("ray --image a output_dir=/outputs", "--image is of mvp launch k8s and skypilot, not of"),
        ("ray output_dir=/outputs --gpus 3 --nodes 2 parallel.shard=4", "2 nodes with 3 GPUs"),
    ],
)
def test_job_that_would_lose_its_checkpoints_or_not_start_is_a_user_error(words, message, capsys):
    kind, *more = words.split()
    assert mvp(f"launch {kind} {MAGIC}", *more) == EXIT_USER_ERROR
    assert message in capsys.readouterr().err


def run_name():
    line = next(line for line in MAGIC.read_text().splitlines() if line.startswith("run_name:"))
    return shlex.split(line, comments=True)[1]


def work_of_uneven_nodes():
    """How often this rank did the work of its node: the first has three ranks, the second has one."""
    calls = list[int]()
    with pytest.MonkeyPatch.context() as patch:  # the ranks serve other tests, too
        if os.environ["RANK"] == "3":
            patch.setenv("LOCAL_RANK", "0")
        patch.setenv("LOCAL_WORLD_SIZE", "1" if os.environ["RANK"] == "3" else "3")
        world = World.join("cpu")
        world.once_per_node(lambda: calls.append(1), "uneven")
        world.close()
    return len(calls)


def test_work_once_per_node_ends_on_nodes_with_different_numbers_of_ranks(ranks4):
    assert ranks4.run(work_of_uneven_nodes) == [1, 0, 0, 1]

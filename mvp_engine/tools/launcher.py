"""Commands that run a config on ranks: train, evaluate, check, profile.

One rank runs in this process; several, or several nodes, run under torchrun, which is also started from this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import logging
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from mvp_engine.config import Composed, Config, compose
from mvp_engine.config.compose import read_draft, word
from mvp_engine.errors import (
    ELASTIC,
    ERROR_FILE,
    EXIT_BUG,
    EXIT_CODE_FILE,
    EXIT_INTERRUPTED,
    EXIT_TRY_AGAIN,
    EXIT_USER_ERROR,
    JOB_ID,
    TRY_AGAIN_FILE,
    UserError,
    count,
)
from mvp_engine.process.signals import StopSignals, without_collections
from mvp_engine.runs import open_run
from mvp_engine.tools.config import config_or_run, evaluation_words, names_run
from mvp_engine.tools.nodes import Nodes, nodes_of, use_interface_to

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

# Seconds that torchrun waits for its workers after a stop signal: a long step and a large checkpoint.
SHUTDOWN_SECONDS = 600
# Seconds that a node waits for the others to start.
JOIN_SECONDS = 600
NOT_STARTED = "stopped before the ranks started; launch the same command again."
# Where the ranks of the first and only attempt keep their keys (`World.join`).
STORE_PREFIX = "mvp_engine/0"
# A rank that ends with one of these exit codes has printed why.
SAID_WHY = (EXIT_BUG, EXIT_USER_ERROR, EXIT_INTERRUPTED)
SIGNALLED = 128  # plus the signal's number: the exit code of a job with a killed rank, as in shells
# Signals that no rank gets since another one has failed.
KILLS = (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS)


def train(config: str, overrides: list[str], **nodes: Any) -> int:
    return _launch(config, overrides, nodes)


# The shipped configs of each method, and overrides to them.
METHODS: dict[str, dict[str, list[str]]] = {
    "sft": {"lora": ["sft/lora"], "full": ["sft/full"]},
    "dpo": {"lora": ["preference/gpu1"], "full": ["preference/gpu8"]},
    "rm": {"lora": ["reward_model/gpu1"], "full": ["reward_model/gpu8"]},
    "distil": {
        "full": ["distil/gpu1"],
        "lora": ["distil/gpu1", "lora.rank=16", "lora.target_modules=[llm]", "optim.lr=1e-4"],
    },
    "grpo": {"lora": ["math_rl/lora"], "full": ["math_rl/lora", "lora=null", "optim.lr=1e-6"]},
}


def fine_tune(
    command: str,
    overrides: list[str],
    model: str | None,
    data: str | None,
    eval_data: str | None,
    *,
    teacher: str | None,
    engine: str | None,
    **options: Any,
) -> int:
    """Train by the shipped config of a method; prints the `mvp train` command that it stands for."""
    flags = [name for name in ("lora", "qlora", "full") if options.pop(name)]
    if len(flags) > 1:
        raise UserError(f"mvp {command}: --{' and --'.join(flags)} exclude each other")
    way = flags[0] if flags else next(iter(METHODS[command]))
    config, *words = METHODS[command]["lora" if way == "qlora" else way]
    nproc = nodes_of(Namespace(**options)).nproc
    if way == "full" and read_draft(config).values.get("parallel", {}).get("shard") not in (
        None,
        1,
    ):
        words.append(f"parallel.shard={nproc}")
    if way == "qlora":
        words.append("model.quantize={llm:nf4}")
    for flag, value, of in (("teacher", teacher, "distil"), ("engine", engine, "grpo")):
        if value is not None and command != of:
            raise UserError(f"mvp {command}: --{flag} is of mvp {of}")
    given = {"model.path": model, "distil.teacher": teacher, "engine": engine}
    if engine is not None:
        file, colon, name = engine.partition(":")
        given["engine"] = f"{Path(file).resolve()}{colon}{name}" if file.endswith(".py") else engine
    (rows,) = [key for key in read_draft(config).missing if key.startswith("data.sources.")]
    given[rows] = data
    if eval_data is not None:
        given |= {"data.sources.held_out.path": eval_data, "data.sources.held_out.split": "eval"}
        words.append(f"{rows.removesuffix('.path')}.hold_out=null")
    words += [word(key, value) for key, value in given.items() if value is not None]
    words += overrides
    flag_of = {"model.path": "--model", rows: "--data", "distil.teacher": "--teacher"}
    if missing := [flag_of.get(key, f"{key}=...") for key in read_draft(config, words).missing]:
        raise UserError(f"mvp {command} needs {' and '.join(missing)}")
    print(shlex.join(["mvp", "train", config, *words]), file=sys.stderr, flush=True)
    return _launch(config, words, options)


def evaluate(config: str, overrides: list[str], root: str, **options: Any) -> int:
    """Evaluate the best checkpoint of a run, or of a config's newest run, unless an override names another one."""
    config, overrides = config_or_run(config, overrides, Path(root))
    words = evaluation_words(options)  # takes its own out: those of nodes are left
    return _launch(config, [*words, "resume=auto", *overrides], options)


def _launch(config: str, overrides: list[str], options: dict[str, Any]) -> int:
    nodes = nodes_of(Namespace(**options))
    composed = compose(config, overrides)  # errors are printed once, and before the import of torch
    words = ["--config", config, *overrides]
    return run_module("mvp_engine.launch", nodes, words, composed)


def check(
    config: str, overrides: list[str], step: int | None, root: str, *, as_json: bool, **nodes: Any
) -> int:
    """Check a config; or, of a run, the step that was skipped or failed."""
    if step is not None or names_run(config):
        from mvp_engine.tools.replay import replay

        if any(value is not None for name, value in nodes.items() if name != "nproc"):
            raise UserError("the step of a run is repeated on one machine: leave --nnodes out")
        return replay(config, overrides, root, step, nodes["nproc"], as_json)
    with tempfile.TemporaryDirectory(prefix="mvp-check-") as folder:
        arguments = ["--config", config, "--folder", folder]
        if as_json:
            arguments.append("--quiet")
        place = nodes_of(Namespace(**nodes))
        code = run_module("mvp_engine.tools.check.stages", place, [*arguments, *overrides])
        if as_json and (Path(folder) / "facts.json").exists():  # only on the node of rank 0
            from mvp_engine.tools.check.record import read_facts

            print(json.dumps(read_facts(Path(folder)), indent=2))
    return code


def profile(
    config: str,
    overrides: list[str],
    *,
    out: str,
    steps: int,
    first: int,
    step: int | None,
    **nodes: Any,
) -> int:
    """Profile steps of a config; or one step of a run, on as many ranks as it had."""
    if steps < 1 or first < 1 or (step or 1) < 1:
        raise UserError("--steps, --first and --step: at least 1")
    place = nodes_of(Namespace(**nodes))
    replayed = []
    if step is not None:
        from mvp_engine.tools.replay import config_of

        run = open_run(config, Path("outputs"))
        config, replayed, steps, first = (
            str(config_of(run, step)),
            ["--replayed", str(run.dir)],
            1,
            step,
        )
        place = Nodes(nodes["nproc"] or run.info.get("setup", {}).get("ranks", 1))
    words = [
        "--config",
        config,
        *replayed,
        "--out",
        out,
        "--steps",
        str(steps),
        "--first",
        str(first),
    ]
    return run_module("mvp_engine.tools.profile", place, [*words, *overrides])


def run_module(
    module: str, nodes: Nodes, arguments: list[str], composed: Composed | None = None
) -> int:
    """Run `module.main(arguments)` on the ranks of this node; returns its exit code.

    One rank runs in this process, and gets the config that this process has `composed`.
    """
    if nodes.count == 1 and nodes.nproc == 1:
        with (
            without_collections(),
            created_meanwhile(composed.config.device if composed else "cpu"),
        ):
            imported = importlib.import_module(module)
        return int(imported.main(arguments, composed) if composed else imported.main(arguments))
    while (
        True
    ):  # ranks that want to start again (`TryAgain`) are started again if all are on this node
        code = _torchrun(module, nodes, arguments)
        if code != EXIT_TRY_AGAIN or nodes.count > 1:
            return code


def _torchrun(module: str, nodes: Nodes, arguments: list[str]) -> int:
    """Run torchrun in this process; returns the exit code of this node's rank that failed first."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nodes.nproc)))
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import parse_args, run

    _silence_torchrun()
    words = [*nodes.torchrun_options(JOIN_SECONDS), "-m", module, *arguments]
    with tempfile.TemporaryDirectory(prefix="mvp-") as folder, contextlib.ExitStack() as stack:
        errors = Path(folder) / ERROR_FILE
        stack.callback(_print_errors, errors)
        stack.enter_context(StopSignals(leave=lambda: _leave(errors), idle=NOT_STARTED))
        if nodes.count > 1:
            where = f"{nodes.address}:{nodes.port}"
            print(f"mvp: {nodes}; the nodes meet at {where}", file=sys.stderr, flush=True)
            nodes.wait_for_node_0(JOIN_SECONDS)
            use_interface_to(nodes.address)
        # torchrun does not report the exit code of a worker that a signal stopped; its first rank writes it here.
        exit_code_file = Path(folder) / "exit_code"
        os.environ[EXIT_CODE_FILE] = str(exit_code_file)
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_SECONDS))
        if nodes.least is not None:
            os.environ[ELASTIC] = f"{nodes.address}:{nodes.port}"
            # A store that agents share is not announced to a node that joins later: it would wait for it in vain.
            os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        try:
            run(parse_args(words))
        except ChildFailedError as error:
            if (again := errors.with_name(TRY_AGAIN_FILE)).is_file():
                os.environ[JOB_ID] = again.read_text()  # they find their run by it
                return EXIT_TRY_AGAIN
            rank, ended = first_failure(error.failures)
            if nodes.rank > 0 and nodes.least is None:
                _record_failure(nodes, rank)
            if ended not in SAID_WHY:
                with open(errors, "a") as out:
                    out.write(f"mvp: error: {_how_it_ended(rank, ended)}\n")
            return (ended if ended >= 0 else SIGNALLED - ended) or EXIT_BUG
        except RendezvousError as error:
            with open(errors, "a") as out:
                out.write(f"mvp: error: {nodes.lost_rendezvous(str(error))}\n")
            return EXIT_BUG
        except DistError as error:
            raise UserError(nodes.no_meeting(JOIN_SECONDS, str(error))) from None
        except SignalException:
            if exit_code_file.is_file():
                return int(exit_code_file.read_text())
            return EXIT_BUG if errors.is_file() else EXIT_INTERRUPTED
        errors.unlink(missing_ok=True)  # of ranks that torchrun has restarted
    return 0


def first_failure(failures: Mapping[int, ProcessFailure]) -> tuple[int, int]:
    """The rank that failed first, and its exit code or, negative, the signal that ended it.

    Of ranks that ended in the same second, that is the killed one: the others ended since it was.
    """
    exits = {rank: failure.exitcode for rank, failure in failures.items()}
    rank = min(exits, key=lambda one: (failures[one].timestamp, exits[one] not in KILLS))
    return rank, exits[rank]


def _record_failure(nodes: Nodes, rank: int) -> None:
    """Record a rank that died without a message, so that ranks on other nodes do not wait for it in a collective.

    Node 0 hosts the store, and other nodes notice when it is gone.
    """
    from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
    from torch.distributed.distributed_c10d import PrefixStore

    from mvp_engine.process.watchdog import record_death

    wait = timedelta(seconds=10)
    with contextlib.suppress(DistError):
        store = TCPStore(nodes.address, nodes.port, is_master=False, timeout=wait)
        record_death(PrefixStore(STORE_PREFIX, store), rank, "the rank died", EXIT_BUG)


def _silence_torchrun() -> None:
    """The last line of a failed job is the error of a rank, not torchrun's account of it (LOGLEVEL brings it back)."""
    if "LOGLEVEL" not in os.environ:
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("torch.distributed.elastic"):
                logging.getLogger(name).setLevel(logging.CRITICAL)


def _how_it_ended(rank: int, exitcode: int) -> str:
    if exitcode >= 0:
        return f"rank {rank} ended with exit code {exitcode} and no message"
    name = signal.Signals(-exitcode).name
    memory = ": the kernel does that when memory runs out (see dmesg)" if name == "SIGKILL" else ""
    return (
        f"rank {rank} was killed by {name}{memory}. resume=auto continues from the last checkpoint"
    )


def _leave(errors: Path) -> None:
    """Kill the ranks, print why some of them had failed by then, and remove the files of this job."""
    process = os.getpid()
    for child in Path(f"/proc/{process}/task/{process}/children").read_text().split():
        with contextlib.suppress(ProcessLookupError):  # torchrun has read its exit code since
            os.kill(int(child), signal.SIGKILL)
    _print_errors(errors)
    shutil.rmtree(errors.parent, ignore_errors=True)


def _print_errors(file: Path) -> None:
    """Print why ranks failed, after all that other ranks printed meanwhile."""
    if file.is_file():
        print(file.read_text(), end="", file=sys.stderr, flush=True)


# The CUDA context of this process, created by a thread while the process imports torch: both take seconds.

DRIVER = "libcuda.so.1"


@contextmanager
def created_meanwhile(device: str) -> Iterator[None]:
    """A context for imports, in which a thread creates the context that torch will use, unless `device` is cpu.

    The thread has ended when the context is left, also by an error: no fork and no exit of the process meets it.
    """
    if device == "cpu":
        yield
        return
    thread = threading.Thread(target=_create, name="mvp-cuda-context", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _create() -> None:
    """Retain the primary context of this rank's GPU; where it cannot be created, torch will say why."""
    try:
        driver = ctypes.CDLL(DRIVER)  # its calls release the GIL
    except OSError:
        return  # no GPU
    device = ctypes.c_int()
    context = ctypes.c_void_p()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), local_rank):
        return
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


SCRIPT = """#!/bin/bash
{options}

# SLURM sends SIGTERM {grace} s before the time is over: the training saves and exits with {interrupted}.
# The job is then queued again, under the same id, and resume=auto continues the run of this id.
# A job that scancel stops is not RUNNING any more, and is not queued again.
# There is one task per node, which starts a rank for each of its GPUs.
srun --wait=120 {command}
code=$?
if [ "$code" -eq {interrupted} ] && [ "$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)" = RUNNING ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


# The driver of a Ray job: the training of each node is a Ray task, so it moves to another node when its own is lost.
RAY_SCRIPT = """\
# ray job submit --address http://HEAD:8265 --submission-id {name} --working-dir . -- python FILE
import subprocess
import sys

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

NODES = {nodes}
RESOURCES = {resources}  # of each node
COMMAND = {command}
PREEMPTED = {interrupted}  # exit code of a training that was stopped and has saved


def train(rank, address):
    words = [sys.executable, *COMMAND]
    if NODES > 1:
        words += ["--nnodes", str(NODES), "--node-rank", str(rank), "--master-addr", address]
    return subprocess.run(words).returncode


def exit_code(task):
    try:
        return ray.get(task)
    except (ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError) as error:
        print("a node is lost:", error, file=sys.stderr)
        return PREEMPTED


def attempt():
    group = ray.util.placement_group([RESOURCES] * NODES, strategy="STRICT_SPREAD")
    print("waiting for", NODES, "x", RESOURCES, flush=True)
    ray.get(group.ready())

    def on(rank, function):
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
        needs = {{"num_cpus": RESOURCES["CPU"], "num_gpus": RESOURCES.get("GPU", 0)}}
        return ray.remote(function).options(scheduling_strategy=place, max_retries=0, **needs)

    address = ray.get(on(0, ray.util.get_node_ip_address).remote())
    codes = [exit_code(task) for task in [on(rank, train).remote(rank, address) for rank in range(NODES)]]
    ray.util.remove_placement_group(group)
    return codes


ray.init()
while PREEMPTED in (codes := attempt()):
    print("preempted: the training continues from its last checkpoint", flush=True)
sys.exit(max(codes))
"""

# Which kinds of cluster have an option of `mvp launch` that not all have.
OPTIONS_OF = {
    "time": ["slurm"],
    "sbatch": ["slurm"],
    "grace": ["slurm", "k8s"],
    "image": ["k8s", "skypilot"],
    "volume": ["k8s", "skypilot"],
    "accelerator": ["skypilot"],
}


@dataclass(frozen=True)
class ClusterJob:
    nodes: int = 1
    gpus: int = 8  # per node; 0: a CPU job
    cpus: int | None = None  # per node
    time: str | None = None  # of sbatch, default: a day
    # Seconds before the end of the time: a long step and a large checkpoint. Default: 600.
    grace: int | None = None
    sbatch: list[str] = field(default_factory=list)  # more options of sbatch, as given
    image: str | None = None  # of the container
    volume: list[str] = field(default_factory=list)  # SOURCE:/path
    accelerator: str | None = None  # name of the GPU

    @property
    def grace_seconds(self) -> int:
        return 600 if self.grace is None else self.grace

    @property
    def mounts(self) -> dict[str, str]:
        """The source of each path at which a volume is mounted."""
        mounts = {}
        for volume in self.volume:
            source, _, path = volume.rpartition(":")
            if not source or not path.startswith("/") or path.startswith("//"):
                raise UserError(f"--volume {volume}: write SOURCE:/path, the path in the container")
            mounts[path] = source
        return mounts


def print_script(kind: str, config: str, overrides: list[str], **options: Any) -> None:
    print(script(kind, config, overrides, ClusterJob(**options)), end="")


def script(kind: str, config_file: str, overrides: list[str], job: ClusterJob) -> str:
    """The text of the job. The config and the parallel layout are checked now, not after hours in a queue."""
    if any(word.startswith("resume=") for word in overrides):
        raise UserError("resume=: the script sets resume=auto itself, to continue after a requeue")
    if job.nodes < 1 or job.gpus < 0:
        raise UserError("--nodes: at least 1; --gpus: at least 0, for a job without GPUs")
    for option, kinds in OPTIONS_OF.items():
        if getattr(job, option) and kind not in kinds:
            raise UserError(f"--{option} is of mvp launch {' and '.join(kinds)}, not of {kind}")
    config = compose(config_file, overrides).config
    _check_layout(config, job)
    if kind == "slurm":
        return SCRIPT.format(
            options="\n".join(f"#SBATCH {option}" for option in _options(config, job)),
            command=_command(config_file, overrides, config),
            grace=job.grace_seconds,
            interrupted=EXIT_INTERRUPTED,
        )
    name = config.run_id or f"{config.run_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    _check_output_dir(kind, config.output_dir, job)
    words = ["train", config_file, "resume=auto", f"run_id={name}", *overrides]
    words += ["--nproc", str(max(job.gpus, 1))]
    if kind == "ray":
        resources = {"CPU": job.cpus or 1, **({"GPU": job.gpus} if job.gpus else {})}
        command = ["-m", "mvp_engine.cli", *words]
        places = {"nodes": job.nodes, "resources": resources, "command": command}
        return RAY_SCRIPT.format(name=name, interrupted=EXIT_INTERRUPTED, **places)
    if job.image is None and kind == "k8s":
        raise UserError("--image: a container image with mvp-engine; see docs/install.md, Docker")
    return {"k8s": _jobset, "skypilot": _sky_task}[kind](name, words, job)


def _check_output_dir(kind: str, folder: str, job: ClusterJob) -> None:
    """A job starts again in another container or on another machine, and must find its checkpoints there."""
    if kind == "ray":
        if not Path(folder).is_absolute():
            raise UserError(
                f"output_dir={folder}: a Ray job runs in a folder that is deleted with it. Give the absolute path of "
                "a folder that all nodes share"
            )
    elif not any(Path(folder).is_relative_to(path) for path in job.mounts):
        raise UserError(
            f"output_dir={folder} is on no volume, so a preempted training would lose its checkpoints. Add --volume "
            "SOURCE:/outputs and output_dir=/outputs"
        )


def _jobset(name: str, words: list[str], job: ClusterJob) -> str:
    """A JobSet with one pod per node. A preempted pod, or one that saved and ended with 75, restarts all of them."""
    name = _dns_name(name)
    words = [word.replace("$(", "$$(") for word in words]  # Kubernetes replaces $(NAME)
    if job.nodes > 1:
        # JobSet gives each pod the host name NAME-JOB-0-INDEX in the subdomain NAME.
        words = [*words, "--nnodes", str(job.nodes), "--node-rank", "$(JOB_COMPLETION_INDEX)"]
        words += ["--master-addr", f"{name}-node-0-0.{name}"]
    resources: dict[str, Any] = {"nvidia.com/gpu": job.gpus} if job.gpus else {}
    resources |= {"cpu": job.cpus} if job.cpus else {}
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    source = {"fieldRef": {"fieldPath": index}}
    volumes: list[Any] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]  # of DataLoader, NCCL
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    for number, (path, claim) in enumerate(job.mounts.items()):
        volumes.append({"name": f"v{number}", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": f"v{number}", "mountPath": path})
    container = {
        "name": "train",
        "image": job.image,
        "command": ["mvp"],
        "args": words,
        "env": [{"name": "JOB_COMPLETION_INDEX", "valueFrom": source}],
        "resources": {"limits": resources},
        "volumeMounts": mounts,
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace_seconds,
        "containers": [container],
        "volumes": volumes,
    }
    exit_codes = {"containerName": "train", "operator": "In", "values": [EXIT_INTERRUPTED]}
    preempted = {"type": "DisruptionTarget", "status": "True"}
    rules = [
        {"action": "FailJob", "onExitCodes": exit_codes},
        {"action": "FailJob", "onPodConditions": [preempted]},
    ]
    spec = {
        "parallelism": job.nodes,
        "completions": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": rules},
        "template": {"spec": pod},
    }
    restart = {
        "name": "preempted",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    # Blocking: no pod starts before the last of the old ones has saved and left the run.
    policy = {"maxRestarts": 0, "restartStrategy": "BlockingRecreate", "rules": [restart]}
    jobs = [{"name": "node", "replicas": 1, "template": {"spec": spec}}]
    return _yaml(
        apiVersion="jobset.x-k8s.io/v1alpha2",
        kind="JobSet",
        metadata={"name": name},
        spec={"failurePolicy": policy, "replicatedJobs": jobs},
    )


def _dns_name(name: str) -> str:
    """`name` as a part of the host names of pods, which have at most 63 characters."""
    start, end = name[:-16], name[-16:]  # the end is the time
    text = re.sub(r"[^a-z0-9]+", "-", f"{start[:30]}{end}".lower()).strip("-")
    return text if text[:1].isalpha() else f"run-{text}"


def _sky_task(name: str, words: list[str], job: ClusterJob) -> str:
    if job.gpus and job.accelerator is None:
        raise UserError("--accelerator: which GPU, such as H100; or --gpus 0")
    command = shlex.join(["mvp", *words])
    if job.nodes > 1:
        command += f' --nnodes {job.nodes} --node-rank "$SKYPILOT_NODE_RANK"'
        command += ' --master-addr "$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"'
    recovery = {"strategy": "EAGER_NEXT_REGION", "recover_on_exit_codes": [EXIT_INTERRUPTED]}
    resources: dict[str, Any] = {"job_recovery": recovery}
    resources |= {"accelerators": f"{job.accelerator}:{job.gpus}"} if job.gpus else {}
    resources |= {"cpus": f"{job.cpus}+"} if job.cpus else {}
    resources |= {"image_id": f"docker:{job.image}"} if job.image else {}
    task: dict[str, Any] = {"name": _dns_name(name), "num_nodes": job.nodes, "workdir": "."}
    task["resources"] = resources
    buckets = {path: source for path, source in job.mounts.items() if "://" in source}
    disks = {path: source for path, source in job.mounts.items() if "://" not in source}
    if buckets:
        mode = {"mode": "MOUNT_CACHED"}
        task["file_mounts"] = {path: {"source": source, **mode} for path, source in buckets.items()}
    if disks:
        task["volumes"] = disks
    if not job.image:
        task["setup"] = "pip install 'mvp-engine[all]'"
    return _yaml(**task, run=command)


def _yaml(**values: Any) -> str:
    return yaml.safe_dump(values, sort_keys=False, width=1000)


def _check_layout(config: Config, job: ClusterJob) -> None:
    parallel = config.parallel
    ranks = job.nodes * max(job.gpus, 1)
    shards = parallel.shard * parallel.context * parallel.ulysses * parallel.tensor
    shards *= parallel.pipeline
    if ranks % shards:
        raise UserError(
            f"{count(job.nodes, 'node')} with {count(job.gpus, 'GPU')} are {count(ranks, 'rank')}. They are not "
            f"divisible into parallel.shard={parallel.shard}, context={parallel.context}, ulysses={parallel.ulysses}, "
            f"tensor={parallel.tensor} and pipeline={parallel.pipeline}: change --nodes, --gpus or these keys"
        )


def _options(config: Config, job: ClusterJob) -> list[str]:
    options = [
        f"--job-name={config.run_name}",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        f"--time={job.time or '24:00:00'}",
        f"--signal=TERM@{job.grace_seconds}",
        "--requeue",
        "--open-mode=append",
        "--output=slurm-%j.out",
        f"--chdir={shlex.quote(str(Path.cwd()))}",
    ]
    if job.gpus:
        options.insert(3, f"--gpus-per-node={job.gpus}")
    if job.cpus:
        options.insert(3, f"--cpus-per-task={job.cpus}")
    return options + job.sbatch


def _command(config_file: str, overrides: list[str], config: Config) -> str:
    """The training, as the interpreter that printed the script runs it."""
    words = [sys.executable, "-m", "mvp_engine.cli", "train", config_file, "resume=auto"]
    run_id = f'run_id={shlex.quote(config.run_name)}-"$SLURM_JOB_ID"'
    return f"{shlex.join(words)} {run_id} {shlex.join(overrides)}".rstrip()

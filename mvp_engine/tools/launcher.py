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
import shlex
import shutil
import signal
import sys
import tempfile
import threading
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mvp_engine.config import Composed, Config, compose
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
from mvp_engine.tools.config import config_or_run, names_run
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


def evaluate(config: str, overrides: list[str], root: str, **nodes: Any) -> int:
    """Evaluate the best checkpoint of a run, or of a config's newest run, unless an override names another one."""
    config, overrides = config_or_run(config, overrides, Path(root))
    return _launch(config, ["workflow=evaluate", "resume=auto", *overrides], nodes)


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


@dataclass(frozen=True)
class SlurmJob:
    nodes: int = 1
    gpus: int = 8  # per node; 0: a CPU job
    cpus: int | None = None  # per node
    time: str = "24:00:00"
    grace: int = 600  # seconds before the end of the time: a long step and a large checkpoint
    options: list[str] = field(default_factory=list)  # more options of sbatch, as given


def print_script(config: str, overrides: list[str], **job: Any) -> None:
    print(script(config, overrides, SlurmJob(**job)), end="")


def script(config_file: str, overrides: list[str], job: SlurmJob) -> str:
    """The text of the script. The config and the parallel layout are checked now, not after hours in a queue."""
    if any(word.startswith("resume=") for word in overrides):
        raise UserError("resume=: the script sets resume=auto itself, to continue after a requeue")
    if job.nodes < 1 or job.gpus < 0:
        raise UserError("--nodes: at least 1; --gpus: at least 0, for a job without GPUs")
    config = compose(config_file, overrides).config
    _check_layout(config, job)
    return SCRIPT.format(
        options="\n".join(f"#SBATCH {option}" for option in _options(config, job)),
        command=_command(config_file, overrides, config),
        grace=job.grace,
        interrupted=EXIT_INTERRUPTED,
    )


def _check_layout(config: Config, job: SlurmJob) -> None:
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


def _options(config: Config, job: SlurmJob) -> list[str]:
    options = [
        f"--job-name={config.run_name}",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        f"--time={job.time}",
        f"--signal=TERM@{job.grace}",
        "--requeue",
        "--open-mode=append",
        "--output=slurm-%j.out",
        f"--chdir={shlex.quote(str(Path.cwd()))}",
    ]
    if job.gpus:
        options.insert(3, f"--gpus-per-node={job.gpus}")
    if job.cpus:
        options.insert(3, f"--cpus-per-task={job.cpus}")
    return options + job.options


def _command(config_file: str, overrides: list[str], config: Config) -> str:
    """The training, as the interpreter that printed the script runs it."""
    words = [sys.executable, "-m", "mvp_engine.cli", "train", config_file, "resume=auto"]
    run_id = f'run_id={shlex.quote(config.run_name)}-"$SLURM_JOB_ID"'
    return f"{shlex.join(words)} {run_id} {shlex.join(overrides)}".rstrip()

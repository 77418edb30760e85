"""Commands that run a config on the ranks of this machine: train, evaluate, check, profile.

One rank runs in this process; several run under torchrun, which is also started from this process.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import tempfile
from pathlib import Path

from mvp_engine.errors import EXIT_BUG, EXIT_CODE_FILE, UserError
from mvp_engine.process.signals import StopSignals

# Seconds that torchrun waits for its workers after a stop signal: a long step and a large checkpoint.
SHUTDOWN_SECONDS = 600


def train(config: str, overrides: list[str], nproc: int) -> int:
    return run_module("mvp_engine.launch", nproc, ["--config", config, *overrides])


def evaluate(config: str, overrides: list[str], nproc: int) -> int:
    """Evaluate the newest run's newest checkpoint, unless an override names another one."""
    words = ["workflow=evaluate", "resume=auto", *overrides]
    return run_module("mvp_engine.launch", nproc, ["--config", config, *words])


def check(config: str, overrides: list[str], nproc: int, *, as_json: bool) -> int:
    with tempfile.TemporaryDirectory(prefix="mvp-check-") as folder:
        arguments = ["--config", config, "--folder", folder]
        if as_json:
            arguments.append("--quiet")
        code = run_module("mvp_engine.tools.check", nproc, [*arguments, *overrides])
        if as_json:
            from mvp_engine.tools.check import read_facts

            print(json.dumps(read_facts(Path(folder)), indent=2))
    return code


def profile(
    config: str, overrides: list[str], nproc: int, *, out: str, steps: int, first: int
) -> int:
    if steps < 1 or first < 1:
        raise UserError("--steps and --first: at least 1")
    arguments = ["--config", config, "--out", out, "--steps", str(steps), "--first", str(first)]
    return run_module("mvp_engine.tools.profile", nproc, [*arguments, *overrides])


def run_module(module: str, nproc: int, arguments: list[str]) -> int:
    """Run `module.main(arguments)` on `nproc` ranks; returns its exit code."""
    if nproc < 1:
        raise UserError(f"--nproc {nproc}: at least one process is needed")
    if nproc == 1:
        return int(importlib.import_module(module).main(arguments))
    return _torchrun(module, nproc, arguments)


def _torchrun(module: str, nproc: int, arguments: list[str]) -> int:
    """Run torchrun in this process; returns the exit code of the rank that failed first."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    words = ["--standalone", f"--nproc_per_node={nproc}", "-m", module, *arguments]
    with tempfile.TemporaryDirectory(prefix="mvp-") as folder, StopSignals(leave=_kill_children):
        # torchrun does not report the exit code of a worker that a signal stopped; rank 0 writes it here.
        exit_code_file = Path(folder) / "exit_code"
        os.environ[EXIT_CODE_FILE] = str(exit_code_file)
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_SECONDS))
        try:
            run(parse_args(words))
        except ChildFailedError as error:
            return error.get_first_failure()[1].exitcode or EXIT_BUG
        except SignalException:
            return int(exit_code_file.read_text()) if exit_code_file.is_file() else EXIT_BUG
    return 0


def _kill_children() -> None:
    process = os.getpid()
    for child in Path(f"/proc/{process}/task/{process}/children").read_text().split():
        os.kill(int(child), signal.SIGKILL)

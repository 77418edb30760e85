"""`mvp launch slurm`: an sbatch script for a config, which is queued again when its time is over."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mvp_engine.config import Config, compose
from mvp_engine.errors import EXIT_INTERRUPTED, UserError, count

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
    fits = ranks % shards == 0 and parallel.replicate in (-1, ranks // shards)
    if not fits:
        raise UserError(
            f"{count(job.nodes, 'node')} with {count(job.gpus, 'GPU')} are {count(ranks, 'rank')}. They are not "
            f"divisible into parallel.shard={parallel.shard}, context={parallel.context}, ulysses={parallel.ulysses}, "
            f"tensor={parallel.tensor}, pipeline={parallel.pipeline} and replicate={parallel.replicate}: change "
            "--nodes, --gpus or these keys"
        )


def _options(config: Config, job: SlurmJob) -> list[str]:
    options = [
        f"--job-name={config.project.name}",
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
    run_id = f'project.run_id={shlex.quote(config.project.name)}-"$SLURM_JOB_ID"'
    return f"{shlex.join(words)} {run_id} {shlex.join(overrides)}".rstrip()

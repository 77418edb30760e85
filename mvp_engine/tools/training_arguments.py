"""Commands that run a config on ranks, predict it, or look into its runs: train to replay."""

from __future__ import annotations

import argparse
from typing import Any

from mvp_engine.tools.command_parsers import (
    CONFIG,
    add_command,
    add_config_command,
    add_group,
    add_json_option,
    add_overrides,
)
from mvp_engine.tools.estimate_arguments import add_estimate_options, add_plan_options

RUN = "a run's folder or id, or latest"


def add_training_commands(commands: Any) -> None:
    """Commands that run a config on one or more ranks."""
    train = add_config_command(commands, "train", "train the model of a config, or resume its run")
    train.set_defaults(run="train")

    text = "evaluate the best checkpoint of a run, or of a config's newest run (or resume=PATH)"
    evaluate = add_config_command(commands, "evaluate", text, f"{CONFIG}; or {RUN}")
    evaluate.add_argument("--dir", default="outputs", help="folder of the runs (default: outputs)")
    evaluate.set_defaults(run="evaluate")

    text = (
        "dry-run a config: data, model, a few training steps, one evaluation batch; leaves no files"
    )
    check = add_config_command(commands, "check", text)
    add_json_option(check)
    check.set_defaults(run="check")

    text = "profile steps of a config, or of a run: where their time and memory go, as a page and a trace"
    profile = add_config_command(commands, "profile", text)
    profile.add_argument(
        "--out", default="profile", metavar="DIR", help="output folder (default: profile)"
    )
    profile.add_argument(
        "--steps", type=int, default=3, metavar="N", help="number of traced steps (default: 3)"
    )
    text = "first traced step; the ones before it warm up (default: 6)"
    profile.add_argument("--first", type=int, default=6, metavar="N", help=text)
    text = "trace step N of a run, repeated from the nearest checkpoint: CONFIG is then its folder or id, or latest"
    profile.add_argument("--step", type=int, metavar="N", help=text)
    profile.set_defaults(run="profile")

    for command in (train, evaluate, check, profile):
        _add_node_options(command)


def _add_node_options(
    command: argparse.ArgumentParser, ranks: str = "1; under srun, one per GPU"
) -> None:
    text = f"processes (ranks) on this machine (default: {ranks})"
    command.add_argument("--nproc", type=int, metavar="N", help=text)
    text = "machines that train together; srun sets this and the next three by itself (default: 1). 1:2: elastic, it "
    text += "continues with one of two when the other is lost"
    command.add_argument("--nnodes", metavar="N", help=text)
    command.add_argument("--node-rank", type=int, metavar="N", help="which of them this is, from 0")
    command.add_argument("--master-addr", metavar="HOST", help="host name of node 0")
    text = "a free port of node 0 (default: 29500)"
    command.add_argument("--master-port", type=int, metavar="PORT", help=text)


def add_launch_commands(commands: Any) -> None:
    launch = add_group(commands, "launch", "scripts that start a training on a cluster")
    text = "print an sbatch script, which saves and queues itself again when its time is over"
    slurm = add_config_command(launch, "slurm", text)
    slurm.add_argument(
        "--nodes", type=int, default=1, metavar="N", help="number of nodes (default: 1)"
    )
    slurm.add_argument(
        "--gpus", type=int, default=8, metavar="N", help="GPUs per node (default: 8)"
    )
    slurm.add_argument("--cpus", type=int, metavar="N", help="CPU cores per node")
    slurm.add_argument(
        "--time", default="24:00:00", metavar="TIME", help="as for sbatch (default: 24:00:00)"
    )
    text = "seconds before the end of the time at which the training saves (default: 600)"
    slurm.add_argument("--grace", type=int, default=600, metavar="S", help=text)
    text = "another option of sbatch, such as --sbatch=--partition=gpu; may be repeated"
    slurm.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help=text)
    slurm.set_defaults(run="launch_slurm")


def add_doctor_command(commands: Any) -> None:
    text = "check this machine: versions, GPUs, kernels, media, disk, all-reduce; each line ok or a fix"
    doctor = add_command(commands, "doctor", text)
    text = "also check the disk and the kernels for this YAML file or shipped config"
    doctor.add_argument("config", nargs="?", metavar="CONFIG", help=text)
    add_overrides(doctor)
    text = "folder of the runs (default: outputs, or project.dir of CONFIG)"
    doctor.add_argument("--dir", metavar="DIR", help=text)
    _add_node_options(doctor, "one per GPU")
    add_json_option(doctor)
    doctor.set_defaults(run="doctor")


def add_estimate_commands(commands: Any) -> None:
    text = (
        "predict memory and time on GPUs that need not be present; exit code 2 if it does not fit"
    )
    estimate = add_command(commands, "estimate", text)
    add_estimate_options(estimate)
    estimate.set_defaults(run="estimate")
    text = "simulate a training step on any number of ranks: memory, collectives, hangs"
    plan = add_command(commands, "plan", text)
    add_plan_options(plan)
    plan.set_defaults(run="plan")
    for command in (estimate, plan):
        add_json_option(command)


def add_replay_command(commands: Any) -> None:
    text = "find the rows and the parameter that made a step of a run non-finite, or fail"
    replay = add_command(commands, "replay", text)
    replay.add_argument("name", metavar="RUN", help=RUN)
    replay.add_argument("overrides", nargs="*", metavar="key=value", help="changes to its config")
    text = "the step (default: the last that was skipped or failed; of a streak, its first)"
    replay.add_argument("--step", type=int, metavar="N", help=text)
    text = "processes (default: as many as the run had)"
    replay.add_argument("--nproc", type=int, metavar="N", help=text)
    replay.add_argument("--dir", default="outputs", help="folder of the runs (default: outputs)")
    add_json_option(replay)
    replay.set_defaults(run="replay")

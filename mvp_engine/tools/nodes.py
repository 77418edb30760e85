"""Nodes: the ranks that a command starts here, and how they find those of other nodes.

The numbers come from the options (`--nnodes 2 --node-rank 0 --master-addr HOST`), from the variables that SLURM's srun
sets, or are those of one machine. This module imports no torch.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import socket
import struct
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

from mvp_engine.errors import UserError, count

DEFAULT_PORT = 29500
# Elastic: seconds that the nodes which are there wait for others, at the start and after one was lost.
LAST_CALL_SECONDS = 10
KEEP_ALIVE_SECONDS = 3  # elastic: a node that misses three of them is lost
MIN_RESTARTS = 3  # elastic: lost nodes and failures that a job survives, at least
SIOCGIFADDR = 0x8915  # ioctl: the address of a network interface


@dataclass(frozen=True)
class Nodes:
    """The nodes of a job, and the place of this one among them."""

    nproc: int = 1  # ranks that this process starts
    count: int = 1
    rank: int = 0
    address: str = "127.0.0.1"  # of node 0, for all others
    port: int = DEFAULT_PORT
    least: int | None = None  # elastic: the job continues with so many nodes when others are lost

    def __post_init__(self) -> None:
        error = None
        if self.least is not None and not 1 <= self.least < self.count:
            error = f"--nnodes {self.least}:{self.count}: the first number is at least 1 and less than the second"
        elif self.nproc < 1:
            error = f"--nproc {self.nproc}: at least one process is needed"
        elif self.count < 1:
            error = f"--nnodes {self.count}: at least one node is needed"
        elif not 0 <= self.rank < self.count:
            error = (
                f"--node-rank {self.rank}: with --nnodes {self.count} it is 0 to {self.count - 1}, "
            )
            error += "another one on each node"
        if error:
            raise UserError(error)

    def __str__(self) -> str:
        return f"node rank {self.rank} of {self.count} nodes, {count(self.nproc, 'rank')} here"

    def torchrun_options(self, seconds: int) -> list[str]:
        """`seconds`: how long a node waits for the others."""
        ranks = f"--nproc_per_node={self.nproc}"
        if self.count == 1:
            return ["--standalone", ranks]
        options = [ranks, f"--rdzv-endpoint={self.address}:{self.port}"]
        if self.least is None:
            options += [f"--nnodes={self.count}", f"--node-rank={self.rank}"]
            return [*options, "--rdzv-backend=static", f"--rdzv-conf=timeout={seconds}"]
        waits = f"join_timeout={seconds},last_call_timeout={LAST_CALL_SECONDS}"
        waits += f",keep_alive_interval={KEEP_ALIVE_SECONDS}"
        options += [f"--nnodes={self.least}:{self.count}", f"--rdzv-id=mvp-{self.port}"]
        options += ["--rdzv-backend=c10d", f"--rdzv-conf=is_host={self.rank == 0},{waits}"]
        return [*options, f"--max-restarts={max(MIN_RESTARTS, self.count - self.least)}"]

    def wait_for_node_0(self, seconds: float) -> None:
        """Wait until node 0 accepts connections. torch would print a stack trace for each attempt."""
        deadline = time.monotonic() + seconds
        while self.rank > 0:
            try:
                socket.create_connection((self.address, self.port), 5.0).close()
                return
            except socket.gaierror as error:
                raise UserError(f"--master-addr {self.address}: {error.strerror}") from None
            except OSError as error:
                if time.monotonic() > deadline:
                    raise UserError(self.no_meeting(seconds, str(error))) from None
                time.sleep(0.5)

    def no_meeting(self, seconds: float, error: str) -> str:
        if self.rank == 0 and "in use" in error:
            return f"port {self.port} of this node is in use: give all nodes another --master-port"
        return (
            f"{self}: the nodes did not meet at {self.address}:{self.port} within {seconds:g} s. Start the command on "
            f"all {self.count} nodes, each with its --node-rank. {self.address} must be node 0, and the others must "
            f"reach port {self.port} there ({error.splitlines()[0][:200]})"
        )

    def lost_rendezvous(self, error: str) -> str:
        return (
            f"{self}: the nodes of this elastic job no longer meet at {self.address}:{self.port}, on node 0: it is "
            f"gone, or the job has ended ({error.splitlines()[0][:200]}). resume=auto continues from the last "
            "checkpoint"
        )


def nodes_of(args: argparse.Namespace) -> Nodes:
    """The nodes that the options of a command, or the variables of SLURM, describe."""
    least, nnodes = _node_range(args.nnodes)
    if nnodes is not None and nnodes > 1:
        return _from_options(args, nnodes, least)
    for name in ("node_rank", "master_addr", "master_port"):
        if getattr(args, name) is not None and args.nnodes is None:
            option = name.replace("_", "-")
            raise UserError(f"--{option} is for several nodes: give --nnodes as well")
    if "WORLD_SIZE" in os.environ:
        _check_torchrun(os.environ, args.nproc)
    if "WORLD_SIZE" in os.environ or args.nnodes is not None:
        return Nodes(_or(args.nproc, 1), _or(nnodes, 1))
    if "SLURM_STEP_NUM_TASKS" in os.environ:
        return _from_slurm(os.environ, args.nproc)
    allocated = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    if allocated != "1":
        print(
            f"mvp: warning: this SLURM job has {allocated} nodes, but the command was not started by srun and runs "
            "on one of them. Write: srun mvp ...",
            file=sys.stderr,
        )
    return Nodes(_or(args.nproc, 1))


def _node_range(text: str | None) -> tuple[int | None, int | None]:
    """(least, most) of `--nnodes`: `2`, or `1:2` for an elastic job."""
    if text is None:
        return None, None
    match = re.fullmatch(r"(?:(\d+):)?(-?\d+)", str(text))
    if match is None:
        raise UserError(f"--nnodes {text}: write a number, or LEAST:MOST for an elastic job")
    return (int(match[1]) if match[1] else None), int(match[2])


def _check_torchrun(variables: Mapping[str, str], nproc: int | None) -> None:
    """Raise for variables that describe no rank: torch would wait for ranks that never come."""
    size = _number(variables, "WORLD_SIZE")
    if size <= 1:
        return
    fix = "Start ranks with --nproc or with torchrun, which sets them, or unset WORLD_SIZE"
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in variables]
    if missing:
        names = ", ".join(missing)
        raise UserError(f"WORLD_SIZE={size} is set in the environment, and not {names}. {fix}")
    rank = _number(variables, "RANK")
    if rank >= size:
        raise UserError(f"RANK={rank}: with WORLD_SIZE={size} it is 0 to {size - 1}. {fix}")
    _number(variables, "MASTER_PORT")
    if (nproc or 1) > 1:
        raise UserError(
            f"--nproc {nproc}: WORLD_SIZE={size} in the environment says that this process is one of {size} ranks. "
            "Remove --nproc, or unset WORLD_SIZE; for several nodes give --nnodes, --node-rank and --master-addr"
        )


def _number(variables: Mapping[str, str], name: str, default: int = 0) -> int:
    text = variables.get(name, str(default))
    if not text.isdecimal():
        raise UserError(f"the environment variable {name}={text} is not a number")
    return int(text)


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _from_options(args: argparse.Namespace, nnodes: int, least: int | None) -> Nodes:
    address = args.master_addr or os.environ.get("MASTER_ADDR")
    if args.node_rank is None or address is None:
        raise UserError(
            f"--nnodes {args.nnodes}: run the command on each node, with --node-rank 0 to {nnodes - 1} and the "
            "same --master-addr, the host name of node 0"
        )
    port = args.master_port or _number(os.environ, "MASTER_PORT", DEFAULT_PORT)
    return Nodes(_or(args.nproc, 1), nnodes, args.node_rank, address, port, least)


def _from_slurm(variables: Mapping[str, str], nproc: int | None) -> Nodes:
    """The nodes of a job step that srun started: one task per node, which starts the ranks, or one task per rank."""
    tasks = int(variables["SLURM_STEP_NUM_TASKS"])
    nodes = int(variables["SLURM_STEP_NUM_NODES"])
    task = int(variables["SLURM_PROCID"])
    address = variables.get("MASTER_ADDR") or first_host(variables["SLURM_STEP_NODELIST"])
    port = int(variables.get("MASTER_PORT") or _port(variables))
    if tasks == nodes:
        # In an interactive shell (srun --pty) the default is one rank, as on any machine.
        gpus = "1" if "SLURM_PTY_PORT" in variables else variables.get("SLURM_GPUS_ON_NODE", "1")
        return Nodes(_or(nproc, int(gpus)), nodes, task, address, port)
    if nproc is not None:
        raise UserError(
            f"--nproc {nproc}: srun already starts {tasks} tasks on {count(nodes, 'node')}, one per rank. Remove "
            "--nproc, or start one task per node: srun --ntasks-per-node=1"
        )
    ranks = {
        "RANK": str(task),
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": variables["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(_tasks_here(variables)),
        "GROUP_RANK": variables["SLURM_NODEID"],
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }
    os.environ.update(ranks)
    if nodes > 1:
        use_interface_to(address)
    return Nodes()


def first_host(nodelist: str) -> str:
    """The first host of SLURM's notation: gpu003 of `gpu[003-005,9],login1`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)
    assert first is not None, nodelist
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])


def _tasks_here(variables: Mapping[str, str]) -> int:
    """The tasks on this node: of `8(x2),4` the first two nodes have eight."""
    tasks = []
    for entry in variables["SLURM_STEP_TASKS_PER_NODE"].split(","):
        number, _, times = entry.rstrip(")").partition("(x")
        tasks += [int(number)] * int(times or 1)
    return tasks[int(variables["SLURM_NODEID"])]


def _port(variables: Mapping[str, str]) -> int:
    """A port that all tasks of a job step agree on, and other jobs on the nodes most likely do not use."""
    step = int(variables["SLURM_JOB_ID"]) + int(variables["SLURM_STEP_ID"])
    return 10_000 + step % 20_000


def use_interface_to(address: str) -> None:
    """Let gloo use the network interface that reaches node 0.

    By default it uses the one of the host name, which on many machines resolves to 127.0.1.1.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, DEFAULT_PORT))  # of a datagram: nothing is sent
        except OSError:
            return  # unknown host, or IPv6: the launcher's own connection says so
        local = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            if not local.startswith("127.") and _interface_address(probe, name) == local:
                os.environ["GLOO_SOCKET_IFNAME"] = name


def _interface_address(probe: socket.socket, name: str) -> str | None:
    request = struct.pack("256s", name.encode()[:15])
    try:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24])
    except OSError:  # an interface without an IPv4 address
        return None

"""The nodes of a job: how many ranks a command starts on this node, and how they connect to other nodes.

These settings come from the options (`--nnodes 2 --node-rank 0 --master-addr HOST`) or from the variables that SLURM's
srun sets. Without either, the job has one node. This module does not import torch, so that commands start fast.

An *elastic* job (`--nnodes 1:4`) continues when nodes are lost, and accepts nodes that join later.
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
# Elastic: seconds that nodes wait for further ones when enough have joined, at the start and after one was lost.
LAST_CALL_SECONDS = 10
KEEP_ALIVE_SECONDS = 3  # elastic: between two signs of life; a node that misses three is lost
MIN_RESTARTS = 3  # elastic: how often a job restarts its ranks after a loss or failure, at least
SIOCGIFADDR = 0x8915  # ioctl: the address of a network interface


@dataclass(frozen=True)
class Nodes:
    """The nodes of a job, and the rank of this node among them."""

    nproc: int = 1  # ranks that this command starts on this node
    count: int = 1  # of nodes
    rank: int = 0  # of this node
    address: str = "127.0.0.1"  # of node 0, to which all others connect
    port: int = DEFAULT_PORT
    least: int | None = None  # elastic: the smallest number of nodes that the job runs on

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
        """Returns the options for torchrun. `seconds`: how long a node waits for the others."""
        ranks = f"--nproc_per_node={self.nproc}"
        if self.count == 1:
            return ["--standalone", ranks]
        options = [ranks, f"--rdzv-endpoint={self.address}:{self.port}"]
        if self.least is None:
            options += [f"--nnodes={self.count}", f"--node-rank={self.rank}"]
            return [*options, "--rdzv-backend=static", f"--rdzv-conf=timeout={seconds}"]
        timeouts = f"join_timeout={seconds},last_call_timeout={LAST_CALL_SECONDS}"
        timeouts += f",keep_alive_interval={KEEP_ALIVE_SECONDS}"
        options += [f"--nnodes={self.least}:{self.count}", f"--rdzv-id=mvp-{self.port}"]
        options += ["--rdzv-backend=c10d", f"--rdzv-conf=is_host={self.rank == 0},{timeouts}"]
        return [*options, f"--max-restarts={max(MIN_RESTARTS, self.count - self.least)}"]

    def wait_for_node_0(self, seconds: float) -> None:
        """Wait until node 0 accepts connections. If torch waited, it would print a stack trace for each attempt."""
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
        """Returns the message for a job whose nodes did not connect in time; `error` is torch's."""
        if self.rank == 0 and "in use" in error:
            return f"port {self.port} of this node is in use: give all nodes another --master-port"
        return (
            f"{self}: the nodes did not meet at {self.address}:{self.port} within {seconds:g} s. Start the command on "
            f"all {self.count} nodes, each with its --node-rank. {self.address} must be node 0, and the others must "
            f"reach port {self.port} there ({error.splitlines()[0][:200]})"
        )

    def lost_rendezvous(self, error: str) -> str:
        """Returns the message for an elastic job whose store on node 0 is gone; `error` is torch's."""
        return (
            f"{self}: the nodes of this elastic job no longer meet at {self.address}:{self.port}, on node 0: it is "
            f"gone, or the job has ended ({error.splitlines()[0][:200]}). resume=auto continues from the last "
            "checkpoint"
        )


def nodes_of(args: argparse.Namespace) -> Nodes:
    """Returns the nodes for the options of a command, or else for the variables of SLURM."""
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
        return Nodes(_or_default(args.nproc, 1), _or_default(nnodes, 1))
    if "SLURM_STEP_NUM_TASKS" in os.environ:
        return _from_slurm(os.environ, args.nproc)
    allocated = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    if allocated != "1":
        print(
            f"mvp: warning: this SLURM job has {allocated} nodes, but the command was not started by srun and runs "
            "on one of them. Write: srun mvp ...",
            file=sys.stderr,
        )
    return Nodes(_or_default(args.nproc, 1))


def _node_range(text: str | None) -> tuple[int | None, int | None]:
    """Returns (least, most) of `--nnodes`: (None, 2) for `2`, and (1, 2) for `1:2`, an elastic job."""
    if text is None:
        return None, None
    match = re.fullmatch(r"(?:(\d+):)?(-?\d+)", str(text))
    if match is None:
        raise UserError(f"--nnodes {text}: write a number, or LEAST:MOST for an elastic job")
    return (int(match[1]) if match[1] else None), int(match[2])


def _check_torchrun(variables: Mapping[str, str], nproc: int | None) -> None:
    """Raise if torchrun's variables are incomplete: torch would wait for ranks that are never started."""
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


def _or_default(value: int | None, default: int) -> int:
    return default if value is None else value


def _from_options(args: argparse.Namespace, nnodes: int, least: int | None) -> Nodes:
    address = args.master_addr or os.environ.get("MASTER_ADDR")
    if args.node_rank is None or address is None:
        raise UserError(
            f"--nnodes {args.nnodes}: run the command on each node, with --node-rank 0 to {nnodes - 1} and the "
            "same --master-addr, the host name of node 0"
        )
    port = args.master_port or _number(os.environ, "MASTER_PORT", DEFAULT_PORT)
    return Nodes(_or_default(args.nproc, 1), nnodes, args.node_rank, address, port, least)


def _from_slurm(variables: Mapping[str, str], nproc: int | None) -> Nodes:
    """Returns the nodes of a job step that srun started.

    With one task per node, this task starts the ranks of its node. With one task per rank, this task is a rank: its
    variables for torch.distributed are set here, and it starts nothing.
    """
    tasks = int(variables["SLURM_STEP_NUM_TASKS"])
    nodes = int(variables["SLURM_STEP_NUM_NODES"])
    task = int(variables["SLURM_PROCID"])
    address = variables.get("MASTER_ADDR") or first_host(variables["SLURM_STEP_NODELIST"])
    port = int(variables.get("MASTER_PORT") or _port(variables))
    if tasks == nodes:
        # In an interactive shell (srun --pty) the default is one rank, as on any machine.
        gpus = "1" if "SLURM_PTY_PORT" in variables else variables.get("SLURM_GPUS_ON_NODE", "1")
        return Nodes(_or_default(nproc, int(gpus)), nodes, task, address, port)
    if nproc is not None:
        raise UserError(
            f"--nproc {nproc}: srun already starts {tasks} tasks on {count(nodes, 'node')}, one per rank. Remove "
            "--nproc, or start one task per node: srun --ntasks-per-node=1"
        )
    rank_variables = {
        "RANK": str(task),
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": variables["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(_tasks_here(variables)),
        "GROUP_RANK": variables["SLURM_NODEID"],
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }
    os.environ.update(rank_variables)
    if nodes > 1:
        use_interface_to(address)
    return Nodes()  # one rank: this process


def first_host(nodelist: str) -> str:
    """Returns the first host of a list in SLURM's notation: gpu003 for `gpu[003-005,9],login1`."""
    # Up to the first comma that is not in brackets.
    entry = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)
    assert entry is not None, nodelist
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", entry[0])


def _tasks_here(variables: Mapping[str, str]) -> int:
    """Returns the number of tasks on this node. SLURM writes `8(x2),4` for two nodes with 8 and one with 4."""
    tasks = []
    for entry in variables["SLURM_STEP_TASKS_PER_NODE"].split(","):
        per_node, _, repeats = entry.rstrip(")").partition("(x")
        tasks += [int(per_node)] * int(repeats or 1)
    return tasks[int(variables["SLURM_NODEID"])]


def _port(variables: Mapping[str, str]) -> int:
    """Returns a port that is the same in all tasks of a job step, and most likely not used by other jobs."""
    job_and_step = int(variables["SLURM_JOB_ID"]) + int(variables["SLURM_STEP_ID"])
    return 10_000 + job_and_step % 20_000


def use_interface_to(address: str) -> None:
    """Let gloo use the network interface that reaches node 0.

    By default gloo uses the interface of the host name, which on many machines resolves to 127.0.1.1. To find the
    right one, a datagram socket is connected to node 0: its local address is that of the interface.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, DEFAULT_PORT))  # of a datagram socket: nothing is sent
        except OSError:
            return  # unknown host, or IPv6: connecting the nodes reports it
        local_ip = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            if not local_ip.startswith("127.") and _interface_address(probe, name) == local_ip:
                os.environ["GLOO_SOCKET_IFNAME"] = name


def _interface_address(probe: socket.socket, name: str) -> str | None:
    """Returns the IPv4 address of a network interface, which is in bytes 20 to 24 of the answer (struct ifreq)."""
    request = struct.pack("256s", name.encode()[:15])
    try:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24])
    except OSError:  # an interface without an IPv4 address
        return None

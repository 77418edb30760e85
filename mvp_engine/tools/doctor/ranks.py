"""Runs the all-reduce in processes of its own, with a time limit: broken networks hang."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mvp_engine.tools.doctor.finding import Finding, ok, problem, warning
from mvp_engine.tools.nodes import Nodes

SECONDS = 180.0
MODULE = "mvp_engine.tools.doctor.all_reduce"
SLOW = 5e9  # bytes per second between GPUs: PCIe without peer access
NCCL_FIX = (
    "NCCL_DEBUG=INFO mvp doctor shows where it stops. Common: NCCL_P2P_DISABLE=1 (virtual machines without peer "
    "access), NCCL_SOCKET_IFNAME=eth0 (the network interface), a larger /dev/shm"
)
GLOO_FIX = (
    "the host name must resolve (add it to /etc/hosts), or set GLOO_SOCKET_IFNAME=lo on one machine"
)
NODES_FIX = "run mvp doctor on all nodes within three minutes, with the options of the training (docs/several_nodes.md)"


def check_all_reduce(nodes: Nodes, on_gpus: bool) -> Finding:
    """One all-reduce over all ranks of these nodes."""
    fix = NCCL_FIX if on_gpus else GLOO_FIX
    what = f"{nodes.count * nodes.nproc} ranks"
    if nodes.count > 1:
        fix = f"{NODES_FIX}. {fix}"
    with tempfile.TemporaryDirectory(prefix="mvp-doctor-") as folder:
        out = Path(folder) / "facts.json"
        command = [sys.executable, "-m", MODULE, "--out", str(out)]
        # With it, this process is one rank of several, as under srun.
        if "WORLD_SIZE" not in os.environ:
            command += ["--nodes", json.dumps(dataclasses.asdict(nodes))]
        code, output = run_with_limit(command, SECONDS)
        if code is None:
            return problem("all-reduce", f"{what} did not finish within {SECONDS:.0f} s", fix)
        if code != 0:
            lines = output.strip().splitlines() or [f"exit code {code}"]
            return problem("all-reduce", f"{what}: {lines[-1][:300]}", fix)
        if not out.is_file():
            return ok("all-reduce", f"{what} agree; rank 0 prints the bandwidth")
        return describe(json.loads(out.read_text()))


def describe(facts: dict[str, Any]) -> Finding:
    """The finding of a completed all-reduce."""
    ranks = facts["ranks"]
    where = f"{ranks} ranks" if ranks > 1 else "1 rank"
    if len(facts["hosts"]) > 1:
        where += f" on {len(facts['hosts'])} hosts"
    text = f"{where}, {facts['backend']}"
    fix = NCCL_FIX if facts["backend"] != "gloo" else GLOO_FIX
    if not facts["right"]:
        return problem("all-reduce", f"{text}: wrong values", fix, **facts)
    if ranks == 1:
        return ok("all-reduce", f"{text} loads; with one GPU there is nothing to send", **facts)
    text += f", {facts['bytes_per_s'] / 1e9:.3g} GB/s"
    if facts["backend"] != "gloo" and facts["bytes_per_s"] < SLOW and len(facts["hosts"]) == 1:
        fix = "nvidia-smi topo -m shows how the GPUs are connected; unset NCCL_P2P_DISABLE and NCCL_SHM_DISABLE"
        return warning("all-reduce", f"{text}: slow", fix, **facts)
    return ok("all-reduce", text, **facts)


def run_with_limit(command: list[str], seconds: float) -> tuple[int | None, str]:
    """Exit code and output of a command; a code of None after the time limit, when all its processes are killed."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return code, output.read()

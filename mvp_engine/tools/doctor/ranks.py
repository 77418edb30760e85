"""Runs the all-reduce in processes of its own, with a time limit: broken networks hang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mvp_engine.tools.doctor.finding import Finding, ok, problem, warning

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


def check_all_reduce(gpus: int) -> Finding:
    """One all-reduce over all GPUs of this machine; without GPUs, over two processes."""
    nproc = gpus or 2
    fix = NCCL_FIX if gpus else GLOO_FIX
    with tempfile.TemporaryDirectory(prefix="mvp-doctor-") as folder:
        out = Path(folder) / "facts.json"
        command = [sys.executable, "-m", MODULE, "--nproc", str(nproc), "--out", str(out)]
        code, output = run_with_limit(command, SECONDS)
        if code is None:
            text = f"{nproc} ranks did not finish within {SECONDS:.0f} s"
            return problem("all-reduce", text, fix, ranks=nproc)
        if code != 0 or not out.is_file():
            lines = output.strip().splitlines() or [f"exit code {code}"]
            return problem("all-reduce", f"{nproc} ranks: {lines[-1][:300]}", fix, ranks=nproc)
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

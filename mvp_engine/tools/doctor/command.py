"""`mvp doctor`: the order of the checks, their processes, and the exit code. This module imports no torch."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mvp_engine import __version__
from mvp_engine.errors import EXIT_USER_ERROR
from mvp_engine.tools.doctor import host, probe, software
from mvp_engine.tools.doctor.finding import PROBLEM, Finding, Printer, ok, problem, warning
from mvp_engine.tools.nodes import Nodes

PROBE = [sys.executable, "-m", probe.__name__]
PROBE_SECONDS = 300.0


def doctor(
    config: str | None,
    overrides: list[str],
    nodes: Nodes,
    nproc: int | None = None,
    *,
    folder: str | None = None,
    as_json: bool = False,
) -> int:
    """Check this machine and print one line per finding. Exit code 2 if a training would fail.

    `nproc`: ranks of the all-reduce on this machine; None: one per GPU, or two without GPUs.
    """
    printer = Printer(quiet=as_json)
    findings = []
    request = probe.Request(config, overrides, folder)
    for heading, finding in _findings(request, nodes, nproc):
        if heading:
            printer.heading(heading)
        if finding is not None:
            findings.append(finding)
            printer.finding(finding)
    printer.end(findings)
    failed = any(finding.status == PROBLEM for finding in findings)
    if as_json:
        facts = {
            "ok": not failed,
            "mvp_engine": __version__,
            "host": platform.node(),
            "findings": [dataclasses.asdict(finding) for finding in findings],
        }
        print(json.dumps(facts, indent=2))
    return EXIT_USER_ERROR if failed else 0


def _findings(
    request: probe.Request, nodes: Nodes, nproc: int | None
) -> Iterator[tuple[str | None, Finding | None]]:
    """(a heading or None, a finding or None), in the order of the terminal."""
    yield f"mvp_engine {__version__} on {platform.node()}: versions", None
    for finding in software.check_software():
        yield None, finding
    yield "Host", None
    for finding in [*host.check_host(), host.check_hub_cache()]:
        yield None, finding
    gpus = 0
    for name, found in run_probe(probe.CHECKS, request):
        yield probe.HEADINGS.get(name) if found is None else None, found
        gpus += found is not None and found.name.startswith("GPU ")
    yield "Ranks", None
    ranks_here = nproc or gpus or (2 if nodes.count == 1 else nodes.nproc)
    nodes = dataclasses.replace(nodes, nproc=ranks_here)
    yield None, check_all_reduce(nodes, on_gpus=gpus > 0)


def run_probe(checks: list[str], request: probe.Request) -> Iterator[tuple[str, Finding | None]]:
    """Run checks in a process that imports torch: (name, None) before each, then its findings.

    A check that ends the process is a problem, and the rest run in another process.
    """
    while checks:
        name = ""
        with tempfile.TemporaryFile("w+") as errors:
            lines = _ProbeProcess([checks, dataclasses.asdict(request)], errors.fileno())
            for line in lines:
                if "begin" in line:
                    name = line["begin"]
                    checks = checks[checks.index(name) + 1 :]
                    yield name, None
                else:
                    yield name, Finding(**line["finding"])
            if lines.code == 0:
                return
            errors.seek(0)
            yield name, _ended(name or "torch", lines.code, errors.read())
        if not name:
            return  # it ended before the first check: torch does not import


class _ProbeProcess:
    """One process of the probe: its JSON lines, then its exit code in `code`, None after the time limit."""

    def __init__(self, request: list[Any], errors: int) -> None:
        reader, writer = os.pipe()
        command = [*PROBE, str(writer), json.dumps(request)]
        self._process = subprocess.Popen(
            command, pass_fds=[writer], stdin=subprocess.DEVNULL, stdout=errors, stderr=errors
        )
        os.close(writer)
        self._reader = reader
        self.code: int | None = 0
        self._timed_out = False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        timer = threading.Timer(PROBE_SECONDS, self._time_out)
        timer.daemon = True
        timer.start()
        with os.fdopen(self._reader) as lines:
            for line in lines:
                yield json.loads(line)
        code = self._process.wait()
        self.code = None if self._timed_out else code
        timer.cancel()

    def _time_out(self) -> None:
        self._timed_out = True
        self._process.kill()


def _ended(name: str, code: int | None, output: str) -> Finding:
    if code is None:
        fix = "set CUDA_VISIBLE_DEVICES to leave out a GPU that does not answer, or restart its driver"
        return problem(name, f"the check did not finish within {PROBE_SECONDS:g} s", fix)
    last = (output.strip().splitlines() or ["no message"])[-1][:300]
    how = f"exit code {code}: {last}"
    if code < 0:
        how = f"{signal.Signals(-code).name}: {last}"
    fix = (
        "reinstall the package that the message names; torch and its CUDA packages belong together"
    )
    return problem(name, f"the check ended its process with {how}", fix)


# Runs the all-reduce in processes of its own, with a time limit: broken networks hang.

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

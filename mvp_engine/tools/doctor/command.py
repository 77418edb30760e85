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
from typing import Any

from mvp_engine import __version__
from mvp_engine.errors import EXIT_USER_ERROR
from mvp_engine.tools.doctor import host, probe, ranks, software
from mvp_engine.tools.doctor.finding import PROBLEM, Finding, Printer, problem
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
    yield None, ranks.check_all_reduce(nodes, on_gpus=gpus > 0)


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

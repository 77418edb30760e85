"""Runs a Python program of a model in a process with limits. README.md says what they protect against, and what not."""

import ctypes
import os
import resource
import signal
import subprocess
import sys
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory

MAX_FILE = 2**20  # bytes of each file that it writes, and of its output
MAX_TEXT = 2000  # characters of the output that are returned, the last ones
CLONE_NEWUSER, CLONE_NEWNET, CLONE_NEWIPC = 0x10000000, 0x40000000, 0x08000000


def run(code: str, seconds: float, memory_mib: int) -> str:
    """What the program prints, and how it ended if not by itself."""
    from mvp_engine.process.watchdog import (
        kill_descendants,
    )  # here: the limited process needs the standard library alone

    with TemporaryDirectory(prefix="program-", ignore_cleanup_errors=True) as folder:
        (Path(folder) / "program.py").write_text(code, errors="replace")
        output = Path(folder) / "output.txt"
        # Nothing of the training's environment, such as keys: a program could print them.
        environment = {"HOME": folder, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-I", __file__, str(ceil(seconds)), str(memory_mib)]
        options = {"cwd": folder, "env": environment, "stdin": subprocess.DEVNULL, "start_new_session": True}
        with open(output, "wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, **options)  # type: ignore[call-overload]
            try:
                end = process.wait(seconds)
            except subprocess.TimeoutExpired:
                end = None
            finally:
                kill_descendants(process.pid)
                process.kill()
                process.wait()
        text = _tail(output)
    if end is None:
        return f"{text}\nerror: no end after {seconds:g} s".lstrip()
    if end:
        how = signal.Signals(-end).name if end < 0 else f"exit code {end}"
        return f"{text}\nerror: {how}".lstrip()
    return text or "(no output)"


def has_no_network() -> bool:
    """Whether programs see no network interface but the one of their own namespace."""
    shown = run("import socket; print(*(name for _, name in socket.if_nameindex()))", seconds=30, memory_mib=512)
    return shown in ("lo", "(no output)")


def _tail(file: Path) -> str:
    with open(file, "rb") as opened:
        opened.seek(max(0, file.stat().st_size - 4 * MAX_TEXT))
        return opened.read().decode(errors="replace")[-MAX_TEXT:].strip()


def limit(seconds: int, memory_mib: int) -> None:
    """Limit this process and those that replace it. Limits cannot be raised again."""
    memory = memory_mib * 2**20
    limits = {
        resource.RLIMIT_CPU: seconds + 1,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: MAX_FILE,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_NPROC: 0,  # no other processes or threads; root is not limited
        resource.RLIMIT_CORE: 0,
    }
    # A network with nothing in it. Where the kernel allows none, the rest still holds; see `has_no_network`.
    ctypes.CDLL(None).unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWIPC)
    for kind, value in limits.items():
        resource.setrlimit(kind, (value, value))


if __name__ == "__main__":
    limit(int(sys.argv[1]), int(sys.argv[2]))
    os.execv(sys.executable, [sys.executable, "-I", "-B", "program.py"])

"""Ends the processes of a Ray instance whose controller was killed. It is a script: it imports nothing but this file's.

Ray's control service and raylet die with the process that started them, but the agents that the raylet started wait a
minute for a control service that is gone. By then nothing says whose they were, so the guard notes the processes while
the controller lives.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

POLL = 0.5  # seconds


def start(session: str) -> subprocess.Popen[bytes] | None:
    """Guard the Ray session that this process has started; None where there is no /proc."""
    if not Path("/proc/self/stat").exists():
        return None
    words = [sys.executable, "-S", "-E", __file__, session, str(os.getpid())]
    # In a session of its own: Ctrl-C in the terminal must not end it before the controller.
    return subprocess.Popen(words, start_new_session=True, stdin=subprocess.DEVNULL)


def processes() -> dict[int, tuple[int, str]]:
    """The parent and the start time of each process, by its id. A process with both is the same one as before."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            found[int(folder.name)] = (int(fields[1]), fields[19])
    return found


def of_session(session: str, controller: int) -> set[tuple[int, str]]:
    """(id, start time) of the controller's children that have the session in their command, and of all below them.

    This process is none of them: the guard has the session in its command, too.
    """
    now = processes()
    now.pop(os.getpid(), None)
    family = {
        pid for pid, (parent, _) in now.items() if parent == controller and _has(pid, session)
    }
    new = family
    while new:
        new = {pid for pid, (parent, _) in now.items() if parent in new} - family
        family = family | new
    return {(pid, now[pid][1]) for pid in family}


def _has(pid: int, session: str) -> bool:
    try:
        return session.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def kill(known: set[tuple[int, str]]) -> None:
    now = processes()
    for pid, began in known:
        if pid in now and now[pid][1] == began:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def main() -> None:
    session, controller = sys.argv[1], int(sys.argv[2])
    known: set[tuple[int, str]] = set()
    while os.getppid() == controller:
        known |= of_session(session, controller)
        time.sleep(POLL)
    kill(known)


if __name__ == "__main__":
    main()

"""RankWatchdog: a thread that ends a rank when its launcher or another rank of the job has died."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from mvp_engine import PARENT

FIRST_FAILURE = "first_failure"  # key of the store: the rank that failed first, a space, and why


class RankWatchdog:
    """A collective with a dead rank would never return, and a job must not continue unseen after its launcher was
    killed. The thread holds no reference to the World: a process group must not be destroyed by a thread at exit.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.siblings: list[int] = []  # the processes of this machine's ranks
        # With several nodes, on one rank of each: where failures are recorded.
        self.store: Any = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mvp-watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.is_set():
            who = self._dead()
            # After a rank died, the broken collective usually raises by itself, with a better message.
            if not self._ended.wait(4.0 if who else 0.5) and (who or os.getppid() != PARENT):
                who = who or "the launcher"
                self._record_failure(who)
                print(
                    f"[rank {self.rank}] {who} of this job died; leaving",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(1)

    def _dead(self) -> str | None:
        for pid in self.siblings:
            if not _alive(pid):
                return f"process {pid}"
        try:
            if self.store is not None and self.store.check([FIRST_FAILURE]):
                return "a rank on another node"
        except RuntimeError:  # its host is node 0
            return "node 0"
        return None

    def has_dead_rank(self, seconds: float = 0.5) -> bool:
        """Whether a rank of this machine has died. Its connections are closed a moment before it has."""
        deadline = time.monotonic() + seconds
        while all(_alive(pid) for pid in self.siblings):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def _record_failure(self, who: str) -> None:
        if self.store is not None:
            with contextlib.suppress(RuntimeError):
                self.store.compare_set(FIRST_FAILURE, "", f"{self.rank} {who} died")


def _alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent to read its exit code does not."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2]
    except ProcessLookupError:
        return False
    except OSError:  # of another user, or no Linux
        return True
    return not state.startswith(("Z", "X"))

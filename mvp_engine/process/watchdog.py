"""RankWatchdog: a thread that ends a rank when its launcher or another rank of the machine has died."""

from __future__ import annotations

import os
import sys
import threading

from mvp_engine import PARENT


class RankWatchdog:
    """A collective with a dead rank would never return, and a job must not continue unseen after its launcher was
    killed. The thread holds no reference to the World: a process group must not be destroyed by a thread at exit.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.siblings: list[int] = []  # the processes of this machine's ranks
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mvp-watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.is_set():
            gone = [pid for pid in self.siblings if not _alive(pid)]
            # After a rank died, the broken collective usually raises by itself, with a better message.
            if not self._ended.wait(4.0 if gone else 0.5) and (gone or os.getppid() != PARENT):
                who = f"process {gone[0]}" if gone else "the launcher"
                print(
                    f"[rank {self.rank}] {who} of this job died; leaving",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(1)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True

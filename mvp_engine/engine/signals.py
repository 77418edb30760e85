"""SIGTERM and Ctrl-C: the first asks for a stop after the current step, a second Ctrl-C leaves at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

# torchrun passes Ctrl-C on to workers that have already had it from the terminal: within this time it is the same one.
ECHO_SECONDS = 2.0


class StopSignals:
    """A context in which `requested` names the signal that asked for a stop."""

    def __init__(self) -> None:
        self.requested: str | None = None
        self._first = 0.0
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, _: FrameType | None) -> None:
        name = signal.Signals(number).name
        now = time.monotonic()
        if self.requested is None:
            self.requested, self._first = name, now
            # Written raw: it may have come in the middle of a print or a log call, which cannot be entered twice.
            os.write(2, f"{name}: finishing this step, then saving. Ctrl-C once more leaves at once.\n".encode())
        elif number == signal.SIGINT and not ("TORCHELASTIC_RUN_ID" in os.environ and now - self._first < ECHO_SECONDS):
            os._exit(130)

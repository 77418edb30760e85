"""SIGTERM and Ctrl-C: the first asks for a stop after the current step, a second Ctrl-C leaves at once.

A thread reads the signals from a pipe that Python's C code writes to as they arrive: a Python handler alone would have
to wait until the main thread comes back from a long computation or a hung collective. The handler notes the request
too: where the main thread is running Python, a busy machine may let the thread wait longer than a step.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable

EXIT_AT_ONCE = 130

# A launcher may pass on a Ctrl-C that the terminal has sent to its workers too: within this time it is the same one.
ECHO_SECONDS = 2.0


class StopSignals:
    """A context in which `requested` names the signal that asked for a stop."""

    def __init__(self, message: str = "", leave: Callable[[], None] | None = None) -> None:
        """`message` is shown at the first signal; `leave` is called at a second Ctrl-C, before the process ends."""
        self.requested: str | None = None
        self._message, self._leave = message, leave
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._fd_before = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._note)
        threading.Thread(target=self._watch, name="mvp-signals", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._before:
            for number, handler in self._before.items():
                signal.signal(number, handler)  # type: ignore[arg-type]
            signal.set_wakeup_fd(self._fd_before)
            self._write.close()  # ends the thread

    def _note(self, number: int, *_: object) -> None:
        self.requested = self.requested or signal.Signals(number).name

    def _watch(self) -> None:
        first: float | None = None
        while numbers := self._read.recv(16):
            for number in numbers:
                if number not in (signal.SIGTERM, signal.SIGINT):
                    continue
                now = time.monotonic()
                if first is None:
                    first = now
                    self._note(number)
                    os.write(
                        2, f"{self.requested}: {self._message}\n".encode() if self._message else b""
                    )
                elif number == signal.SIGINT and not (
                    _under_torchrun() and now - first < ECHO_SECONDS
                ):
                    if self._leave:
                        self._leave()
                    os.write(
                        2, b"\x1b[?25h" if os.isatty(2) else b""
                    )  # a live panel had hidden the cursor
                    os._exit(EXIT_AT_ONCE)
        self._read.close()


def _under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ

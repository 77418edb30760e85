"""SIGTERM and Ctrl-C: the first signal requests a stop after the current step, a second Ctrl-C exits at once.

A thread reads the signals from a pipe that Python's C code writes to as they arrive. A Python handler alone
runs only once the main thread returns from a long kernel or a hung collective. The handler sets the request
too: while the main thread runs Python code, a loaded machine may delay the thread for longer than a step.

A terminal sends Ctrl-C to all processes of a job. Forked processes (loader workers) ignore it and inherit no pipe, or
each of them would report the same Ctrl-C to its parent once more.

Garbage collection without what stays: modules, models, compiled graphs.

A full collection looks at every object, in 0.2 to 1 s for a compiled training, and no kernel is launched meanwhile.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mvp_engine.errors import EXIT_INTERRUPTED

# Frozen objects stay when the interpreter ends, and Triton 3.9 then prints some 30 lines about leaks.
atexit.register(gc.unfreeze)


def settle() -> None:
    """Collect garbage; later collections in `settled` look at nothing of what is left."""
    gc.collect()
    gc.freeze()


@contextmanager
def settled() -> Iterator[None]:
    """A context in which collections look at nothing that was there before."""
    settle()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def without_collections() -> Iterator[None]:
    """A context for imports, of which everything stays: collections take a fifth of their time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


EXIT_AT_ONCE = 130

# torchrun forwards a Ctrl-C that the terminal has also sent to the workers: within this time it is the same one.
ECHO_SECONDS = 2.0

EARLY = "stopped before the first step; launch the same command again. Measured rows are kept."
SHOW_CURSOR = b"\x1b[?25h"


class StopSignals:
    """A context in which `requested` is the name of the signal that requested a stop, or None."""

    def __init__(
        self,
        message: str = "",
        leave: Callable[[], None] | None = None,
        failed: Callable[[], bool] = lambda: False,
        idle: str = "",
    ) -> None:
        """`message` is printed at the first signal, unless torchrun sends it since a rank has `failed`.
        `leave` is called before a second Ctrl-C exits. `idle`: a launcher waits, possibly in C code, until torchrun
        sets handlers of its own and starts ranks; before that the first signal prints this and exits."""
        self.requested: str | None = None
        self._message = message
        self._leave = leave
        self._failed = failed
        self._idle = idle
        self.early = False  # True: a signal raises KeyboardInterrupt, as there is no step to finish
        self._handlers_before: dict[int, object] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            return self  # Python allows signal handlers in the main thread only
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._fd_before = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            self._handlers_before[number] = signal.signal(number, self._handle)
        os.register_at_fork(after_in_child=self._ignore_in_fork)
        self._thread = threading.Thread(target=self._watch, name="mvp-signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._handlers_before:
            for number, handler in self._handlers_before.items():
                signal.signal(number, handler)  # type: ignore[arg-type]
            self._handlers_before = {}
            signal.set_wakeup_fd(self._fd_before)
            self._write.close()  # ends the thread
            self._thread.join(1.0)  # on a loaded machine its message may still be to come

    def _ignore_in_fork(self) -> None:
        if self._handlers_before:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _handle(self, number: int, *_: object) -> None:
        self._request_stop(number)
        if self.early:
            raise KeyboardInterrupt(EARLY)

    def _request_stop(self, number: int) -> None:
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
                    self._request_stop(number)
                    if self._idle and signal.getsignal(number) == self._handle:
                        print(f"mvp: {self.requested}: {self._idle}", file=sys.stderr, flush=True)
                        self._exit_at_once(EXIT_INTERRUPTED)
                    if self._message and not self.early and not self._failed():
                        # Through sys.stderr, which a live panel redirects: it prints above itself.
                        print(f"{self.requested}: {self._message}", file=sys.stderr, flush=True)
                elif number == signal.SIGINT and not _is_echo(now - first):
                    self._exit_at_once()
        self._read.close()

    def _exit_at_once(self, code: int = EXIT_AT_ONCE) -> None:
        if self._leave:
            self._leave()
        if os.isatty(2):
            os.write(2, b"\n" + SHOW_CURSOR)  # below the live panel, which hides the cursor
        os._exit(code)


def _is_echo(seconds: float) -> bool:
    """Whether a Ctrl-C this long after the first one is the same one, forwarded by torchrun."""
    return "TORCHELASTIC_RUN_ID" in os.environ and seconds < ECHO_SECONDS

"""The log hub: it passes metrics to the backends that the config names, and owns the package's log messages.

A backend is a class with `start`, `metrics` and `close` (see `Backend`). Only rank 0 has backends; the other
ranks print warnings to stderr.
"""

from __future__ import annotations

import logging
import math
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from mvp_engine.errors import Interrupted, UserError
from mvp_engine.imports import load_spec
from mvp_engine.log.backends import BACKENDS, Backend, RunInfo

LOGGER = logging.getLogger("mvp_engine")


class EarlyMessages(logging.StreamHandler[Any]):
    """A handler for messages while data and model are built, before the hub exists.

    It prints them at once and keeps them for the hub's log file.
    """

    def __init__(self, backends: list[str], rank: int = 0) -> None:
        on_terminal = rank == 0 and "terminal" in backends
        super().__init__(sys.stdout if on_terminal else sys.stderr)
        prefix = f"[rank {rank}] " if rank else ""
        self.setFormatter(logging.Formatter(f"{prefix}%(levelname)s %(message)s"))
        self.min_level = logging.INFO if on_terminal else logging.WARNING
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        if record.levelno >= self.min_level:
            super().emit(record)

    def __enter__(self) -> EarlyMessages:
        _own_logger()
        LOGGER.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        LOGGER.removeHandler(self)


def _own_logger() -> list[logging.LogRecord]:
    """Send the package's messages to its own handlers only; ends `EarlyMessages` and returns its records."""
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False
    records = list[logging.LogRecord]()
    for handler in list(LOGGER.handlers):
        if isinstance(handler, EarlyMessages):
            LOGGER.removeHandler(handler)
            records += handler.records
    return records


class LogHub:
    """The backends of one run, from their start to their close."""

    def __init__(self, info: RunInfo, names: list[str], rank: int = 0) -> None:
        self.info = replace(info, messages=_own_logger())
        self.backends: list[Backend] = []
        self._failing: set[Backend] = set()  # backends with a reported failure
        self._stderr: logging.Handler | None = None
        if rank == 0:
            self._start_backends(names)
        else:
            self._stderr = logging.StreamHandler(sys.stderr)
            self._stderr.setLevel(logging.WARNING)
            formatter = logging.Formatter(f"[rank {rank}] %(levelname)s: %(message)s")
            self._stderr.setFormatter(formatter)
            LOGGER.addHandler(self._stderr)

    def _start_backends(self, names: list[str]) -> None:
        classes = [backend_class(name) for name in names]
        try:
            for kind in classes:
                backend = kind()
                backend.start(self.info)
                self.backends.append(backend)
        except BaseException as error:
            self.__exit__(None, error, None)  # closes a live panel, which owns the terminal
            raise

    def metrics(self, record: dict[str, Any]) -> None:
        """Pass a record to all backends; non-finite values become None."""
        finite = {}
        for key, value in record.items():
            finite[key] = None if isinstance(value, float) and not math.isfinite(value) else value
        for backend in self.backends:
            self._call(backend, "metrics", finite)

    def _call(self, backend: Backend, method: str, value: Any) -> None:
        """Call a backend. A full disk or a lost connection must not end the training; other errors are bugs."""
        try:
            getattr(backend, method)(value)
        except OSError as error:
            if backend not in self._failing:
                self._failing.add(backend)
                name = type(backend).__name__
                LOGGER.error("%s cannot write: %s. Training continues.", name, error)
        else:
            self._failing.discard(backend)

    def __enter__(self) -> LogHub:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        failed = error is not None and not isinstance(error, Interrupted)
        failure = "".join(traceback.format_exception(error)) if failed else None
        for backend in self.backends:
            self._call(backend, "close", failure)
        if self._stderr is not None:
            LOGGER.removeHandler(self._stderr)


def backend_class(name: str) -> type[Backend]:
    """The class of a backend: a built-in one by name, or the user's own as module:Class."""
    if name in BACKENDS:
        return BACKENDS[name]
    if ":" not in name:
        known = ", ".join(BACKENDS)
        raise UserError(f"log.backends: unknown backend {name!r}; known: {known}, or module:Class")
    module, attribute = load_spec(name, Path.cwd(), "log.backends")
    found = getattr(module, attribute or "", None)
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise UserError(
            f"log.backends: {name!r} is not a subclass of mvp_engine.log.backends.Backend"
        )
    return found

"""The log hub: it passes metrics to the backends that the config names, and owns the package's log messages.

A backend is a class with `start`, `metrics` and `close` (see `Backend`). Only rank 0 has backends; the other
ranks print warnings to stderr.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import logging
import math
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from mvp_engine.errors import Interrupted, UserError
from mvp_engine.imports import load_spec
from mvp_engine.log.backends import BACKENDS, Backend, RunInfo
from mvp_engine.log.terminal import message_handler

LOGGER = logging.getLogger("mvp_engine")
BackendEntry = str | dict[str, Any]  # of log.backends


class EarlyMessages(logging.Handler):
    """A handler for messages while data and model are built, before the hub exists.

    It prints them at once and keeps them for the hub's log file.
    """

    def __init__(self, backends: list[BackendEntry], rank: int = 0) -> None:
        super().__init__()
        if rank == 0 and "terminal" in backends:
            self.printer = message_handler(Console())
        else:
            self.printer = logging.StreamHandler(sys.stderr)
            self.printer.setLevel(logging.WARNING)
            prefix = f"[rank {rank}] " if rank else ""
            self.printer.setFormatter(logging.Formatter(f"{prefix}%(levelname)s %(message)s"))
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        if record.levelno >= self.printer.level:
            self.printer.handle(record)

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

    def __init__(self, info: RunInfo, backends: list[BackendEntry], rank: int = 0) -> None:
        self.info = replace(info, messages=_own_logger())
        self.backends: list[Backend] = []
        self._failing: set[Backend] = set()  # backends with a reported OSError
        self._stderr: logging.Handler | None = None
        if rank == 0:
            self._start_backends(backends)
        else:
            self._stderr = logging.StreamHandler(sys.stderr)
            self._stderr.setLevel(logging.WARNING)
            formatter = logging.Formatter(f"[rank {rank}] %(levelname)s: %(message)s")
            self._stderr.setFormatter(formatter)
            LOGGER.addHandler(self._stderr)

    def _start_backends(self, entries: list[BackendEntry]) -> None:
        engine = self.info.config.get("engine")
        factories = [backend_factory(entry, engine) for entry in entries]
        try:
            for factory in factories:
                backend = factory()
                self.backends.append(backend)
                self._call(backend, "start", self.info)
        except BaseException as error:
            self.__exit__(None, error, None)  # closes a live panel, which owns the terminal
            raise

    def progress(self, step: int, doing: str = "") -> None:
        for backend in list(self.backends):
            self._call(backend, "progress", step, doing)

    def metrics(self, record: dict[str, Any]) -> None:
        """Pass a record to all backends; non-finite values become None."""
        finite = {}
        for key, value in record.items():
            finite[key] = None if isinstance(value, float) and not math.isfinite(value) else value
        for backend in list(self.backends):
            self._call(backend, "metrics", finite)

    def _call(self, backend: Backend, method: str, *values: Any) -> None:
        """Call a backend; its errors never end the training.

        A full disk or a lost connection (OSError) may pass, so the backend stays; any other error disables it.
        """
        try:
            getattr(backend, method)(*values)
            if method != "progress":
                self._failing.discard(backend)
        except Exception as error:
            name = type(backend).__name__
            if isinstance(error, OSError) and method != "start":
                if backend not in self._failing:
                    LOGGER.error("%s cannot write: %s. Training continues.", name, error)
                self._failing.add(backend)
                return
            self.backends.remove(backend)
            if isinstance(error, UserError) and method == "start":
                raise
            text = f"the log backend {name} is disabled, since its {method} failed."
            LOGGER.warning("%s Training continues.", text, exc_info=error)
            if method in ("metrics", "progress"):
                with contextlib.suppress(Exception):
                    backend.close(None)

    def __enter__(self) -> LogHub:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        failed = error is not None and not isinstance(error, Interrupted)
        failure = "".join(traceback.format_exception(error)) if failed else None
        for backend in list(self.backends):
            self._call(backend, "close", failure)
        if self._stderr is not None:
            LOGGER.removeHandler(self._stderr)


def backend_factory(entry: BackendEntry, engine: str | None) -> Callable[[], Backend]:
    """Makes the backend of an entry of `log.backends`: a name, or `{name: ..., <setting>: ...}`.

    A name is that of a built-in backend, or the user's own as `module:Class` or `file.py:Class`; the file is found in
    the folder of the recipe's `engine`, if that is a `file.py:Class` too, or in the working directory.
    """
    settings = {"name": entry} if isinstance(entry, str) else dict(entry)
    name = settings.pop("name", None)
    if not isinstance(name, str):
        raise UserError(f"log.backends: {entry} has no name: write {{name: wandb, ...}}")
    kind = BACKENDS.get(name) or _own_backend(name, Path((engine or "").rpartition(":")[0]).parent)
    if kind.package and importlib.util.find_spec(kind.package) is None:
        fix = f"pip install {kind.package}, or leave it out"
        raise UserError(f"log.backends names {name!r}, but {kind.package} is not installed: {fix}")
    try:
        inspect.signature(kind).bind(**settings)
    except TypeError as error:
        raise UserError(
            f"log.backends: settings of {name!r}, which {kind.__name__}() takes: {error}"
        ) from None
    return partial(kind, **settings)


def _own_backend(name: str, recipe: Path) -> type[Backend]:
    location, colon, attribute = name.rpartition(":")
    if not colon:
        known = ", ".join(BACKENDS)
        raise UserError(
            f"log.backends: unknown backend {name!r}; known: {known}, or module:Class, file.py:Class"
        )
    folder = recipe if (recipe / location).is_file() else Path.cwd()
    module, _ = load_spec(name, folder, "log.backends")
    found = getattr(module, attribute, None)
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise UserError(
            f"log.backends: {name!r} is not a subclass of mvp_engine.log.backends.Backend"
        )
    if found.metrics is Backend.metrics:
        raise UserError(f"log.backends: {name!r} must define metrics(self, record)")
    return found

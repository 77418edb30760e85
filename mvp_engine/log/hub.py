"""Where metrics and messages go: the hub hands each to the backends that the config names.

A backend is a class with `start`, `metrics` and `close` (see `Backend`). Only rank 0 has any; the other ranks print
their warnings to stderr and nothing else.
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
    """What is said while data and model are made, before there is a hub: shown at once, and kept for its log file."""

    def __init__(self, names: list[str], rank: int = 0) -> None:
        shows = rank == 0 and "terminal" in names
        super().__init__(sys.stdout if shows else sys.stderr)
        self.setFormatter(
            logging.Formatter(f"{f'[rank {rank}] ' if rank else ''}%(levelname)s %(message)s")
        )
        self.least = logging.INFO if shows else logging.WARNING
        self.kept: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append(record)
        if record.levelno >= self.least:
            super().emit(record)

    def __enter__(self) -> EarlyMessages:
        _take_over()
        LOGGER.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        LOGGER.removeHandler(self)


def _take_over() -> list[logging.LogRecord]:
    """Messages of the package go to its own handlers from now on. Gives what was said before, which ends here."""
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False
    early = [handler for handler in LOGGER.handlers if isinstance(handler, EarlyMessages)]
    for handler in early:
        LOGGER.removeHandler(handler)
    return [record for handler in early for record in handler.kept]


class LogHub:
    def __init__(self, info: RunInfo, names: list[str], rank: int = 0) -> None:
        self.info = info = replace(info, messages=_take_over())
        self.backends: list[Backend] = []
        self._failing: set[Backend] = set()  # told of already
        if rank == 0:
            classes = [backend_class(name) for name in names]
            self._stderr = None
            try:
                for kind in classes:
                    backend = kind()
                    backend.start(info)
                    self.backends.append(backend)
            except BaseException as error:
                self.__exit__(None, error, None)  # a live panel must give the terminal back
                raise
        else:
            self._stderr = logging.StreamHandler(sys.stderr)
            self._stderr.setLevel(logging.WARNING)
            self._stderr.setFormatter(
                logging.Formatter(f"[rank {rank}] %(levelname)s: %(message)s")
            )
            LOGGER.addHandler(self._stderr)

    def metrics(self, record: dict[str, Any]) -> None:
        record = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in record.items()
        }
        for backend in self.backends:
            self._call(backend, "metrics", record)

    def _call(self, backend: Backend, method: str, value: Any) -> None:
        """A full disk or a lost connection must not end the training; any other error is a bug and does."""
        try:
            getattr(backend, method)(value)
        except OSError as error:
            if backend not in self._failing:
                self._failing.add(backend)
                LOGGER.error(
                    "%s cannot write: %s. Training goes on.", type(backend).__name__, error
                )
        else:
            self._failing.discard(backend)

    def __enter__(self) -> LogHub:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        failed = error is not None and not isinstance(error, Interrupted)
        failure = "".join(traceback.format_exception(error)) if failed else None
        for backend in self.backends:
            self._call(backend, "close", failure)
        if self._stderr:
            LOGGER.removeHandler(self._stderr)


def backend_class(name: str) -> type[Backend]:
    if name in BACKENDS:
        return BACKENDS[name]
    if ":" not in name:
        raise UserError(
            f"log.backends: unknown backend {name!r}; known: {', '.join(BACKENDS)}, or module:Class"
        )
    module, attribute = load_spec(name, Path.cwd(), "log.backends")
    found = getattr(module, attribute or "", None)
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise UserError(
            f"log.backends: {name!r} is not a subclass of mvp_engine.log.backends.Backend"
        )
    return found

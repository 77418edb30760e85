"""What the `check.py` files of the loss skills share: a step context without a log, and their command line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mvp_engine.errors import EXIT_USER_ERROR, UserError, did_you_mean
from mvp_engine.imports import load_spec


class NoLog:
    """A step context that discards metrics."""

    def log(self, *_: Any) -> None: ...

    def count(self, *_: Any) -> None: ...


@contextmanager
def user_errors() -> Iterator[None]:
    """A context that prints a user error as one message, and exits with 2, as commands do."""
    try:
        yield
    except UserError as error:
        print(f"check.py: error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)


@user_errors()
def check_loss(problems: Callable[[Any], list[str]], kit_loss: Any) -> None:
    """Print `ok`, or the problems of the loss `FILE.py:NAME` on the command line (default: the kit's), and exit."""
    loss = kit_loss
    if len(sys.argv) > 1:
        module, name = load_spec(sys.argv[1], Path.cwd(), "the loss")
        name = name or "loss"
        if not hasattr(module, name):
            known = [key for key, value in vars(module).items() if callable(value)]
            raise UserError(f"{sys.argv[1]}: the file has no {name}.{did_you_mean(name, known)}")
        loss = getattr(module, name)
    found = problems(loss)
    print("\n".join(found) or "ok")
    sys.exit(bool(found))

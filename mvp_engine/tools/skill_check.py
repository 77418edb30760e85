"""What the `check.py` files of the loss skills share: a step context without a log, and their command line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mvp_engine.imports import load_spec


class NoLog:
    """A step context that discards metrics."""

    def log(self, *_: Any) -> None: ...

    def count(self, *_: Any) -> None: ...


def check_loss(problems: Callable[[Any], list[str]], kit_loss: Any) -> None:
    """Print `ok`, or the problems of the loss `FILE.py:NAME` on the command line (default: the kit's), and exit."""
    loss = kit_loss
    if len(sys.argv) > 1:
        module, name = load_spec(sys.argv[1], Path.cwd(), "the loss")
        loss = getattr(module, name or "loss")
    found = problems(loss)
    print("\n".join(found) or "ok")
    sys.exit(bool(found))

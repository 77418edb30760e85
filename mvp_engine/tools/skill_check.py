"""What the `check.py` files of the skills share: their command line, a time limit, and a step context without a log."""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from mvp_engine.errors import EXIT_USER_ERROR, UserError, did_you_mean
from mvp_engine.imports import load_spec
from mvp_engine.process.watchdog import adopt_orphans, end_with_this_process, kill_descendants

LIMIT_SECONDS = 600.0
STACK_SECONDS = 1.0  # for the process to print where it hangs


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
def run_check(check: Callable[[], list[str]]) -> NoReturn:
    """Print `ok`, or the problems that `check` returns, and exit. `--timeout SECONDS` limits its time.

    It runs in a forked process: code of the user that hangs may hold the GIL, or have started processes.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--timeout", type=float, default=LIMIT_SECONDS)
    options, sys.argv[1:] = parser.parse_known_args()
    arguments = (check, end_with_this_process())
    process = multiprocessing.get_context("fork").Process(target=_run, args=arguments)
    process.start()
    process.join(options.timeout)
    if process.exitcode is None:
        print(f"after {options.timeout:g} s the check is at:", file=sys.stderr, flush=True)
        os.kill(process.pid or 0, signal.SIGUSR1)
        process.join(STACK_SECONDS)
        kill_descendants(process.pid or 0)
        process.kill()
        process.join()
        raise UserError(f"no result after {options.timeout:g} s: it hangs, or raise --timeout")
    if process.exitcode < 0:
        raise UserError(f"the check was ended by {signal.Signals(-process.exitcode).name}")
    sys.exit(process.exitcode)


def _run(check: Callable[[], list[str]], end_with_parent: Callable[[], None]) -> None:
    end_with_parent()
    adopt_orphans()
    faulthandler.register(signal.SIGUSR1)
    with user_errors():
        found = check()
    print("\n".join(found) or "ok")
    sys.exit(bool(found))


def given(default: Any, what: str, name: str) -> Any:
    """The object `FILE.py:NAME` on the command line, or the default."""
    if len(sys.argv) < 2:
        return default
    module, chosen = load_spec(sys.argv[1], Path.cwd(), what)
    chosen = chosen or name
    if not hasattr(module, chosen):
        known = [key for key, value in vars(module).items() if callable(value)]
        raise UserError(f"{sys.argv[1]}: the file has no {chosen}.{did_you_mean(chosen, known)}")
    return getattr(module, chosen)


def check_loss(problems: Callable[[Any], list[str]], kit_loss: Any) -> NoReturn:
    """Check the loss `FILE.py:NAME` on the command line; default: the kit's."""
    run_check(lambda: problems(given(kit_loss, "the loss", "loss")))

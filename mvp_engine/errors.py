"""The ways a run ends early, with their exit codes. Bugs are not here: they keep their traceback and exit with 1."""

import difflib
from collections.abc import Iterable
from pathlib import Path

EXIT_BUG = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 75  # EX_TEMPFAIL: everything is saved, launch again with resume=auto
EXIT_TRY_AGAIN = 74  # EX_IOERR: the run starts again, with other sizes
EXIT_CODE_FILE = "MVP_EXIT_CODE_FILE"  # environment variable: the file for rank 0's exit code
ELASTIC = "MVP_ELASTIC"  # environment variable of a job that may lose nodes: where they meet, as HOST:PORT
JOB_ID = (
    "MVP_JOB_ID"  # environment variable: the name of an elastic job, the same after each restart
)
ERROR_FILE = "error.txt"  # next to it: why ranks failed, for the launcher to print last
TRY_AGAIN_FILE = (
    "try_again"  # next to it: the launcher id of a run that its ranks want to start again
)


class UserError(ValueError):
    """A user error: the text names what is wrong, where, and the fix. It is shown without a traceback."""


class RowError(UserError):
    """A user error in one row of a micro-batch, such as a label out of range. The engine adds where the row is from."""

    def __init__(self, text: str, row: int) -> None:
        """`row`: its index in the micro-batch; in a packed batch, the index of its sequence."""
        super().__init__(text)
        self.row = row


def reason_of(error: BaseException) -> str:
    """One error in words: a user error's own, else with its type."""
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The sentence to append for a misspelt name, with a space before it; empty where no known name is similar."""
    similar = difflib.get_close_matches(name, list(known), 1)
    return f" Did you mean {similar[0]}?" if similar else ""


def similar_path(path: str | Path) -> str:
    """As `did_you_mean`, for a path that does not exist: each missing part becomes the most similar name there."""
    parts = Path(path).expanduser().parts
    found = Path(*parts[:1]) if Path(path).is_absolute() else Path()
    for part in parts:
        if not (found / part).exists():
            try:
                names = [entry.name for entry in found.iterdir()]
            except OSError:  # a file, or a folder that may not be listed
                return ""
            part = next(iter(difflib.get_close_matches(part, names, 1)), "")
            if not part:
                return ""
        found /= part
    return f" Did you mean {found}?"


def count(number: int, noun: str) -> str:
    """A number with its noun in singular or plural: `1 rank`, `2,000 ranks`, `3 micro-batches`."""
    ending = "es" if noun.endswith(("ch", "s")) else "s"
    return f"{number:,} {noun}{'' if number == 1 else ending}"


class Interrupted(Exception):
    """SIGTERM or Ctrl-C: the step was finished and saved."""


class TryAgain(Interrupted):
    """The run can start again in another way, such as with smaller packs: the text says why and how."""

"""The ways a run ends early, with their exit codes. Bugs are not here: they keep their traceback and exit with 1."""

EXIT_BUG = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 75  # EX_TEMPFAIL: everything is saved, launch again with resume=auto
EXIT_CODE_FILE = "MVP_EXIT_CODE_FILE"  # environment variable: the file for rank 0's exit code


class UserError(ValueError):
    """A user error: the text names what is wrong, where, and the fix. It is shown without a traceback."""


class Interrupted(Exception):
    """SIGTERM or Ctrl-C: the step was finished and saved."""

"""The command: starts trials as processes of their own, and prints their table and the fastest config.

A trial is a process, so that one that runs out of memory ends alone, and each starts with an empty GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mvp_engine.errors import UserError
from mvp_engine.kit.data.settings import MLLMData
from mvp_engine.process.signals import EXIT_AT_ONCE
from mvp_engine.tools.config import read_config
from mvp_engine.tools.tune.page import page, words_of
from mvp_engine.tools.tune.search import OUT_OF_MEMORY, Outcome, best, search
from mvp_engine.tools.tune.setups import Setup, Space

SHOWN_LINES = 12  # of the log of a failed trial


def tune(
    config: str,
    overrides: list[str],
    *,
    minutes: float,
    nproc: int,
    out: str | None,
    as_json: bool,
) -> int:
    _check_config(config, overrides)
    file = None if out is None else _out_file(out)
    if minutes <= 0 or nproc < 1:
        raise UserError("--minutes and --nproc: more than 0")
    tuner = Tuner(config, overrides, minutes, nproc)
    with _stop_signals():
        is_stopped = tuner.search()
    found = tuner.report()
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        print(page(found, minutes))
    if not found["values"]:
        raise UserError(f"no trial fits into the memory. {_estimate_hint(config)}")
    if file is not None:
        lines = read_config(config, [*overrides, *words_of(found["values"])]).to_yaml()
        file.write_text(f"# {config}, with the fastest setup that mvp tune found.\n{lines}")
        print(f"mvp: written: {file}", file=sys.stderr)
    return EXIT_AT_ONCE if is_stopped else 0


class Tuner:
    """The trials of one config."""

    def __init__(self, config: str, overrides: list[str], minutes: float, nproc: int) -> None:
        self.config = config
        self.overrides = overrides
        self.nproc = nproc
        self.minutes = minutes
        self.outcomes: list[Outcome] = []
        self.durations: list[float] = []
        self.facts: dict[str, Any] = {}
        self.folder = Path(tempfile.mkdtemp(prefix="mvp-tune-"))
        self.keeps_logs = False
        self.is_over = False  # there was no time for more trials

    def search(self) -> bool:
        """Run trials until the time is over; returns whether a signal ended the search early."""
        self.deadline = time.monotonic() + 60 * self.minutes
        try:
            first = self._first_trial()
            for outcome in search(self.space, first, self._trial, self._has_time):
                self._add(outcome)
        except KeyboardInterrupt:
            if not self.outcomes:
                raise
            return True
        finally:
            if not self.keeps_logs:
                shutil.rmtree(self.folder)
        return False

    def _first_trial(self) -> Outcome:
        """The config as it is. It reports what the space is; if it does not run at all, that is the user's error."""
        folder, problem = self._run([], limit=None)
        facts_file = folder / "facts.json"
        if not facts_file.is_file() or problem not in (None, OUT_OF_MEMORY):
            self.keeps_logs = True
            raise UserError(
                f"the config does not train, so there is nothing to compare. The end of {folder / 'log.txt'}:\n"
                f"{_last_lines(folder)}\n{_check_hint(self.config, problem)}"
            )
        facts = self.facts = json.loads(facts_file.read_text())
        self.space = Space(
            facts["section"],
            facts["tokens"] * facts["packs"],
            facts["row_tokens"],
            facts["least_tokens"],
            facts["data_ranks"],
            tuple(facts["parts"]),
            facts["is_in_packs"],
            tuple(facts["compiles"]),
        )
        setup = Setup(facts["tokens"], tuple(facts["modes"]), facts["compiles"][0])
        outcome = self._outcome(setup, folder, problem)
        self._add(outcome)
        return outcome

    def _trial(self, setup: Setup) -> Outcome:
        limit = max(0.0, self.deadline - time.monotonic()) + max(self.durations)
        folder, problem = self._run(words_of(self.space.values(setup)), limit)
        return self._outcome(setup, folder, problem)

    def _has_time(self) -> bool:
        """Whether a trial as long as the mean of those so far ends in time."""
        mean = sum(self.durations) / len(self.durations)
        self.is_over = time.monotonic() + mean > self.deadline
        return not self.is_over

    def _run(self, words: list[str], limit: float | None) -> tuple[Path, str | None]:
        """Run a trial; returns its folder, and what went wrong."""
        folder = self.folder / f"trial_{len(self.durations) + 1}"
        folder.mkdir()
        started = time.monotonic()
        arguments = ["--config", self.config, "--folder", str(folder), *self.overrides, *words]
        log = folder / "log.txt"
        try:
            code = run_process(self.nproc, arguments, log, limit)
        finally:
            self.durations.append(time.monotonic() - started)
        if code is None:
            return folder, "not finished in time"
        if code == 0:
            has_ended = (folder / "measured.json").is_file()
            return folder, None if has_ended else "the data ended before the measured steps"
        if OUT_OF_MEMORY in log.read_text(errors="replace").lower():
            return folder, OUT_OF_MEMORY
        return folder, f"failed with exit code {code}"

    def _outcome(self, setup: Setup, folder: Path, problem: str | None) -> Outcome:
        if problem is None:
            facts = json.loads((folder / "facts.json").read_text())
            if facts["tokens"] * facts["packs"] != self.space.total:
                problem = f"another global batch: {facts['packs']} x {facts['tokens']:,} tokens"
        if problem is not None:
            if problem != OUT_OF_MEMORY:
                self.keeps_logs = True
                problem += f", see {folder / 'log.txt'}"
            return Outcome(setup, problem=problem)
        found = json.loads((folder / "measured.json").read_text())
        return Outcome(setup, found["tokens_per_s"], found["step_s"], found["peak_gib"])

    def _add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        result = outcome.problem or f"{outcome.tokens_per_s:,.0f} tokens/s"
        text = f"mvp: trial {len(self.outcomes)}, {self.space.text(outcome.setup)}: {result}"
        print(text, file=sys.stderr, flush=True)

    # ---- Results --------------------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        top = best(self.outcomes)
        trials = []
        for outcome in self.outcomes:
            trials.append(
                {
                    "setup": self.space.text(outcome.setup),
                    "values": self.space.values(outcome.setup),
                    "tokens_per_s": outcome.tokens_per_s or None,
                    "step_s": outcome.step_s or None,
                    "peak_gib": outcome.peak_gib or None,
                    "problem": outcome.problem,
                }
            )
        first = self.outcomes[0].tokens_per_s
        return {
            "config": self.config,
            "overrides": self.overrides,
            "nproc": self.nproc,
            "device": self.facts["device"],
            "ranks": self.facts["ranks"],
            "auto": self.facts["auto"],
            "global_batch_tokens": self.space.total,
            "trials": trials,
            "time_is_over": self.is_over,
            "best": top and self.outcomes.index(top),
            "speedup": top.tokens_per_s / first if top and first else None,
            "values": self.space.values(top.setup) if top else {},
        }


def _check_config(config: str, overrides: list[str]) -> None:
    """Raise for configs that have no pack size, before a trial starts."""
    values = read_config(config, overrides)
    if values.resume is not None:
        raise UserError("mvp tune starts new trainings: leave resume out")
    if hasattr(values, "rl"):
        raise UserError(
            f"mvp tune trains on rows; {config} is a config of reinforcement learning, whose steps generate them. "
            "mvp estimate CONFIG predicts its memory"
        )
    if not any(isinstance(value, MLLMData) for _, value in values):
        raise UserError(
            f"mvp tune searches mllm.micro_batch_tokens; {config} has no section of the data kit, so it has no pack "
            "size. mvp profile CONFIG shows where the time of its steps goes"
        )


def _out_file(out: str) -> Path:
    file = Path(out).expanduser()
    if file.suffix != ".yaml":
        raise UserError(f"--out {out}: mvp train reads files that are called *.yaml")
    if not file.parent.is_dir() or not os.access(file.parent, os.W_OK):
        raise UserError(f"--out {out}: {file.parent} is no folder that can be written to")
    return file


def run_process(nproc: int, arguments: list[str], log: Path, limit: float | None) -> int | None:
    """Run the ranks of a trial; returns the exit code, or None if they had not ended after `limit` seconds."""
    command = [sys.executable, "-m", "mvp_engine.tools.tune", str(nproc), *arguments]
    with log.open("w") as out:
        # A session of its own: the end of a trial is also that of its ranks and loader workers.
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def _stop_signals() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, as Ctrl-C does: the search ends its trial and prints what it has."""

    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _last_lines(folder: Path) -> str:
    lines = (folder / "log.txt").read_text(errors="replace").splitlines()
    return "\n".join(f"  {line}" for line in lines[-SHOWN_LINES:])


def _check_hint(config: str, problem: str | None) -> str:
    return _estimate_hint(config) if problem == OUT_OF_MEMORY else f"mvp check {config} tests it"


def _estimate_hint(config: str) -> str:
    return f"mvp estimate {config} prints settings that fit"

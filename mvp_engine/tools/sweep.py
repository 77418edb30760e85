"""`mvp sweep`: trainings of one config with several values of some keys, each a run and a process of its own.

A grid, or values that Optuna chooses. `sweep.json` in the sweep's folder has the values of each run; what became of it
is read from its run folder, so that the same command continues a sweep that was stopped or killed at any moment.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mvp_engine.config import compose
from mvp_engine.errors import EXIT_INTERRUPTED, EXIT_USER_ERROR, UserError, count
from mvp_engine.files import atomic_write_text
from mvp_engine.log.format import number
from mvp_engine.process.signals import StopSignals
from mvp_engine.process.watchdog import end_with_this_process
from mvp_engine.report.facts import RunFacts
from mvp_engine.report.page import plot_points
from mvp_engine.runs import SWEEP_FILE, Run

POLL_SECONDS = 0.5
LEAST_COMPARED = 3  # runs that a run is compared with before it may be stopped early
RESERVED = ("run_id", "resume", "workflow")
STOPPED = "the running trainings save and end; the same command continues the sweep"


@dataclass
class Trial:
    """One run of a sweep."""

    run: str  # its id
    values: dict[str, Any]  # of the swept keys
    state: str = "waiting"  # running, pruning; finished, pruned, failed
    value: float | None = None  # the best value of the metric, and its step
    step: int | None = None
    error: str = ""
    evaluations: dict[int, float] = field(default_factory=dict)  # the metric by step

    @property
    def words(self) -> list[str]:
        return [f"{key}={value}" for key, value in self.values.items()]

    @property
    def is_ended(self) -> bool:
        return self.state in ("finished", "pruned", "failed")


@dataclass
class Sweep:
    """What is searched, in which folder, and the runs until now."""

    config: str
    fixed: list[str]  # the other words of the command line
    swept: dict[str, Any]  # Hydra's overrides by key
    metric: str
    is_min: bool
    folder: Path
    trials: list[Trial] = field(default_factory=list)
    lock: Run | None = None  # of one command at a time

    def run(self, trial: Trial) -> Run:
        return Run(self.folder.parent / trial.run)

    def output(self, trial: Trial) -> Path:
        return self.folder / f"{trial.run}.txt"

    def add(self, values: dict[str, Any]) -> Trial:
        self.trials.append(Trial(f"{self.folder.name}-{len(self.trials):03d}", values))
        return self.trials[-1]

    def save(self) -> None:
        trials = [{**asdict(trial), "evaluations": {}} for trial in self.trials]
        facts = {"config": self.config, "words": self.fixed, "metric": self.metric}
        text = json.dumps({**facts, "is_min": self.is_min, "trials": trials}, indent=2)
        atomic_write_text(self.folder / SWEEP_FILE, text + "\n")

    def load(self) -> None:
        """Continue where the last command ended: runs that failed or were stopped start again."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = Run(self.folder)
        self.lock.lock()
        if (self.folder / SWEEP_FILE).is_file():
            facts = json.loads((self.folder / SWEEP_FILE).read_text())
            self.trials = [Trial(**one) for one in facts["trials"]]
        for trial in self.trials:
            self.read(trial)
            if (
                trial.state in ("running", "waiting")
                and RunFacts(self.run(trial)).info.get("status") == "finished"
            ):
                self.end(trial, 0)  # while nobody watched
            if trial.state not in ("finished", "pruned"):
                trial.state, trial.error = "waiting", ""

    def read(self, trial: Trial) -> None:
        """Read the evaluations of its run until now."""
        for record in self.run(trial).records("eval"):
            value = record.get(self.metric)
            if value is not None and math.isfinite(value):
                trial.evaluations[record["step"]] = value
        if trial.evaluations:
            best = min if self.is_min else max
            trial.step = best(trial.evaluations, key=trial.evaluations.__getitem__)
            trial.value = trial.evaluations[trial.step]

    def end(self, trial: Trial, code: int) -> None:
        """Note how a run ended, by the exit code of its process."""
        self.read(trial)
        if code == 0 and trial.value is not None:
            trial.state = "finished"
        elif code == EXIT_INTERRUPTED:
            trial.state = "pruned" if trial.state == "pruning" else "waiting"
        else:
            trial.state, trial.error = "failed", f"no evaluation has a finite {self.metric}"
            if code:
                output = self.output(trial).read_text(errors="replace")
                lines = (
                    str(RunFacts(self.run(trial)).info.get("error") or output).strip().splitlines()
                )
                trial.error = f"exit code {code}: {lines[-1] if lines else 'no message'}"

    def ranked(self) -> list[Trial]:
        """The best first, those without a value last."""
        sign = 1 if self.is_min else -1
        return sorted(
            self.trials, key=lambda one: math.inf if one.value is None else sign * one.value
        )


class Grid:
    """All combinations of the values."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        for override in sweep.swept.values():
            if override.is_interval_sweep():
                raise UserError(
                    f"{override.input_line}: a grid has no points in an interval: name values, or give --optuna N"
                )
        values = [list(override.sweep_string_iterator()) for override in sweep.swept.values()]
        known = [trial.values for trial in sweep.trials]
        for point in itertools.product(*values):
            if (one := dict(zip(sweep.swept, point, strict=True))) not in known:
                sweep.add(one)
        for trial in sweep.trials:  # a value that no training accepts is an error now, not in hours
            compose(sweep.config, [*sweep.fixed, *trial.words])
        self.size = len(sweep.trials)

    def next(self) -> Trial | None:
        return next((trial for trial in self.sweep.trials if trial.state == "waiting"), None)

    def is_worse(self, trial: Trial) -> bool:
        """Optuna's median rule: the best value of a run, and the median of the others at its last evaluation."""
        step = max(trial.evaluations)
        others = [
            one.evaluations[step]
            for one in self.sweep.trials
            if one is not trial and step in one.evaluations
        ]
        if len(others) < LEAST_COMPARED or trial.value is None:
            return False
        median = statistics.median(others)
        return trial.value > median if self.sweep.is_min else trial.value < median

    def ended(self, trial: Trial) -> None:
        """A grid does not learn from a run."""


class OptunaSearch(Grid):
    """Values from Optuna's TPE sampler, and its median pruner. Its study is made again from the runs."""

    def __init__(self, sweep: Sweep, size: int) -> None:
        try:
            import optuna
        except ModuleNotFoundError:
            fix = "pip install 'mvp-engine[optuna]'"
            raise UserError(f"--optuna needs the package optuna: {fix}") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.optuna, self.sweep, self.size = optuna, sweep, size
        least = LEAST_COMPARED
        self.study = optuna.create_study(
            direction="minimize" if sweep.is_min else "maximize",
            sampler=optuna.samplers.TPESampler(seed=len(sweep.trials), constant_liar=True),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=least, n_min_trials=least),
        )
        self.space = {key: self._values(override) for key, override in sweep.swept.items()}
        self.asked: dict[str, Any] = {}
        for trial in sweep.trials:
            if trial.is_ended:
                self._ask(trial)
                for step, value in trial.evaluations.items():
                    self.asked[trial.run].report(value, step)
                self.ended(trial)

    def _values(self, override: Any) -> Any:
        kinds = self.optuna.distributions
        if not override.is_interval_sweep():
            return kinds.CategoricalDistribution(list(override.sweep_string_iterator()))
        interval = override.value()
        is_int, is_log = "int" in interval.tags, "log" in interval.tags
        if is_int:
            return kinds.IntDistribution(int(interval.start), int(interval.end), log=is_log)
        return kinds.FloatDistribution(float(interval.start), float(interval.end), log=is_log)

    def _ask(self, trial: Trial) -> None:
        """Make Optuna's trial with the values of ours."""
        self.study.enqueue_trial(trial.values)
        self.asked[trial.run] = self.study.ask(self.space)

    def next(self) -> Trial | None:
        if (trial := super().next()) is not None:
            if trial.run not in self.asked:  # else it was stopped from outside, and continues
                self._ask(trial)
            return trial
        if len(self.sweep.trials) >= self.size:
            return None
        asked = self.study.ask(self.space)
        trial = self.sweep.add(asked.params)
        self.asked[trial.run] = asked
        return trial

    def is_worse(self, trial: Trial) -> bool:
        asked, step = self.asked[trial.run], max(trial.evaluations)
        asked.report(trial.evaluations[step], step)
        return bool(asked.should_prune())

    def ended(self, trial: Trial) -> None:
        states = self.optuna.trial.TrialState
        state = {"finished": states.COMPLETE, "pruned": states.PRUNED}.get(trial.state, states.FAIL)
        value = trial.value if state == states.COMPLETE else None
        self.study.tell(self.asked[trial.run], value, state)


def sweep_command(
    config: str,
    overrides: list[str],
    optuna: int | None,
    jobs: int,
    nproc: int | None,
    *,
    prune: bool,
    as_json: bool,
) -> int:
    """Run a sweep to its end; 75 if a signal stopped it, 2 if no run finished."""
    if jobs < 1 or (optuna is not None and optuna < 1):
        raise UserError("--jobs and --optuna: at least 1")
    sweep = read_sweep(config, overrides)
    sweep.load()
    search = OptunaSearch(sweep, optuna) if optuna else Grid(sweep)
    out = sys.stderr if as_json else sys.stdout
    ended = sum(trial.is_ended for trial in sweep.trials)
    more = f", {ended} of them ended before" if ended else ""
    name = sweep.folder.name
    runs = f"{count(max(search.size, len(sweep.trials)), 'run')}{more}"
    print(f"{sweep.folder}: {runs}. To watch: mvp runs serve {name}", file=out, flush=True)
    is_stopped = run_all(sweep, search, jobs, nproc or 1, prune, out)
    if ranked := [trial for trial in sweep.ranked() if trial.value is not None]:
        values = {key: [trial.values.get(key, "-") for trial in ranked] for key in sweep.swept}
        figures = [trial.value or 0.0 for trial in ranked]
        plot_points(sweep.folder / "sweep.png", values, sweep.metric, figures)
    if as_json:
        facts = {"folder": str(sweep.folder), "metric": sweep.metric}
        print(json.dumps({**facts, "trials": list(map(asdict, sweep.ranked()))}, indent=2))
    else:
        print_table(sweep)
    if is_stopped:
        return EXIT_INTERRUPTED
    return 0 if any(trial.state == "finished" for trial in sweep.trials) else EXIT_USER_ERROR


def read_sweep(config: str, overrides: Sequence[str]) -> Sweep:
    """The sweep that the words describe. Its name follows from them, so that the same words continue it."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    fixed, swept, firsts = list[str](), dict[str, Any](), list[str]()
    for word in overrides:
        key = word.partition("=")[0]
        if key in RESERVED:
            raise UserError(f"{word}: a sweep sets {key} of each run itself: leave it out")
        try:
            override = OverridesParser.create().parse_override(word)
        except HydraException as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"{word!r} cannot be read: {reason}") from None
        if not override.is_sweep_override():
            fixed.append(word)
            continue
        swept[key] = override
        value: Any = override.value()
        if override.is_interval_sweep():
            firsts.append(f"{key}={int(value.start) if 'int' in value.tags else value.start}")
        else:
            firsts.append(f"{key}={next(iter(override.sweep_string_iterator()))}")
    if not swept:
        raise UserError(
            f"no key has several values: write such as mvp sweep {config} optim.lr=1e-5,3e-5"
        )
    composed = compose(config, [*fixed, *firsts]).config
    metric = composed.checkpoint.best_metric
    if metric is None or composed.eval.steps is None:
        key = "eval.steps" if metric else "checkpoint.best_metric"
        raise UserError(f"{key} is null, but evaluations of the runs are compared: set it")
    text = json.dumps([str(Path(config).resolve()), sorted(overrides)])
    name = f"{composed.run_name}-sweep-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
    folder = Path(composed.output_dir).expanduser() / name
    return Sweep(config, fixed, swept, metric, composed.checkpoint.best_mode == "min", folder)


def run_all(sweep: Sweep, search: Grid, jobs: int, nproc: int, prune: bool, out: Any) -> bool:
    """Run the trials, `jobs` at a time; returns whether a signal stopped them."""
    running: dict[int, tuple[Trial, subprocess.Popen[bytes]]] = {}  # by their place among the jobs
    is_stopping = False
    with StopSignals(STOPPED) as signals:
        while True:
            for place in set(range(jobs)) - set(running):
                if signals.requested or (trial := search.next()) is None:
                    break
                trial.state = "running"
                while sweep.run(trial).is_live() and not signals.requested:
                    time.sleep(POLL_SECONDS)  # of a sweep that was killed: it saves
                running[place] = trial, start(sweep, trial, place, jobs, nproc)
                sweep.save()
                print(f"{trial.run}  {' '.join(trial.words)}", file=out, flush=True)
            if not running:
                return signals.requested is not None
            if signals.requested and not is_stopping:
                is_stopping = True
                for _, process in running.values():
                    process.send_signal(signal.SIGTERM)
            time.sleep(POLL_SECONDS)
            for place, (trial, process) in list(running.items()):
                code = process.poll()  # before the evaluations, so that none is missed
                num_read = len(trial.evaluations)
                sweep.read(trial)
                is_new = code is None and len(trial.evaluations) > num_read
                if is_new and prune and trial.state == "running" and search.is_worse(trial):
                    trial.state = "pruning"
                    process.send_signal(signal.SIGTERM)
                if code is not None:
                    del running[place]
                    sweep.end(trial, code)
                    sweep.save()
                if trial.is_ended:
                    search.ended(trial)
                    text = trial.error or f"{sweep.metric} {number(trial.value)}"
                    print(f"{trial.run}  {trial.state}: {text}", file=out, flush=True)


def start(sweep: Sweep, trial: Trial, place: int, jobs: int, nproc: int) -> subprocess.Popen[bytes]:
    """Start or resume a run, with its share of the cores and GPUs. It is stopped when this process ends."""
    words = ["-m", "mvp_engine.cli", "train", sweep.config, *sweep.fixed, *trial.words]
    words += [f"run_id={trial.run}", "resume=auto", "--nproc", str(nproc)]
    environment = dict(os.environ)
    files = [file.name.removeprefix("nvidia") for file in Path("/dev").glob("nvidia[0-9]*")]
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(files)).split(",")
    if jobs > 1 and all(gpus):  # else there are none, or it is not known which
        own = [gpus[(place * nproc + rank) % len(gpus)] for rank in range(nproc)]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(own))
    if jobs > 1:
        cores = max(1, (os.cpu_count() or 1) // (jobs * nproc))
        environment.setdefault("OMP_NUM_THREADS", str(cores))
    with sweep.output(trial).open("ab") as output:
        output.write(f"$ mvp {shlex.join(words[2:])}\n".encode())
        output.flush()
        return subprocess.Popen(
            [sys.executable, *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches this process alone, which stops the runs
            preexec_fn=end_with_this_process(thread_lasts=True, number=signal.SIGTERM),
        )


def print_table(sweep: Sweep) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("run", *sweep.swept, sweep.metric, "step", "state", box=None, pad_edge=False)
    ranked = sweep.ranked()
    for trial in ranked:
        values = [str(trial.values.get(key, "-")) for key in sweep.swept]
        step = "-" if trial.step is None else str(trial.step)
        table.add_row(trial.run, *values, number(trial.value), step, trial.state)
    print()
    Console(highlight=False, width=None if sys.stdout.isatty() else 160).print(table)
    if ranked[0].value is not None:
        print(f"\nbest: {' '.join(ranked[0].words)}\n{sweep.folder / 'sweep.png'}")

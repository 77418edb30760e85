"""Several benchmarks in one session on a GPU machine: each has a limit, and none leaves a process on the GPU.

    PYTHONPATH=. python benchmarks/session.py --seconds 500 --logs logs \\
        "+120 benchmarks/prime.py text_1.7b" "+120 -m pytest -m gpu tests/ops" \\
        "60 benchmarks/recipes.py --only text_1.7b --warm --no-profile --no-peers --out text.json"

A job is its limit in seconds and the arguments of python. Jobs that begin with + run at the same time: what compiles,
or compares results. A job without + runs alone after all before it, as a timing must. `--seconds` bounds the session: a
job gets what is left, and benchmarks end their trainings some seconds earlier, to write what they have. Output goes to
a file per job; its last lines are printed when it ends.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.watch import ENDS, ended_by_sigterm, kill_session


@dataclass(frozen=True)
class Job:
    limit: float
    words: list[str]
    is_alone: bool

    @classmethod
    def parse(cls, text: str) -> Job:
        limit, *words = shlex.split(text)
        if not words:
            raise argparse.ArgumentTypeError(f"{text!r} has no arguments of python after its seconds")
        return cls(float(limit.removeprefix("+")), words, is_alone=not limit.startswith("+"))


class Session:
    def __init__(self, seconds: float, logs: Path, shown: int) -> None:
        self.started = time.perf_counter()
        self.seconds = seconds
        self.logs = logs
        self.shown = shown
        self.results: list[tuple[str, int | None]] = []  # None: killed
        self._leaders: list[int] = []  # of the sessions of jobs that run

    def run(self, jobs: list[Job]) -> None:
        running: list[threading.Thread] = []
        try:
            for number, job in enumerate(jobs):
                if job.is_alone:
                    _join(running)
                running.append(threading.Thread(target=self._run_one, args=(number, job), daemon=True))
                running[-1].start()
                if job.is_alone:
                    _join(running)
            _join(running)
        finally:
            for leader in list(self._leaders):  # after SIGTERM or Ctrl-C some still run
                kill_session(leader)

    def _run_one(self, number: int, job: Job) -> None:
        limit = min(job.limit, self.seconds - self.now)
        name = shlex.join(job.words)
        log = self.logs / f"{number}.txt"
        log.unlink(missing_ok=True)  # of an earlier session
        code: int | None = None
        ending = "not started: the time of the session was up"
        if limit > 0:
            ending = f"killed after {limit:.0f} s"
            with log.open("w") as out:
                command = [sys.executable, *job.words]
                env = os.environ | {ENDS: str(time.time() + limit)}
                process = subprocess.Popen(
                    command,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                self._leaders.append(process.pid)
                try:
                    code = process.wait(limit)
                    ending = f"ended with {code}"
                except subprocess.TimeoutExpired:
                    pass
                try:
                    kill_session(process.pid)
                    process.wait()
                    self._leaders.remove(process.pid)
                except RuntimeError as error:  # the next jobs run all the same
                    code, ending = None, str(error)
        lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
        text = "\n".join(line[:600] for line in lines[-self.shown :])
        print(f"=== {self.now:.0f} s: {name} {ending}\n{text}", flush=True)
        self.results.append((name, code))

    @property
    def now(self) -> float:
        return time.perf_counter() - self.started


def _join(threads: list[threading.Thread]) -> None:
    while threads:
        threads.pop().join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="+", type=Job.parse, metavar="[+]SECONDS ARGUMENTS")
    parser.add_argument("--seconds", type=float, default=3600, help="of the whole session")
    parser.add_argument("--logs", type=Path, default=Path("logs"), help="the folder of the outputs")
    parser.add_argument("--shown", type=int, default=8, help="last lines of each job that are printed")
    args = parser.parse_args()
    args.logs.mkdir(parents=True, exist_ok=True)
    session = Session(args.seconds, args.logs, args.shown)
    with ended_by_sigterm():
        session.run(args.jobs)
    return 0 if all(code == 0 for _, code in session.results) else 1


if __name__ == "__main__":
    sys.exit(main())

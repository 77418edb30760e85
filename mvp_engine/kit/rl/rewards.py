"""Rewards of completions: a plain Python function of the raw row and the answer, checked and isolated.

A reward that raises, hangs, returns NaN or kills its process fails alone: it is named with its row, and the
completion is left out. The order of completions is kept, and random numbers do not depend on the workers.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import multiprocessing
import multiprocessing.util
import numbers
import os
import pickle
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from mvp_engine.data import derived_seed, rng_state, seed_everything, set_rng_state
from mvp_engine.errors import UserError, count
from mvp_engine.kit.rl.prompts import Prompt
from mvp_engine.kit.rl.rollout import Sample
from mvp_engine.kit.rl.settings import RewardSettings
from mvp_engine.process.watchdog import adopt_orphans, end_with_this_process, kill_descendants

LOGGER = logging.getLogger("mvp_engine")
Model = Callable[[Sequence[Prompt], Sequence[Sample]], list[float]]
MAX_WARNINGS = 10  # of a run
SHOWN_CHARACTERS = 200  # of an answer
TAKEN_NAMES = {  # of parts of a reward, whose metric is reward_NAME
    "": "is empty: choose another one",
    "errors": "is that of the metric reward_errors: choose another one",
    "model": "is that of the reward model's score: choose another one",
}


@dataclass(frozen=True)
class Answer:
    """A completion, as a reward sees it."""

    text: str  # without special tokens
    tokens: list[int]
    reason: str  # "stop", or "length": cut after generation.max_new_tokens
    log_probs: list[float]
    version: int  # of the weights that wrote it


@dataclass(frozen=True)
class Reward:
    """The reward of one completion."""

    value: float | None  # None: it failed, and the completion is dropped
    # Of a function that returns several numbers.
    parts: dict[str, float] = field(default_factory=dict)
    error: str | None = None  # why it failed


class RewardFailed(UserError):
    """Rewards failed that may not, or too many of them."""


class Rewards:
    """Computes the rewards of samples with `compute(row, answer)`, in `settings.workers` processes.

    `compute` returns a number, or several by name: their sum is the reward. `model` scores all samples of a step, and
    its score is added. One of both may be None.
    """

    def __init__(
        self, compute: Compute | None, tokenizer: Any, settings: RewardSettings, seed: int = 0
    ) -> None:
        if compute is not None:
            _check_arguments(compute)
        self.compute = _Checked(compute or (lambda row, answer: 0.0))
        self.model: Model | None = None
        self.tokenizer = tokenizer
        self.settings = settings
        self.seed = seed
        self._warned = 0
        self._lock = threading.Lock()  # rollouts in a thread and an evaluation share the workers
        self._workers: RewardWorkers | None = None
        if settings.workers and compute is not None:
            self._workers = RewardWorkers(self.compute, settings.workers, settings.timeout)

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def __call__(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[Reward]:
        """The reward of each sample; `sample.prompt` is an index into the prompts."""
        answers = [self.answer(sample) for sample in samples]
        groups = self._groups(prompts, samples, answers)
        outcomes: dict[int, Outcome] = {}
        failed: list[str] = []

        def add(index: int, outcome: Outcome) -> None:
            outcomes[index] = outcome
            if outcome.error is not None:
                place = _describe(prompts[samples[index].prompt], answers[index], outcome)
                failed.append(f"{place}\n{outcome.detail}".rstrip())
                self._warn(place)
                self._check_failures(failed, len(outcomes), len(samples))

        # Closed at once when too many have failed: of rewards that hang, each would cost a time-out.
        with self._lock, closing(self._run(groups)) as finished:
            for index, outcome in finished:
                add(index, outcome)
        if self.model is not None:
            for index, score in enumerate(self.model(prompts, samples)):
                if outcomes[index].error is None:
                    add(index, self._with_score(outcomes[index], score))
        return [self._reward(outcomes[index]) for index in range(len(samples))]

    def _run(self, groups: list[Group]) -> Generator[tuple[int, Outcome]]:
        if self._workers is not None:
            yield from self._workers.run(groups)
            return
        outside = rng_state()
        for group in groups:
            for task in group.tasks:
                yield task.index, run_task(self.compute, group.row, task)
        set_rng_state(outside)

    def _with_score(self, outcome: Outcome, score: float) -> Outcome:
        """The outcome with the score of the reward model as one more part."""
        if not math.isfinite(score):
            return Outcome(error=f"the reward model's score is {score}")
        value, parts = outcome.value
        total = value + score
        return Outcome((total, {**parts, "model": score}))

    def answer(self, sample: Sample) -> Answer:
        text = self.tokenizer.decode(sample.tokens, skip_special_tokens=True)
        tokens = list(sample.tokens)
        log_probs = list(sample.log_probs)
        return Answer(str(text), tokens, sample.reason, log_probs, sample.version)

    def _groups(
        self, prompts: Sequence[Prompt], samples: Sequence[Sample], answers: Sequence[Answer]
    ) -> list[Group]:
        groups: dict[int, Group] = {}
        for index, (sample, answer) in enumerate(zip(samples, answers, strict=True)):
            prompt = prompts[sample.prompt]
            if sample.prompt not in groups:
                groups[sample.prompt] = Group(pickle.dumps(prompt.row))
            tasks = groups[sample.prompt].tasks
            seed = derived_seed(self.seed, "reward", prompt.key, len(tasks))
            tasks.append(Task(index, seed, answer))
        return list(groups.values())

    def _reward(self, outcome: Outcome) -> Reward:
        if outcome.error is not None:
            return Reward(None, error=outcome.error)
        value, parts = outcome.value
        return Reward(value, parts)

    def _warn(self, place: str) -> None:
        if self._warned < MAX_WARNINGS:
            LOGGER.warning("reward failed: %s", place)
        self._warned += 1
        if self._warned == MAX_WARNINGS:
            LOGGER.warning("further failed rewards are only counted")

    def _check_failures(self, failed: list[str], computed: int, total: int) -> None:
        """Raise if a reward may not fail, or if too many of the `total` rewards of a step did."""
        share = self.settings.max_errors
        allowed = min(max(1, int(share * total)) if share else 0, total - 1)
        if len(failed) > allowed:
            raise RewardFailed(
                f"reward: {len(failed)} of the first {count(computed, 'reward')} of this step failed, and {allowed} of "
                f"{total} may (reward.max_errors={share:g}). Fix the reward function, or raise reward.max_errors. The "
                f"first: {failed[0]}"
            )


def reward_metrics(rewards: Sequence[Reward]) -> dict[str, tuple[float, float]]:
    """Metrics of a step as (sum, weight): the mean reward, its parts, and the share of failed rewards."""
    found: dict[str, tuple[float, float]] = {}
    for reward in rewards:
        values = {} if reward.value is None else {"reward": reward.value}
        values |= {f"reward_{name}": value for name, value in reward.parts.items()}
        for name, value in values.items():
            total, weight = found.get(name, (0.0, 0.0))
            found[name] = (total + value, weight + 1)
    failed = sum(reward.error is not None for reward in rewards)
    return found | ({"reward_errors": (float(failed), float(len(rewards)))} if rewards else {})


class _Checked:
    """A reward function whose result is a finite number and its parts by name."""

    def __init__(self, compute: Compute) -> None:
        self.compute = compute

    def __call__(self, row: dict[str, Any], answer: Answer) -> tuple[float, dict[str, float]]:
        returned = self.compute(row, answer)
        if not isinstance(returned, Mapping):
            return _number(returned, "the reward"), {}
        if not returned:
            raise ValueError("the reward is an empty dict, wanted a number or numbers by name")
        parts = {}
        for name, value in returned.items():
            if not isinstance(name, str):
                raise TypeError(f"the reward has the name {name!r}, wanted a string")
            if name in TAKEN_NAMES:
                raise ValueError(f"the reward has the name {name!r}, which {TAKEN_NAMES[name]}")
            parts[name] = _number(value, f"the reward {name!r}")
        return sum(parts.values()), parts


def _check_arguments(compute: Compute) -> None:
    """Raise `UserError` for a function that does not take a row and an answer, before anything is generated."""
    try:
        signature = inspect.signature(compute)
    except ValueError:  # of a compiled function, which may have none
        return
    try:
        signature.bind({}, None)
    except TypeError:
        name = getattr(compute, "__qualname__", "the reward function")
        raise UserError(
            f"{name}{signature}: a reward is called with a row and one of its answers. Write reward(self, row, answer)"
        ) from None


def _number(value: Any, what: str) -> float:
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:  # of numpy and torch
        value = value.item()
    if not isinstance(value, numbers.Real):  # bool and int are real numbers
        raise TypeError(f"{what} is {value!r:.80} of type {type(value).__name__}, wanted a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}, wanted a finite number")
    return number


def _describe(prompt: Prompt, answer: Answer, outcome: Outcome) -> str:
    written = answer.text[:SHOWN_CHARACTERS]
    return f"{prompt.where} (source {prompt.source}), answer {written!r}: {outcome.error}"


# Processes that compute rewards: one that hangs or dies costs one reward, and is replaced.
#
# They are forked from the controller, so that a reward may be a method of an engine, and start in milliseconds. Each
# has a keeper, an idle process between it and the controller: when the worker or the controller ends, or when a reward
# takes too long, the keeper is the root of all processes that the reward has started, also in sessions of their own.

POLL_SECONDS = 0.2  # between two looks at whether workers are alive
Compute = Callable[[dict[str, Any], Any], Any]


@dataclass(frozen=True)
class Task:
    """One reward to compute."""

    index: int  # of its outcome
    seed: int  # of the random generators
    answer: Any


@dataclass(frozen=True)
class Outcome:
    """What a reward function returned, or why it failed."""

    value: Any = None
    error: str | None = None  # one line
    detail: str = ""  # the traceback


@dataclass
class Group:
    """Rewards of one row, which is sent once."""

    row: bytes  # pickled
    tasks: deque[Task] = field(default_factory=deque)


def run_task(compute: Compute, row: bytes, task: Task) -> Outcome:
    """The outcome of one reward in this process. Each has a row of its own to change, and its own random numbers."""
    seed_everything(task.seed, cuda=False)
    try:
        return Outcome(compute(pickle.loads(row), task.answer))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything
        frames = _user_frames(error)
        lines = traceback.format_exception(error.with_traceback(frames)) if frames else []
        return Outcome(error=f"{type(error).__name__}: {error}"[:500], detail="".join(lines))


def _user_frames(error: BaseException) -> Any:
    """The frames of the reward function; None for a result that is no number."""
    frames = error.__traceback__
    while frames and Path(frames.tb_frame.f_code.co_filename).parent == Path(__file__).parent:
        frames = frames.tb_next
    return frames


class RewardWorkers:
    """A fixed number of processes, each replaced when it fails."""

    def __init__(self, compute: Compute, count: int, timeout: float) -> None:
        self.compute = compute
        self.timeout = timeout
        # A keeper ends with the thread that forked it: this one lives as long as the workers are needed.
        self._starter = ThreadPoolExecutor(1, "mvp-reward-workers")
        self._workers: list[_Worker] = []
        # Before multiprocessing waits at the exit for processes that nobody has closed.
        multiprocessing.util.Finalize(self, _kill_all, (self._workers,), exitpriority=10)
        for _ in range(count):
            self._workers.append(self._start())

    def close(self) -> None:
        _kill_all(self._workers)
        self._workers.clear()
        self._starter.shutdown()

    def run(self, groups: Sequence[Group]) -> Iterator[tuple[int, Outcome]]:
        """The outcome of each task, as they are finished."""
        waiting = deque(groups)
        try:
            while waiting or any(worker.group for worker in self._workers):
                for worker in [one for one in self._workers if one.group is None]:
                    if waiting:
                        self._give(worker, waiting.popleft())
                yield from self._collect(waiting)
        finally:
            for worker in [one for one in self._workers if one.group is not None]:
                self._replace(worker)  # after an error: what it computes is not needed

    def _give(self, worker: _Worker, group: Group) -> None:
        if not worker.process.is_alive():  # killed while it was idle: no reward was lost
            worker = self._replace(worker)
        worker.group = group
        worker.deadline = time.monotonic() + self.timeout
        with contextlib.suppress(OSError):  # it died just now, which `_collect` finds
            worker.connection.send((group.row, list(group.tasks)))

    def _collect(self, waiting: deque[Group]) -> Iterator[tuple[int, Outcome]]:
        busy = [worker for worker in self._workers if worker.group is not None]
        first = min(worker.deadline for worker in busy) - time.monotonic()
        ready = wait([one.connection for one in busy], max(0.0, min(first, POLL_SECONDS)))
        for worker in busy:
            outcome = worker.outcome(worker.connection in ready, self.timeout)
            if outcome is None:
                continue
            assert worker.group is not None
            task = worker.group.tasks.popleft()
            worker.deadline = time.monotonic() + self.timeout
            rest = worker.group
            if worker.is_lost:
                self._replace(worker)
                if rest.tasks:
                    waiting.appendleft(rest)
            elif not rest.tasks:
                worker.group = None
            yield task.index, outcome

    def _start(self) -> _Worker:
        return self._starter.submit(_Worker, self.compute).result()

    def _replace(self, worker: _Worker) -> _Worker:
        worker.kill()
        new = self._start()
        self._workers[self._workers.index(worker)] = new
        return new


class _Worker:
    """One process, seen from the controller."""

    def __init__(self, compute: Compute) -> None:
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe()
        end = end_with_this_process(thread_lasts=True, number=signal.SIGTERM)
        self.process = context.Process(target=_keep, args=(compute, theirs, end))
        self.process.start()
        theirs.close()
        self.group: Group | None = None
        self.deadline = 0.0
        self.is_lost = False  # nothing more comes from it

    def outcome(self, is_ready: bool, timeout: float) -> Outcome | None:
        """The outcome of the first task of the group; None while it is being computed."""
        # A result may have come while the controller replaced another worker: it is no time-out.
        if is_ready or self.connection.poll():
            try:
                found: Outcome = self.connection.recv()
                return found
            except (EOFError, OSError, pickle.UnpicklingError):
                return self._death()
        if time.monotonic() > self.deadline:
            self.is_lost = True
            return Outcome(error=f"no result after {timeout:g} s (reward.timeout)")
        if not self.process.is_alive() and not self.connection.poll():
            return self._death()
        return None

    def _death(self) -> Outcome:
        self.is_lost = True
        self.process.join(10.0)  # its keeper kills what it has started
        code = self.process.exitcode
        how = f"exit code {code}"
        if code is not None and code < 0:
            how = signal.Signals(-code).name
        return Outcome(error=f"its process died ({how})")

    def kill(self) -> None:
        pid = self.process.pid
        assert pid is not None
        kill_descendants(pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # where there is no /proc
        self.process.kill()
        self.process.join()
        self.connection.close()


def _kill_all(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.kill()


def _keep(
    compute: Compute, connection: Connection, end_with_controller: Callable[[], None]
) -> None:
    """The keeper of a worker: it ends like the worker, after everything that the worker has started."""
    os.setsid()
    adopt_orphans()
    # The parent stops its workers itself. A handler inherited from it would report a Ctrl-C to it once more.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    awaited = {signal.SIGCHLD, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    end_with_keeper = end_with_this_process()
    worker = os.fork()
    if worker == 0:
        end_with_keeper()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)
        _work(compute, connection)
    connection.close()
    end_with_controller()
    code = None
    while code is None and signal.sigwait(awaited) == signal.SIGCHLD:
        code = _reaped(worker)
    kill_descendants(os.getpid())
    if code is not None and code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code or 0)


def _reaped(worker: int) -> int | None:
    """The exit code of the worker if it has ended, after a look at all children that have."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            if ended[0] == worker:
                code = os.waitstatus_to_exitcode(ended[1])
    return code


def _work(compute: Compute, connection: Connection) -> None:
    # A forked process has none of torch's threads, and would wait for them in the first parallel operation.
    torch.set_num_threads(1)
    while True:
        try:
            row, tasks = connection.recv()
        except EOFError:
            os._exit(0)
        for task in tasks:
            connection.send(run_task(compute, row, task))

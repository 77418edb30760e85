"""Episodes: what an engine's `episode` or `reward` does with the policy's answers, each in a process of its own.

User code that raises, hangs, returns NaN or ends its process fails alone: it is named with its row, and the completion
is left out. Order and random numbers do not depend on the processes.

Episodes of several turns run at the same time. With our own decode, when each of them has asked for an answer or has
ended, the answers of all are generated in one call, in the order of prompts and samples: so a run has the same bits
however long tools take. Servers get each request at once.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import multiprocessing
import multiprocessing.util
import os
import pickle
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from mvp_engine.data import derived_seed, rng_state, seed_everything, set_rng_state
from mvp_engine.errors import UserError, count
from mvp_engine.kit.decoding import Decoding
from mvp_engine.kit.rl.chat import (
    Answer,
    Ask,
    Chat,
    ChatSettings,
    Connected,
    ContextFull,
    checked_number,
)
from mvp_engine.kit.rl.prompts import Prompt
from mvp_engine.kit.rl.rollout import Rollout, Rounds, Sample, generate
from mvp_engine.kit.rl.settings import RewardSettings
from mvp_engine.process.watchdog import end_with_this_process, end_zygote, run_zygote

LOGGER = logging.getLogger("mvp_engine")
Model = Callable[[Sequence[Prompt], Sequence[Sample]], list[float]]
Phase = Callable[[str], AbstractContextManager[None]]  # measures the time of a part of a step


def untimed(name: str) -> AbstractContextManager[None]:
    return nullcontext()


MAX_WARNINGS = 10  # of a run
SHOWN_CHARACTERS = 200  # of an answer
MAX_DETAIL = 20_000  # characters of a traceback: the message of an error may hold a whole response
REWARD_WORKERS = 2  # where `reward.workers` is null
MAX_EPISODES = 256  # at a time, the same for episodes of several turns
TAKEN_NAMES = {  # of parts of a reward, whose metric is reward_NAME
    "": "is empty: choose another one",
    "errors": "is that of the metric reward_errors: choose another one",
    "model": "is that of the reward model's score: choose another one",
    "turns": "is that of the rewards by chat.reward: choose another one",
}


@dataclass(frozen=True)
class Reward:
    """The reward of one episode, with those of its turns."""

    value: float | None  # None: it failed, and the completion is dropped
    # Of a function that returns several numbers.
    parts: dict[str, float] = field(default_factory=dict)
    error: str | None = None  # why it failed
    baseline: float | None = (
        None  # the reward of the prompt's greedy completion, of rl.algorithm=remax
    )


class RewardFailed(UserError):
    """Rewards failed that may not, or too many of them."""


class Episodes:
    """Plays episodes in processes of their own, as many at a time as `settings.workers` says.

    `play` is `reward(row, answer)`; with `chat` it is `episode(row, chat)`, which may have several turns. It returns a
    number, or several by name: their sum is the reward. `model` scores all samples of a step, and its
    score is added; `play` may be None then. With `of_many_threads` these play at the same time, a group each, and
    `check` says for a whole step whether too many rewards have failed; otherwise they take turns.
    """

    def __init__(
        self,
        play: Play | None,
        tokenizer: Any,
        settings: RewardSettings,
        seed: int = 0,
        chat: ChatSettings | None = None,
        *,
        of_many_threads: bool = False,
    ) -> None:
        if play is not None:
            _check_arguments(play, "answer" if chat is None else "chat")
        self.model: Model | None = None
        self.phase: Phase = untimed
        self.idle: Callable[[], AbstractContextManager[None]] = nullcontext
        self.tokenizer = tokenizer
        self.settings = settings
        self.seed = seed
        self.chat = chat
        self.has_read_last = False  # any episode of several turns, the policy's last answer
        self._play = play or (lambda row, answer: 0.0)
        self._warned = 0
        self.of_many_threads = of_many_threads
        self._lock = threading.Lock()  # rollouts in a thread and an evaluation share the processes
        self._processes: Processes | None = None
        workers = settings.workers
        if workers is None:
            workers = REWARD_WORKERS if chat is None else MAX_EPISODES
        if chat is not None:
            if not workers:
                raise UserError(
                    "reward.workers=0: episodes of several turns run in processes. Leave it out"
                )
            chat.encoder.prepare()  # what the processes inherit
        if workers and play is not None:
            self._processes = Processes(self._work, workers, settings.timeout)

    def close(self) -> None:
        if self._processes is not None:
            self._processes.close()
            self._processes = None

    def stop(self) -> None:
        """End what other threads play."""
        if self._processes is not None:
            self._processes.stop()

    def play(
        self,
        prompts: Sequence[Prompt],
        rollout: Rollout,
        sampling: Decoding,
        phase: Phase | None = None,
    ) -> tuple[list[Sample], list[Reward]]:
        """`sampling.samples` episodes of each prompt and their rewards. `phase`: by default that of a training."""
        phase = phase or self.phase
        if self.chat is None:
            with phase("generate"):
                found = generate(rollout, prompts, sampling)
            return found, self.rewards(prompts, found)
        rounds = Rounds(prompts, rollout, sampling, self.answer)
        tasks: list[Task] = []
        for prompt in prompts:
            given = pickle.dumps(prompt)
            for number in range(sampling.samples):
                seed = derived_seed(self.seed, "reward", prompt.key, number)
                tasks.append(Task(len(tasks), seed, given))
        return rounds.samples, self._judge(prompts, rounds.samples, tasks, rounds, phase)

    def rewards(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[Reward]:
        """The reward of each sample of one answer; `sample.prompt` is an index into the prompts."""
        rows: dict[int, bytes] = {}
        numbers: dict[int, int] = {}
        tasks = []
        for index, sample in enumerate(samples):
            prompt = prompts[sample.prompt]
            if sample.prompt not in rows:
                rows[sample.prompt] = pickle.dumps(prompt.row)
            number = numbers.get(sample.prompt, 0)
            numbers[sample.prompt] = number + 1
            seed = derived_seed(self.seed, "reward", prompt.key, number)
            tasks.append(Task(index, seed, rows[sample.prompt], self.answer(sample)))
        return self._judge(prompts, samples, tasks)

    def answer(self, sample: Sample) -> Answer:
        text = str(self.tokenizer.decode(sample.tokens, skip_special_tokens=True))
        tokens = list(sample.tokens)
        log_probs = list(sample.log_probs)
        return Answer(text, tokens, sample.reason, log_probs, sample.version)

    # ---- In the controller ----------------------------------------------------------------------------------------

    def _judge(
        self,
        prompts: Sequence[Prompt],
        samples: Sequence[Sample],
        tasks: list[Task],
        rounds: Rounds | None = None,
        phase: Phase | None = None,
    ) -> list[Reward]:
        outcomes: dict[int, Outcome] = {}
        failed: list[str] = []

        def add(index: int, outcome: Outcome) -> None:
            outcomes[index] = outcome
            if outcome.error is not None:
                place = _describe(
                    prompts[samples[index].prompt], self.answer(samples[index]), outcome
                )
                failed.append(f"{place}\n{outcome.detail}".rstrip())
                self._warn(place)
                if not self.of_many_threads:
                    self._check_failures(failed, len(outcomes), len(samples))

        lock = nullcontext() if self.of_many_threads and self._processes else self._lock
        # Closed at once when too many have failed: of rewards that hang, each would cost a time-out.
        with lock, closing(self._run(tasks, rounds, phase)) as finished:
            for index, outcome in finished:
                if rounds is not None:
                    rounds.end(index, outcome.rewards, outcome.is_cut)
                    self.has_read_last |= not outcome.is_unread
                add(index, outcome)
        if self.model is not None:
            for index, score in enumerate(self.model(prompts, samples)):
                if outcomes[index].error is None:
                    add(index, self._with_score(outcomes[index], score))
        return [self._reward(outcomes[index]) for index in range(len(samples))]

    def _run(
        self, tasks: list[Task], rounds: Rounds | None, phase: Phase | None
    ) -> Generator[tuple[int, Outcome]]:
        if self._processes is not None:
            yield from self._processes.run(tasks, rounds, phase or untimed, self.idle)
            return
        outside = rng_state()
        for task in tasks:
            yield task.index, self.run(task)
        set_rng_state(outside)

    def _with_score(self, outcome: Outcome, score: float) -> Outcome:
        """The outcome with the score of the reward model as one more part."""
        if not math.isfinite(score):
            return Outcome(error=f"the reward model's score is {score}")
        value, parts = outcome.value
        return Outcome((value + score, {**parts, "model": score}))

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

    def check(
        self, prompts: Sequence[Prompt], samples: Sequence[Sample], rewards: Sequence[Reward]
    ) -> None:
        """Raise if too many rewards of a step failed, of groups in many threads."""
        pairs = zip(samples, rewards, strict=True)
        errors = [
            f"{prompts[one.prompt].where}: {reward.error}" for one, reward in pairs if reward.error
        ]
        if errors:
            self._check_failures(errors, len(rewards), len(rewards))

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

    # ---- In a process of an episode -------------------------------------------------------------------------------

    def _work(self, connection: Connection) -> None:
        # A forked process has none of torch's threads, and would wait for them in the first parallel operation.
        torch.set_num_threads(1)
        # Where the machine has no memory left, the kernel ends an episode, and neither the controller nor a rank.
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
        folder, pid = os.getcwd(), os.getpid()

        def send(ask: Ask) -> Answer:
            connection.send_bytes(pickle.dumps(ask))
            answer: Answer = pickle.loads(connection.recv_bytes())
            return answer

        while True:
            try:
                task = pickle.loads(connection.recv_bytes())
            except EOFError:
                os._exit(0)
            outcome = self.run(task, send)
            if os.getpid() != pid:  # a fork of the episode that returned from it, too
                os._exit(0)
            # What an episode leaves behind ends with its process: threads, and processes that it started.
            outcome.is_last = _has_threads() or _has_children()
            connection.send_bytes(pickle.dumps(outcome))
            if outcome.is_last:
                os._exit(0)
            os.chdir(folder)

    def run(self, task: Task, send: Callable[[Ask], Answer] | None = None) -> Outcome:
        """One episode in this process. Each has a row of its own to change, and its own random numbers."""
        seed_everything(task.seed, cuda=False)
        rewards: dict[int, list[float]] = {}
        is_cut = is_credited = is_unread = False
        try:
            given = pickle.loads(task.given)
            if self.chat is None or send is None:
                value = self._play(given, task.answer)
            else:
                shared = Connected(send, self.chat, task.seed)
                rewards = shared.rewards
                with closing(shared):
                    try:
                        value = self._play(given.row, Chat(shared, given))
                    except ContextFull:
                        value = 0.0
                        is_cut = True
                is_credited = shared.is_credited
                if value is None and is_credited:
                    value = 0.0
                is_unread = shared.last is not None and not shared.last.is_read
            total, parts = _checked(value)
            of_turns = sum(map(sum, rewards.values()))
            if is_credited:
                parts["turns"] = of_turns
            value = (total + of_turns, parts)
            return Outcome(value, rewards=rewards, is_cut=is_cut, is_unread=is_unread)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything
            frames = _user_frames(error)
            lines = traceback.format_exception(error.with_traceback(frames)) if frames else []
            message = f"{type(error).__name__}: {error}"[:500]
            return Outcome(error=message, detail="".join(lines)[:MAX_DETAIL], rewards=rewards)


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


def _checked(returned: Any) -> tuple[float, dict[str, float]]:
    """What a reward returned as a finite number, and its parts by name."""
    if not isinstance(returned, Mapping):
        return checked_number(returned, "the reward"), {}
    if not returned:
        raise ValueError("the reward is an empty dict, wanted a number or numbers by name")
    parts = {}
    for name, value in returned.items():
        if not isinstance(name, str):
            raise TypeError(f"the reward has the name {name!r}, wanted a string")
        if name in TAKEN_NAMES:
            raise ValueError(f"the reward has the name {name!r}, which {TAKEN_NAMES[name]}")
        parts[name] = checked_number(value, f"the reward {name!r}")
    return sum(parts.values()), parts


def _check_arguments(play: Play, second: str) -> None:
    """Raise `UserError` for a function that does not take two arguments, before anything is generated."""
    try:
        signature = inspect.signature(play)
    except ValueError:  # of a compiled function, which may have none
        return
    try:
        signature.bind({}, None)
    except TypeError:
        name = getattr(play, "__qualname__", "the reward function")
        if second == "chat":
            told = "an episode is called with a row and a chat. Write episode(self, row, chat)"
        else:
            told = "a reward is called with a row and one of its answers. Write reward(self, row, answer)"
        raise UserError(f"{name}{signature}: {told}") from None


def _describe(prompt: Prompt, answer: Answer, outcome: Outcome) -> str:
    written = answer.text[:SHOWN_CHARACTERS]
    return f"{prompt.where} (source {prompt.source}), answer {written!r}: {outcome.error}"


# Processes of episodes: one that hangs or dies costs one episode, and is replaced.
#
# They are forked from a small process (the zygote) which is forked from the controller before it starts models, so that
# an episode may be a method of an engine. When a process of an episode or the controller ends, or when an episode takes
# too long, the zygote inherits and kills everything that the episode has started, also in sessions of their own.

Play = Callable[[dict[str, Any], Any], Any]


@dataclass
class Task:
    """One episode to play."""

    index: int  # of its outcome
    seed: int  # of the random generators
    given: bytes  # its row, or with turns its Prompt, pickled
    answer: Answer | None = None  # of an engine without turns


@dataclass
class Outcome:
    """What an episode returned, or why it failed."""

    value: Any = None
    error: str | None = None  # one line
    detail: str = ""  # the traceback
    rewards: dict[int, list[float]] = field(default_factory=dict)  # of turns, by sequence
    is_cut: bool = False  # by ContextFull
    is_unread: bool = False  # the last answer: nothing depends on it
    is_last: bool = False  # its process ends


def _user_frames(error: BaseException) -> Any:
    """The frames of the user's function; None for a result that is no number."""
    frames = error.__traceback__
    while frames and Path(frames.tb_frame.f_code.co_filename).parent == Path(__file__).parent:
        frames = frames.tb_next
    return frames


def _has_threads() -> bool:
    """Do threads run that an episode has started? Those that decode media wait for the next item."""
    others = set(threading.enumerate()) - {threading.main_thread()}
    return any(thread.name != "media" for thread in others)


def _has_children() -> bool:
    """Has this process children that run? As it adopts orphans, these are all that an episode has started."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


class Processes:
    """At most `limit` processes, each of which plays one episode after another; replaced when it fails.

    Several threads may `run` tasks; a process belongs to one of them while it plays an episode.
    """

    def __init__(self, work: Callable[[Connection], None], limit: int, timeout: float) -> None:
        self.limit = limit
        self.timeout = timeout
        context = multiprocessing.get_context("fork")
        self._control, theirs = context.Pipe()
        args = (work, self._control, theirs, end_with_this_process(number=signal.SIGTERM))
        self._zygote = context.Process(target=run_zygote, args=args)
        self._zygote.start()
        theirs.close()
        self._processes: list[_Process] = []
        self._exit_codes: dict[int, int] = {}  # of processes that have died, by process id
        self._lock = threading.RLock()
        self._freed = threading.Condition(self._lock)
        self._writers: set[Connection] = set()  # each wakes a thread in `run`
        self._is_stopped = False
        # Before multiprocessing waits at the exit for processes that nobody has closed.
        multiprocessing.util.Finalize(
            self, end_zygote, (self._zygote, self._control), exitpriority=10
        )

    def close(self) -> None:
        end_zygote(self._zygote, self._control)
        for process in self._processes:
            process.connection.close()
        self._processes.clear()

    def stop(self) -> None:
        """End what is played: `run` raises in other threads."""
        with self._lock:
            self._is_stopped = True
            self._freed.notify_all()
            for writer in self._writers:
                writer.send_bytes(b"")

    def run(
        self,
        tasks: Sequence[Task],
        rounds: Rounds | None,
        phase: Phase,
        idle: Callable[[], AbstractContextManager[None]],
    ) -> Iterator[tuple[int, Outcome]]:
        """The outcome of each task, as they end; `rounds` generate the answers that episodes of several turns ask for.

        A batched rollout generates when all that are played have asked. `idle` is a context around the wait for a
        process, where other threads have them all.
        """
        waiting = deque(tasks)
        playing: dict[int, _Process] = {}  # by the index of the task
        reader, writer = multiprocessing.Pipe(duplex=False)  # wakes this thread
        with self._lock:
            self._writers.add(writer)

        def wake(future: Future[Sample]) -> None:
            with contextlib.suppress(OSError):  # after an error nobody waits
                writer.send_bytes(b"")

        try:
            while waiting or playing:
                with self._lock:
                    while not self._give(waiting, playing):
                        with idle():
                            self._freed.wait()
                asks = {
                    index: one.ask
                    for index, one in playing.items()
                    if one.ask is not None and one.answer is None
                }
                is_busy = any(process.ask is None for process in playing.values())
                if rounds is not None and asks:
                    is_batched = rounds.rollout.is_batched
                    if not is_batched or not is_busy:
                        with phase("generate"):
                            for index, future in rounds.submit(asks).items():
                                playing[index].answer = future
                                if not is_batched:
                                    future.add_done_callback(wake)
                            rounds.rollout.run()
                answered = [one for one in playing.values() if one.answer and one.answer.done()]
                for process in answered:
                    assert process.task
                    assert process.ask
                    assert process.answer
                    assert rounds
                    turn = process.answer.result()
                    answer = rounds.write(process.task.index, process.ask, turn)
                    process.ask = process.answer = None
                    self._send(process, answer)
                if answered:
                    continue
                timed = nullcontext() if is_busy else phase("generate")
                if is_busy and asks and rounds is not None and rounds.rollout.is_batched:
                    timed = phase("tool_wait")  # of the slowest user code of a round
                with timed:
                    ended = self._collect(playing, reader)
                for index, _ in ended:
                    del playing[index]
                yield from ended
        finally:
            with self._lock:
                self._writers.remove(writer)
                for process in playing.values():
                    self._kill(process)  # after an error: what it computes is not needed
            reader.close()
            writer.close()

    def _give(self, waiting: deque[Task], playing: dict[int, _Process]) -> bool:
        """Start the next tasks, as many as there are processes; False if nothing is played, for want of one."""
        if self._is_stopped:
            raise RuntimeError("episodes were stopped")
        self._read_control(0.0)
        idle = [one for one in self._processes if one.task is None]
        for process in [one for one in idle if one.pid in self._exit_codes]:
            self._forget(process)  # killed while it was idle: no episode was lost
        while waiting:
            free = next((one for one in self._processes if one.task is None), None)
            if free is None and len(self._processes) < self.limit:
                free = self._fork()
            if free is None:
                break
            free.task = waiting.popleft()
            playing[free.task.index] = free
            self._send(free, free.task)
        return bool(playing) or not waiting

    def _send(self, process: _Process, value: Any) -> None:
        process.deadline = time.monotonic() + self.timeout
        with contextlib.suppress(OSError):  # it died just now, which `_collect` finds
            process.connection.send_bytes(pickle.dumps(value))

    def _collect(
        self, playing: Mapping[int, _Process], reader: Connection
    ) -> list[tuple[int, Outcome]]:
        """Wait for processes or completions; returns the outcomes of episodes that have ended."""
        busy = {index: process for index, process in playing.items() if process.ask is None}
        seconds = None
        if busy:
            first = min(process.deadline for process in busy.values())
            seconds = max(0.0, first - time.monotonic())
        connections = [process.connection for process in busy.values()]
        ready = set(wait([self._control, reader, *connections], seconds))
        while reader.poll():
            reader.recv_bytes()
        if self._control in ready:
            with self._lock:
                self._read_control(0.0)
        ended = []
        for index, process in busy.items():
            outcome = self._outcome(process)
            if outcome is not None:
                ended.append((index, outcome))
                with self._lock:
                    process.task = None
                    if outcome.is_last:
                        self._forget(process)
                    else:
                        self._freed.notify()
        return ended

    def _outcome(self, process: _Process) -> Outcome | None:
        """The outcome of an episode; None while it is played."""
        # A message may have come while the controller did something else: it is no time-out.
        is_dead = process.pid in self._exit_codes
        if process.connection.poll():
            try:
                found = pickle.loads(process.connection.recv_bytes())
            except (EOFError, OSError):
                return self._death(process)
            if isinstance(found, Ask):
                process.ask = found
                return None
            assert isinstance(found, Outcome)
            return found
        if is_dead:
            return self._death(process)
        if time.monotonic() > process.deadline:
            self._kill(process)
            return Outcome(
                error=f"no result after {self.timeout:g} s (reward.timeout)", is_last=True
            )
        return None

    def _death(self, process: _Process) -> Outcome:
        while process.pid not in self._exit_codes:
            with self._lock:  # another thread may read the death
                self._read_control(0.05)
        code = self._exit_codes[process.pid]
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return Outcome(error=f"its process died ({how})", is_last=True)

    def _kill(self, process: _Process) -> None:
        """End a process and all that it has started."""
        with self._lock:
            self._control.send(("kill", process.pid))
            self._forget(process)

    def _forget(self, process: _Process) -> None:
        if process in self._processes:
            self._processes.remove(process)
            process.connection.close()
            self._freed.notify()

    def _fork(self) -> _Process:
        self._control.send(("fork", 0))
        while True:
            forked = self._read_control(None)
            if forked is not None:
                self._processes.append(forked)
                return forked

    def _read_control(self, seconds: float | None) -> _Process | None:
        """Read what the zygote says: deaths, until there are no more of them or until it has forked a process."""
        while seconds is None or self._control.poll(seconds):
            try:
                kind, pid, code = self._control.recv()
            except (EOFError, OSError):
                raise RuntimeError(
                    "the process that starts episodes has ended; was it killed?"
                ) from None
            if kind == "forked":
                return _Process(pid, Connection(reduction.recv_handle(self._control)))
            if kind == "failed":
                raise UserError(
                    f"cannot start a process for an episode: {code}. Lower reward.workers"
                )
            self._exit_codes[pid] = code
            if seconds is None:
                return None
        return None


@dataclass(eq=False)
class _Process:
    """The process of an episode, seen from the controller."""

    pid: int
    connection: Connection
    task: Task | None = None
    ask: Ask | None = None  # what it waits for
    answer: Future[Sample] | None = None  # the completion that was submitted for it
    deadline: float = 0.0

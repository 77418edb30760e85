"""Episodes: what an engine's `episode` or `reward` does with the policy's answers, each in a process of its own.

User code that raises, hangs, returns NaN or ends its process fails alone: it is named with its row, and the completion
is left out. Order and random numbers do not depend on the processes.

Episodes of several turns run at the same time. When each of them has asked for an answer or has ended, the answers of
all are generated in one call, in the order of prompts and samples: so a run has the same bits however long tools take.
"""

from __future__ import annotations

import contextlib
import gc
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
from contextlib import closing
from dataclasses import dataclass, field
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from mvp_engine.data import derived_seed, rng_state, seed_everything, set_rng_state
from mvp_engine.errors import UserError, count
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
from mvp_engine.kit.rl.rollout import Complete, Rounds, Sample
from mvp_engine.kit.rl.settings import RewardSettings
from mvp_engine.process.watchdog import adopt_orphans, end_with_this_process, kill_descendants

LOGGER = logging.getLogger("mvp_engine")
Model = Callable[[Sequence[Prompt], Sequence[Sample]], list[float]]
MAX_WARNINGS = 10  # of a run
SHOWN_CHARACTERS = 200  # of an answer
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


class RewardFailed(UserError):
    """Rewards failed that may not, or too many of them."""


class Episodes:
    """Plays episodes in processes of their own, as many at a time as `settings.workers` says.

    `play` is `reward(row, answer)`; with `chat` it is `episode(row, chat)`, which may have several turns. It returns a
    number, or several by name: their sum is the reward. `model` scores all samples of a step, and its
    score is added; `play` may be None then.
    """

    def __init__(
        self,
        play: Play | None,
        tokenizer: Any,
        settings: RewardSettings,
        seed: int = 0,
        chat: ChatSettings | None = None,
    ) -> None:
        if play is not None:
            _check_arguments(play, "answer" if chat is None else "chat")
        self.model: Model | None = None
        self.tokenizer = tokenizer
        self.settings = settings
        self.seed = seed
        self.chat = chat
        self._play = play or (lambda row, answer: 0.0)
        self._warned = 0
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

    def play(
        self, prompts: Sequence[Prompt], samples: int, complete: Complete
    ) -> tuple[list[Sample], list[Reward]]:
        """So many episodes of each prompt and their rewards; `complete` generates answers."""
        if self.chat is None:
            found = complete(list(prompts), samples)
            return found, self.rewards(prompts, found)
        rounds = Rounds(prompts, samples, complete, self.answer)
        tasks: list[Task] = []
        for prompt in prompts:
            given = pickle.dumps(prompt)
            for number in range(samples):
                seed = derived_seed(self.seed, "reward", prompt.key, number)
                tasks.append(Task(len(tasks), seed, given))
        return rounds.samples, self._judge(prompts, rounds.samples, tasks, rounds)

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
        return self._judge(prompts, samples, tasks, None)

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
        rounds: Rounds | None,
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
                self._check_failures(failed, len(outcomes), len(samples))

        # Closed at once when too many have failed: of rewards that hang, each would cost a time-out.
        with self._lock, closing(self._run(tasks, rounds)) as finished:
            for index, outcome in finished:
                if rounds is not None:
                    rounds.end(index, outcome.rewards, outcome.is_cut)
                add(index, outcome)
        if self.model is not None:
            for index, score in enumerate(self.model(prompts, samples)):
                if outcomes[index].error is None:
                    add(index, self._with_score(outcomes[index], score))
        return [self._reward(outcomes[index]) for index in range(len(samples))]

    def _run(self, tasks: list[Task], rounds: Rounds | None) -> Generator[tuple[int, Outcome]]:
        if self._processes is not None:
            yield from self._processes.run(tasks, rounds.answers if rounds else None)
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
        is_cut = is_credited = False
        try:
            given = pickle.loads(task.given)
            if self.chat is None or send is None:
                value = self._play(given, task.answer)
            else:
                shared = Connected(send, self.chat, task.seed)
                rewards = shared.rewards
                try:
                    value = self._play(given.row, Chat(shared, given))
                except ContextFull:
                    value = 0.0
                    is_cut = True
                is_credited = shared.is_credited
                if value is None and is_credited:
                    value = 0.0
            total, parts = _checked(value)
            of_turns = sum(map(sum, rewards.values()))
            if is_credited:
                parts["turns"] = of_turns
            return Outcome((total + of_turns, parts), rewards=rewards, is_cut=is_cut)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything
            frames = _user_frames(error)
            lines = traceback.format_exception(error.with_traceback(frames)) if frames else []
            message = f"{type(error).__name__}: {error}"[:500]
            return Outcome(error=message, detail="".join(lines), rewards=rewards)


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
    """At most `limit` processes, each of which plays one episode after another; replaced when it fails."""

    def __init__(self, work: Callable[[Connection], None], limit: int, timeout: float) -> None:
        self.limit = limit
        self.timeout = timeout
        context = multiprocessing.get_context("fork")
        self._control, theirs = context.Pipe()
        args = (work, self._control, theirs, end_with_this_process(number=signal.SIGTERM))
        self._zygote = context.Process(target=_zygote, args=args)
        self._zygote.start()
        theirs.close()
        self._processes: list[_Process] = []
        self._exit_codes: dict[int, int] = {}  # of processes that have died, by process id
        # Before multiprocessing waits at the exit for processes that nobody has closed.
        multiprocessing.util.Finalize(self, _end, (self._zygote, self._control), exitpriority=10)

    def close(self) -> None:
        _end(self._zygote, self._control)
        for process in self._processes:
            process.connection.close()
        self._processes.clear()

    def run(
        self,
        tasks: Sequence[Task],
        answer: Callable[[Mapping[int, Ask]], dict[int, Answer]] | None = None,
    ) -> Iterator[tuple[int, Outcome]]:
        """The outcome of each task, as they end; `answer` is called when all that are played have asked."""
        waiting = deque(tasks)
        try:
            while True:
                self._give(waiting)
                playing = {one.task.index: one for one in self._processes if one.task is not None}
                if not playing:
                    return
                if any(process.ask is None for process in playing.values()):
                    yield from self._collect()
                    continue
                assert answer is not None
                asks = {index: process.ask for index, process in playing.items() if process.ask}
                for index, found in answer(asks).items():
                    playing[index].ask = None
                    self._send(playing[index], found)
        finally:
            for process in [one for one in self._processes if one.task is not None]:
                self._kill(process)  # after an error: what it computes is not needed

    def _give(self, waiting: deque[Task]) -> None:
        """Start the next tasks in processes without one."""
        self._read_control(0.0)
        for process in [
            one for one in self._processes if one.pid in self._exit_codes and one.task is None
        ]:
            self._forget(process)  # killed while it was idle: no episode was lost
        free = [one for one in self._processes if one.task is None]
        missing = min(len(waiting), self.limit - len(self._processes) + len(free)) - len(free)
        free += [self._fork() for _ in range(missing)]
        for process in free:
            if waiting:
                process.task = waiting.popleft()
                self._send(process, process.task)

    def _send(self, process: _Process, value: Any) -> None:
        process.deadline = time.monotonic() + self.timeout
        with contextlib.suppress(OSError):  # it died just now, which `_collect` finds
            process.connection.send_bytes(pickle.dumps(value))

    def _collect(self) -> Iterator[tuple[int, Outcome]]:
        """Read what processes have sent; the outcomes of episodes that have ended."""
        busy = [one for one in self._processes if one.task is not None and one.ask is None]
        first = min(process.deadline for process in busy) - time.monotonic()
        ready = set(wait([self._control, *(one.connection for one in busy)], max(0.0, first)))
        if self._control in ready:
            self._read_control(0.0)
        for process in busy:
            outcome = self._outcome(process)
            if outcome is not None:
                assert process.task is not None
                index = process.task.index
                process.task = None
                if outcome.is_last:
                    self._forget(process)
                yield index, outcome

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
            self._read_control(None)
        code = self._exit_codes[process.pid]
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return Outcome(error=f"its process died ({how})", is_last=True)

    def _kill(self, process: _Process) -> None:
        """End a process and all that it has started."""
        self._control.send(("kill", process.pid))
        self._forget(process)

    def _forget(self, process: _Process) -> None:
        if process in self._processes:
            self._processes.remove(process)
            process.connection.close()

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
    deadline: float = 0.0


def _end(zygote: Any, control: Connection) -> None:
    if not control.closed:
        with contextlib.suppress(OSError):
            control.send(("end", 0))
        control.close()
    zygote.join(10.0)
    if zygote.is_alive():
        kill_descendants(zygote.pid)
        zygote.kill()
        zygote.join()


def _zygote(
    work: Callable[[Connection], None],
    controllers: Connection,
    control: Connection,
    end_with_controller: Callable[[], None],
) -> None:
    """The process that forks those of episodes. It ends after all that they have started."""
    controllers.close()
    os.setsid()
    adopt_orphans()
    gc.freeze()
    # The controller stops this process itself. A handler inherited from it would report a Ctrl-C to it once more.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    end_with_controller()
    workers: set[int] = set()
    while True:
        ready = wait([control, reader])
        if reader in ready:
            if signal.SIGTERM in os.read(reader, 4096):
                break
            try:
                _report_deaths(workers, control)
            except OSError:
                break
        if control in ready:
            try:
                command, pid = control.recv()
                if command == "fork":
                    _fork_worker(work, workers, control, (reader, writer))
                elif command == "end":
                    break
                elif pid in workers:
                    _kill_worker(pid)
            except (EOFError, OSError):
                break
    kill_descendants(os.getpid())
    os._exit(0)


def _fork_worker(
    work: Callable[[Connection], None],
    workers: set[int],
    control: Connection,
    pipe: tuple[int, int],
) -> None:
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    end_with_zygote = end_with_this_process()
    try:
        pid = os.fork()
    except OSError as error:
        control.send(("failed", 0, str(error)))
        return
    if pid == 0:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        end_with_zygote()
        os.setsid()
        adopt_orphans()
        for connection in (control, ours):
            connection.close()
        for end in pipe:
            os.close(end)
        try:
            work(theirs)
        finally:
            os._exit(1)
    workers.add(pid)
    theirs.close()
    control.send(("forked", pid, 0))
    reduction.send_handle(control, ours.fileno(), None)
    ours.close()


def _kill_worker(pid: int) -> None:
    kill_descendants(pid)
    for kill in (os.killpg, os.kill):  # the group, where there is no /proc
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _report_deaths(workers: set[int], control: Connection) -> None:
    """Report to the controller which processes of episodes have died, after what they have started."""
    died = {}
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            if ended[0] in workers:
                died[ended[0]] = os.waitstatus_to_exitcode(ended[1])
    if died:
        workers -= died.keys()
        kill_descendants(os.getpid(), but=workers)
    for pid, code in died.items():
        control.send(("died", pid, code))

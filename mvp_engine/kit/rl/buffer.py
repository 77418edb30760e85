"""Prompts on the way from the loader over rollouts and rewards to the update, each trained once.

With `rl.async_steps` of 0 or 1, `Collector` makes the experience of one step after another; with 1 that of the next
step is begun before the update of this one. With more, groups (the samples of one prompt) run at the same time in
`GroupThreads`, also over several updates, and each step trains those that `Buffer` chooses. What is finished and not
trained yet is part of a checkpoint, as the weights that sampled it are gone by then.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any

import torch

from mvp_engine.engine.feed import Feed
from mvp_engine.errors import UserError
from mvp_engine.kit.rl.episodes import Reward
from mvp_engine.kit.rl.prompts import Prompt
from mvp_engine.kit.rl.rollout import Buckets, Rollout, Sample
from mvp_engine.kit.rl.settings import RLConfig
from mvp_engine.model_engine import StepNumbers
from mvp_engine.worker.worker import UpdateNumbers

# Experience: prompts, their samples and rewards, on the way from the rollout to the update.


@dataclass
class Experience:
    """Samples of a step; `samples[i].prompt` is an index into `prompts`, and `rewards[i]` its reward.

    The reward of a sample may have failed: then it has no value, and nothing is learnt from the sample.
    """

    prompts: list[Prompt] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    rewards: list[Reward] = field(default_factory=list)
    batches: int = 0  # batches of prompts that were taken from the loader for it
    epoch: int = 0
    place: dict[str, Any] = field(default_factory=dict)  # in the data, of the first of them
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)  # name -> (sum, weight)

    def log(self, name: str, value: float, weight: float = 1.0) -> None:
        total = self.metrics.get(name, (0.0, 0.0))
        self.metrics[name] = (total[0] + value, total[1] + weight)

    def groups(self) -> list[list[int]]:
        """The indices of the samples of each prompt; a prompt may have none."""
        members: list[list[int]] = [[] for _ in self.prompts]
        for index, sample in enumerate(self.samples):
            members[sample.prompt].append(index)
        return members

    def add(self, other: Experience, prompts: list[int]) -> None:
        """Append some prompts of another one, with their samples and rewards."""
        groups = other.groups()
        for prompt in prompts:
            self.prompts.append(other.prompts[prompt])
            for index in groups[prompt]:
                sample = other.samples[index]
                at = len(self.prompts) - 1
                self.samples.append(Sample(**{**vars(sample), "prompt": at}))
                self.rewards.append(other.rewards[index])

    def only(self, prompts: list[int]) -> Experience:
        """Some of the prompts, with their samples and rewards."""
        chosen = Experience()
        chosen.add(self, prompts)
        return chosen

    def prompts_with_signal(self) -> list[int]:
        """The prompts whose samples have different rewards: the others have no advantages."""
        found = []
        for prompt, members in enumerate(self.groups()):
            values = {self.rewards[index].value for index in members} - {None}
            if len(values) > 1:
                found.append(prompt)
        return found

    def trainable(self) -> list[int]:
        """The samples with a reward and at least one token."""
        pairs = zip(self.samples, self.rewards, strict=True)
        return [
            i for i, (sample, one) in enumerate(pairs) if sample.tokens and one.value is not None
        ]

    def is_of(self, version: int) -> bool:
        """Whether weights of this version wrote all samples that are trained."""
        return all(set(one.versions) <= {version} for one in self._trained_sequences())

    def _trained_sequences(self) -> list[Sample]:
        return [one for i in self.trainable() for one in self.samples[i].sequences()]

    def log_staleness(self, step: int) -> None:
        """How many steps older the weights were that wrote what step `step` trains, and how many wrote an episode."""
        for one in self._trained_sequences():
            written = [v for start, end in one.written() for v in one.versions[start:end]]
            self.log("staleness", sum(step - version for version in written), len(written))
        trained = [self.samples[i] for i in self.trainable()]
        versions = [{v for one in sample.sequences() for v in one.versions} for sample in trained]
        self.log("versions_per_episode", sum(map(len, versions)), len(versions))
        if versions:
            self.log("staleness_max", step - min(map(min, versions)))

    def hash(self) -> int:
        """The sum of hashes of (prompt, sample): over a run, whichever steps trained them, a sum of all of them."""
        total = 0
        for prompt, members in zip(self.prompts, self.groups(), strict=True):
            for number in range(len(members)):
                digest = blake2b(f"{prompt.key} {number}".encode(), digest_size=4).digest()
                total += int.from_bytes(digest)
        return total

    # ---- Checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything but the prompts, which are read from the data again."""
        return {
            "keys": [prompt.key for prompt in self.prompts],
            "samples": [sample.state_dict() for sample in self.samples],
            "rewards": [dict(vars(reward)) for reward in self.rewards],
            "batches": self.batches,
            "epoch": self.epoch,
            "place": self.place,
            "metrics": {name: list(pair) for name, pair in self.metrics.items()},
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], read: list[Prompt]) -> Experience:
        """`read`: the prompts of the same batches of the loader."""
        by_key = {prompt.key: prompt for prompt in read}
        return cls(
            [by_key[key] for key in state["keys"]],
            [Sample.from_state(sample) for sample in state["samples"]],
            [Reward(**reward) for reward in state["rewards"]],
            state["batches"],
            state["epoch"],
            state["place"],
            {name: (value, weight) for name, (value, weight) in state["metrics"].items()},
        )


def take(feed: Feed, epochs: int | None) -> Experience | None:
    """The next prompts of the loader; None at the end of the last epoch."""
    while epochs is None or feed.epoch < epochs:
        if taken := feed.take():
            place = feed.advance(len(taken))
            return Experience(taken[0], place=place, epoch=feed.epoch)
        feed.next_epoch()
    return None


def cursor_of(feed: Feed) -> dict[str, Any]:
    return {"all": feed.state_dict(), "rank": feed.rank_state_dict()}


def load_cursor(feed: Feed, cursor: dict[str, Any]) -> None:
    feed.load_state_dict(cursor["all"], 1, lambda _: cursor["rank"])


Begun = Future[Experience | None]
Sampler = Callable[[list[Prompt]], Experience]


class Collector:
    """The experience of one step after another; with `rl.async_steps=1` that of the next step is begun early."""

    def __init__(self, config: RLConfig, feed: Feed, sample: Sampler, *, apart: bool) -> None:
        """`sample`: samples of some prompts with their rewards. `apart`: it does not use what an update uses."""
        self.config = config
        self.feed = feed
        self.sample = sample
        self._apart = apart and config.rl.async_steps > 0
        self._thread = ThreadPoolExecutor(1, "mvp-rollout")
        self._pending: Begun | None = None
        self._cursor: dict[str, Any] = {}  # the state of the feed before what is pending

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def next(self, sync: Callable[[], None], step: int, left: int | None) -> Experience | None:
        """The experience of the next step, None at the end of the data.

        `sync` gives the rollout the weights of now, whose version is `step`; so many steps are `left` after it.
        """
        begun = self._pending or self._begin(sync)
        self._pending = None
        experience = begun.result()
        if self.config.rl.async_steps and experience is not None and left != 0:
            self._pending = self._begin(sync)
        return experience

    def _begin(self, sync: Callable[[], None]) -> Begun:
        sync()
        self._cursor = cursor_of(self.feed)
        if self._apart:
            return self._thread.submit(self._collect)
        begun: Begun = Future()
        begun.set_result(self._collect())
        return begun

    def _collect(self) -> Experience | None:
        """Samples and rewards of the next prompts; prompts without a signal may be replaced by others."""
        rounds = 1 + self.config.rl.dynamic_sampling
        made = Experience()
        new = Experience()
        wanted = 0
        while made.batches < rounds and (not wanted or len(made.prompts) < wanted):
            taken = take(self.feed, self.config.train.epochs)
            if taken is None:
                break
            new = self.sample(taken.prompts)
            useful = list(range(len(new.prompts)))
            if rounds > 1:
                useful = new.prompts_with_signal()
                made.log("replaced", len(new.prompts) - len(useful), len(new.prompts))
            if not made.batches:
                wanted = len(new.prompts)
                made.epoch = taken.epoch
                made.place = taken.place
            for name, (value, weight) in new.metrics.items():
                made.log(name, value, weight)
            made.batches += 1
            made.add(new, useful[: wanted - len(made.prompts)])
        if not made.batches:
            return None
        if not made.samples:  # nothing to learn from in any round: the step says so
            made.add(new, list(range(len(new.prompts))))
        return made

    # ---- Checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any] | None:
        """What is pending; None if nothing is."""
        pending = None if self._pending is None else self._pending.result()
        return None if pending is None else {"cursor": self._cursor, **pending.state_dict()}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        if state is None:
            return
        if "groups" in state:
            raise UserError(
                f"rl.async_steps={self.config.rl.async_steps}: the checkpoint has rollouts of several steps. Resume it "
                "with rl.async_steps of 2 or more"
            )
        self._cursor = state["cursor"]
        load_cursor(self.feed, self._cursor)
        read: list[Prompt] = []
        for _ in range(state["batches"]):
            taken = take(self.feed, self.config.train.epochs)
            assert taken is not None  # they were read before
            read += taken.prompts
        self._pending = Future()
        self._pending.set_result(Experience.from_state(state, read))


# Groups of several steps at the same time.


@dataclass(eq=False)
class Group:
    """The samples of one prompt, on the way."""

    prompt: Prompt
    epoch: int
    version: int  # of the weights when it was started: none of its tokens is older
    future: Future[Experience]
    is_kept: bool = False  # it has passed the filter of `rl.dynamic_sampling`


class Buffer:
    """Starts groups and chooses those of each step, so that no token is older than `rl.async_steps` steps.

    At most `async_steps + 1` times `prompts_per_step` groups are started and not trained. A step takes the oldest ones
    that are finished; it waits where another one would become too old. So none is dropped, and each is trained once.
    """

    def __init__(
        self,
        config: RLConfig,
        feed: Feed,
        start: Callable[[Prompt], Future[Experience]],
        wait: Callable[[], None],
    ) -> None:
        """`start` begins a group. `wait` returns when another one has finished."""
        self.config = config
        self.feed = feed
        self.start = start
        self.wait = wait
        self.groups: list[Group] = []  # from the oldest to the newest
        self.waiting: deque[tuple[Prompt, int]] = deque()  # prompts to start, with their epochs
        # Batches of the loader with a prompt that is not trained: the cursor before each, and the keys of its prompts.
        self._batches: deque[tuple[dict[str, Any], set[int]]] = deque()
        self._replaced = Experience()  # metrics of groups that were replaced since the last step
        self._num_replaced = 0

    def next(self, sync: Callable[[], None], step: int, left: int | None) -> Experience | None:
        """The experience of the next step, as that of `Collector.next`."""
        sync()
        while True:
            self._start(step, left)
            self._filter()
            if not self.groups and not self._more():
                return None
            if chosen := self._chosen(step):
                return self._experience(chosen, step)
            if self._is_full(left) or not self._more():
                self.wait()

    def _is_full(self, left: int | None) -> bool:
        rl = self.config.rl
        ahead = rl.async_steps if left is None else min(rl.async_steps, left)
        return len(self.groups) >= (ahead + 1) * rl.prompts_per_step

    def _more(self) -> bool:
        """Is there a prompt to start?"""
        return bool(self.waiting) or self._take()

    def _take(self) -> bool:
        """Read the next prompts, if there are any."""
        cursor = cursor_of(self.feed)
        taken = take(self.feed, self.config.train.epochs)
        if taken is not None:
            self._batches.append((cursor, {prompt.key for prompt in taken.prompts}))
            self.waiting += [(prompt, taken.epoch) for prompt in taken.prompts]
        return taken is not None

    def _start(self, step: int, left: int | None) -> None:
        while not self._is_full(left) and self._more():
            prompt, epoch = self.waiting.popleft()
            self.groups.append(Group(prompt, epoch, step, self.start(prompt)))

    def _filter(self) -> None:
        """With `rl.dynamic_sampling`, drop finished groups whose samples all have the same reward."""
        most = self.config.rl.dynamic_sampling * self.config.rl.prompts_per_step
        for group in [one for one in self.groups if one.future.done() and not one.is_kept]:
            made = group.future.result()
            group.is_kept = self._num_replaced >= most or bool(made.prompts_with_signal())
            if most:
                self._replaced.log("replaced", not group.is_kept)
            if not group.is_kept:
                self._num_replaced += 1
                self.groups.remove(group)
                for name, (value, weight) in made.metrics.items():
                    self._replaced.log(name, value, weight)

    def _chosen(self, step: int) -> list[Group]:
        """The groups of a step; empty if it has to wait."""
        size = self.config.rl.prompts_per_step
        chosen: list[Group] = []
        others: list[Group] = []
        for group in self.groups:
            (chosen if group.is_kept and len(chosen) < size else others).append(group)
        if len(chosen) < min(size, len(self.groups)):
            return []
        if chosen != self.groups[:size]:
            # The steps after this one can train the others in this order.
            for place, group in enumerate(others):
                if step + 1 + place // size > group.version + self.config.rl.async_steps:
                    return []
        return chosen

    def _experience(self, chosen: list[Group], step: int) -> Experience:
        made = self._replaced
        self._replaced = Experience()
        self._num_replaced = 0
        for group in chosen:
            of_group = group.future.result()
            made.add(of_group, [0])
            for name, (value, weight) in of_group.metrics.items():
                made.log(name, value, weight)
        self.groups = [group for group in self.groups if group not in set(chosen)]
        self._forget_batches()
        made.epoch = min(group.epoch for group in chosen)
        rows = [group.prompt.where for group in chosen]
        made.place = {"epoch": made.epoch, "micro_batches": [0, 0], "rows": rows}
        made.log_staleness(step)
        return made

    # ---- Checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Groups that are finished, and the place of all others in the data: they start again."""
        self._filter()
        open_keys = self._forget_batches()
        finished = [group for group in self.groups if group.is_kept]
        return {
            "cursor": self._batches[0][0] if self._batches else cursor_of(self.feed),
            "batches": len(self._batches),
            "groups": [(one.version, one.future.result().state_dict()) for one in finished],
            "open": sorted(open_keys),
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        if state is None:
            return
        if "groups" not in state:
            raise UserError(
                f"rl.async_steps={self.config.rl.async_steps}: the checkpoint has the rollouts of the next step. "
                "Resume it with rl.async_steps=1"
            )
        load_cursor(self.feed, state["cursor"])
        for _ in range(state["batches"]):
            self._take()
        read = {prompt.key: (prompt, epoch) for prompt, epoch in self.waiting}
        open_keys = set(state["open"])
        for version, finished in state["groups"]:
            (key,) = finished["keys"]
            open_keys.remove(key)
            prompt, epoch = read[key]
            done: Future[Experience] = Future()
            done.set_result(Experience.from_state(finished, [prompt]))
            self.groups.append(Group(prompt, epoch, version, done, is_kept=True))
        self.waiting = deque(one for one in self.waiting if one[0].key in open_keys)

    def _forget_batches(self) -> set[int]:
        """Forget batches that are trained; returns the keys of prompts that are not."""
        open_keys = {group.prompt.key for group in self.groups}
        open_keys |= {prompt.key for prompt, _ in self.waiting}
        while self._batches and not self._batches[0][1] & open_keys:
            self._batches.popleft()
        return open_keys


MAX_GROUPS = 256  # at a time
GROUP_THREAD = "mvp-group"  # the begin of the name of each thread of a group


class Closed(Exception):
    """The training has ended; what still runs ends, too."""


class GroupThreads:
    """Groups in threads of their own, and the rollout that they share.

    Completions of our own decode are generated in rounds, when every group waits for some: by `wait`, so not while the
    actor is updated, or with `apart` in one more thread. Weights are switched between two rounds. Requests to servers
    are sent at once; where a server cannot switch weights meanwhile, new requests wait until the others have ended.
    """

    def __init__(
        self,
        rollout: Rollout,
        sample: Callable[[list[Prompt]], Experience],
        *,
        apart: bool,
        stop: Callable[[], None] = lambda: None,
    ) -> None:
        """`sample` makes the samples of a group; `stop` ends what it waits for, at the end of a training."""
        self.rollout = rollout
        self.sample = sample
        self.stop = stop
        self.is_batched = rollout.is_batched
        self.switches_in_flight = rollout.switches_in_flight
        self.models = threading.Lock()  # of the controller, but for `wait`
        self.models.acquire()
        lock = threading.Lock()
        self._changed = threading.Condition(lock)  # for who generates rounds or waits for a group
        self._released = threading.Condition(lock)  # for groups
        self._weights = threading.Lock()  # held by a round, and by a switch
        self._alive = 0  # groups that are started and not finished
        self._asking = 0  # of them, those that wait for the next round
        self._idle = 0  # and those that wait for something else
        self._begun = 0  # rounds
        self._done = 0
        self._has_ended = False  # has a group, since the last `wait`?
        self._is_switching = False
        self._is_closed = False
        self._error: BaseException | None = None
        self._pending: set[Future[Sample]] = set()  # completions by servers
        self._pool = ThreadPoolExecutor(MAX_GROUPS, GROUP_THREAD)
        self._driver: threading.Thread | None = None
        self._generates = self.is_batched and not apart
        if self.is_batched and apart:
            self._driver = threading.Thread(target=self._drive, name="mvp-rounds", daemon=True)
            self._driver.start()

    # ---- Groups ---------------------------------------------------------------------------------------------------

    def start(self, prompt: Prompt) -> Future[Experience]:
        with self._changed:
            self._alive += 1
        future = self._pool.submit(self.sample, [prompt])
        future.add_done_callback(self._end)
        return future

    def _end(self, future: Future[Experience]) -> None:
        with self._changed:
            self._alive -= 1
            self._has_ended = True
            self._changed.notify_all()

    def wait(self) -> None:
        """Return when a group has finished since the last call."""
        self.models.release()
        try:
            self._generate_until(lambda: self._has_ended or self._error is not None)
        finally:
            self.models.acquire()
        self._has_ended = False
        if self._error is not None:
            raise self._error

    @contextmanager
    def idle(self) -> Iterator[None]:
        """A context in which a group waits for something that only other groups can end."""
        with self._changed:
            self._idle += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._idle -= 1

    def with_models(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of models that the actor's processes have, too, while they do nothing else."""
        with self.models if self._generates else nullcontext():
            return function(*args)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            pending = list(self._pending)
            self._changed.notify_all()
            self._released.notify_all()
        self.models.release()
        for future in pending:
            self._complete(future, None)
        self.stop()
        if self._driver is not None:
            self._driver.join()
        self._pool.shutdown(cancel_futures=True)

    # ---- The rollout ----------------------------------------------------------------------------------------------

    def submit(self, prompt: Prompt, sampling: Any) -> list[Future[Sample]]:
        if self.is_batched:
            return self.rollout.submit(prompt, sampling)
        with self._released:
            self._released.wait_for(lambda: self._is_closed or not self._is_switching)
            if self._is_closed:
                raise Closed
            # Others than those of the servers, which may still complete them when the training has ended.
            futures: list[Future[Sample]] = [Future() for _ in range(sampling.samples)]
            self._pending |= set(futures)
        for ours, theirs in zip(futures, self.rollout.submit(prompt, sampling), strict=True):
            theirs.add_done_callback(partial(self._complete, ours))
        return futures

    def _complete(self, ours: Future[Sample], theirs: Future[Sample] | None) -> None:
        with self._changed:
            if ours not in self._pending:
                return  # the training has ended
            self._pending.remove(ours)
            self._changed.notify_all()
        error = Closed() if theirs is None else theirs.exception()
        if error is not None:
            ours.set_exception(error)
        elif theirs is not None:
            ours.set_result(theirs.result())

    def run(self) -> None:
        """Return when what this group has submitted is generated, if that is in rounds."""
        if not self.is_batched:
            return
        with self._released:
            following = self._begun + 1
            self._asking += 1
            self._changed.notify_all()
            self._released.wait_for(lambda: self._is_closed or self._done >= following)
            if self._done < following:
                raise Closed

    def _is_quiet(self) -> bool:
        """Does every group that runs wait, and at least one of them for a round?"""
        running = min(self._alive, MAX_GROUPS)
        return self._asking > 0 and self._asking + self._idle >= running

    def _generate_until(self, is_over: Callable[[], bool], *, in_driver: bool = False) -> None:
        generates = self._generates or in_driver
        while True:
            with self._changed:
                self._changed.wait_for(lambda: is_over() or (generates and self._is_quiet()))
                if is_over():
                    return
            with self.models if self._generates else nullcontext(), self._weights:
                with self._changed:
                    self._begun += 1
                    self._asking = 0
                self.rollout.run()
            with self._released:
                self._done += 1
                self._released.notify_all()

    def _drive(self) -> None:
        try:
            self._generate_until(lambda: self._is_closed, in_driver=True)
        except BaseException as error:  # noqa: BLE001 - raised by `wait`
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def sync(self, weights: Buckets | None, version: int) -> None:
        if self.is_batched or self.switches_in_flight:
            with self._weights:
                self.rollout.sync(weights, version)
            return
        with self._changed:
            self._is_switching = True
            self._changed.wait_for(lambda: not self._pending)
        self.rollout.sync(weights, version)
        with self._released:
            self._is_switching = False
            self._released.notify_all()

    def release(self) -> None:
        """Nothing: groups run on while the actor is updated."""


@dataclass(frozen=True)
class Updates:
    """What the optimizer steps of one step returned; a model that was not updated has none."""

    actor: list[UpdateNumbers] = field(default_factory=list)
    critic: list[UpdateNumbers] = field(default_factory=list)

    def metrics(self) -> dict[str, tuple[float, float]]:
        """Sums and weights of all metrics, over the optimizer steps."""
        sums: dict[str, list[float]] = {}
        for prefix, updates in (("", self.actor), ("critic/", self.critic)):
            for numbers in updates:
                found = dict(numbers.metrics)
                if prefix and numbers.loss is not None:
                    found |= {"loss": (numbers.loss * numbers.weight, numbers.weight)}
                    found |= {"grad_norm": (numbers.grad_norm, 1.0)}
                for name, (value, weight) in found.items():
                    total = sums.setdefault(f"{prefix}{name}", [0.0, 0.0])
                    total[0] += value
                    total[1] += weight
        return {name: (value, weight) for name, (value, weight) in sums.items()}

    def step_numbers(self) -> StepNumbers:
        """The updates of a step as one; a step in which the actor was not updated has the weight 0."""
        weight = sum(one.weight for one in self.actor)
        loss_sum = sum(one.weight * (one.loss or 0.0) for one in self.actor)
        norms = [one.grad_norm for one in self.actor]
        values = [loss_sum, weight, sum(norms) / max(1, len(norms))]
        loss, loss_weight, norm = torch.tensor(values, dtype=torch.float64).unbind()
        return StepNumbers(loss, loss_weight, norm)

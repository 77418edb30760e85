"""Collector: prompts from the loader, samples from the rollout, rewards: the experience of one step after another.

With `rl.async_steps` the experience of the next step is begun before the update of this one. It is part of a
checkpoint, as the weights that sampled it are gone by then.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from mvp_engine.engine.feed import Feed
from mvp_engine.kit.rl.episodes import Reward
from mvp_engine.kit.rl.prompts import Prompt
from mvp_engine.kit.rl.rollout import Sample
from mvp_engine.kit.rl.settings import RLConfig
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
        return all(self.samples[i].version == version for i in self.trainable())

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


Begun = Future[Experience | None]
Sampler = Callable[[list[Prompt]], Experience]


class Collector:
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

    def next(self, sync: Callable[[], None], last: bool) -> Experience | None:
        """The experience of the next step, None at the end of the data; `last`: no step comes after it.

        `sync` gives the rollout the weights of now.
        """
        begun = self._pending or self._begin(sync)
        self._pending = None
        experience = begun.result()
        if self.config.rl.async_steps and experience is not None and not last:
            self._pending = self._begin(sync)
        return experience

    def wait(self) -> None:
        """Until no rollout is being generated; an error of it is raised by `next`."""
        if self._pending is not None:
            self._pending.exception()

    def _begin(self, sync: Callable[[], None]) -> Begun:
        sync()
        self._cursor = {"all": self.feed.state_dict(), "rank": self.feed.rank_state_dict()}
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
            taken = self._take()
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

    def _take(self) -> Experience | None:
        """The next prompts of the loader."""
        epochs = self.config.train.epochs
        while epochs is None or self.feed.epoch < epochs:
            if taken := self.feed.take():
                place = self.feed.advance(len(taken))
                return Experience(taken[0], place=place, epoch=self.feed.epoch)
            self.feed.next_epoch()
        return None

    # ---- Checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any] | None:
        """What is pending; None if nothing is."""
        pending = None if self._pending is None else self._pending.result()
        return None if pending is None else {"cursor": self._cursor, **pending.state_dict()}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        if state is None:
            return
        self._cursor = state["cursor"]
        of_rank = self._cursor["rank"]
        self.feed.load_state_dict(self._cursor["all"], 1, lambda _: of_rank)
        read: list[Prompt] = []
        for _ in range(state["batches"]):
            taken = self._take()
            assert taken is not None  # they were read before
            read += taken.prompts
        self._pending = Future()
        self._pending.set_result(Experience.from_state(state, read))


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

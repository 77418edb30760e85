"""Collector: prompts from the loader, samples from the rollout, rewards: the experience of one step after another.

With `rl.behind` the experience of the next step is begun before the update of this one. It is part of a checkpoint, as
the weights that sampled it are gone by then.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from mvp_engine.engine.feed import Feed
from mvp_engine.rl.experience import Experience
from mvp_engine.rl.prompts import Prompt
from mvp_engine.rl.rl_settings import RLConfig

Begun = Future[Experience | None]
Sampler = Callable[[list[Prompt]], Experience]


class Collector:
    def __init__(self, config: RLConfig, feed: Feed, sample: Sampler, *, apart: bool) -> None:
        """`sample`: samples of some prompts with their rewards. `apart`: it does not use what an update uses."""
        self.config = config
        self.feed = feed
        self.sample = sample
        self._apart = apart and config.rl.behind > 0
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
        if self.config.rl.behind and experience is not None and not last:
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
        epochs = self.config.loop.epochs
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

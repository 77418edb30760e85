"""Collector: prompts from the loader, samples from the rollout, rewards: the experience of one step after another.

With `rl.behind` the experience of the next step is begun before the update of this one. It is part of a checkpoint, as
the weights that sampled it are gone by then.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from mvp_engine.data.batch import PackedBatch
from mvp_engine.engine.feed import Feed
from mvp_engine.kit.rl import (
    ALGORITHMS,
    PolicyLoss,
    ValueLoss,
    advantage_fields,
    kl_penalty,
)
from mvp_engine.kit.rl.batches import with_fields
from mvp_engine.kit.rl.experience import Experience
from mvp_engine.kit.rl.model_groups import ModelGroups
from mvp_engine.kit.rl.prompts import Prompt
from mvp_engine.kit.rl.settings import RLConfig
from mvp_engine.worker.worker import UpdateNumbers

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


# Learner: what a step does with rollouts and their rewards: log-probs, values, advantages, updates.
#
# Legend: T tokens, S sequences. Tensors of the controller are on the CPU.


@dataclass(frozen=True)
class Updates:
    """What the optimizer steps of one step returned; a model that was not updated has none."""

    actor: list[UpdateNumbers]
    critic: list[UpdateNumbers]

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


class Learner:
    def __init__(self, config: RLConfig, groups: ModelGroups) -> None:
        self.config = config
        self.groups = groups
        self.algorithm = ALGORITHMS[config.rl.algorithm]
        self.policy_loss = self._policy_loss()
        self.value_loss = ValueLoss(clip=config.rl.value_clip)

    def _policy_loss(self) -> PolicyLoss:
        rl = self.config.rl
        options: dict[str, Any] = dict(self.algorithm.loss)
        if rl.clip is not None:
            options["clip"] = tuple(rl.clip)
        if rl.norm is not None:
            options["norm"] = rl.norm
        if options.get("norm") == "constant":
            options["length"] = float(self.config.rollout.max_new_tokens)
        if rl.kl and not self.algorithm.kl_in_reward:
            options["kl"] = rl.kl
            options["kl_estimator"] = rl.kl_estimator or "k3"
        return PolicyLoss(
            **options,
            dual_clip=rl.dual_clip,
            entropy=rl.entropy,
            temperature=self.config.rollout.temperature,
            importance_cap=rl.max_importance,
        )

    def measures_gap(self, step: int, on_policy: bool) -> bool:
        """Whether step `step` needs old log-probs of the actor, which also give the gap.

        A single update is made by the policy that sampled: it has the old log-probs itself.
        """
        rl = self.config.rl
        single = rl.updates == 1 and rl.max_importance is None
        in_reward = bool(rl.kl) and self.algorithm.kl_in_reward
        is_due = step == 1 or step % self.config.rollout.gap_interval == 0
        return on_policy and (is_due or in_reward or not single)

    def prepare(
        self, batch: PackedBatch, rewards_S: Tensor, on_policy: bool, step: int = 1
    ) -> PackedBatch:
        """The batch with all fields that the losses read; `step` is counted from 1.

        `on_policy`: the actor still has the weights that sampled. If not, the ratio is to the sampler's log-probs; with
        importance weights to the actor's, and they correct for the difference.
        """
        rl = self.config.rl
        fields: dict[str, Tensor] = {}
        if self.measures_gap(step, on_policy) or (not on_policy and rl.max_importance is not None):
            fields["old_log_probs"] = self._log_probs(batch)
        if rl.kl:
            fields["reference_log_probs"] = self._reference_log_probs(batch)
        kl_T = None
        if rl.kl and self.algorithm.kl_in_reward:
            estimator = rl.kl_estimator or "k1"
            old_T = fields.get("old_log_probs", batch.token_fields["sampler_log_probs"])
            kl_T = kl_penalty(old_T, fields["reference_log_probs"], estimator)
        values_T = None
        if self.groups.critic is not None:
            found = self.groups.critic.infer(batch, ["values"], budget=self.config.budget)
            values_T = found["values"].float()
        fields |= advantage_fields(
            self.algorithm,
            batch,
            rewards_S,
            batch.sequence_fields["group"],
            values_T=values_T,
            kl_T=kl_T,
            kl=rl.kl,
            gamma=rl.gamma,
            lam=rl.lam,
        )
        return with_fields(batch, fields)

    def _log_probs(self, batch: PackedBatch, adapters: bool = True) -> Tensor:
        return self.groups.actor.infer(
            batch,
            ["log_probs"],
            budget=self.config.budget,
            temperature=self.config.rollout.temperature,
            adapters=adapters,
        )["log_probs"].float()

    def _reference_log_probs(self, batch: PackedBatch) -> Tensor:
        if self.groups.reference is None:
            return self._log_probs(batch, adapters=False)
        found = self.groups.reference.infer(
            batch,
            ["log_probs"],
            budget=self.config.budget,
            temperature=self.config.rollout.temperature,
        )
        return found["log_probs"].float()

    def update(self, batch: PackedBatch, on_policy: bool, step: int) -> Updates:
        """The optimizer steps over a prepared batch; `step` is counted from 1."""
        rl = self.config.rl
        to_sampler = not on_policy and rl.max_importance is None
        loss = replace(self.policy_loss, ratio_to="sampler") if to_sampler else self.policy_loss
        options: dict[str, Any] = {"budget": self.config.budget, "cuts": rl.updates}
        critic: list[UpdateNumbers] = []
        actor: list[UpdateNumbers] = []
        if self.groups.critic is not None:
            critic = self.groups.critic.update(batch, self.value_loss, together="group", **options)
        if step > rl.critic_warmup or self.groups.critic is None:
            actor = self.groups.actor.update(batch, loss, together="group", **options)
        if to_sampler:
            for numbers in actor[1:]:  # the first one alone has the policy before the step
                numbers.metrics.pop("gap", None)
        return Updates(actor, critic)

"""Batches of samples, dynamic sampling, rollouts that are one step behind, and the state of what is pending."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.distributed import World
from mvp_engine.engine.feed import Feed
from mvp_engine.kit.rl.collector import Collector, Experience
from mvp_engine.kit.rl.episodes import Reward
from mvp_engine.kit.rl.prompts import Prompt
from mvp_engine.kit.rl.rollout import Sample, rollout_batch


def prompt(key, *ids):
    batch = PackedBatch.from_sequences([torch.tensor(ids or (1, 2))])
    batch.labels.fill_(IGNORE)
    return Prompt(key, {}, batch, list(ids), [], "numbers", f"line {key}", key)


class Loader:
    """Batches of two prompts; an epoch has `size` of them."""

    global_cursor = True

    def __init__(self, size):
        self.size = size
        self.epoch = 0
        self.start = 0

    def __iter__(self):
        while self.start < self.size:
            self.start += 1
            first = 2 * (self.epoch * self.size + self.start - 1)
            yield [prompt(first), prompt(first + 1)]

    def set_epoch(self, epoch):
        self.epoch = epoch
        self.start = 0

    def state_dict(self):
        return {"epoch": self.epoch, "start": self.start}

    def load_state_dict(self, state):
        vars(self).update(state)


class Config:
    """The part of an RLConfig that a collector reads."""

    def __init__(self, async_steps=0, dynamic_sampling=0, epochs=None):
        self.rl = self
        self.train = self
        self.async_steps = async_steps
        self.dynamic_sampling = dynamic_sampling
        self.epochs = epochs


class Policy:
    """Two samples of each prompt; the prompts in `dull` have equal rewards. The version is that of the last sync."""

    def __init__(self, dull=()):
        self.dull = dull
        self.version = -1

    def sample(self, prompts):
        made = Experience(prompts)
        for index, one in enumerate(prompts):
            for number in range(2):
                made.samples.append(Sample(index, [5], [-0.1], self.version, "stop"))
                made.rewards.append(Reward(0.0 if one.key in self.dull else float(number)))
        made.log("samples", len(made.samples))
        return made


def collector(policy, size=4, apart=False, **options):
    feed = Feed(Loader(size), 1, World(0, 1, 0, 1, torch.device("cpu")))
    config: Any = Config(**options)
    return Collector(config, feed, policy.sample, apart=apart)


def steps(collector, policy, first, last):
    """Keys of the prompts and versions of the samples of each step."""
    found = []
    for step in range(first, last):

        def sync(step=step):
            policy.version = step

        experience = collector.next(sync, last=step + 1 == last)
        if experience is None:
            break
        versions = sorted({sample.version for sample in experience.samples})
        found.append(([one.key for one in experience.prompts], versions))
    return found


def test_rollout_batch_labels_and_log_probs_are_of_the_new_tokens_alone():
    prompts = [prompt(0, 7, 8), prompt(1, 9)]
    samples = [Sample(1, [3, 4], [-0.5, -0.25], 0, "stop"), Sample(0, [6], [-1.0], 0, "length")]
    batch = rollout_batch(prompts, samples)
    assert batch.input_ids.tolist() == [9, 3, 4, 7, 8, 6]
    assert batch.labels.tolist() == [3, 4, IGNORE, IGNORE, 6, IGNORE]
    assert batch.token_fields["sampler_log_probs"].tolist() == [-0.5, -0.25, 0.0, 0.0, -1.0, 0.0]
    assert batch.sequence_fields["group"].tolist() == [1, 0]
    assert prompts[0].batch.num_tokens == 2  # unchanged


def test_collector_without_delay_samples_with_the_weights_of_the_step():
    policy = Policy()
    assert steps(collector(policy), policy, 0, 3) == [([0, 1], [0]), ([2, 3], [1]), ([4, 5], [2])]


@pytest.mark.parametrize("apart", [False, True])
def test_collector_one_step_behind_samples_with_the_weights_before_the_update(apart):
    policy = Policy()
    found = steps(collector(policy, apart=apart, async_steps=1), policy, 0, 4)
    assert found == [([0, 1], [0]), ([2, 3], [0]), ([4, 5], [1]), ([6, 7], [2])]


def test_collector_apart_does_not_wait_for_the_next_samples():
    policy = Policy()
    may_sample = threading.Event()
    made = collector(policy, apart=True, async_steps=1)
    may_sample.set()
    original = policy.sample

    def sample(prompts):
        assert may_sample.wait(60)
        return original(prompts)

    made.sample = sample
    assert made.next(lambda: None, last=False) is not None
    made.wait()
    may_sample.clear()
    assert made.next(lambda: None, last=False) is not None  # the next one is begun and cannot end
    may_sample.set()
    made.wait()
    made.close()


def test_collector_resumed_with_a_pending_step_continues_bit_equal():
    policy = Policy(dull=(4,))
    options: dict[str, Any] = {"async_steps": 1, "dynamic_sampling": 1, "size": 5}
    undisturbed = steps(collector(policy, **options), policy, 0, 6)
    first = collector(policy, **options)
    found = []
    for step in range(2):
        found += steps_of(first, policy, step)
    state = first.state_dict()
    second = collector(policy, **options)
    second.load_state_dict(state)
    assert second.state_dict() == state
    found += steps(second, policy, 2, 6)
    assert found == undisturbed


def steps_of(collector, policy, step):
    experience = collector.next(lambda: setattr(policy, "version", step), last=False)
    assert experience is not None
    versions = sorted({sample.version for sample in experience.samples})
    return [([one.key for one in experience.prompts], versions)]


def test_collector_dynamic_sampling_replaces_prompts_of_equal_rewards_within_bounds():
    policy = Policy(dull=(1, 2))
    made = collector(policy, dynamic_sampling=2)
    experience = made.next(lambda: None, last=True)
    assert experience is not None
    assert [one.key for one in experience.prompts] == [0, 3]
    assert experience.metrics["replaced"] == (2.0, 4.0)
    assert [sample.prompt for sample in experience.samples] == [0, 0, 1, 1]
    # Nothing but equal rewards: bounded, and the last prompts stay.
    dull = Policy(dull=tuple(range(100)))
    none = collector(dull, dynamic_sampling=1).next(lambda: None, last=True)
    assert none is not None
    assert [one.key for one in none.prompts] == [2, 3]
    assert none.batches == 2


def test_collector_at_the_end_of_the_last_epoch_returns_none():
    policy = Policy()
    found = steps(collector(policy, size=2, epochs=2), policy, 0, 9)
    assert [keys for keys, _ in found] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    behind = steps(collector(policy, size=2, epochs=2, async_steps=1), policy, 0, 9)
    assert [keys for keys, _ in behind] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_experience_samples_without_a_reward_or_a_token_are_not_trained():
    samples = [
        Sample(0, [5], [-0.1], 0, "stop"),
        Sample(0, [], [], 0, "stop"),
        Sample(0, [6], [-0.2], 0, "length"),
    ]
    made = Experience(
        [prompt(0)], samples, [Reward(1.0), Reward(0.0), Reward(None, error="ValueError")]
    )
    assert made.trainable() == [0]
    assert made.prompts_with_signal() == [0]
    made.rewards[1] = Reward(1.0)
    assert made.prompts_with_signal() == []

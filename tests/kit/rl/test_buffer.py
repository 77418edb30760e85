"""Batches of samples, dynamic sampling, rollouts that are one step behind, and the state of what is pending."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import Future
from random import Random
from typing import Any

import pytest
import torch
from conftest import user_error, wait_until
from hypothesis import given, settings
from hypothesis import strategies as st

from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.distributed import World
from mvp_engine.engine.feed import Feed
from mvp_engine.kit.rl.buffer import Buffer, Collector, Experience, GroupThreads
from mvp_engine.kit.rl.episodes import Reward
from mvp_engine.kit.rl.prompts import Prompt
from mvp_engine.kit.rl.rollout import Sample, Sampling, generate, rollout_batch


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
        self.prompts_per_step = 2


class Policy:
    """Two samples of each prompt; the prompts in `dull` have equal rewards. The version is that of the last sync."""

    def __init__(self, dull=()):
        self.dull = dull
        self.version = -1

    def sample(self, prompts):
        made = Experience(prompts)
        for index, one in enumerate(prompts):
            for number in range(2):
                made.samples.append(Sample(index, [5], [-0.1], [self.version], "stop"))
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

        experience = collector.next(sync, step, last - step - 1)
        if experience is None:
            break
        versions = sorted({sample.version for sample in experience.samples})
        found.append(([one.key for one in experience.prompts], versions))
    return found


def test_rollout_batch_labels_and_log_probs_are_of_the_new_tokens_alone():
    prompts = [prompt(0, 7, 8), prompt(1, 9)]
    samples = [
        Sample(1, [3, 4], [-0.5, -0.25], [0, 0], "stop"),
        Sample(0, [6], [-1.0], [0], "length"),
    ]
    batch = rollout_batch(prompts, samples)
    assert batch.input_ids.tolist() == [9, 3, 4, 7, 8, 6]
    assert batch.labels.tolist() == [3, 4, IGNORE, IGNORE, 6, IGNORE]
    assert batch.token_fields["sampler_log_probs"].tolist() == [-0.5, -0.25, 0.0, 0.0, -1.0, 0.0]
    assert batch.sequence_fields["group"].tolist() == [1, 0]
    assert "versions" not in batch.token_fields
    samples[0].versions = [1, 2]
    mixed = rollout_batch(prompts, samples)
    assert mixed.token_fields["versions"].tolist() == [1, 2, 0, 0, 0, 0]
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
    assert made.next(lambda: None, 0, None) is not None
    made._pending.result(60)
    may_sample.clear()
    assert made.next(lambda: None, 0, None) is not None  # the next one is begun and cannot end
    may_sample.set()
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
    experience = collector.next(lambda: setattr(policy, "version", step), step, None)
    assert experience is not None
    versions = sorted({sample.version for sample in experience.samples})
    return [([one.key for one in experience.prompts], versions)]


def test_collector_dynamic_sampling_replaces_prompts_of_equal_rewards_within_bounds():
    policy = Policy(dull=(1, 2))
    made = collector(policy, dynamic_sampling=2)
    experience = made.next(lambda: None, 0, 0)
    assert experience is not None
    assert [one.key for one in experience.prompts] == [0, 3]
    assert experience.metrics["replaced"] == (2.0, 4.0)
    assert [sample.prompt for sample in experience.samples] == [0, 0, 1, 1]
    # Nothing but equal rewards: bounded, and the last prompts stay.
    dull = Policy(dull=tuple(range(100)))
    none = collector(dull, dynamic_sampling=1).next(lambda: None, 0, 0)
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
        Sample(0, [5], [-0.1], [0], "stop"),
        Sample(0, [], [], [], "stop"),
        Sample(0, [6], [-0.2], [0], "length"),
    ]
    made = Experience(
        [prompt(0)], samples, [Reward(1.0), Reward(0.0), Reward(None, error="ValueError")]
    )
    assert made.trainable() == [0]
    assert made.prompts_with_signal() == [0]
    made.rewards[1] = Reward(1.0)
    assert made.prompts_with_signal() == []


# ---- Groups of several steps at the same time ---------------------------------------------------------------------


class Script:
    """Groups that end in the order of `choose(number)`: `wait` lets one end. Each turn is by the weights of then."""

    def __init__(self, choose, dull=(), turns=1):
        self.choose = choose
        self.dull = dull
        self.turns = turns
        self.version = 0
        self.running: list[Any] = []

    def start(self, prompt):
        future: Future[Experience] = Future()
        self.running.append((prompt, future, [], self.turns))
        return future

    def advance(self):
        """Let one group write a token, or end."""
        assert self.running, "the buffer waits for a group, and none runs"
        at = self.choose(len(self.running))
        prompt, future, versions, left = self.running[at]
        versions.append(self.version)
        if left > 1:
            self.running[at] = (prompt, future, versions, left - 1)
            return False
        del self.running[at]
        tokens = [5] * len(versions)
        made = Experience([prompt])
        for number in range(2):
            made.samples.append(Sample(0, tokens, [-0.1] * len(tokens), list(versions), "stop"))
            made.rewards.append(Reward(0.0 if prompt.key in self.dull else float(number)))
        future.set_result(made)
        return True

    def wait(self):
        while not self.advance():
            pass


def buffer_of(script, size, async_steps, dynamic_sampling=0):
    feed = Feed(Loader(size), 1, World(0, 1, 0, 1, torch.device("cpu")))
    config: Any = Config(async_steps, dynamic_sampling, epochs=2)
    return Buffer(config, feed, script.start, script.wait)


@settings(deadline=None, max_examples=150)
@given(
    limit=st.integers(0, 5), size=st.integers(1, 6), turns=st.integers(1, 3), seed=st.integers(0)
)
def test_buffer_trains_each_prompt_once_and_none_too_old_whatever_ends_first(
    limit, size, turns, seed
):
    """Also where the run is killed at any step, and resumes from an older checkpoint."""
    random = Random(seed)
    script = Script(random.randrange, turns=turns)
    buffer = buffer_of(script, size, limit)
    trained: list[list[int]] = []
    hashes: list[int] = []
    saved = (0, buffer.state_dict())
    total = 2 * size
    while True:
        step = script.version = len(trained)
        left = random.choice([None, total - step - 1])
        made = buffer.next(lambda: None, step, left)
        if made is None:
            break
        assert len(made.prompts) == 2
        assert all(step - limit <= v <= step for one in made.samples for v in one.versions)
        assert len(buffer.groups) <= 2 * limit
        trained.append([prompt.key for prompt in made.prompts])
        hashes.append(made.hash())
        for _ in range(random.randrange(4)):  # during the update
            if script.running:
                script.advance()
        if random.random() < 0.5:
            saved = (len(trained), pickle.loads(pickle.dumps(buffer.state_dict())))
        if random.random() < 0.1:  # killed
            del trained[saved[0] :]
            del hashes[saved[0] :]
            script = Script(random.randrange, turns=turns)
            script.version = len(trained)
            buffer = buffer_of(script, size, limit)
            buffer.load_state_dict(saved[1])
    assert sorted(key for keys in trained for key in keys) == list(range(2 * total))
    everything = Experience([prompt(key) for key in range(2 * total)])
    everything.samples = [Sample(i // 2, [5], [-0.1], [0], "stop") for i in range(4 * total)]
    assert sum(hashes) == everything.hash()


@settings(deadline=None, max_examples=50)
@given(dull=st.sets(st.integers(0, 40)), rounds=st.sampled_from([1, 20]), seed=st.integers(0))
def test_buffer_replaces_groups_of_equal_rewards_within_bounds(dull, rounds, seed):
    script = Script(Random(seed).randrange, dull)
    buffer = buffer_of(script, 40, 2, dynamic_sampling=rounds)
    trained: list[int] = []
    for step in range(5):
        made = buffer.next(lambda: None, step, None)
        assert made is not None
        trained += [prompt.key for prompt in made.prompts]
        replaced, _ = made.metrics.get("replaced", (0, 0))
        assert replaced <= 2 * rounds
    assert len(set(trained)) == len(trained) == 10
    if rounds == 20:
        assert not dull.intersection(trained)


def test_buffer_takes_what_is_finished_and_waits_for_what_would_become_too_old():
    ends: list[int] = []

    def next_to_end(number):
        key = ends.pop(0)
        return next(at for at, one in enumerate(script.running) if one[0].key == key)

    script = Script(next_to_end)
    buffer = buffer_of(script, 20, 2)
    found = []
    # In step 1 it does not take 6 and 7, which are finished first: 0 to 3 are due in step 2, which has room for two.
    for step, order in enumerate([[4, 5], [6, 7, 0, 1], [2, 3], []]):
        script.version = step
        ends += order
        made = buffer.next(lambda: None, step, None)
        assert not ends, "it did not wait for all of these"
        found.append([prompt.key for prompt in made.prompts])
    assert found == [[4, 5], [0, 1], [2, 3], [6, 7]]


def test_buffer_and_collector_refuse_a_checkpoint_of_each_other():
    policy = Policy()
    one = collector(policy, async_steps=1)
    one.next(lambda: None, 0, None)
    many = buffer_of(Script(lambda number: 0), 4, 2)
    many.next(lambda: None, 0, None)
    with user_error("rl.async_steps=2: the checkpoint has the rollouts of the next step"):
        buffer_of(Script(None), 4, 2).load_state_dict(one.state_dict())
    with user_error("rl.async_steps=1: the checkpoint has rollouts of several steps"):
        collector(policy, async_steps=1).load_state_dict(many.state_dict())


class Rollout:
    """Completions of one token. Batched ones are generated by `run`, others when the test says `answer`."""

    def __init__(self, is_batched=True, switches_in_flight=False):
        self.is_batched = is_batched
        self.switches_in_flight = switches_in_flight
        self.version = 0
        self.submitted: list[Any] = []
        self.log: list[str] = []

    def submit(self, prompt, sampling):
        future: Future[Sample] = Future()
        self.log.append(f"submit {prompt.key}")
        self.submitted.append((prompt, future))
        return [future]

    def answer(self):
        submitted, self.submitted = self.submitted, []
        for prompt, future in submitted:
            future.set_result(Sample(0, [prompt.key], [-0.1], [self.version], "stop"))

    def run(self):
        if self.is_batched:
            self.log.append(f"run {sorted(prompt.key for prompt, _ in self.submitted)}")
            self.answer()

    def sync(self, weights, version):
        self.version = version
        self.log.append(f"sync {version}")


@pytest.fixture
def groups():
    """groups(rollout): threads of groups with as many turns as the key of the prompt."""
    opened = []

    def start(rollout, apart=False):
        def sample(prompts):
            made = Experience(prompts)
            for _ in range(prompts[0].key):
                made.samples += generate(threads, prompts, Sampling(1))
            return made

        threads = GroupThreads(rollout, sample, apart=apart)
        opened.append(threads)
        return threads

    yield start
    for threads in opened:
        threads.close()  # also while groups wait for a round or a server


def test_groups_generate_in_full_rounds_and_switch_weights_between_them(groups):
    rollout = Rollout()
    threads = groups(rollout)
    one, two, three = (threads.start(prompt(key)) for key in (1, 2, 3))
    threads.wait()
    assert one.done()
    threads.sync(None, 1)
    threads.wait()
    assert two.done()
    rounds = [line for line in rollout.log if not line.startswith("submit")]
    assert rounds == ["run [1, 2, 3]", "sync 1", "run [2, 3]"]
    assert [sample.version for sample in two.result().samples] == [0, 1]
    threads.start(prompt(1))
    threads.wait()
    assert rollout.log[-1] == "run [1, 3]"
    assert len(three.result(60).samples) == 3


def test_groups_apart_generate_while_the_controller_does_something_else(groups):
    rollout = Rollout()
    threads = groups(rollout, apart=True)
    assert [sample.version for sample in threads.start(prompt(3)).result(60).samples] == [0, 0, 0]
    threads.sync(None, 1)
    (sample,) = threads.start(prompt(1)).result(60).samples
    assert sample.version == 1
    threads.wait()
    rollout.run = lambda: 1 / 0
    threads.start(prompt(1))
    with pytest.raises(ZeroDivisionError):
        threads.wait()


@pytest.mark.parametrize("in_flight", [False, True])
def test_groups_of_a_server_switch_weights_at_once_or_when_its_requests_have_ended(
    groups, in_flight
):
    rollout = Rollout(is_batched=False, switches_in_flight=in_flight)
    threads = groups(rollout)
    first = threads.start(prompt(1))
    wait_until(lambda: rollout.submitted)
    switch = threading.Thread(target=threads.sync, args=(None, 1))
    switch.start()
    if in_flight:
        switch.join(60)
    else:
        wait_until(lambda: threads._is_switching)
    threads.start(prompt(2))
    if in_flight:
        wait_until(lambda: len(rollout.submitted) == 2)
    rollout.answer()
    switch.join(60)
    wait_until(lambda: first.done() and "submit 2" in rollout.log)
    expected = ["submit 1", "sync 1", "submit 2"]
    assert rollout.log[:3] == expected
    threads.wait()
    assert first.result().samples[0].version == int(in_flight)

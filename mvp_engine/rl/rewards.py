"""Rewards of completions: a plain Python function of the raw row and the answer, checked and isolated.

A reward that raises, hangs, returns NaN or kills its process fails alone: it is named with its row, and `on_error` says
what happens to the completion. The order of completions is kept, and random numbers do not depend on the workers.
"""

from __future__ import annotations

import inspect
import logging
import math
import numbers
import pickle
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from mvp_engine.data import derived_seed, rng_state, set_rng_state
from mvp_engine.errors import UserError, count
from mvp_engine.rl.prompts import Prompt
from mvp_engine.rl.reward_workers import Compute, Group, Outcome, RewardWorkers, Task, run_task
from mvp_engine.rl.rl_settings import RewardSettings
from mvp_engine.rl.rollout import Sample

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
    reason: str  # "stop", or "length": cut after rollout.max_new_tokens
    log_probs: list[float]
    version: int  # of the weights that wrote it


@dataclass(frozen=True)
class Reward:
    """The reward of one completion."""

    value: float | None  # None: it failed, and the completion is dropped
    parts: dict[str, float] = field(
        default_factory=dict
    )  # of a function that returns several numbers
    error: str | None = None  # why it failed


class RewardFailed(UserError):
    """Rewards failed that may not, or too many of them."""


class Rewards:
    """Computes the rewards of samples with `compute(row, answer)`, in `settings.workers` processes.

    `compute` returns a number, or several by name: their sum is the reward. `model` scores all samples of a step, and
    `settings.model_weight` times its score is added. One of both may be None.
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
        total = value + self.settings.model_weight * score
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
            return Reward(0.0 if self.settings.on_error == "zero" else None, error=outcome.error)
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
        if self.settings.on_error == "raise":
            raise RewardFailed(f"reward: {failed[0]}")
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

    def add(name: str, value: float) -> None:
        total, weight = found.get(name, (0.0, 0.0))
        found[name] = (total + value, weight + 1)

    for reward in rewards:
        if reward.value is not None:
            add("reward", reward.value)
        for name, value in reward.parts.items():
            add(f"reward_{name}", value)
    for reward in rewards:
        add("reward_errors", float(reward.error is not None))
    return found


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

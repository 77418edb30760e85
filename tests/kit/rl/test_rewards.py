"""Rewards: order and values do not depend on workers; one that raises, hangs, dies or is no number is named."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import is_gone, user_error, wait_until

from mvp_engine.data.batch import PackedBatch
from mvp_engine.kit.rl import episodes
from mvp_engine.kit.rl.chat import Answer
from mvp_engine.kit.rl.episodes import Episodes, RewardFailed, Task, reward_metrics
from mvp_engine.kit.rl.prompts import Prompt
from mvp_engine.kit.rl.rollout import Sample
from mvp_engine.kit.rl.settings import RewardSettings


class Letters:
    """A tokenizer: token i is the i-th letter, 26 is special."""

    def decode(self, tokens, skip_special_tokens):
        return "".join(chr(97 + token) for token in tokens if token < 26)


def prompts(count):
    batch = PackedBatch.from_sequences([torch.tensor([0])])
    return [
        Prompt(
            key=i,
            row={"n": i},
            batch=batch,
            text_ids=[0],
            media=[],
            source="toy",
            where=f"toy.jsonl:{i}",
            sample=i,
        )
        for i in range(count)
    ]


def samples(count, group):
    return [
        Sample(i // group, [i // group, i % group, 26], [0.0] * 3, [7] * 3, "stop")
        for i in range(count * group)
    ]


def settings(**values):
    return RewardSettings(**{"timeout": 20, "workers": 2, "max_errors": 0.5, **values})


@pytest.fixture
def made(request):
    """made(function, **settings): `Episodes.rewards` of objects that are closed after the test."""
    opened = []

    def make(function, **values):
        opened.append(Episodes(function, Letters(), settings(**values)))
        return opened[-1].rewards

    yield make
    for worker in opened:
        worker.close()


class Limit:
    """The clock of the workers. It stands still, however busy the machine is, until a reward that hangs has touched
    `file`. With several workers, the others are idle by then, and the results before it have arrived."""

    def __init__(self, file):
        self.file = file
        self.now = 0.0
        self.workers: list[Any] = []  # empty: there is only one

    def monotonic(self):
        first = [worker.task.answer.text for worker in self.workers if worker.task]
        if self.file.exists() and (first == ["bb"] or not self.workers):
            self.now += 1000.0
            if not self.workers:
                self.file.unlink()
        return self.now


@pytest.fixture
def limit(tmp_path, monkeypatch):
    made = Limit(tmp_path / "hangs")
    monkeypatch.setattr(episodes, "time", made)
    return made


def by_place(row, answer):
    row["n"] += 100  # which the next answer must not see
    return (row["n"] - 100) * 10 + ord(answer.text[1]) - 97 + random.random() * np.random.rand()


def test_rewards_any_number_of_workers_gives_the_same_values_in_order(made):
    found = {}
    random.seed(5)
    before = random.getstate()
    for workers in (0, 1, 3):
        rewards = made(by_place, workers=workers)(prompts(7), samples(7, 3))
        found[workers] = [reward.value for reward in rewards]
    assert random.getstate() == before
    assert found[0] == found[1] == found[3]
    assert [int(value) for value in found[0]] == [10 * i + j for i in range(7) for j in range(3)]


def test_rewards_answer_has_text_without_special_tokens_and_all_of_the_sample(made):
    seen: list[Answer] = []
    made(lambda row, answer: seen.append(answer) or 1, workers=0)(prompts(1), samples(1, 2))
    assert seen[1] == Answer("ab", [0, 1, 26], "stop", [0.0, 0.0, 0.0], 7)


def test_rewards_several_numbers_are_summed_and_logged_by_name(made):
    def reward(row, answer):
        return {"exact": np.float32(row["n"]), "length": torch.tensor(-0.5)}

    found = made(reward)(prompts(2), samples(2, 2))
    assert [one.value for one in found] == [-0.5, -0.5, 0.5, 0.5]
    assert found[2].parts == {"exact": 1.0, "length": -0.5}
    assert reward_metrics(found) == {
        "reward": (0.0, 4.0),
        "reward_exact": (2.0, 4.0),
        "reward_length": (-2.0, 4.0),
        "reward_errors": (0.0, 4.0),
    }


def fails(row, answer):
    if answer.text != "bb":
        return 1.0
    kind = os.environ["REWARD_FAILS"]
    if kind in ("hang", "regex"):
        Path(os.environ["REWARD_HANGS"]).touch()
    if kind == "hang":
        threading.Event().wait()
    if kind == "regex":  # holds the GIL
        re.match(r"(a+)+$", "a" * 60 + "b")
    if kind == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "exit":
        sys.exit("over")
    if kind == "raise":
        raise KeyError("solution")
    values: dict[str, Any] = {
        "nan": float("nan"),
        "inf": {"a": float("inf")},
        "none": None,
        "text": "1",
    }
    values |= {"list": [1.0], "empty": {}, "name": {"errors": 1.0}}
    return values[kind]


FAILURES = {
    "hang": "no result after 0.3 s",
    "regex": "no result after 0.3 s",
    "die": "its process died (SIGKILL)",
    "exit": "SystemExit: over",
    "raise": "KeyError: 'solution'",
    "nan": "ValueError: the reward is nan",
    "inf": "ValueError: the reward 'a' is inf",
    "none": "TypeError: the reward is None of type NoneType",
    "text": "TypeError: the reward is '1' of type str",
    "list": "TypeError: the reward is [1.0] of type list",
    "empty": "ValueError: the reward is an empty dict",
    "name": "ValueError: the reward has the name 'errors', which is that of the metric reward_errors",
}


@pytest.mark.parametrize("kind", FAILURES)
def test_rewards_one_that_fails_is_named_and_costs_no_other(made, kind, monkeypatch, limit):
    monkeypatch.setenv("REWARD_FAILS", kind)
    monkeypatch.setenv("REWARD_HANGS", str(limit.file))
    rewards = made(fails, timeout=0.3)
    limit.workers = rewards.__self__._processes._processes
    found = rewards(prompts(3), samples(3, 3))
    assert [reward.value for reward in found] == [1.0] * 4 + [None] + [1.0] * 4
    assert found[4].error is not None
    assert found[4].error.startswith(FAILURES[kind])


def test_rewards_none_may_fail_and_one_does_ends_the_run_with_its_traceback(made, monkeypatch):
    monkeypatch.setenv("REWARD_FAILS", "raise")
    with pytest.raises(
        RewardFailed, match=r"toy.jsonl:1 \(source toy\), answer 'bb': KeyError"
    ) as error:
        made(fails, max_errors=0.0)(prompts(3), samples(3, 3))
    assert 'raise KeyError("solution")' in str(error.value)  # the traceback


def test_rewards_too_many_failures_end_the_run(made):
    def reward(row, answer):
        return 1 / (row["n"] % 2)

    with pytest.raises(
        RewardFailed, match=r"5 of the first \d+ rewards of this step failed, and 4 of 16 may .*toy"
    ):
        made(reward, max_errors=0.25)(prompts(4), samples(4, 4))
    assert made(reward, max_errors=0.5)(prompts(4), samples(4, 4))[15].value == 1.0
    with pytest.raises(
        RewardFailed, match=r"1 of the first 1 reward of this step failed, and 0 of 1 may"
    ):
        made(reward, max_errors=1.0)(prompts(1), samples(1, 1))


def test_rewards_many_that_hang_end_the_run_after_those_that_may(made, tmp_path):
    def reward(row, answer):
        (tmp_path / f"{row['n']}{answer.text}").touch()
        return float(threading.Event().wait())

    with pytest.raises(
        RewardFailed, match=r"2 of the first 2 rewards .* 1 of 16 may .*no result after 0.1 s"
    ):
        made(reward, max_errors=0.0625, timeout=0.1)(prompts(4), samples(4, 4))
    assert len(list(tmp_path.iterdir())) <= 4


def test_rewards_function_with_other_arguments_is_refused_at_once(made):
    with user_error(r"\(answer\): a reward is called with a row and one of its answers"):
        made(lambda answer: 1.0)


def test_rewards_worker_killed_while_idle_is_replaced(made):
    rewards = made(by_place)
    before = rewards(prompts(3), samples(3, 2))
    processes = rewards.__self__._processes
    assert len(processes._processes) == 2
    for process in processes._processes:
        os.kill(process.pid, signal.SIGKILL)
        wait_until(
            lambda pid=process.pid: processes._read_control(0.0) or pid in processes._exit_codes
        )
    assert rewards(prompts(3), samples(3, 2)) == before


def test_rewards_result_that_came_while_a_worker_was_replaced_is_no_time_out(made, limit):
    """The controller is busy for longer than the limit, and the result is there."""
    processes = made(lambda row, answer: 1.0, workers=1).__self__._processes
    processes._give(deque([Task(0, 0, pickle.dumps({}))]), {})
    (process,) = processes._processes
    assert process.connection.poll(60)
    limit.now = 1000.0
    outcome = processes._outcome(process)
    assert (outcome.value, outcome.error, outcome.is_last) == ((1.0, {}), None, False)


# A child, one in a session of its own, and one whose parent has ended since.
SLEEPERS = {
    "child": "sh -c 'echo $$ > pid; exec sleep 600'",
    "session": "setsid sh -c 'echo $$ > pid; exec sleep 600'",
}
SLEEPERS["daemon"] = f"({SLEEPERS['session']}) & sleep 0"


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("kind", SLEEPERS)
def test_rewards_reward_that_hangs_or_dies_ends_with_the_processes_it_started(
    made, tmp_path, limit, kind, dies
):
    pid = tmp_path / "pid"

    def reward(row, answer):
        shell = subprocess.Popen(["sh", "-c", SLEEPERS[kind]], cwd=tmp_path)
        wait_until(lambda: pid.exists() and pid.read_text().endswith("\n"))
        if dies:
            os._exit(3)
        limit.file.touch()
        return shell.wait() + float(threading.Event().wait())

    error = r"its process died \(exit code 3\)" if dies else "no result after"
    with pytest.raises(RewardFailed, match=error):
        made(reward, timeout=0.5, workers=1)(prompts(1), samples(1, 1))
    wait_until(lambda: is_gone(int(pid.read_text())))


def run_endless_reward(out):
    def reward(row, answer):
        out.send(os.getpid())
        while True:
            pass

    Episodes(reward, Letters(), settings(workers=1)).rewards(prompts(1), samples(1, 1))


def test_rewards_controller_killed_leaves_no_worker():
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    controller = context.Process(target=run_endless_reward, args=(theirs,))
    controller.start()
    worker = ours.recv()
    controller.kill()
    controller.join()
    wait_until(lambda: is_gone(worker))

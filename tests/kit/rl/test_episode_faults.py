"""Episodes whose tools or programs fail: named with the row, at no cost to others, and no process is left."""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import is_gone, wait_until
from test_episodes import counts, post, written
from test_episodes import play as play

from mvp_engine.kit.rl.episodes import RewardFailed
from mvp_engine.process.watchdog import descendants


def fork_and_hang():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        time.sleep(600)
    time.sleep(600)


FAULTS: dict[str, tuple[Any, str]] = {
    "hang": (lambda chat: time.sleep(600), "no result after 1 s"),
    "fork": (lambda chat: fork_and_hang(), "no result after 1 s"),
    "segfault": (
        lambda chat: [faulthandler.disable(), os.kill(os.getpid(), signal.SIGSEGV)],
        "its process died (SIGSEGV)",
    ),
    "exit": (lambda chat: os._exit(5), "its process died (exit code 5)"),
    "raise": (lambda chat: {}["answer"], "KeyError: 'answer'"),
    "nan": (lambda chat: chat.reward(float("nan")), "ValueError: chat.reward(x) is nan"),
    "image": (
        lambda chat: [chat.user({"type": "image", "image": b"broken"}), chat.answer()],
        "BadRow: ",
    ),
    "none": (lambda chat: "return", "TypeError: the reward is None"),
    "memory": (lambda chat: eats_memory(), "MemoryError"),
    "error": (lambda chat: raises("x" * 50_000_000), "ValueError: xxx"),
    "print": (lambda chat: os.write(FULL_PIPE[1], b"x" * 2**30), "no result after 1 s"),
}
FULL_PIPE = os.pipe()  # as a terminal or a pipe whose reader stands still


def raises(text):
    raise ValueError(text)


def eats_memory():
    """As under a limit of the user's own; without one, see the test of the kernel's choice."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))
    return bytearray(2**30)


@pytest.mark.parametrize("kind", FAULTS)
def test_episode_that_fails_is_named_costs_no_other_and_leaves_no_process(play, kind, logged):
    fault, error = FAULTS[kind]
    named = logged()

    def episode(row, chat):
        chat.answer()
        if row["n"] == 1:
            fault(chat)
            return None
        chat.user("next")
        return float(len(chat.answer().text))

    begin = time.monotonic()
    _, rewards, _, _ = play(episode, counts, samples=2, timeout=1.0 if "1 s" in error else 20.0)
    assert time.monotonic() - begin < 30.0  # on a busy machine; on an idle one 1.5
    assert [reward.value for reward in rewards] == [6.0, 6.0, None, None, 6.0, 6.0]
    assert all(error in rewards[i].error for i in (2, 3)), rewards[2]
    assert all(
        f"reward failed: rows.jsonl:2 (source rows), answer 'call 1': {error}"[:70] in text
        for text in named
    )


def test_episode_printing_a_gigabyte_costs_no_other(play):
    """The controller's output is read by somebody: all of it arrives."""
    reader, writer = os.pipe()
    size = 2**30

    def read():
        left = size
        while left:
            left -= len(os.read(reader, 2**20))

    thread = threading.Thread(target=read)
    thread.start()

    def episode(row, chat):
        for _ in range(size // 2**20 if row["n"] == 1 else 0):
            os.write(writer, b"x" * 2**20)
        return float(len(chat.answer().text))

    _, rewards, _, _ = play(episode, counts)
    assert [reward.value for reward in rewards] == [6.0] * 3
    thread.join()
    os.close(reader)
    os.close(writer)


def test_episode_process_is_the_first_that_the_kernel_ends_without_memory(play):
    def episode(row, chat):
        chat.answer()
        tool = subprocess.run(["cat", "/proc/self/oom_score_adj"], capture_output=True, text=True)
        return float(tool.stdout)

    _, rewards, _, _ = play(episode, counts)
    assert [reward.value for reward in rewards] == [1000.0] * 3
    assert int(Path("/proc/self/oom_score_adj").read_text()) < 1000


def test_episode_huge_text_does_not_fit_and_one_that_never_answers_is_not_trained(play):
    def episode(row, chat):
        if row["n"] == 0:
            return 1.0
        chat.answer()
        chat.user("word " * (100_000 if row["n"] == 1 else 1))
        chat.answer()
        return 1.0

    samples, rewards, batch, _ = play(episode, counts)
    assert [len(sample.turns) for sample in samples] == [0, 1, 2]
    assert [reward.value for reward in rewards] == [1.0, 0.0, 1.0]
    assert batch.num_sequences == 2


def test_episode_processes_and_threads_that_it_leaves_end_with_it(play, tmp_path):
    def episode(row, chat):
        chat.answer()
        sleeper = subprocess.Popen(["setsid", "sleep", "600"])
        (tmp_path / f"{row['n']}.pid").write_text(str(sleeper.pid))
        os.chdir("/")
        os.fork()  # both return
        return float(Path.cwd() == Path("/"))

    _, rewards, _, _ = play(episode, counts, workers=1)
    assert [reward.value for reward in rewards] == [1.0, 1.0, 1.0]
    for file in tmp_path.glob("*.pid"):
        wait_until(lambda file=file: is_gone(int(file.read_text())))


def test_episode_too_many_failures_end_the_run_with_the_row(play):
    def episode(row, chat):
        chat.answer()
        raise OSError("no simulator: " + "<html>" * 100_000)

    with pytest.raises(RewardFailed, match=r"rows.jsonl:\d .*OSError: no simulator") as failed:
        play(episode, counts, max_errors=0.0)
    assert len(str(failed.value)) < 30_000


KILLED = """
import os, sys, time
sys.path[:0] = {path!r}
from test_episodes import WORDS, Policy, counts, kit_of, ChatSettings, Episodes, RewardSettings, prompt_loader, Sampling
from pathlib import Path

def episode(row, chat):
    chat.answer()
    if os.fork() == 0:
        os.setsid()
    (Path({folder!r}) / f"{{os.getpid()}}.pid").touch()
    time.sleep(600)

kit = kit_of(Path({folder!r}), [{{"prompt": "Q?"}}], WORDS)
chat = ChatSettings(kit.row_encoder, 16, 250, 8, kit.eos_token_ids)
episodes = Episodes(episode, WORDS, RewardSettings(workers=4), 0, chat)
(prompts,) = prompt_loader(kit, prompts=1, shuffle=False)
episodes.play(prompts, Policy(counts), Sampling(16, samples=3))
"""


def test_episode_controller_killed_leaves_no_process(tmp_path):
    path = [
        str(Path(__file__).parent),
        str(Path(__file__).parents[1]),
        str(Path(__file__).parents[2]),
    ]
    controller = subprocess.Popen(
        [sys.executable, "-c", KILLED.format(path=path, folder=str(tmp_path))]
    )
    wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 6)
    started = descendants(controller.pid)
    assert len(started) >= 7
    controller.kill()
    controller.wait()
    begin = time.monotonic()
    wait_until(lambda: all(map(is_gone, started)), seconds=10)
    print(
        f"controller killed: {len(started)} processes gone after {time.monotonic() - begin:.2f} s"
    )


def test_chat_url_program_that_never_calls_is_rewarded_and_not_trained(play):
    def episode(row, chat):
        agent = [
            sys.executable,
            "-c",
            "import os; print(os.environ['OPENAI_BASE_URL'][:4] == 'http')",
        ]
        if row["n"] != 1:
            post(chat.url, messages=[{"role": "user", "content": row["prompt"]}])
        env = {**os.environ, "OPENAI_BASE_URL": chat.url}
        return float(subprocess.check_output(agent, env=env, text=True) == "True\n")

    samples, rewards, batch, _ = play(episode, counts)
    assert [reward.value for reward in rewards] == [1.0] * 3
    assert [len(sample.turns) for sample in samples] == [1, 0, 1]
    assert batch.num_sequences == 2


def test_chat_url_two_calls_at_once_are_two_conversations_and_both_are_trained(play):
    def episode(row, chat):
        question = [{"role": "user", "content": row["prompt"]}]
        url = chat.url
        with ThreadPoolExecutor(2) as pool:
            replies = list(pool.map(lambda _: post(url, messages=question), range(2)))
        texts = [json.loads(reply)["choices"][0]["message"]["content"] for reply in replies]
        return float(texts == ["call 1"] * 2)

    samples, rewards, batch, policy = play(episode, counts)
    assert [reward.value for reward in rewards] == [1.0] * 3, rewards
    assert [[len(one.turns) for one in sample.sequences()] for sample in samples] == [[1, 1]] * 3
    assert sorted(written(batch)) == sorted(policy.written)
    assert len(set(policy.keys)) == 6  # the second one is drawn with noise of its own


@pytest.mark.parametrize("ends", ["returns", "raises"])
def test_chat_url_program_that_is_given_up_while_it_asks_leaves_a_whole_episode(play, ends):
    """The answer is on its way to a program that the episode no longer waits for."""

    def episode(row, chat):
        chat.answer()
        chat.user("on")
        asked = threading.Event()
        send = chat._shared.send

        def slow(ask):
            asked.set()
            return send(ask)

        chat._shared.send = slow
        if row["n"] == 1:
            url = chat.url
            messages = [{"role": "user", "content": "Go"}]
            threading.Thread(target=post, args=(url,), kwargs={"messages": messages}).start()
            asked.wait()
            if ends == "raises":
                raise TimeoutError("the program")
            return 5.0
        return float(len(chat.answer().text))

    samples, rewards, batch, _ = play(episode, counts)
    assert [reward.value for reward in rewards] == [6.0, 5.0 if ends == "returns" else None, 6.0]
    for sample in samples:
        for one in sample.sequences():
            assert len(one.turns) == len(one.turn_rewards)
    assert batch.num_sequences == 4

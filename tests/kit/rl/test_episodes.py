"""Episodes of several turns: their tokens and rewards, faults of user code, and programs that know only an address."""

from __future__ import annotations

import json
import os
import threading
import urllib.error
import urllib.request
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import user_error, wait_until
from templates.tiny import tokenizer
from test_prompts import kit_of
from tiny_vlm import model_config, qwen3_vl, saved_model, with_images

from mvp_engine.data.batch import IGNORE
from mvp_engine.kit.data.encode import tokenization
from mvp_engine.kit.rl.chat import ChatSettings, ContextFull
from mvp_engine.kit.rl.episodes import Episodes
from mvp_engine.kit.rl.policy import advantage_fields, token_rewards
from mvp_engine.kit.rl.prompts import prompt_loader
from mvp_engine.kit.rl.rollout import (
    PackedRollout,
    Sample,
    Sampling,
    measure_gap,
    rollout_batch,
)
from mvp_engine.kit.rl.settings import ALGORITHMS, RewardSettings
from mvp_engine.process.watchdog import descendants
from mvp_engine.worker import WorkerGroup, WorkerSpec

WORDS = tokenizer("qwen3")
STOP = WORDS.convert_tokens_to_ids("<|im_end|>")
ROWS = [{"prompt": f"Q{i}?", "n": i} for i in range(3)]


class Policy:
    """Writes what `say(text so far, index of the sample)` returns, followed by a stop token unless it ends with ~."""

    def __init__(self, say):
        self.say = say
        self.calls: list[list[str]] = []
        self.written: list[list[int]] = []
        self.keys: list[int] = []  # of the noise
        self.submitted: list[Any] = []

    is_batched = True

    def submit(self, prompt, sampling):
        futures: list[Future] = [Future() for _ in range(sampling.samples)]
        self.submitted.append((prompt, futures))
        return futures

    def run(self):
        if self.submitted:
            self.calls.append([])
        for prompt, futures in self.submitted:
            text = WORDS.decode(prompt.batch.input_ids)
            self.calls[-1].append(text)
            self.keys.append(prompt.key)
            for number, future in enumerate(futures):
                future.set_result(self.write(self.say(text, number)))
        self.submitted = []

    def write(self, words):
        tokens = WORDS(words.removesuffix("~"), add_special_tokens=False).input_ids
        is_cut = words.endswith("~")
        tokens += [] if is_cut else [STOP]
        self.written.append(tokens)
        log_probs = [-0.5 - 0.01 * i for i in range(len(tokens))]
        return Sample(0, tokens, log_probs, [3] * len(tokens), "length" if is_cut else "stop")


@pytest.fixture
def play(tmp_path):
    """play(episode, say, samples=1, **settings): samples, rewards, their batch, and the policy."""
    opened = []

    def run(
        episode,
        say,
        samples=1,
        rows=ROWS,
        words=WORDS,
        max_turns=8,
        max_tokens=250,
        policy=Policy,
        **settings,
    ):
        kit = kit_of(tmp_path, rows, words)
        chat = ChatSettings(kit.row_encoder, 16, max_tokens, max_turns, kit.eos_token_ids)
        given = {"timeout": 20.0, "max_errors": 1.0, **settings}
        opened.append(Episodes(episode, words, RewardSettings(**given), 0, chat))
        (prompts,) = prompt_loader(kit, prompts=len(rows), shuffle=False)
        policy = policy(say)
        policy.episodes = opened[-1]
        found, rewards = opened[-1].play(prompts, policy, Sampling(16, samples=samples))
        trained = [sample for sample in found if sample.tokens]
        return found, rewards, rollout_batch(prompts, trained) if trained else None, policy

    before = descendants(os.getpid())
    yield run
    for episodes in opened:
        idle = {one.pid for one in episodes._processes._processes}
        zygote = episodes._processes._zygote.pid
        wait_until(lambda: descendants(zygote) == idle)  # noqa: B023 - called here
        episodes.close()
    assert descendants(os.getpid()) <= before


def written(batch):
    """The tokens with a label, sequence by sequence, in runs."""
    runs = []
    for start, end in zip(
        batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True
    ):
        run: list[int] = []
        for label in [*batch.labels[start:end].tolist(), IGNORE]:
            if label != IGNORE:
                run.append(label)
            elif run:
                runs.append(run)
                run = []
    return runs


# ---- Tokens and rewards -------------------------------------------------------------------------------------------


def asks_three_times(row, chat):
    first = chat.answer()
    chat.reward(0.25)
    chat.tool("12 degrees", name="weather")
    chat.answer()
    chat.user("And then?")
    last = chat.answer()
    chat.reward(0.5)
    return {"first": float(first.text == "call 1"), "last": float(len(last.text))}


def counts(text, sample):
    return f"call {text.count('assistant')}"


def test_episode_turns_are_one_sequence_with_labels_on_what_was_sampled(play):
    _, rewards, batch, policy = play(asks_three_times, counts, samples=2)
    assert [reward.value for reward in rewards] == [0.75 + 1 + 6] * 6
    assert rewards[0].parts == {"first": 1.0, "last": 6.0, "turns": 0.75}
    text = WORDS.decode(batch.select([0]).input_ids)
    assert text == (
        "<|im_start|>user\nQ0?<|im_end|>\n<|im_start|>assistant\ncall 1<|im_end|>\n<|im_start|>user\n<tool_response>\n"
        "12 degrees\n</tool_response><|im_end|>\n<|im_start|>assistant\ncall 2<|im_end|>\n<|im_start|>user\nAnd then?"
        "<|im_end|>\n<|im_start|>assistant\ncall 3<|im_end|>"
    )
    assert sorted(written(batch)) == sorted(policy.written)  # what was sampled is what is trained
    assert len(policy.calls) == 3  # rounds
    assert len(set(policy.keys)) == 3 + 6 + 6  # no turn and no sample has the noise of another
    assert policy.calls[1] == [text for text in policy.calls[1] if text.count("assistant") == 2]
    sampled_T = batch.labels != IGNORE
    log_probs_T = batch.token_fields["sampler_log_probs"]
    assert bool((log_probs_T[sampled_T] < 0).all())
    assert bool((log_probs_T[~sampled_T] == 0).all())
    assert torch.equal(batch.token_fields["turn"] > 0, sampled_T)


def test_episode_rewards_of_turns_are_at_their_last_tokens(play):
    samples, rewards, batch, _ = play(asks_three_times, counts, rows=ROWS[:1])
    values = torch.tensor([rewards[0].value], dtype=torch.float64)
    rewards_T = token_rewards(values, batch)
    ends = [end - 1 + batch.num_tokens - len(samples[0].tokens) - 1 for _, end in samples[0].turns]
    expected = torch.zeros(batch.num_tokens)
    expected[ends] = torch.tensor([0.25, 0.0, 7.5])
    assert torch.equal(rewards_T, expected)


def test_episode_answer_that_was_cut_gets_the_stop_token_without_label(play):
    _, _, batch, policy = play(asks_three_times, lambda text, sample: "so~", rows=ROWS[:1])
    assert written(batch) == policy.written
    assert WORDS.decode(batch.input_ids).count("so<|im_end|>\n") == 2


def test_episode_full_context_or_no_turn_left_ends_it_with_the_rewards_so_far(play):
    def endless(row, chat):
        while True:
            chat.answer()
            chat.reward(1.0)
            chat.user("again " * (1 if row["n"] else 30))

    samples, rewards, _, _ = play(endless, counts, max_turns=3)
    assert [len(sample.turns) for sample in samples] == [2, 3, 3]
    assert [reward.value for reward in rewards] == [2.0, 3.0, 3.0]
    assert {sample.reason for sample in samples} == {"length"}
    assert all(
        sample.turns[-1][1] == len(sample.tokens) for sample in samples
    )  # nothing that was never read

    def caught(row, chat):
        try:
            endless(row, chat)
        except ContextFull as full:
            return float("max_turns" in str(full))

    assert [reward.value for reward in play(caught, counts, max_turns=3)[1]] == [2.0, 4.0, 4.0]


def test_episode_another_conversation_is_a_sequence_of_the_same_episode(play):
    def asks_a_helper(row, chat):
        chat.answer()
        chat.reward(0.5)
        helper = chat.new(
            [{"role": "system", "content": "Help."}, {"role": "user", "content": "How?"}]
        )
        advice = helper.answer().text
        helper.user("Sure?")
        helper.answer()
        chat.user(advice)
        return float(len(chat.answer().text)) * (1 + row["n"])

    _, rewards, batch, policy = play(asks_a_helper, counts, samples=2)
    assert sorted(written(batch)) == sorted(policy.written)
    assert batch.num_sequences == 12
    assert batch.sequence_fields["episode"].tolist() == [i for i in range(6) for _ in range(2)]
    assert "system\nHelp.<|im_end|>\n<|im_start|>user\nHow?" in WORDS.decode(
        batch.select([1]).input_ids
    )
    values = torch.tensor(
        [reward.value for reward in rewards for _ in range(2)], dtype=torch.float64
    )
    values[0] += 1.0  # as if the first of its two samples were better
    values[1] += 1.0
    fields = advantage_fields(ALGORITHMS["rloo"], batch, values, batch.sequence_fields["group"])
    by_sequence = [float(one.token_fields["a"].max()) for one in parts(batch, fields["advantages"])]
    assert by_sequence[:2] == [
        1.0,
        1.0,
    ]  # against the other sample, not against its own other sequence
    ends = [
        one.token_fields["a"].double().sum().item()
        for one in parts(batch, token_rewards(values, batch))
    ]
    assert ends[1] == pytest.approx(float(values[1]) - 0.5)  # after the rewards of the first


def parts(batch, values_T):
    batch.token_fields["a"] = values_T
    return [batch.select([i]) for i in range(batch.num_sequences)]


def test_episode_tool_calls_are_parsed_and_errors_are_texts_for_the_policy(play):
    def double(n: int) -> int:
        return 2 * n

    def episode(row, chat):
        answer = chat.answer()
        assert [(call.name, call.arguments) for call in answer.calls] == [
            ("double", {"n": 4}),
            ("halve", {}),
        ]
        assert answer.content == "so"
        return float(chat.call(answer, [double]).text == "done")

    def say(text, sample):
        if "tool_response" not in text:
            calls = ('{"name": "double", "arguments": {"n": 4}}', '{"name": "halve"}', '{"na}')
            return "so " + "".join(f"<tool_call>{call}</tool_call>" for call in calls)
        assert "<tool_response>\n8\n</tool_response>" in text
        assert "error: there is no tool 'halve'; tools are double" in text
        return "done"

    _, rewards, _, _ = play(episode, say, rows=ROWS[:1])
    assert [reward.value for reward in rewards] == [1.0], rewards


def test_episode_same_answers_for_any_number_of_processes(play):
    def episode(row, chat):
        for _ in range(1 + row["n"]):
            chat.answer()
            chat.user(f"{chat.random.random()}")
        return chat.random.random() + len(chat.answer().tokens)

    found = {}
    for workers in (1, 2, 16):
        samples, rewards, batch, _ = play(episode, counts, samples=3, workers=workers)
        found[workers] = ([vars(sample) for sample in samples], rewards, batch.input_ids.tolist())
    assert found[1] == found[2] == found[16]


class Speller(Policy):
    """Writes "hello" letter by letter, which a tokenizer encodes as one token."""

    letters = (*(WORDS.convert_tokens_to_ids(letter) for letter in "hello"), STOP)

    def write(self, words):
        return Sample(
            0, list(self.letters), [-0.5] * len(self.letters), [0] * len(self.letters), "stop"
        )


def test_episode_answers_are_trained_as_sampled_and_never_tokenized(play, tmp_path, monkeypatch):
    heard = tmp_path / "encoded.txt"

    def noted(encode):
        def encoder(tokenizer, text, *args, **options):
            with open(heard, "a") as file:  # in the processes of episodes, too
                file.write(f"{text!r}\n")
            return encode(tokenizer, text, *args, **options)

        return encoder

    assert WORDS("hello", add_special_tokens=False).input_ids != list(Speller.letters[:-1])
    for name in ("__call__", "encode"):
        monkeypatch.setattr(type(WORDS), name, noted(getattr(type(WORDS), name)))
    monkeypatch.setattr(tokenization, "fast_encode", noted(tokenization.fast_encode))

    def episode(row, chat):
        answer = chat.answer()
        chat.tool("12 degrees")
        other = chat.new([{"role": "user", "content": "And you?"}])
        other.answer()
        post(chat.url, messages=[{"role": "user", "content": "Own"}])
        return float(chat.answer().tokens == answer.tokens)

    _, rewards, batch, _ = play(episode, counts, samples=2, policy=Speller)
    assert [reward.value for reward in rewards] == [1.0] * 6
    assert written(batch) == [list(Speller.letters)] * 24
    assert "12 degrees" in heard.read_text()
    assert "hello" not in heard.read_text()


@pytest.mark.parametrize(
    "reads, has_read",
    [
        (["reason"], False),
        (["text", "calls"], False),  # it has no calls
        (["reason", "text"], True),
        (["tokens"], True),
        ([], True),
    ],
)
def test_episode_that_does_not_read_its_last_answer_is_known(play, reads, has_read):
    def episode(row, chat):
        for name in reads:
            getattr(chat.answer(), name)
            chat.user("on")
        return 1.0

    _, rewards, _, policy = play(episode, counts)
    assert [reward.value for reward in rewards] == [1.0] * 3
    assert policy.episodes.has_read_last == has_read


WRONG: dict[str, Any] = {
    "chat.answer() twice": lambda chat: [chat.answer(), chat.answer()],
    "chat.reward(x) credits the last answer": lambda chat: chat.reward(1),
    "call chat.answer() before chat.user": lambda chat: [chat.user("first"), chat.answer()],
    "chat.tool() needs a text or an image": lambda chat: [chat.answer(), chat.tool()],
    "notes.txt is no image, video or audio file": lambda chat: [
        chat.answer(),
        chat.user(Path("notes.txt")),
    ],
    "no placeholder for image": lambda chat: [
        chat.answer(),
        chat.user(np.zeros((4, 4, 3), np.uint8)),
        chat.answer(),
    ],
}


def test_episode_calls_that_make_no_sense_say_what_to_do(play):
    names = list(WRONG)
    names.append("")  # not all may fail
    WRONG[""] = lambda chat: [chat.answer()]
    rows = [{"prompt": "Q?", "n": n} for n in range(len(names))]
    _, rewards, _, _ = play(
        lambda row, chat: WRONG[names[row["n"]]](chat) and 1.0, counts, rows=rows
    )
    for name, reward in zip(names[:-1], rewards[:-1], strict=True):
        assert reward.error is not None
        assert name in reward.error, name


def test_episode_on_a_template_without_such_messages_is_refused_at_start(tmp_path):
    kit = kit_of(tmp_path, ROWS, tokenizer("gemma"))
    settings = ChatSettings(kit.row_encoder, 16, 250, 8, kit.eos_token_ids)
    assert settings.verdicts()["user"] == ""
    settings.check(has_tools=False)
    with user_error(
        "tools: the chat template .*Use a model whose template writes results of tools"
    ):
        settings.check(has_tools=True)


# ---- Programs with a loop of their own ------------------------------------------------------------------------------


def post(url, **request):
    asked = urllib.request.Request(
        f"{url}/chat/completions",
        json.dumps(request).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=20) as found:
        return found.read().decode()


def by_url(row, chat):
    """The same conversation as `asks_three_times`, by a client that keeps its own history."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": row["prompt"]}]

    def ask():
        message = json.loads(post(chat.url, model="policy", messages=messages))["choices"][0][
            "message"
        ]
        messages.append(message)
        return message["content"]

    first = ask()
    messages.append({"role": "tool", "content": "12 degrees", "tool_call_id": "x"})
    ask()
    messages.append({"role": "user", "content": "And then?"})
    return {"first": float(first == "call 1"), "last": float(len(ask()))}


def plain(row, chat):
    first = chat.answer()
    chat.tool("12 degrees")
    chat.answer()
    chat.user("And then?")
    return {"first": float(first.text == "call 1"), "last": float(len(chat.answer().text))}


def test_chat_url_gives_a_program_the_same_episode_as_a_loop(play):
    served = play(by_url, counts, samples=2)
    looped = play(plain, counts, samples=2)
    assert [vars(sample) for sample in served[0]] == [vars(sample) for sample in looped[0]]
    assert served[1] == looped[1]
    assert torch.equal(served[2].input_ids, looped[2].input_ids)


def test_chat_url_request_that_does_not_extend_the_history_begins_another_sequence(play):
    def episode(row, chat):
        own = [{"role": "system", "content": "Act."}, {"role": "user", "content": "Go"}]
        first = json.loads(post(chat.url, messages=own))["choices"][0]["message"]
        post(chat.url, messages=[*own, first, {"role": "user", "content": "on"}])
        summary = [*own, {"role": "user", "content": f"So far: {first['content']}"}]
        post(chat.url, messages=summary)
        return 1.0

    samples, _, batch, policy = play(episode, counts, rows=ROWS[:1])
    assert [len(one.turns) for one in samples[0].sequences()] == [2, 1]
    assert sorted(written(batch)) == sorted(policy.written)
    assert "Q0?" not in WORDS.decode(batch.input_ids)


def test_chat_url_calls_of_tools_streams_and_refusals(play):
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}

    def episode(row, chat):
        base = {"messages": [{"role": "user", "content": "Go"}], "tools": [tool]}
        reply = json.loads(post(chat.url, **base))["choices"][0]
        assert reply["finish_reason"] == "tool_calls"
        (call,) = reply["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"x": 1}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "ok"}
        lines = post(
            chat.url,
            messages=[*base["messages"], reply["message"], result],
            tools=[tool],
            stream=True,
        )
        chunks = [
            json.loads(line[6:]) for line in lines.split("\n\n") if line.startswith("data: {")
        ]
        assert (
            "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == "done"
        )
        assert lines.endswith("data: [DONE]\n\n")
        for wrong in ({"messages": []}, {**base, "n": 2}):
            with pytest.raises(urllib.error.HTTPError, match="400"):
                post(chat.url, **wrong)
        return 1.0

    def say(text, sample):
        return (
            "done"
            if "tool_response" in text
            else '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
        )

    samples, rewards, _, _ = play(episode, say, rows=ROWS[:1])
    assert rewards[0].error is None
    assert len(samples[0].turns) == 2
    assert not samples[0].others


class Server(Policy):
    """A policy that answers each request by itself."""

    is_batched = False

    def submit(self, prompt, sampling):
        futures: list[Future] = [Future() for _ in range(sampling.samples)]
        text = WORDS.decode(prompt.batch.input_ids)

        def answer():
            for number, future in enumerate(futures):
                future.set_result(self.write(self.say(text, number)))

        threading.Thread(target=answer).start()
        return futures

    def run(self):
        """Nothing to do."""


def waits_for_the_others(row, chat):
    chat.answer()
    folder = Path(row["folder"])
    if row["first"]:
        wait_until(lambda: len(list(folder.iterdir())) == 2)
    else:
        for _ in range(3):
            chat.user("More?")
            chat.answer()
        (folder / str(os.getpid())).touch()
    return 1.0


def test_episodes_of_a_server_do_not_wait_for_one_whose_tool_takes_long(play, tmp_path):
    folder = tmp_path / "ended"
    folder.mkdir()
    rows = [{"prompt": f"Q{n}?", "first": n == 0, "folder": str(folder)} for n in range(3)]
    samples, rewards, _, _ = play(waits_for_the_others, counts, rows=rows, policy=Server)
    assert [reward.value for reward in rewards] == [1.0, 1.0, 1.0]
    assert [len(sample.turns) for sample in samples] == [1, 4, 4]


# ---- With a model -------------------------------------------------------------------------------------------------


def looks_twice(row, chat):
    chat.answer()
    rng = np.random.default_rng(len(row["messages"][0]["content"]))
    chat.user("Closer:", rng.integers(0, 255, (24, 16, 3), dtype=np.uint8))
    chat.answer()
    chat.user("Once more:", rng.integers(0, 255, (16, 16, 3), dtype=np.uint8), "?")
    return float(len(chat.answer().tokens))


def test_episode_with_images_between_turns_has_no_gap_to_the_trainer(tmp_path):
    config = model_config()
    kit = kit_of(tmp_path, with_images(tmp_path, 4), qwen3_vl(), config)
    chat = ChatSettings(kit.row_encoder, 6, 250, 8, kit.eos_token_ids)
    episodes = Episodes(
        looks_twice, kit.row_encoder.media.tokenizer, RewardSettings(max_errors=0.0), 0, chat
    )
    (prompts,) = prompt_loader(kit, prompts=4, shuffle=False)
    spec = WorkerSpec.of(model={"path": str(saved_model(tmp_path))}, device="cpu", cpu_threads=1)
    with WorkerGroup.start(spec) as group:
        rollout = PackedRollout(group, budget=256)
        sampling = Sampling(max_new_tokens=6, samples=2, seed=1, stop=tuple(kit.eos_token_ids))

        try:
            samples, _ = episodes.play(prompts, rollout, sampling)
            again, _ = episodes.play(prompts, rollout, sampling)
            assert not episodes._processes._exit_codes  # decoding leaves no process behind
        finally:
            episodes.close()
        batch = rollout_batch(prompts, samples)
        trainer_T = group.infer(batch, ["log_probs"], budget=256)["log_probs"]
    assert [sample.tokens for sample in again] == [sample.tokens for sample in samples]
    assert [sample.log_probs for sample in again] == [sample.log_probs for sample in samples]
    assert [len(sample.turns) for sample in samples] == [3] * 8
    gap = measure_gap(batch, trainer_T, prompts, samples)
    assert set(gap.by_modality) == {"image"}
    assert set(gap.by_turn) == {"turn1", "turn2+"}
    assert gap.by_modality["image"].largest < 2e-5
    assert gap.by_turn["turn2+"].tokens > gap.by_turn["turn1"].tokens
    state = [Sample.from_state(sample.state_dict()) for sample in samples]
    assert torch.equal(rollout_batch(prompts, state).input_ids, batch.input_ids)

"""A whole RL training whose rollouts come from servers: weights are sent before each step, faults do not end it."""

from __future__ import annotations

import copy
import json
import threading
import time
from typing import Any

import pytest
import torch
import yaml
from conftest import read_metrics
from fake_servers import FakeVLLM

from mvp_engine.errors import EXIT_USER_ERROR
from mvp_engine.kit.tiny_processors import train_tokenizer

ENGINE = """
from mvp_engine.kit.rl import RLEngine

class ParityEngine(RLEngine):
    def reward(self, row, answer):
        return float(sum(token % 2 for token in answer.tokens))
"""
TURNS = """
from mvp_engine.kit.rl import RLEngine

class TurnsEngine(RLEngine):
    def episode(self, row, chat):
        total = 0.0
        for turn in range(3):
            total += sum(token % 2 for token in chat.answer().tokens)
            if turn < 2:
                chat.user("again")
        return total
"""
CONFIG: dict[str, Any] = {
    "engine": "engine.py:ParityEngine",
    "run_name": "servers",
    "cpu_threads": 1,
    "model": {"type": "language_model"},
    "data": {"pack_tokens": 512, "num_workers": 0},
    "rl": {"algorithm": "grpo", "prompts_per_step": 3, "num_generations": 4},
    "generation": {"backend": "vllm", "max_new_tokens": 6, "max_gap": 1e-4},
    # Processes that are forked would keep the sockets of the servers open.
    "reward": {"workers": 0},
    "train": {"max_steps": 3},
    "eval": {"steps": None},
    "log": {"interval": 1},
    "optim": {"lr": 0.01, "schedule": "constant"},
}


@pytest.fixture
def fakes(tmp_path):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
    }
    sizes |= {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "tie_word_embeddings": True,
    }
    base = tmp_path / "base"
    Qwen3ForCausalLM(Qwen3Config(**sizes)).save_pretrained(base)
    train_tokenizer(["one two three"], 300).save_pretrained(base)
    started = [FakeVLLM(base) for _ in range(2)]
    yield started
    for fake in started:
        fake.kill()


def config(folder, urls):
    """The config of a training in `folder`."""
    rows = [json.dumps({"prompt": f"number {index}"}) + "\n" for index in range(20)]
    (folder / "rows.jsonl").write_text("".join(rows))
    (folder / "engine.py").write_text(ENGINE)
    own = copy.deepcopy(CONFIG)
    own["model"]["path"] = own["processor"] = str(folder / "base")
    own["data"]["sources"] = {"rows": {"path": str(folder / "rows.jsonl")}}
    own["generation"]["urls"] = urls
    (folder / "config.yaml").write_text(yaml.safe_dump(own))
    return folder / "config.yaml"


def versions(fake):
    """The versions of the weights that a server got."""
    bodies = [body for path, body in fake.requests if path == "/finish_weight_update"]
    return [int(body["weight_version"].split("-")[-1]) for body in bodies]


@pytest.mark.slow
def test_training_with_servers_has_no_gap_and_survives_the_death_of_one(train, tmp_path, fakes):
    fakes[1].dies_at = "/start_weight_update"
    assert train(config=config(tmp_path, [fake.url for fake in fakes])) == 0
    assert versions(fakes[0]) == [0, 1, 2]
    assert versions(fakes[1]) == []
    records = read_metrics(tmp_path)
    assert [record["step"] for record in records] == [1, 2, 3]
    assert records[0]["gap/text"] < 1e-5
    assert all(record["gap"] < 1e-5 for record in records)
    # So the weights of the versions differ.
    assert all(record["grad_norm"] > 0 for record in records)


@pytest.mark.slow
def test_episodes_whose_only_server_dies_in_turn_2_continue_when_it_is_back(train, tmp_path, fakes):
    fakes[1].kill()
    fake = fakes[0]
    path = config(tmp_path, [fake.url])
    (tmp_path / "engine.py").write_text(TURNS.replace("TurnsEngine", "ParityEngine"))
    generate = fake.generate
    deaths: list[threading.Thread] = []

    asked: list[list[int]] = []

    def dies_once(body):
        ids = body["token_ids"]
        is_second_turn = any(ids[: len(one)] == one and ids != one for one in asked)
        asked.append(ids)
        if not deaths and is_second_turn:
            deaths.append(threading.Thread(target=fake.restart))
            deaths[0].start()
        return generate(body)

    fake.generate = dies_once
    assert train("train.max_steps=1", "reward.workers=4", config=path) == 0
    (death,) = deaths
    death.join()
    assert versions(fake) == [0, 0]  # its weights were sent again
    (record,) = read_metrics(tmp_path)
    assert record["turns"] == 3
    assert record["gap/turn1"] < 1e-5
    assert record["gap/turn2+"] < 1e-5


@pytest.mark.slow
def test_training_without_its_server_ends_with_url_and_fix(
    train,
    tmp_path,
    fakes,
    capfd,
):
    fakes[0].kill()
    assert train("parallel.timeout=0.1", config=config(tmp_path, [fakes[0].url])) == EXIT_USER_ERROR
    err = capfd.readouterr().err
    assert f"no server for 0.1 s:\n  {fakes[0].url}: " in err
    assert "Start the servers (docs/rl.md" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_training_that_fails_while_a_server_generates_for_the_next_step_ends_at_once(
    train, tmp_path, fakes, capfd
):
    fakes[1].kill()
    (fake, _), may_end = fakes, threading.Event()
    path = config(tmp_path, [fake.url])
    step = """
    def train_step(self, ctx, experience):
        from pathlib import Path
        while not Path(__file__).with_name("begun").exists():
            pass
        raise UserError("the step failed")
"""
    error = "from mvp_engine.errors import UserError\n"
    (tmp_path / "engine.py").write_text(error + ENGINE + step)
    generate = fake.generate

    def waits(body):
        if len([1 for at, _ in fake.requests if at == "/inference/v1/generate"]) > 12:
            (tmp_path / "begun").touch()
            may_end.wait(60)
        return generate(body)

    fake.generate = waits
    start = time.monotonic()
    assert train("rl.async_steps=1", config=path) == EXIT_USER_ERROR
    assert time.monotonic() - start < 50
    may_end.set()
    assert "the step failed" in capfd.readouterr().err

"""A whole RL training whose rollouts come from servers: weights are sent before each step, faults do not end it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, read_metrics
from fake_vllm import FakeVLLM

from mvp_engine.errors import EXIT_USER_ERROR

CONFIG = ROOT / "recipes" / "reverse_rl" / "configs" / "grpo.yaml"
SIZES = [
    "made.rows=30",
    "rl.prompts=3",
    "rl.group=2",
    "rl.updates=1",
    "loop.total_steps=3",
    "loop.eval_interval=null",
    "log.interval=1",
]


@pytest.fixture
def fakes(tmp_path: Path) -> Iterator[list[FakeVLLM]]:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True}
    Qwen3ForCausalLM(Qwen3Config(**sizes)).save_pretrained(tmp_path / "reverse_base")
    started = [FakeVLLM(tmp_path / "reverse_base") for _ in range(2)]
    yield started
    for fake in started:
        fake.kill()


def versions(fake: FakeVLLM) -> list[int]:
    """The versions of the weights that a server got."""
    bodies = [body for path, body in fake.requests if path == "/finish_weight_update"]
    return [int(body["weight_version"].split("-")[-1]) for body in bodies]


@pytest.mark.slow
def test_training_with_servers_has_no_gap_and_survives_the_death_of_one(
    train: Callable[..., int], tmp_path: Path, fakes: list[FakeVLLM]
) -> None:
    urls = ",".join(fake.url for fake in fakes)
    fakes[1].dies_at = "/start_weight_update"
    code = train(*SIZES, "rollout.backend=vllm", f"rollout.urls=[{urls}]", "rollout.max_gap=1e-4", config=CONFIG)
    assert code == 0
    assert versions(fakes[0]) == [0, 1, 2]
    assert versions(fakes[1]) == []
    records = read_metrics(next(tmp_path.glob("reverse_grpo-*")))
    assert [record["step"] for record in records][-1] == 3
    assert all(record["gap/text"] < 1e-5 for record in records)


@pytest.mark.slow
def test_training_without_its_server_ends_with_url_and_fix(
    train: Callable[..., int], fakes: list[FakeVLLM], capfd: pytest.CaptureFixture[str]
) -> None:
    fakes[0].kill()
    options = ["rollout.backend=vllm", f"rollout.urls=[{fakes[0].url}]", "rollout.server_wait=0.1"]
    assert train(*SIZES, *options, config=CONFIG) == EXIT_USER_ERROR
    err = capfd.readouterr().err
    assert f"no server for 0.1 s:\n  {fakes[0].url}: " in err
    assert "Start the servers again" in err
    assert "Traceback" not in err

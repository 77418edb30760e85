"""`mvp tune`: the search over setups, trials of a real training, and the config that it writes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers as hf
import yaml
from conftest import ROOT
from templates.tiny import tokenizer

from mvp_engine.cli import main
from mvp_engine.config import compose
from mvp_engine.tools.tune import command, rank
from mvp_engine.tools.tune.page import words_of
from mvp_engine.tools.tune.search import OUT_OF_MEMORY, Outcome, best, search
from mvp_engine.tools.tune.setups import Setup, Space

SPACE = Space("mllm", 65536, 4096, 4096, 1, ("vision", "llm"), False, ("auto", None))
CONFIG = """
engine: engine.py
project: {name: tiny, dir: outputs}
model: {type: language_model, path: model, activation_checkpointing: none, compile: null}
mllm:
  micro_batch_tokens: 256
  sources:
    rows: {path: rows.jsonl}
data: {micro_batch_size: 1, global_batch_size: 2, num_workers: 0}
optim: {lr: 0.01}
loop: {epochs: 1, precision: fp32, eval_interval: 2}
log: {interval: 1}
cpu_threads: 1
"""
ENGINE = """
import torch
from mvp_engine.kit import MLLMEngine

class TinyEngine(MLLMEngine):
    def forward_step(self, ctx, micro_batch):
        if self.config.mllm.pack_tokens > 256:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return super().forward_step(ctx, micro_batch)
"""


def searched(measure: Callable[[Setup], float | None], start: Setup, space: Space = SPACE) -> list[Outcome]:
    """All outcomes of a search; `measure` returns tokens/s, or None for out of memory."""

    def run(setup: Setup) -> Outcome:
        speed = measure(setup)
        return Outcome(setup, problem=OUT_OF_MEMORY) if speed is None else Outcome(setup, speed, 1.0, setup.tokens)

    first = run(start)
    return [first, *search(space, first, run, lambda: True)]


def test_search_moves_to_the_fastest_setup_and_skips_what_cannot_fit() -> None:
    memory = {"none": 4, "selective": 2, "attention": 1.5, "full": 1}
    speed = {"none": 1.0, "selective": 0.95, "attention": 0.8, "full": 0.75}

    def measure(setup: Setup) -> float | None:
        need = setup.tokens * (memory[setup.modes[0]] + memory[setup.modes[1]])
        if need > 4.5 * 65536:
            return None
        host = min(1.0, setup.tokens / 32768)  # launches kernels for as long, however few the tokens
        return 1e4 * host * speed[setup.modes[0]] * speed[setup.modes[1]] * (1.0 if setup.compile else 0.6)

    outcomes = searched(measure, Setup(8192, ("full", "full"), "auto"))
    chosen = best(outcomes)
    assert chosen is not None
    assert chosen.setup == Setup(32768, ("none", "none"), "auto")
    assert len({outcome.setup for outcome in outcomes}) == len(outcomes)  # none twice
    failed = [outcome.setup for outcome in outcomes if outcome.is_out_of_memory]
    assert failed
    for i, outcome in enumerate(outcomes):  # nothing is tried that needs more than what ran out of memory before
        earlier = [one.setup for one in outcomes[:i] if one.is_out_of_memory]
        assert not any(outcome.setup.needs_at_least(one) for one in earlier)


def test_search_whose_start_is_out_of_memory_finds_what_fits() -> None:
    def measure(setup: Setup) -> float | None:
        is_large = setup.tokens > 4096 or not {"full", "offload"}.issuperset(setup.modes)
        return None if is_large else 100.0 - 10 * setup.modes.count("offload")

    chosen = best(searched(measure, Setup(65536, ("none", "none"), None)))
    assert chosen is not None
    assert (chosen.setup.tokens, chosen.setup.modes) == (4096, ("full", "full"))
    assert best(searched(lambda setup: None, Setup(65536, ("none", "none"), None))) is None


def test_search_ends_when_time_is_over() -> None:
    first = Outcome(Setup(16384, ("none", "none"), None), 1.0)
    answers = iter([True, False])
    found = list(search(SPACE, first, lambda setup: Outcome(setup, 1.0), lambda: next(answers)))
    assert len(found) == 1


def test_best_of_nearly_equal_setups_needs_least_memory() -> None:
    setup = Setup(16384, ("none", "none"), None)
    outcomes = [Outcome(setup, 995.0, 1.0, 60.0), Outcome(setup, 1000.0, 1.0, 120.0), Outcome(setup, 900.0, 1.0, 30.0)]
    assert best(outcomes) is outcomes[0]


def test_space_sizes_divide_the_global_batch_equally_over_ranks() -> None:
    space = Space("mllm", 3 * 65536, 8192, 8192, 4, ("llm",), False, (None,))
    assert space.sizes == [8192, 12288, 16384, 24576, 49152]
    assert all(space.total % (4 * size) == 0 for size in space.sizes)
    assert SPACE.sizes == [4096, 8192, 16384, 32768, 65536]


def test_space_values_are_those_that_the_config_reads_from_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text(ENGINE)
    file = tmp_path / "train.yaml"
    file.write_text(CONFIG.replace("activation_checkpointing: none", "activation_checkpointing: {llm: selective}"))
    space = Space("mllm", 1024, 512, 128, 1, ("vision", "llm"), True, (None, "inductor"))
    for setup in (Setup(512, ("full", "none"), "inductor"), Setup(256, ("full", "full"), None)):
        values = space.values(setup)
        read: Any = compose(file, words_of(values)).config
        assert (read.mllm.micro_batch_tokens, read.mllm.global_batch_tokens) == (setup.tokens, 1024)
        assert read.mllm.row_tokens == min(512, setup.tokens)
        assert read.data.global_batch_size is None
        assert read.model.compile == setup.compile
        assert read.model.activation_checkpointing == values["model.activation_checkpointing"]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    shape = hf.Qwen3Config(vocab_size=400, hidden_size=32, intermediate_size=48, num_hidden_layers=2, **heads)
    hf.Qwen3ForCausalLM(shape).save_pretrained("model")
    tokenizer("qwen_vl").save_pretrained("model")
    rows = [{"text": " ".join(["yes"] * (i % 24 + 1))} for i in range(100)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("engine.py").write_text(ENGINE)
    Path("train.yaml").write_text(CONFIG)
    return "train.yaml"


def run_here(nproc: int, arguments: list[str], log: Path, limit: float | None) -> int:
    """A trial in this process."""
    with log.open("w") as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        return rank.main(arguments)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "run_process", run_here)
    monkeypatch.setattr(rank, "SECONDS", 0.0)


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_tune_compares_trials_on_equal_batches_and_writes_a_config_that_trains(config: str, capsys: Any) -> None:
    assert main(["tune", config, "--minutes", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["device"] == "CPU"
    assert found["global_batch_tokens"] == 512
    trials = {
        (t["values"]["mllm.micro_batch_tokens"], t["values"]["model.activation_checkpointing"]): t
        for t in found["trials"]
    }
    assert trials[256, "none"]["tokens_per_s"] > 0 < trials[256, "none"]["peak_gib"]
    assert trials[512, "none"]["problem"] == OUT_OF_MEMORY  # a line of the table, not an end
    assert trials[512, "none"]["values"]["mllm.row_tokens"] == 256  # the same rows as before
    assert trials[128, "none"]["tokens_per_s"] > 0  # longer than every row of the data
    assert min(tokens for tokens, _ in trials) == 128  # packs of 64 would leave rows out
    assert not Path("outputs").exists()
    first = found["trials"][0]
    assert found["speedup"] == pytest.approx(found["trials"][found["best"]]["tokens_per_s"] / first["tokens_per_s"])

    assert main(["tune", config, "optim.lr=2e-3", "--minutes", "0.001", "--out", "tuned.yaml"]) == 0
    printed = capsys.readouterr().out
    assert f"or: mvp train {config} optim.lr=2e-3 mllm.micro_batch_tokens=256" in printed
    assert "--minutes 0.003 tries more" in printed  # the first trial always runs
    lines = printed.split("fastest:\n\n")[1].split("\nor: ")[0]
    assert yaml.safe_load(lines)["mllm"] == {"micro_batch_tokens": 256, "global_batch_tokens": 512, "row_tokens": 256}
    assert main(["train", "tuned.yaml", "loop.total_steps=1", "loop.eval_interval=null", "log.backends=[]"]) == 0


@pytest.mark.usefixtures("in_process")
def test_tune_config_that_does_not_train_is_shown_with_its_log(config: str, capsys: Any) -> None:
    assert main(["tune", config, "mllm.sources.rows.path=missing.jsonl"]) == 2
    error = capsys.readouterr().err
    assert "missing.jsonl" in error
    log = Path(next(word for word in error.split() if word.endswith("log.txt:"))[:-1])
    assert "missing.jsonl" in log.read_text()


def test_tune_user_errors_are_explained_before_a_trial_starts(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(command, "run_process", lambda *args: pytest.fail("a trial was started"))
    magic = str(ROOT / "recipes" / "magic_transformer" / "configs" / "train.yaml")
    rl = str(ROOT / "recipes" / "reverse_rl" / "configs" / "grpo.yaml")
    for words, text in [
        ([magic], "it has no pack size"),
        ([rl], "reinforcement learning"),
        ([config, "resume=auto"], "leave resume out"),
        ([config, "--out", "tuned.json"], "*.yaml"),
        ([config, "--out", "nowhere/tuned.yaml"], "no folder"),
        ([config, "--minutes", "0"], "--minutes"),
        ([config, "mllm.micro_batch_token=1"], "micro_batch_tokens"),
    ]:
        assert main(["tune", *words]) == 2
        assert text in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.campaign(only=True)
def test_tune_runs_trials_on_two_ranks_and_a_signal_prints_what_it_has(config: str) -> None:
    words = [sys.executable, "-m", "mvp_engine.cli", "tune", config, "--nproc", "2", "--minutes", "9"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    assert process.stderr is not None
    assert process.stdout is not None
    line = process.stderr.readline()
    assert "trial 1, 1 x 256 tokens" in line
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "on 2 x CPU" in printed
    children = subprocess.run(["pgrep", "-f", "mvp_engine.tools.tune"], capture_output=True, text=True)
    assert not children.stdout

"""`auto`: pack size and activation checkpointing by the memory of the GPU, recorded with the run and kept on resume."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
import yaml
from conftest import ROOT
from ranks import RankPool
from tiny_vlm import chat, model_config, qwen3_vl, with_images, write

from mvp_engine.cli import main
from mvp_engine.config import compose
from mvp_engine.config.schema import CHECKPOINTING_MODES
from mvp_engine.data.batch import PackedBatch
from mvp_engine.engine.state import with_intervals
from mvp_engine.errors import EXIT_USER_ERROR
from mvp_engine.hf.model.language_model import LanguageModel
from mvp_engine.kit import MLLMData, auto
from mvp_engine.kit.plan.choice import USABLE, Workload, choose
from mvp_engine.kit.plan.costs import PlanSettings
from mvp_engine.kit.plan.hardware import GIB, Gpu, gpu_by_name
from mvp_engine.kit.plan.step import estimate_step
from mvp_engine.runs import list_runs

SHAPES = yaml.safe_load((ROOT / "benchmarks" / "hardware" / "shapes.yaml").read_text())
KEYS = ("mllm.micro_batch_tokens", "mllm.global_batch_tokens", "model.activation_checkpointing")
CONFIG = """
engine: mvp_engine.kit:MLLMEngine
project: {name: tiny, dir: outputs}
model: {type: language_model, path: model, activation_checkpointing: auto, compile: null}
mllm:
  micro_batch_tokens: auto
  global_batch_tokens: 512
  row_tokens: 128
  sources:
    images: {path: images.jsonl}
data: {num_workers: 0}
optim: {lr: 0.01}
loop: {total_steps: 4, precision: fp32}
checkpoint: {best_metric: null, interval: 2}
log: {backends: [jsonl, file], interval: 1}
"""
WHOLE_STEP = 1024.0 * GIB  # memory for all tokens of a step in one micro-batch


def rows_of(lengths: list[int]) -> PackedBatch:
    return PackedBatch.from_sequences([torch.zeros(length, dtype=torch.long) for length in lengths])


def test_choose_fills_the_memory_with_packs_and_then_checkpoints_activations() -> None:
    model = LanguageModel.on_meta(None, SHAPES["Qwen/Qwen3-1.7B"])
    data = MLLMData(
        sources=[{"path": "x"}],
        micro_batch_tokens="auto",
        row_tokens=4096,
        global_batch_tokens=131072,
    )  # type: ignore[list-item]
    config = SimpleNamespace(model=SimpleNamespace(activation_checkpointing="auto"))
    tokens, modes, accumulation = [], [], []
    for gib in (180, 139.8, 79.1, 44.4, 34):
        work = Workload(
            model,
            PlanSettings(),
            lambda size: rows_of([512] * (size // 512)),
            Gpu(989e12, gib * GIB, 4.8e12),
            data_ranks=2,
        )
        found = choose(config, "mllm", data, None, work)
        values = [found.values[key] for key in KEYS]
        batch = work.batch(values[0])
        settings = PlanSettings(activation_checkpointing=values[2])
        assert estimate_step(model, [batch], [batch], settings)["peak_gib"] <= USABLE * gib
        assert 0.99 * 131072 <= values[1] <= 131072
        assert values[1] % (2 * values[0]) == 0  # as many micro-batches on each rank
        assert f"{values[0]:,} tokens" in found.reason
        tokens.append(values[0])
        modes.append(CHECKPOINTING_MODES.index(values[2]))
        accumulation.append(values[1] // values[0] // 2)
    assert tokens[0] == 65536
    assert accumulation[0] == 1
    assert tokens[:4] == sorted(tokens[:4], reverse=True)
    assert modes[0] == modes[1] == 0
    assert modes == sorted(modes)
    assert modes[-1] > 0
    work = Workload(model, PlanSettings(), work.batch, Gpu(989e12, 20 * GIB, 4.8e12), 1)
    too_large = choose(config, "mllm", data, None, work)
    assert "nothing fits" in too_large.reason
    assert [too_large.values[key] for key in KEYS] == [4096, 131072, "offload"]
    fixed = SimpleNamespace(model=SimpleNamespace(activation_checkpointing="full"))
    room = (
        too_large.peak + choose(fixed, "mllm", data, None, work).peak
    ) / 2  # not enough for full
    found = choose(config, "mllm", data, None, work, room)
    assert found.values[KEYS[2]] == "offload"
    assert "the fastest that fits" in found.reason


def test_choose_of_one_open_key_keeps_the_other() -> None:
    model = LanguageModel.on_meta(None, SHAPES["Qwen/Qwen3-1.7B"])
    gpu = Gpu(989e12, 44 * GIB, 4.8e12)
    work = Workload(model, PlanSettings(), lambda size: rows_of([512] * (size // 512)), gpu, 1)
    data = MLLMData(sources=[{"path": "x"}], micro_batch_tokens=16384)  # type: ignore[list-item]
    open_mode = SimpleNamespace(model=SimpleNamespace(activation_checkpointing="auto"))
    assert choose(open_mode, "mllm", data, 4, work).values == {KEYS[2]: "attention"}
    open_size = SimpleNamespace(model=SimpleNamespace(activation_checkpointing="full"))
    data = data.model_copy(
        update={"micro_batch_tokens": "auto", "row_tokens": 8192, "global_batch_tokens": 98304}
    )
    found = choose(open_size, "mllm", data, None, work)
    assert found.values.keys() == set(KEYS[:2])
    assert found.values[KEYS[0]] > 16384


def test_choose_of_one_long_sequence_computes_its_attention_once() -> None:
    """131,072 tokens of a 1.7B on an H200: attention is most of the step, and outputs of GEMMs do not fit."""
    model = LanguageModel.on_meta(None, SHAPES["Qwen/Qwen3-1.7B"])
    work = Workload(model, PlanSettings(), lambda size: rows_of([size]), gpu_by_name("H200"), 1)
    data = MLLMData(sources=[{"path": "x"}], micro_batch_tokens=131072)  # type: ignore[list-item]
    config = SimpleNamespace(model=SimpleNamespace(activation_checkpointing="auto"))
    assert choose(config, "mllm", data, 1, work).values == {KEYS[2]: "attention"}
    batch = rows_of([131072])
    found = estimate_step(
        model, [batch], [batch], PlanSettings(activation_checkpointing="attention")
    )
    rows = json.loads((ROOT / "benchmarks" / "results" / "recipes.json").read_text())["rows"]
    measured = next(row for row in rows if row["work"] == "long_128k")
    assert found["step_s"] == pytest.approx(measured["step_s"], rel=0.05)
    assert found["peak_gib"] == pytest.approx(measured["memory_gib"], rel=0.05)


def test_choose_leaves_out_attention_where_it_would_keep_nothing() -> None:
    """Soft caps need FlexAttention, which is no operator: there `attention` is `full`."""
    shape = {
        "model_type": "gemma2",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
    }
    shape |= {
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    }
    model = LanguageModel.on_meta(None, shape)
    settings = PlanSettings()
    work = Workload(model, settings, lambda size: rows_of([size]), gpu_by_name("H200"), 1)
    data = MLLMData(sources=[{"path": "x"}], micro_batch_tokens=131072)  # type: ignore[list-item]
    config = SimpleNamespace(model=SimpleNamespace(activation_checkpointing="auto"))
    assert choose(config, "mllm", data, 1, work).values == {KEYS[2]: "full"}
    batch = rows_of([8192])
    modes = [replace(settings, activation_checkpointing=mode) for mode in ("attention", "full")]
    attention, full = (estimate_step(model, [batch], [batch], one) for one in modes)
    assert attention == full


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = [chat(f"Say {i}", " ".join(["yes"] * (i % 20 + 1))) for i in range(40)]
    write(tmp_path / "images.jsonl", [*with_images(tmp_path, 40), *rows])
    hf.AutoModelForImageTextToText.from_config(model_config()).save_pretrained(tmp_path / "model")
    qwen3_vl().save_pretrained(tmp_path / "model")
    (tmp_path / "train.yaml").write_text(CONFIG)
    return str(tmp_path / "train.yaml")


def use_gpu(monkeypatch: pytest.MonkeyPatch, memory: float) -> None:
    """Choose as for a GPU, and train on the CPU."""
    monkeypatch.setattr(auto, "gpu_of_ranks", lambda device, world: ("a GPU", memory))


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in list_runs(folder)[-1].records("train")]


def test_train_records_its_choice_and_resumes_with_it_on_another_gpu(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    use_gpu(monkeypatch, WHOLE_STEP)
    assert main(["train", config, "project.dir=whole"]) == 0
    whole = list_runs(tmp_path / "whole")[-1]
    assert [whole.info["auto"]["values"][key] for key in KEYS] == [512, 512, "none"]
    saved = yaml.safe_load((whole.dir / "config.yaml").read_text())
    assert saved["mllm"]["micro_batch_tokens"] == 512
    use_gpu(monkeypatch, 1.0)  # nothing fits: a new run takes the smallest packs
    middle = whole.checkpoint_list()[0]
    assert main(["train", config, "project.dir=resumed", f"resume={middle}"]) == 0
    assert losses(tmp_path / "resumed") == losses(tmp_path / "whole")
    assert main(["train", config, "project.dir=small", "loop.total_steps=2"]) == 0
    assert main(["train", config, "project.dir=small", "resume=auto"]) == 0
    small = list_runs(tmp_path / "small")[-1]
    assert small.info["auto"]["values"][KEYS[0]] == 128
    assert "full" in str(small.info["auto"]["values"][KEYS[2]])
    (before,) = small.dir.glob("config.until_step_*")  # only the steps differ
    assert (
        yaml.safe_load(before.read_text())["mllm"]
        == yaml.safe_load((small.dir / "config.yaml").read_text())["mllm"]
    )
    assert main(["train", str(whole.dir / "config.yaml"), "project.dir=again", "resume=null"]) == 0
    assert losses(tmp_path / "again") == losses(tmp_path / "whole")


def test_train_without_a_gpu_takes_the_documented_default_and_tools_say_so(
    config: str, tmp_path: Path, capsys: Any
) -> None:
    words = ["mllm.global_batch_tokens=16384", "loop.total_steps=1"]
    assert main(["train", config, *words]) == 0
    values = list_runs(tmp_path / "outputs")[-1].info["auto"]["values"]
    assert [values[key] for key in KEYS] == [4096, 16384, "none"]
    capsys.readouterr()
    assert main(["plan", config, "--gpu", "T4"]) == 0
    assert "auto: 1 micro-batch of 512 tokens" in capsys.readouterr().out
    assert main(["data", "inspect", config]) == 0
    capsys.readouterr()
    assert main(["check", config, "--json", *words]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["auto"] == {**values, "reason": facts["auto"]["reason"]}
    words = "tokens, activation checkpointing none: the default without a GPU"
    assert words in facts["stages"][0]["says"]


FEW_ROWS = [
    "mllm.global_batch_tokens=auto",
    "loop.total_steps=null",
    "log.interval=auto",
    "checkpoint.interval=auto",
]


@pytest.mark.slow
def test_train_on_few_rows_derives_batch_and_intervals_that_resume_on_two_ranks(
    config: str, tmp_path: Path, ranks2: RankPool
) -> None:
    words = [*FEW_ROWS, "model.freeze=[vision]"]
    whole = f"project.dir={tmp_path / 'whole'}"
    assert main(["train", config, whole, *words, "loop.epochs=1"]) == 0
    run = list_runs(tmp_path / "whole")[-1]
    total = run.info["setup"]["total_steps"]
    assert total >= auto.EPOCH_STEPS
    saved = yaml.safe_load((run.dir / "config.yaml").read_text())
    longest = saved["mllm"]["row_tokens"]
    assert longest <= saved["mllm"]["global_batch_tokens"] < 512
    assert [saved["log"]["interval"], saved["checkpoint"]["interval"]] == [1, -(-total // 5)]
    text = (run.dir / "log.txt").read_text()
    assert "global batch of" in text
    assert f"auto, for {total} steps: log.interval=1" in text
    assert "dropped: 0" in text
    middle = run.checkpoint_list()[0]
    again = [
        f"project.dir={tmp_path / 'resumed'}",
        f"resume={middle}",
        "loop.epochs=1",
        f"model.path={tmp_path}/model",
    ]
    again += [f"mllm.sources.images.path={tmp_path}/images.jsonl"]
    assert ranks2.launch(config, *words, *again) == [0, 0]
    assert losses(tmp_path / "resumed") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)


def test_train_on_few_rows_and_a_gpu_divides_the_derived_batch_by_the_estimates(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_gpu(monkeypatch, WHOLE_STEP)
    assert main(["train", config, "mllm.global_batch_tokens=auto", "loop.total_steps=1"]) == 0
    run = list_runs(tmp_path / "outputs")[-1]
    values = run.info["auto"]["values"]
    assert values[KEYS[0]] == values[KEYS[1]] < 512  # the whole step in one micro-batch
    assert values["mllm.row_tokens"] <= values[KEYS[0]]
    assert "global batch of" in run.info["auto"]["reason"]
    assert "the fastest that fits" in run.info["auto"]["reason"]


def test_global_batch_auto_of_many_rows_is_its_largest_without_measuring_them(
    config: str, tmp_path: Path
) -> None:
    rows = [json.loads(line) for line in (tmp_path / "images.jsonl").read_text().splitlines()[40:]]
    write(tmp_path / "images.jsonl", rows * 500)
    composed = compose(config, ["mllm.global_batch_tokens=auto"])
    kit = composed.engine_class.data_kit(auto.with_defaults(composed.config))
    found = auto.global_batch(composed.config, kit)
    assert found.values == {"mllm.global_batch_tokens": 16384}
    assert not kit._measured


@pytest.mark.parametrize(
    ("total", "intervals"),
    [(1, (1, 1, 1)), (93, (2, 10, 19)), (100_000, (10, 400, 200)), (None, (10, 400, 200))],
)
def test_auto_intervals_follow_from_the_number_of_steps(
    config: str, total: int | None, intervals: tuple[int, ...]
) -> None:
    words = ["log.interval=auto", "loop.eval_interval=auto", "checkpoint.interval=auto"]
    found = with_intervals(compose(config, words).config, total)
    assert (found.log.interval, found.loop.eval_interval, found.checkpoint.interval) == intervals
    given = compose(config, ["log.interval=7", *words[1:2], "checkpoint.interval=null"]).config
    kept = with_intervals(given, total)
    assert (kept.log.interval, kept.loop.eval_interval, kept.checkpoint.interval) == (
        7,
        intervals[1],
        None,
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mllm.row_tokens=null"], "needs mllm.row_tokens"),
        (
            ["mllm.global_batch_tokens=null"],
            "mllm.global_batch_tokens, the tokens of an optimizer step",
        ),
        (["data.global_batch_size=4"], "both set the global batch"),
        (["mllm.global_batch_tokens=64"], "raise it to mllm.row_tokens=128"),
        (["model.backend=megatron"], "model.backend=fsdp"),  # with or without its package
    ],
)
def test_auto_that_cannot_be_chosen_is_refused(
    config: str, words: list[str], message: str, capsys: Any
) -> None:
    assert main(["train", config, *words]) == EXIT_USER_ERROR
    assert message in capsys.readouterr().err


ENGINE = """
import os
import torch
from mvp_engine.kit import MLLMEngine
from mvp_engine.kit import auto

auto.gpu_of_ranks = lambda device, world: ("a GPU", 2.0**40)  # choose as for a GPU, and train on the CPU


class Engine(MLLMEngine):
    def forward_step(self, ctx, micro_batch):
        least = int(os.environ["LEAST_TOKENS"])
        # On one rank alone: the other one waits for it.
        if ctx.split == "train" and self.world.rank == self.world.size - 1 and micro_batch.num_tokens > least:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return super().forward_step(ctx, micro_batch)
"""


def own_engine(config: str, tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text(ENGINE)
    (tmp_path / "train.yaml").write_text(
        CONFIG.replace("mvp_engine.kit:MLLMEngine", f"{tmp_path}/engine.py:Engine")
    )


def test_train_out_of_memory_in_the_first_step_starts_again_with_less(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    use_gpu(monkeypatch, 0.0)  # the engine's own
    own_engine(config, tmp_path)
    monkeypatch.setenv("LEAST_TOKENS", "400")
    assert main(["train", config, "project.dir=oom"]) == 0
    (run,) = list_runs(tmp_path / "oom")
    assert run.info["auto"]["out_of_memory"][0]["values"][KEYS[0]] == 512
    assert run.info["auto"]["values"][KEYS[0]] < 400
    assert run.info["status"] == "finished"
    assert [record["step"] for record in run.records("train")] == [1, 2, 3, 4]
    assert capsys.readouterr().err.count("out of memory in step 1") == len(
        run.info["auto"]["out_of_memory"]
    )
    monkeypatch.setenv("LEAST_TOKENS", "10")
    smallest = [
        "mllm.row_tokens=512",
        "model.activation_checkpointing=none",
    ]  # nothing is left to lower
    assert main(["train", config, "project.dir=none", *smallest]) == EXIT_USER_ERROR
    assert "out of memory with the sizes that need least" in capsys.readouterr().err
    # A run that was resumed keeps its packs, and fixed sizes are not lowered.
    middle = run.checkpoint_list()[0]
    assert main(["train", config, "project.dir=resumed", f"resume={middle}"]) == EXIT_USER_ERROR
    assert "CUDA out of memory" in capsys.readouterr().err


@pytest.mark.campaign(only=True)
def test_train_out_of_memory_on_one_of_two_ranks_starts_both_again(
    config: str, tmp_path: Path
) -> None:
    own_engine(config, tmp_path)
    env = {**os.environ, "LEAST_TOKENS": "200", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "mvp_engine.cli",
        "train",
        config,
        "--nproc",
        "2",
        "loop.total_steps=2",
    ]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    (run,) = list_runs(tmp_path / "outputs")
    assert run.info["auto"]["out_of_memory"][0]["values"][KEYS[0]] == 256
    assert run.info["auto"]["values"][KEYS[0]] < 200
    assert run.info["status"] == "finished"
    assert "out of memory in step 1" in done.stderr

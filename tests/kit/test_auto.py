"""`auto`: pack size and activation checkpointing by the memory of the GPU, recorded with the run and kept on resume."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import yaml
from conftest import CAMPAIGN, ROOT, mvp, run_process
from run_files import printed_json, read_json
from tiny_vlm import chat, with_images, write

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
KEYS = ("data.pack_tokens", "data.global_batch_tokens", "model.activation_checkpointing")
CONFIG = """
engine: mvp_engine.kit:MLLMEngine
run_name: tiny
output_dir: outputs
model: {type: language_model, path: model, activation_checkpointing: auto, compile: null}
data:
  pack_tokens: auto
  global_batch_tokens: 512
  max_length: 128
  sources:
    images: {path: images.jsonl}
  num_workers: 0
optim: {lr: 0.01}
train: {max_steps: 4, precision: fp32}
checkpoint: {best_metric: null, interval: 2}
log: {backends: [jsonl, file], interval: 1}
"""
WHOLE_STEP = 1024.0 * GIB  # memory for all tokens of a step in one micro-batch


def qwen3():
    return LanguageModel.on_meta(None, SHAPES["Qwen/Qwen3-1.7B"])


def data_of(tokens, **settings):
    return MLLMData(sources=[{"path": "x"}], pack_tokens=tokens, **settings)


def chosen(mode, *facts):
    config = SimpleNamespace(model=SimpleNamespace(activation_checkpointing=mode))
    return choose(config, "data", *facts)


def rows_of(lengths):
    return PackedBatch.from_sequences([torch.zeros(length, dtype=torch.long) for length in lengths])


def rows_of_512(size):
    return rows_of([512] * (size // 512))


def test_choose_fills_the_memory_with_packs_and_then_checkpoints_activations():
    model, data = qwen3(), data_of("auto", max_length=4096, global_batch_tokens=131072)
    tokens, modes, accumulation = [], [], []
    for gib in (180, 139.8, 79.1, 44.4, 34):
        gpu = Gpu(989e12, gib * GIB, 4.8e12)
        work = Workload(model, PlanSettings(), rows_of_512, gpu, data_ranks=2)
        found = chosen("auto", data, None, work)
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
    too_large = chosen("auto", data, None, work)
    assert "nothing fits" in too_large.reason
    assert [too_large.values[key] for key in KEYS] == [4096, 131072, "offload"]
    room = (too_large.peak + chosen("full", data, None, work).peak) / 2  # not enough for full
    found = chosen("auto", data, None, work, room)
    assert found.values[KEYS[2]] == "offload"
    assert "the fastest that fits" in found.reason


def test_choose_of_one_open_key_keeps_the_other():
    gpu = Gpu(989e12, 44 * GIB, 4.8e12)
    work = Workload(qwen3(), PlanSettings(), rows_of_512, gpu, 1)
    assert chosen("auto", data_of(16384), 4, work).values == {KEYS[2]: "attention"}
    data = data_of("auto", max_length=8192, global_batch_tokens=98304)
    found = chosen("full", data, None, work)
    assert found.values.keys() == set(KEYS[:2])
    assert found.values[KEYS[0]] > 16384


def test_choose_of_one_long_sequence_computes_its_attention_once():
    """131,072 tokens of a 1.7B on an H200: attention is most of the step, and outputs of GEMMs do not fit."""
    model, batch = qwen3(), rows_of([131072])
    work = Workload(model, PlanSettings(), lambda size: rows_of([size]), gpu_by_name("H200"), 1)
    assert chosen("auto", data_of(131072), 1, work).values == {KEYS[2]: "attention"}
    settings = PlanSettings(activation_checkpointing="attention")
    found = estimate_step(model, [batch], [batch], settings)
    rows = read_json(ROOT / "benchmarks" / "results" / "recipes.json")["rows"]
    measured = next(row for row in rows if row["work"] == "long_128k")
    assert found["step_s"] == pytest.approx(measured["step_s"], rel=0.05)
    assert found["peak_gib"] == pytest.approx(measured["memory_gib"], rel=0.05)


def test_choose_leaves_out_attention_where_it_would_keep_nothing():
    """Soft caps need FlexAttention, which is no operator: there `attention` is `full`."""
    names = (
        "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
    )
    sizes = zip(names.split(" "), (2048, 6144, 28, 16, 8), strict=True)
    shape = {"model_type": "gemma2", "head_dim": 128, "vocab_size": 151936, **dict(sizes)}
    model = LanguageModel.on_meta(None, shape)
    settings = PlanSettings()
    work = Workload(model, settings, lambda size: rows_of([size]), gpu_by_name("H200"), 1)
    assert chosen("auto", data_of(131072), 1, work).values == {KEYS[2]: "full"}
    batch = rows_of([8192])
    modes = [replace(settings, activation_checkpointing=mode) for mode in ("attention", "full")]
    attention, full = (estimate_step(model, [batch], [batch], one) for one in modes)
    assert attention == full


@pytest.fixture
def config(vlm_folder):
    rows = [chat(f"Say {i}", " ".join(["yes"] * (i % 20 + 1))) for i in range(40)]
    write(vlm_folder / "images.jsonl", [*with_images(vlm_folder, 40), *rows])
    (vlm_folder / "train.yaml").write_text(CONFIG)
    return str(vlm_folder / "train.yaml")


@pytest.fixture
def use_gpu(monkeypatch):
    """use_gpu(memory): choose as for a GPU, and train on the CPU."""
    return lambda memory: monkeypatch.setattr(auto, "gpu_of_ranks", lambda *_: ("a GPU", memory))


def train(config, *words):
    assert mvp(f"train {config}", *words) == 0


def run_of(folder):
    return list_runs(folder)[-1]


def settings_of(run, name="config.yaml"):
    return yaml.safe_load((run.dir / name).read_text())


def losses(folder):
    return [record["loss"] for record in run_of(folder).records("train")]


@pytest.mark.slow
def test_train_records_its_choice_and_resumes_with_it_on_another_gpu(config, tmp_path, use_gpu):
    use_gpu(WHOLE_STEP)
    train(config, "output_dir=whole")
    whole = run_of(tmp_path / "whole")
    assert [whole.info["auto"]["values"][key] for key in KEYS] == [512, 512, "none"]
    assert settings_of(whole)["data"]["pack_tokens"] == 512
    use_gpu(1.0)  # nothing fits: a new run takes the smallest packs
    train(config, "output_dir=resumed", f"resume={whole.checkpoint_list()[0]}")
    assert losses(tmp_path / "resumed") == losses(tmp_path / "whole")
    train(config, "output_dir=small", "train.max_steps=2")
    train(config, "output_dir=small", "resume=auto")
    small = run_of(tmp_path / "small")
    assert small.info["auto"]["values"][KEYS[0]] == 128
    assert "full" in str(small.info["auto"]["values"][KEYS[2]])
    (before,) = small.dir.glob("config.until_step_*")  # only the steps differ
    assert settings_of(small, before.name)["data"] == settings_of(small)["data"]
    train(str(whole.dir / "config.yaml"), "output_dir=again", "resume=null")
    assert losses(tmp_path / "again") == losses(tmp_path / "whole")


@pytest.mark.slow
def test_train_without_a_gpu_takes_the_documented_default_and_tools_say_so(
    config, tmp_path, capsys
):
    words = ["data.global_batch_tokens=16384", "train.max_steps=1"]
    train(config, *words)
    values = run_of(tmp_path / "outputs").info["auto"]["values"]
    assert [values[key] for key in KEYS] == [4096, 16384, "none"]
    capsys.readouterr()
    assert mvp(f"plan {config} --gpu T4") == 0
    assert "auto: 1 micro-batch of 512 tokens" in capsys.readouterr().out
    assert mvp(f"data inspect {config}") == 0
    capsys.readouterr()
    assert mvp(f"check {config} --json", *words) == 0
    facts = printed_json(capsys)
    assert facts["auto"] == {**values, "reason": facts["auto"]["reason"]}
    words = "tokens, activation checkpointing none: the default without a GPU"
    assert words in facts["stages"][0]["says"]


FEW_ROWS = "data.global_batch_tokens=auto train.max_steps=null log.interval=auto checkpoint.interval=auto".split()


@pytest.mark.slow
def test_train_on_few_rows_derives_batch_and_intervals_that_resume_on_two_ranks(
    config, tmp_path, ranks2
):
    words = [*FEW_ROWS, "model.freeze=[vision]"]
    train(config, f"output_dir={tmp_path / 'whole'}", *words, "train.epochs=1")
    run = run_of(tmp_path / "whole")
    total, saved = run.info["setup"]["total_steps"], settings_of(run)
    assert total >= auto.EPOCH_STEPS
    assert saved["data"]["max_length"] <= saved["data"]["global_batch_tokens"] < 512
    assert [saved["log"]["interval"], saved["checkpoint"]["interval"]] == [1, -(-total // 5)]
    text = (run.dir / "log.txt").read_text()
    assert "global batch of" in text
    assert f"auto, for {total} steps: log.interval=1" in text
    assert "dropped: 0" in text
    middle = run.checkpoint_list()[0]
    again = [
        f"output_dir={tmp_path / 'resumed'}",
        f"resume={middle}",
        "train.epochs=1",
        f"model.path={tmp_path}/model",
    ]
    again += [f"data.sources.images.path={tmp_path}/images.jsonl"]
    assert ranks2.launch(config, *words, *again) == [0, 0]
    assert losses(tmp_path / "resumed") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)


def test_train_on_few_rows_and_a_gpu_divides_the_derived_batch_by_the_estimates(
    config, tmp_path, use_gpu
):
    use_gpu(WHOLE_STEP)
    train(config, "data.global_batch_tokens=auto", "train.max_steps=1")
    run = run_of(tmp_path / "outputs")
    values = run.info["auto"]["values"]
    assert values[KEYS[0]] == values[KEYS[1]] < 512  # the whole step in one micro-batch
    assert values["data.max_length"] <= values[KEYS[0]]
    assert "global batch of" in run.info["auto"]["reason"]
    assert "the fastest that fits" in run.info["auto"]["reason"]


def test_global_batch_auto_of_many_rows_is_its_largest_without_measuring_them(config, tmp_path):
    rows = [json.loads(line) for line in (tmp_path / "images.jsonl").read_text().splitlines()[40:]]
    write(tmp_path / "images.jsonl", rows * 500)
    composed = compose(config, ["data.global_batch_tokens=auto"])
    kit = composed.engine_class.data_kit(auto.with_defaults(composed.config))
    assert auto.global_batch(composed.config, kit).values == {"data.global_batch_tokens": 16384}
    assert not kit._measured


@pytest.mark.parametrize(
    "total, intervals",
    [(1, (1, 1, 1)), (93, (2, 10, 19)), (100_000, (10, 400, 200)), (None, (10, 400, 200))],
)
def test_auto_intervals_follow_from_the_number_of_steps(config, total, intervals):
    words = ["log.interval=auto", "eval.steps=auto", "checkpoint.interval=auto"]
    given = ["log.interval=7", words[1], "checkpoint.interval=null"]
    for overrides, expected in ((words, intervals), (given, (7, intervals[1], None))):
        found = with_intervals(compose(config, overrides).config, total)
        assert (found.log.interval, found.eval.steps, found.checkpoint.interval) == expected


@pytest.mark.parametrize(
    "words, message",
    [
        (["data.max_length=null"], "needs data.max_length"),
        (
            ["data.global_batch_tokens=null"],
            "data.global_batch_tokens, the tokens of an optimizer step",
        ),
        (["data.global_batch_size=4"], "both set the global batch"),
        (["data.global_batch_tokens=64"], "raise it to data.max_length=128"),
        (["model.backend=megatron"], "model.backend=fsdp"),  # with or without its package
    ],
)
def test_auto_that_cannot_be_chosen_is_refused(config, words, message, capsys):
    assert mvp(f"train {config}", *words) == EXIT_USER_ERROR
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


def own_engine(config, tmp_path):
    (tmp_path / "engine.py").write_text(ENGINE)
    (tmp_path / "train.yaml").write_text(
        CONFIG.replace("mvp_engine.kit:MLLMEngine", f"{tmp_path}/engine.py:Engine")
    )


@pytest.mark.slow
def test_train_out_of_memory_in_the_first_step_starts_again_with_less(
    config, tmp_path, use_gpu, monkeypatch, capsys
):
    use_gpu(0.0)  # the engine's own
    own_engine(config, tmp_path)
    monkeypatch.setenv("LEAST_TOKENS", "400")
    train(config, "output_dir=oom")
    (run,) = list_runs(tmp_path / "oom")
    assert run.info["auto"]["out_of_memory"][0]["values"][KEYS[0]] == 512
    assert run.info["auto"]["values"][KEYS[0]] < 400
    assert run.info["status"] == "finished"
    assert [record["step"] for record in run.records("train")] == [1, 2, 3, 4]
    assert capsys.readouterr().err.count("out of memory in step 1") == len(
        run.info["auto"]["out_of_memory"]
    )
    monkeypatch.setenv("LEAST_TOKENS", "10")
    # Nothing is left to lower.
    smallest = [
        "data.max_length=512",
        "model.activation_checkpointing=none",
    ]
    assert mvp(f"train {config} output_dir=none", *smallest) == EXIT_USER_ERROR
    assert "out of memory with the sizes that need least" in capsys.readouterr().err
    # A run that was resumed keeps its packs, and fixed sizes are not lowered.
    middle = run.checkpoint_list()[0]
    assert mvp(f"train {config} output_dir=resumed resume={middle}") == EXIT_USER_ERROR
    assert "CUDA out of memory" in capsys.readouterr().err


@CAMPAIGN
def test_train_out_of_memory_on_one_of_two_ranks_starts_both_again(config, tmp_path):
    own_engine(config, tmp_path)
    env = {"LEAST_TOKENS": "200", "OMP_NUM_THREADS": "1"}
    words = ["train", config, "--nproc", "2", "train.max_steps=2"]
    code, output = run_process("-m", "mvp_engine.cli", *words, env=env, fresh=True)
    assert code == 0, output
    (run,) = list_runs(tmp_path / "outputs")
    assert run.info["auto"]["out_of_memory"][0]["values"][KEYS[0]] == 256
    assert run.info["auto"]["values"][KEYS[0]] < 200
    assert run.info["status"] == "finished"
    assert "out of memory in step 1" in output

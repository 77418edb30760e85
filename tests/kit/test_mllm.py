"""MLLMEngine: user errors are raised before the first step, and evaluation, export and report handle every row."""

import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import mvp
from run_files import json_lines, printed_json
from safetensors.torch import load_file
from tiny_vlm import chat, with_images, write

from mvp_engine.cli import main
from mvp_engine.errors import EXIT_USER_ERROR, count
from mvp_engine.kit import MLLMEngine, generation
from mvp_engine.runs import list_runs

CONFIG = """
engine: mvp_engine.kit:MLLMEngine
run_name: tiny
output_dir: outputs
model: {type: language_model, path: model}
data:
  pack_tokens: 256
  sources:
    images: {path: images.jsonl}
    held: {path: held.jsonl, split: eval}
  global_batch_size: 1
  num_workers: 0
train: {max_steps: 1}
eval: {steps: 1, generation: {max_new_tokens: 2}}
checkpoint: {best_metric: null}
log: {backends: [jsonl]}
"""
FOLDERS = ["hf_step_1_ema", "hf_step_1"]
REPORT = ["workflow=report", "resume=auto"]


@pytest.fixture
def config(vlm_folder):
    rows = with_images(vlm_folder, 8)
    write(vlm_folder / "images.jsonl", rows)
    write(vlm_folder / "held.jsonl", rows[:2])
    (vlm_folder / "train.yaml").write_text(CONFIG)
    return str(vlm_folder / "train.yaml")


def train(config, *words):
    return mvp(f"train {config}", *words)


def page(folder):
    (file,) = folder.glob("outputs/*/report.html")
    return file.read_text()


@pytest.mark.slow
def test_report_row_that_ends_with_an_unanswered_image_is_left_out(config, tmp_path):
    rows = json_lines(tmp_path / "held.jsonl")
    rows[1]["messages"].append(rows[1]["messages"][0])
    write(tmp_path / "held.jsonl", rows)
    assert train(config) == 0
    assert train(config, *REPORT) == 0
    assert "How many? 0" in page(tmp_path)
    assert "How many? 1" not in page(tmp_path)


@pytest.mark.slow
def test_report_marks_answers_by_the_verdicts_of_score_and_none_by_default(
    config, tmp_path, monkeypatch
):
    marks = ["card right", "card wrong", "answers are wrong"]
    words = ["log.backends=[jsonl,plot]", "run_id=run"]
    assert train(config, "output_dir=outputs/default", *words) == 0
    text = (tmp_path / "outputs" / "default" / "run" / "report.html").read_text()
    assert "How many? 0" in text
    assert not any(mark in text for mark in marks)
    monkeypatch.setattr(
        MLLMEngine, "score", lambda self, ctx, name, answers: [one.sample == 0 for one in answers]
    )
    assert train(config, "output_dir=outputs/judged", *words) == 0
    text = (tmp_path / "outputs" / "judged" / "run" / "report.html").read_text()
    assert all(mark in text for mark in marks)
    lines = (tmp_path / "outputs" / "judged" / "run" / "answers.jsonl").read_text().splitlines()
    assert [json.loads(line)["right"] for line in lines] == [True, False]


@pytest.mark.parametrize(
    "stream", [None, *(pytest.param(name, marks=pytest.mark.slow) for name in ("images", "held"))]
)
def test_train_writes_the_report_and_logs_rows_per_second_and_fill(config, tmp_path, stream):
    words = ["log.backends=[jsonl,plot]", "train.max_steps=2"]
    words += [f"data.sources.{stream}.stream=true"] if stream else []
    assert train(config, *words) == 0
    assert "How many? 1" in page(tmp_path)
    assert stream == "held" or "data:image/png" in page(tmp_path)
    (run,) = list_runs(tmp_path / "outputs")
    for record in run.records("train"):
        rows = record["perf"]["samples_per_s"] * record["perf"]["step_s"]
        assert rows == pytest.approx(round(rows))
        assert rows > 1  # more than the one pack
        assert record["fill"] == record["totals"]["tokens"] / 256


def test_export_with_and_without_ema_writes_two_folders_and_never_overwrites_a_folder(
    config, tmp_path, capsys
):
    words = "eval.steps=null optim.ema=0.9 optim.lr=0.1 export_link=link".split()
    assert train(config, *words) == 0
    assert train(config, *words, "workflow=export", "resume=auto", "optim.ema=null") == 0
    averages, last = (load_file(weights_of(tmp_path, name)) for name in FOLDERS)
    assert any(not averages[name].equal(last[name]) for name in last)
    assert (tmp_path / "link").resolve().name == FOLDERS[1]
    for workflow in ("train", "export", "report"):
        again = [*words, f"workflow={workflow}", "resume=auto"]
        assert train(config, *again, "export_link=model") == EXIT_USER_ERROR
        assert "no link of an earlier run" in capsys.readouterr().err
        assert train(config, *again, "export_link=train.yaml/new") == EXIT_USER_ERROR
        assert "nothing can be written into" in capsys.readouterr().err


def weights_of(folder, export):
    return next(folder.glob(f"outputs/*/{export}/model.safetensors"))


@pytest.mark.slow
def test_export_chat_and_push_use_the_best_checkpoint_not_the_last(config, tmp_path, capsys):
    # The loss falls, so the first step is the best one.
    words = ["checkpoint.best_metric=loss", "checkpoint.best_mode=max", "optim.ema=0.5"]
    words += ["optim.lr=0.01", "optim.schedule=constant", "eval.generation=null"]
    words += ["log.backends=[jsonl,file]"]
    three = [*words, "output_dir=three", "train.max_steps=3"]
    assert train(config, *words, "output_dir=one", "export_link=one_step") == 0
    assert train(config, *three, "export_link=three_steps") == 0
    [run] = list_runs(tmp_path / "three")
    assert [record["step"] for record in run.records("eval")] == [1, 2, 3]
    assert (tmp_path / "three_steps").resolve() == run.dir / "hf_step_1_ema"
    best, one = (load_file(Path(name, "model.safetensors")) for name in ("three_steps", "one_step"))
    assert all(torch.equal(best[name], one[name]) for name in {**best, **one})
    words = "the model is that of the best checkpoint, step 1, not of the last step 3"
    assert words in (run.dir / "log.txt").read_text()
    here = ["--dir", "three"]
    chat_command = ["chat", "latest", *here, "-p", "How many?", "--max-new-tokens", "1"]
    for folder in ("hf_step_1_ema", "checkpoints/step_00000001"):
        for command in (chat_command, ["export", "latest", "--push", "me/it", *here, "--dry-run"]):
            assert main(command) == 0
            assert f"/{folder}\n" in capsys.readouterr().err
        shutil.rmtree(run.dir / "hf_step_1_ema", ignore_errors=True)
    assert train(config, *three, "workflow=export", "resume=auto") == 0
    assert (run.dir / "hf_step_1_ema").is_dir()
    for name in ("latest", run.id, f"three/{run.id}"):
        assert mvp(f"evaluate {name}", *here) == 0
    assert [record["step"] for record in json_lines(run.dir / "evaluate.jsonl")] == [1, 1, 1]
    capsys.readouterr()
    assert mvp("evaluate lates", *here) == EXIT_USER_ERROR
    assert f"no run 'lates' below {tmp_path / 'three'}" in capsys.readouterr().err


def test_export_with_ema_and_an_own_optimizer_holds_the_averages(config, tmp_path, monkeypatch):
    def sgd(engine, model):
        return torch.optim.SGD(model.parameters(), lr=0.5)

    monkeypatch.setattr(MLLMEngine, "prepare_optimizer", sgd)
    words = ["eval.steps=null", "optim.ema=0.9", "export_link=link"]
    export = [*words, "workflow=export", "resume=auto"]
    assert train(config, *words) == 0
    assert train(config, *export, "optim.ema=null") == 0
    in_training, last = (load_file(weights_of(tmp_path, name)) for name in FOLDERS)
    assert any(not in_training[name].equal(last[name]) for name in last)
    shutil.rmtree(weights_of(tmp_path, FOLDERS[0]).parent)
    assert train(config, *export) == 0
    later = load_file(weights_of(tmp_path, FOLDERS[0]))
    assert all(later[name].equal(in_training[name]) for name in last)


@pytest.mark.parametrize("stream", ["false", "true"])
def test_eval_generation_completes_at_most_max_samples_rows(config, tmp_path, stream):
    write(tmp_path / "held.jsonl", with_images(tmp_path, 7))
    words = ["eval.generation.max_samples=3", f"data.sources.held.stream={stream}"]
    assert train(config, *words) == 0
    (file,) = tmp_path.glob("outputs/*/answers.jsonl")
    samples = [json.loads(line)["sample"] for line in file.read_text().splitlines()]
    assert sorted(samples) == ([0, 1, 2] if stream == "true" else [0, 3, 6])


def test_evaluation_of_a_part_reads_packs_of_all_sources_and_completes_rows_of_these(
    config, tmp_path
):
    write(tmp_path / "held.jsonl", with_images(tmp_path, 24))
    write(tmp_path / "more.jsonl", [chat(f"Say {i}", "yes") for i in range(24)])
    words = ["eval.generation.max_samples=3", "eval.batches=2", "data.pack_tokens=64"]
    words += ["+data.sources.more={path: more.jsonl, split: eval}", "data.max_length=64"]
    assert train(config, *words) == 0
    (run,) = list_runs(tmp_path / "outputs")
    assert {"loss_held", "loss_more"} <= list(run.records("eval"))[-1].keys()
    lines = (run.dir / "answers.jsonl").read_text().splitlines()
    assert 1 <= len(lines) <= 3


@pytest.mark.slow
def test_train_for_epochs_announces_their_steps_and_ends_the_schedule(config, tmp_path):
    drawn = np.random.default_rng(0)
    answers = ["yes " * int(drawn.integers(3, 22)) for _ in range(40)]
    write(tmp_path / "images.jsonl", [chat("Say", answer) for answer in answers])
    words = "train.max_steps=null train.epochs=3 eval.steps=null log.interval=1".split()
    assert train(config, *words, "data.pack_tokens=160") == 0
    (run,) = list_runs(tmp_path / "outputs")
    records = list(run.records("train"))
    of_epochs = [sum(record["epoch"] == epoch for record in records) for epoch in range(3)]
    assert len(set(of_epochs)) > 1
    assert run.info["setup"]["total_steps"] == records[-1]["step"] == sum(of_epochs)


@pytest.mark.parametrize("word", ["data.sources.held.path=gone.jsonl", "data.sources.held=null"])
def test_train_with_missing_eval_rows_fails_before_the_first_step(config, tmp_path, word):
    assert train(config, word) == EXIT_USER_ERROR
    assert not list(tmp_path.glob("outputs/*/metrics.jsonl"))
    assert train(config, word, "eval.steps=null") == 0


def test_rows_that_the_default_loss_would_ignore_are_refused(config, tmp_path, capsys):
    sides = {side: chat("Hi", side)["messages"] for side in ("chosen", "rejected")}
    labels = [{"prompt": "Why?", "completion": "So.", "label": i % 2 == 0} for i in range(8)]
    for rows, word, said in (
        ([sides] * 4, "data.pairs=true", "rejected answers"),
        (labels, "data.fields={label: int}", "data.fields has label"),
    ):
        write(tmp_path / "images.jsonl", rows)
        assert train(config, "eval.steps=null", word) == EXIT_USER_ERROR
        assert said in capsys.readouterr().err
    write(tmp_path / "images.jsonl", [sides] * 4)
    assert train(config, "eval.steps=null") == 0


def test_train_with_a_corrupt_image_warns_and_ends_with_a_summary(config, tmp_path):
    file = tmp_path / "4_0.png"
    file.write_bytes(file.read_bytes()[:100])
    words = "eval.steps=null train.epochs=1 train.max_steps=null data.max_bad_rows=0.5".split()
    words.append("log.backends=[file]")
    assert train(config, *words) == 0
    (log,) = tmp_path.glob("outputs/*/log.txt")
    lines = log.read_text().splitlines()
    assert any("bad row, left out: images.jsonl:5: corrupt" in line for line in lines)
    assert any("left out 1 bad row (images: 1 corrupt). All are in" in line for line in lines[-2:])


def test_plan_of_rows_that_do_not_fit_is_a_user_error(config, capsys):
    assert mvp(f"plan {config} data.max_length=2") == EXIT_USER_ERROR
    assert "no row of train" in capsys.readouterr().err


@pytest.mark.parametrize(
    "size, packs",
    [(["data.global_batch_size=2"], 2), (["data.global_batch_tokens=512"], 2), ([], 1)],
)
def test_global_batch_size_from_packs_or_tokens_agrees_in_loader_scheduler_and_log(
    config, monkeypatch, size, packs
):
    text = Path(config).read_text().replace("  global_batch_size: 1\n", "")
    Path(config).write_text(text.replace("{steps: 1", "{steps: null"))
    engines = []
    prepare = MLLMEngine.prepare_scheduler

    def kept(self, optimizer):
        engines.append(self)
        return prepare(self, optimizer)

    monkeypatch.setattr(MLLMEngine, "prepare_scheduler", kept)
    assert train(config, *size) == 0
    (engine,) = engines
    assert engine.global_batch_size == packs
    assert engine.feed.loader.dataset.plan.packs_per_step == packs
    assert engine.run.info["setup"]["global_batch"] == count(packs, "pack")


def test_global_batch_size_from_packs_and_tokens_is_a_user_error(config, capsys):
    for command in (["train", config], ["plan", config], ["data", "inspect", config]):
        assert main([*command, "data.global_batch_tokens=512"]) == EXIT_USER_ERROR
        error = capsys.readouterr().err
        assert "data.global_batch_size" in error
        assert "data.global_batch_tokens" in error
    assert train(config, "data.packs_per_step=2") == EXIT_USER_ERROR
    words = "unknown key 'data.packs_per_step'. Here it is data.global_batch_size"
    assert words in capsys.readouterr().err


def test_evaluation_error_in_generation_or_score_is_a_warning_in_training_and_raised_by_evaluate(
    config, tmp_path, monkeypatch, capsys
):
    def fail(*_, **__):
        raise IndexError("no answer")

    sources = (generation, "generate_answers", "generation"), (MLLMEngine, "score", "score")
    for target, name, what in sources:
        with monkeypatch.context() as patch:
            patch.setattr(target, name, fail)
            words = ["checkpoint.best_metric=exact_held", "log.backends=[file]"]
            words.append(f"output_dir={what}")
            assert train(config, *words, "train.max_steps=2") == 0
            (log,) = tmp_path.glob(f"{what}/*/log.txt")
            assert f"{what} failed in the evaluation at step 1" in log.read_text()
            assert "in fail" in log.read_text()  # the traceback
            assert mvp(f"evaluate {config}", *words) == 1
            assert "IndexError: no answer" in capsys.readouterr().err


@pytest.mark.slow
def test_chat_with_a_lora_run_equals_its_export(config, tmp_path, capsys):
    words = "eval.steps=null lora.rank=2 lora.target_modules=[llm] optim.lr=0.5".split()
    words.append("train.max_steps=2")
    assert train(config, *words) == 0
    (run,) = (tmp_path / "outputs").iterdir()

    def answer(target):
        capsys.readouterr()
        options = "--device cpu --max-new-tokens 6 --json --image 1_0.png"
        assert mvp(f"chat {target}", *shlex.split(options), "-p", "How many?") == 0
        return str(printed_json(capsys)["answer"])

    untrained = answer("model")
    of_checkpoint = answer(run.name)  # merged for the chat
    assert train(config, *words, "workflow=export", "resume=auto", "export_link=link") == 0
    assert answer(str(run)) == of_checkpoint == answer("link") != untrained

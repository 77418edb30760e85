"""Evaluation harnesses: their scores from our forward and decoding. `make test-harness` has the packages."""

import io
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
import transformers as hf
from conftest import ROOT, mvp, user_error
from PIL import Image
from run_files import json_lines
from templates.tiny import FOLDER, tokenizer
from tiny_vlm import TEXT, with_images, write

import mvp_engine
from mvp_engine.config.compose import compose
from mvp_engine.kit import harness

TASKS = Path(__file__).with_name("harness_tasks")
CONFIG = """
engine: mvp_engine.kit:MLLMEngine
output_dir: outputs
model: {type: language_model, path: model}
data:
  pack_tokens: 256
  sources:
    rows: {path: rows.jsonl}
    held: {path: rows.jsonl, split: eval}
  global_batch_size: 1
  num_workers: 0
train: {max_steps: 20}
optim: {lr: 1.0e-2}
eval: {generation: {max_new_tokens: 16}}
checkpoint: {best_metric: null}
log: {backends: [jsonl]}
"""
LM = ["text_choice", "text_answer", "text_perplexity"]
LMMS = ["count", "choose"]


@pytest.fixture
def lm():
    return pytest.importorskip("lm_eval")


@pytest.fixture
def lmms():
    return pytest.importorskip("lmms_eval.evaluator")


@pytest.fixture
def config(vlm_folder):
    rows = with_images(vlm_folder, 24)
    write(vlm_folder / "rows.jsonl", rows)
    docs = []
    for row in rows:
        *images, question = row["messages"][0]["content"]
        names = [part["image"] for part in images]
        answer = row["messages"][1]["content"]
        docs.append({"images": names, "question": question["text"], "answer": answer})
    write(vlm_folder / "docs.jsonl", docs)
    shutil.copytree(TASKS, vlm_folder, dirs_exist_ok=True)
    (vlm_folder / "train.yaml").write_text(CONFIG)
    return str(vlm_folder / "train.yaml")


@pytest.fixture
def text_config(config, workspace):
    """The same for a model of text, and its folder."""
    folder = workspace / "text_model"
    torch.manual_seed(0)
    hf.Qwen3ForCausalLM(hf.Qwen3Config(**TEXT, max_position_embeddings=64)).save_pretrained(folder)
    words = tokenizer("qwen_vl")
    words.chat_template = (FOLDER / "qwen_vl.jinja").read_text()
    words.save_pretrained(folder)
    docs = json_lines(workspace / "docs.jsonl")
    write(
        workspace / "rows.jsonl", [{"text": f"{one['question']} {one['answer']}"} for one in docs]
    )
    text = CONFIG.replace("path: model", "path: text_model")
    (workspace / "text.yaml").write_text(text)
    return str(workspace / "text.yaml")


def files(names):
    return [f"{name}.yaml" for name in names]


@pytest.mark.slow
def test_log_likelihoods_and_answers_are_those_of_the_harness_own_model_class(lm, text_config):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    docs = json_lines(Path("docs.jsonl"))

    def ask(kind, arguments):
        return [Instance(kind, {}, one, i) for i, one in enumerate(arguments)]

    pairs = [(one["question"], f" {one['answer']}") for one in docs]
    pairs += [("How many? 1 1", " pictures."), ("How many? 2 2", " pictures.")]
    pairs += [("", "no context"), ("a context with a space ", "x"), ("How many? " * 40, "left out")]
    texts = [("How many? 1 pictures. " * n,) for n in range(1, 12)]
    greedy = {"until": [" p"], "max_gen_toks": 6, "do_sample": False}
    with mvp_engine.train(text_config) as run:
        ours = harness.lm_class()(harness.Requests(run.engine, 0))
        exported = hf.AutoModelForCausalLM.from_pretrained(run.export(), dtype=torch.float32)
        words = hf.AutoTokenizer.from_pretrained(run.export())
        # Its cache takes the first log-probs of a text that is split into context and answer at two places.
        theirs = HFLM(exported, tokenizer=words, device="cpu", logits_cache=False)
        assert ours.max_length == theirs.max_length == 64
        for kind, arguments in (("loglikelihood", pairs), ("loglikelihood_rolling", texts)):
            found = getattr(ours, kind)(ask(kind, arguments))
            expected = getattr(theirs, kind)(ask(kind, arguments))
            if kind == "loglikelihood":
                assert [one for _, one in found] == [one for _, one in expected]
                assert any(one for _, one in found)
                found, expected = ([one for one, _ in all_] for all_ in (found, expected))
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
        prompts = ask("generate_until", [(text, greedy) for text, _ in pairs if text])
        assert ours.generate_until(prompts) == theirs.generate_until(prompts)


def scores(config, words, tasks):
    os.chdir(Path(config).parent)
    with mvp_engine.train(config, *words) as run:
        return run.evaluate(tasks=tasks)


@pytest.mark.slow
@pytest.mark.parametrize("shard", [1, 2])
def test_scores_on_two_ranks_are_those_of_one_to_the_last_digit(lm, text_config, ranks2, shard):
    del lm
    assert mvp(f"train {text_config} run_id=run") == 0
    words = [
        "resume=outputs/run",
        "workflow=evaluate_tasks",
        "eval_harness.tasks=[text_choice.yaml]",
    ]
    alone = scores(text_config, [*words, "run_id=one"], files(LM))
    both = ranks2.run(scores, text_config, [*words, f"parallel.shard={shard}"], files(LM))
    assert both == [alone, alone]
    assert {name.partition("/")[0] for name in alone} == set(LM)


@pytest.mark.slow
def test_scores_of_pictures_are_those_of_the_own_evaluation(lmms, config, workspace, ranks2):
    rows, docs = (json_lines(workspace / f"{name}.jsonl") for name in ("rows", "docs"))
    for row, doc in zip(rows[:5], docs[:5], strict=True):  # which no model answers
        doc["answer"] = row["messages"][1]["content"] = "7 pictures."
    write(workspace / "held.jsonl", rows)
    write(workspace / "docs.jsonl", docs)
    held = "data.sources.held.path=held.jsonl"
    with mvp_engine.train(config, "run_id=run", "train.max_steps=60", held) as run:
        own = run.evaluate()
        found = run.evaluate(tasks=files(LMMS))
        limited = run.evaluate(tasks=[{"task": "count.yaml", "limit": 5}])
    assert 0 < own["exact_held"] < 1
    assert found["count/exact"] == own["exact_held"]
    assert 0 < found["choose/acc"] < 1
    assert limited == {"count/exact": 0.0}
    words = ["resume=outputs/run", "workflow=evaluate_tasks", "eval_harness.tasks=[count.yaml]"]
    assert ranks2.run(scores, config, words, files(LMMS)) == [found, found]


@pytest.mark.slow
def test_tasks_in_a_training_are_metrics_and_leave_it_as_it_is(lm, text_config, workspace):
    words = ["eval.steps=5", "eval.generation=null"]
    assert mvp(f"train {text_config} run_id=without", *words) == 0
    section = "eval_harness={tasks:[text_choice.yaml,{task:text_answer.yaml,limit:4}],every:2}"
    page = "log.backends=[jsonl,plot]"
    assert mvp(f"train {text_config} run_id=with {section} {page}", *words) == 0
    plain, more = (
        json_lines(workspace / f"outputs/{name}/metrics.jsonl") for name in ("without", "with")
    )
    assert [one["loss"] for one in plain] == [one["loss"] for one in more]
    steps = [one["step"] for one in more if "text_choice/acc" in one]
    assert steps == [10, 20]
    assert all(
        "text_answer/exact_match" in one
        for one in more
        if one["step"] in steps and one["split"] == "eval"
    )
    written = json.loads((workspace / "outputs/with/tasks/step_20.json").read_text())
    assert written["text_answer/exact_match"]["examples"] == 4
    assert len(json_lines(workspace / "outputs/with/tasks/step_20_text_answer.jsonl")) == 4
    assert "<h2>Benchmarks</h2>" in (workspace / "outputs/with/report.html").read_text()


@pytest.mark.slow
def test_command_runs_tasks_with_fewshot_and_without_template(lm, text_config, workspace):
    assert mvp(f"train {text_config} run_id=run log.backends=[jsonl,plot]") == 0
    options = "--tasks text_answer.yaml --limit 3"
    found = {}
    for name, more in (
        ("plain", "--no-chat-template"),
        ("chat", ""),
        ("shots", "--fewshot 2 --system Be."),
    ):
        assert mvp(f"evaluate outputs/run {options} {more}") == 0
        (sample, *others) = json_lines(workspace / "outputs/run/tasks/step_20_text_answer.jsonl")
        assert len(others) == 2
        found[name] = sample["arguments"][0][0]
    assert found["plain"] == "How many? 0"
    assert "<|im_start|>user\nHow many? 0<|im_end|>" in found["chat"]
    assert found["shots"].startswith("<|im_start|>system\nBe.<|im_end|>")
    assert found["shots"].count("pictures.") == 2
    assert [one.keys() for one in json_lines(workspace / "outputs/run/evaluate.jsonl")][-1] >= {
        "text_answer/exact_match"
    }
    assert "<h2>Benchmarks</h2>" in (workspace / "outputs/run/report.html").read_text()


def test_tasks_that_cannot_run_are_errors_before_the_training(config, monkeypatch):
    with user_error("eval_harness.tasks: none.yaml: no such file"):
        mvp_engine.train(config, "eval_harness.tasks=[none.yaml]")
    with user_error("eval_harness.tasks: mm:x: give a name, a file, lm:NAME or lmms:NAME"):
        mvp_engine.train(config, "eval_harness.tasks=['mm:x']")
    with user_error("eval_harness: RL runs have no tasks of harnesses"):
        compose(ROOT / "recipes/grid_rl/configs/rl.yaml", ["eval_harness.tasks=[gsm8k]"])
    monkeypatch.setattr(harness, "PACKAGES", {"lm": "no_lm_eval", "lmms": "no_lmms_eval"})
    with user_error("needs the package no-lm-eval: pip install 'mvp-engine.lm-eval.'"):
        mvp_engine.train(config, "eval_harness.tasks=[gsm8k]")
    with user_error("needs the package no-lmms-eval: pip install"):
        mvp_engine.train(config, "eval_harness.tasks=[count.yaml]")


def test_sounds_of_lmms_eval_are_audio_of_a_row():
    wave = np.sin(np.linspace(0, 60, 1600)).astype(np.float32)
    sound = {"array": wave, "sampling_rate": 16_000}
    content = [{"type": "video", "url": sound}, {"type": "text", "text": "What?"}]
    message = harness.message_of({"role": "user", "content": content})
    audio, question = message["content"]
    assert question == {"type": "text", "text": "What?"}
    samples, rate = soundfile.read(io.BytesIO(audio["audio"]["bytes"]), dtype="float32")
    assert (audio["type"], rate) == ("audio", 16_000)
    assert np.array_equal(samples, wave)
    kinds = [
        harness.kind_of(one)
        for one in (sound, "a.mp4", "b.PNG", "c.flac", Image.new("RGB", (8, 8)))
    ]
    assert kinds == ["audio", "video", "image", "audio", "image"]


def test_generation_settings_that_decoding_lacks_are_refused(config):
    with mvp_engine.train(config, "train.max_steps=1", "eval.generation=null") as run:
        requests = harness.Requests(run.engine, 0)
        decoding, until = requests._decoding(
            {"until": "x", "temperature": 0.7, "max_new_tokens": 9}
        )
        assert (decoding.temperature, decoding.max_new_tokens, until) == (0.7, 9, ["x"])
        assert requests._decoding({"do_sample": False, "temperature": 0.7})[0].temperature == 0
        for wrong in ({"num_beams": 4}, {"repetition_penalty": 1.2}):
            with user_error(f"{next(iter(wrong))}="):
                requests._decoding(wrong)

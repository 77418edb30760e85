"""The recipe of docs/data.md, verbatim: it trains, logs a loss for each source, and exports the pixel limits."""

import re
from multiprocessing import active_children

import pytest
import transformers as hf
from conftest import CAMPAIGN, ROOT, mvp
from run_files import json_lines, printed_json
from templates.tiny import tokenizer
from test_kit import chat, with_images, write

from mvp_engine.cli import main
from mvp_engine.kit import MLLMData, MLLMDataKit


@pytest.fixture
def recipe(vlm_folder):
    page = (ROOT / "docs" / "data.md").read_text()
    for name, code in re.findall(
        r"`(chat/[^`]+)`:\n\n```(?:python|yaml)\n(.*?)```", page, flags=re.DOTALL
    ):
        (vlm_folder / name).parent.mkdir(parents=True, exist_ok=True)
        (vlm_folder / name).write_text(code)
    write(vlm_folder / "photos.jsonl", with_images(vlm_folder, 24))
    write(
        vlm_folder / "texts.jsonl",
        [chat(f"Count to {i}", " ".join(map(str, range(i)))) for i in range(1, 20)],
    )
    return vlm_folder


def records(folder):
    (file,) = folder.glob("*/metrics.jsonl")
    return json_lines(file)


@pytest.mark.slow
def test_docs_recipe_trains_and_logs_a_loss_for_each_source(recipe, capsys):
    words = ["chat/configs/train.yaml", "log.interval=1", "optim.lr=0.01"]
    assert main(["train", *words]) == 0
    lines = records(recipe / "outputs")
    for (
        line
    ) in lines:  # the loss is the mean over all tokens, so it lies between those of the sources
        parts = [line[key] for key in ("loss_photos", "loss_texts") if line.get(key) is not None]
        assert min(parts) - 1e-4 <= line["loss"] <= max(parts) + 1e-4
    assert all(
        any(line.get(key) is not None for line in lines) for key in ("loss_photos", "loss_texts")
    )
    assert lines[-1]["loss"] < lines[0]["loss"]
    capsys.readouterr()
    assert mvp("data inspect chat/configs/train.yaml --json") == 0
    assert printed_json(capsys)["plan"]["steps"] == len(lines)
    (run,) = recipe.glob("outputs/*")
    assert mvp(f"export {run} merged") == 0
    processor = hf.AutoProcessor.from_pretrained("merged")
    assert processor.image_processor.size["longest_edge"] == 512  # limits.max_pixels of the recipe
    assert hf.AutoModelForImageTextToText.from_pretrained("merged") is not None


@CAMPAIGN
def test_docs_recipe_on_streams_resumes_bit_exactly(recipe, monkeypatch):
    config = recipe / "chat" / "configs" / "train.yaml"
    text = (
        config.read_text()
        .replace("name: photos", "stream: true")
        .replace("repeats: 2.0", "stream: true")
    )
    config.write_text(text)
    monkeypatch.setattr("mvp_engine.kit.data.kit.STREAM_WINDOW", 2)
    words = f"train {config} log.interval=1 train.epochs=null optim.schedule=constant".split()
    before = {*active_children()}
    assert main([*words, "output_dir=straight", "train.max_steps=4"]) == 0
    for steps in (1, 3, 4):
        assert main([*words, "output_dir=stopped", f"train.max_steps={steps}", "resume=auto"]) == 0
    straight, stopped = (
        [(line["step"], line["epoch"], line["loss"]) for line in records(recipe / name)]
        for name in ("straight", "stopped")
    )
    assert straight == stopped
    assert {
        *active_children()
    } <= before  # the garbage collector would wait five seconds for each worker
    assert [step for step, _, _ in straight] == [1, 2, 3, 4]


def test_row_encoder_template_without_stop_token_warns_once(tmp_path, logged):
    source = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    warned = logged()
    write(tmp_path / "a.jsonl", [chat("Hi", "Yes")] * 3)
    settings = {
        "sources": [{"path": f"{tmp_path}/a.jsonl"}],
        "pack_tokens": 99,
        "global_batch_tokens": 99,
    }
    for words, warnings in (
        (tokenizer("zephyr"), 0),
        (tokenizer("zephyr", chat_template=source), 1),
    ):
        kit = MLLMDataKit(MLLMData.model_validate({**settings, "cache": str(tmp_path)}), words)
        list(kit.loader("train"))
        assert sum("does not learn to stop" in line for line in warned) == warnings

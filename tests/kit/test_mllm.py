"""MLLMEngine on rows as they may be: what cannot work is told at once, and what can does not fail at the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers as hf
from safetensors.torch import load_file
from tiny_vlm import chat, model_config, qwen3_vl, with_images, write

from mvp_engine.cli import main
from mvp_engine.errors import EXIT_USER_ERROR

CONFIG = """
engine: mvp_engine.kit:MLLMEngine
project: {name: tiny, dir: outputs}
model: {type: language_model, path: model}
mllm:
  micro_batch_tokens: 256
  sources:
    pictures: {path: pictures.jsonl}
    held: {path: held.jsonl, split: eval}
data: {micro_batch_size: 1, global_batch_size: 1, num_workers: 0}
loop: {total_steps: 1, eval_interval: 1}
checkpoint: {best_metric: null}
log: {backends: [jsonl]}
ask: {max_new_tokens: 2}
"""
FOLDERS = ["hf_step_1_ema", "hf_step_1"]
REPORT = ["workflow=report", "resume=auto"]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = with_images(tmp_path, 8)
    write(tmp_path / "pictures.jsonl", rows)
    write(tmp_path / "held.jsonl", rows[:2])
    hf.AutoModelForImageTextToText.from_config(model_config()).save_pretrained(tmp_path / "model")
    qwen3_vl().save_pretrained(tmp_path / "model")
    (tmp_path / "train.yaml").write_text(CONFIG)
    return str(tmp_path / "train.yaml")


def page(folder: Path) -> str:
    (file,) = folder.glob("outputs/*/report.html")
    return file.read_text()


def test_rows_that_end_with_a_picture_nobody_answers_are_not_asked(config: str, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (tmp_path / "held.jsonl").read_text().splitlines()]
    rows[1]["messages"].append(rows[1]["messages"][0])
    write(tmp_path / "held.jsonl", rows)
    assert main(["train", config]) == 0
    assert main(["train", config, *REPORT]) == 0
    assert "How many? 0" in page(tmp_path)
    assert "How many? 1" not in page(tmp_path)


def test_a_report_on_held_out_streams_shows_what_was_asked(config: str, tmp_path: Path) -> None:
    assert main(["train", config, "mllm.sources.held.stream=true"]) == 0
    assert main(["train", config, *REPORT, "mllm.sources.held.stream=true"]) == 0
    assert "How many? 1" in page(tmp_path)


def test_averages_and_last_weights_are_exported_apart_and_never_over_a_folder(
    config: str, tmp_path: Path, capsys: Any
) -> None:
    words = ["train", config, "loop.eval_interval=null", "optim.ema=0.9", "optim.lr=0.1", "export=link"]
    assert main(words) == 0
    assert main([*words, "workflow=export", "resume=auto", "optim.ema=null"]) == 0
    averages, last = (load_file(next(tmp_path.glob(f"outputs/*/{name}/model.safetensors"))) for name in FOLDERS)
    assert any(not averages[name].equal(last[name]) for name in last)
    assert (tmp_path / "link").resolve().name == FOLDERS[1]
    for workflow in ("train", "export", "report"):
        assert main([*words, f"workflow={workflow}", "resume=auto", "export=model"]) == EXIT_USER_ERROR
        assert "no link of an earlier run" in capsys.readouterr().err
        assert main([*words, f"workflow={workflow}", "resume=auto", "export=train.yaml/new"]) == EXIT_USER_ERROR
        assert "nothing can be written into" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["mllm.sources.held.path=gone.jsonl", "mllm.sources.held=null"])
def test_held_out_rows_that_are_not_there_are_told_before_the_first_step(
    config: str, tmp_path: Path, word: str
) -> None:
    assert main(["train", config, word]) == EXIT_USER_ERROR
    assert not list(tmp_path.glob("outputs/*/metrics.jsonl"))
    assert main(["train", config, word, "loop.eval_interval=null"]) == 0


def test_rejected_answers_are_not_taught(config: str, tmp_path: Path, capsys: Any) -> None:
    said = {"chosen": chat("Hi", "Yes")["messages"], "rejected": chat("Hi", "No")["messages"]}
    write(tmp_path / "pictures.jsonl", [said] * 4)
    words = ["train", config, "loop.eval_interval=null"]
    assert main([*words, "mllm.pairs=true"]) == EXIT_USER_ERROR
    assert "rejected answers" in capsys.readouterr().err
    assert main(words) == 0


def test_an_estimate_says_what_is_missing(config: str, capsys: Any) -> None:
    for word, told in ("loop.total_steps=null", "how long"), ("mllm.row_tokens=2", "no row of train"):
        assert main(["estimate", config, word]) == EXIT_USER_ERROR
        assert told in capsys.readouterr().err

"""The recipe of docs/value_model.md, verbatim: prompts with scores train a value model, which transformers loads."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
import torch
import transformers as hf
from conftest import ROOT, mvp
from templates.tiny import tokenizer
from tiny_vlm import TEXT, made, write


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "value_model.md").read_text()
    for name, code in re.findall(
        r"`(scores/[^`]+)`:\n\n```(?:python|yaml)\n(.*?)```", page, flags=re.DOTALL
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(code)
    dice = random.Random(0)
    rows = []
    for _ in range(80):
        score = dice.random() < 0.5
        words = dice.choices("abcdef", k=dice.randint(1, 4))
        rows.append(
            {"prompt": " ".join([*words, "good" if score else "bad"]), "score": float(score)}
        )
    write(tmp_path / "scores" / "train.jsonl", rows[:64])
    write(tmp_path / "scores" / "held_out.jsonl", rows[64:])
    words = tokenizer("qwen2_5")
    config = hf.Qwen3Config(**TEXT, pad_token_id=words.eos_token_id)
    hf.Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
    words.save_pretrained(tmp_path / "model")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_docs_value_model_learns_scores_and_exports_a_classifier(recipe):
    torch.manual_seed(0)
    assert mvp("train scores/train.yaml log.backends=[jsonl]") == 0
    (file,) = recipe.glob("outputs/*/metrics.jsonl")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    held_out = [record for record in records if record["split"] == "eval"]
    assert held_out[-1]["loss"] < 0.1  # of the mean alone: 0.25
    model = hf.AutoModelForSequenceClassification.from_pretrained("outputs/score_model")
    words = hf.AutoTokenizer.from_pretrained("outputs/score_model")
    for word, score in (("good", 1), ("bad", 0)):
        chat: Any = [{"role": "user", "content": f"a b {word}"}]
        ids = words.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        assert model(ids["input_ids"]).logits.item() == pytest.approx(score, abs=0.4)


def test_loader_numbers_of_rows_are_sequence_fields(tmp_path):
    rows = [{"prompt": f"{i}", "score": i / 4, "label": i % 2 == 0} for i in range(6)]
    rows += [
        {"prompt": "x", "completion": "y", "score": "2", "label": 3},
        {"prompt": "none", "label": 1},
    ]
    file = write(tmp_path / "rows.jsonl", rows)
    fields = {"score": "float", "label": "int"}
    kit = made(file, tokenizer("qwen2_5"), fields=fields, prompt_only=True, max_bad_rows=0.5)
    (batch,) = kit.loader("train", shuffle=False)
    by_sample = dict(
        zip(batch.sequence_fields["sample"].tolist(), range(batch.num_sequences), strict=True)
    )
    order = [by_sample[i] for i in range(7)]
    assert batch.sequence_fields["score"].dtype == torch.float32
    assert batch.sequence_fields["score"][order].tolist() == [0, 0.25, 0.5, 0.75, 1, 1.25, 2]
    assert batch.sequence_fields["label"][order].tolist() == [1, 0, 1, 0, 1, 0, 3]
    prompt = batch.select([by_sample[0]])
    assert int(prompt.num_loss_tokens) == 0
    text = kit.processor.decode(prompt.input_ids)
    assert text.endswith("<|im_start|>user\n0<|im_end|>\n<|im_start|>assistant\n")
    assert [(bad.where, bad.reason) for bad in kit.bad_rows()] == [
        ("rows.jsonl:8", "missing_field")
    ]
    assert kit.row_encoder.empty_batch({}).sequence_fields["score"].dtype == torch.float32

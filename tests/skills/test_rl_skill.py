"""The rl skill's check passes on the kit and the recipe, and fails on rewards and batches with common errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import ROOT

from mvp_engine.data.batch import IGNORE
from mvp_engine.imports import import_file
from mvp_engine.rl import Sample
from mvp_engine.rl.batches import rollout_batch

check = import_file(ROOT / "skills" / "rl" / "check.py")


def test_check_of_the_kit_and_of_the_recipe_passes() -> None:
    assert check.kit_problems(None) == []
    recipe = import_file(ROOT / "recipes" / "reverse_rl" / "engine.py")
    assert check.problems(recipe.ReverseEngine) == []


def wrong_sign(row: dict[str, Any], answer: Any) -> float:
    return -float(answer.text == row["answer"])


def other_column(row: dict[str, Any], answer: Any) -> float:
    return float(answer.text == row["prompt"])


def not_a_number(row: dict[str, Any], answer: Any) -> dict[str, float]:
    return {"exact": float("nan")}


def tokenized_again(prompts: Any, samples: Any) -> Any:
    texts = [check.TOKENIZER.decode(sample.tokens) for sample in samples]
    new = [check.TOKENIZER(text).input_ids for text in texts]
    return rollout_batch(prompts, [Sample(i, ids, [0.0] * len(ids), 0, "stop") for i, ids in enumerate(new)])


def labels_not_shifted(prompts: Any, samples: Any) -> Any:
    batch = rollout_batch(prompts, samples)
    return replace(batch, labels=torch.where(batch.labels == IGNORE, IGNORE, batch.input_ids))


def labels_of_prompts_too(prompts: Any, samples: Any) -> Any:
    batch = rollout_batch(prompts, samples)
    labels = batch.labels.clone()
    labels[0] = batch.input_ids[1]
    return replace(batch, labels=labels)


@pytest.mark.parametrize(
    ("checked", "said"),
    [
        (wrong_sign, "sign wrong"),
        (other_column, "another column"),
        (not_a_number, "not finite"),
        (tokenized_again, "tokenized again"),
        (labels_not_shifted, "mask is wrong"),
        (labels_of_prompts_too, "mask is wrong"),
    ],
)
def test_check_of_a_wrong_reward_or_batch_names_the_error(checked: Any, said: str) -> None:
    assert any(said in problem for problem in check.problems(checked))

"""A reward model as the reward: scores of the sampled tokens equal transformers' classifier."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from conftest import user_error
from templates.tiny import tokenizer
from test_rewards import Letters, settings
from test_rewards import prompts as toy_prompts
from tiny_vlm import TEXT, made, write

from mvp_engine.kit import MLLMDataKit
from mvp_engine.kit.rl.episodes import Episodes, RewardFailed
from mvp_engine.kit.rl.model_groups import ModelGroups, check_scorer
from mvp_engine.kit.rl.prompts import prompt_loader, prompt_settings
from mvp_engine.kit.rl.rollout import Sample
from mvp_engine.worker.group import WorkerGroup
from mvp_engine.worker.worker import WorkerSpec


@pytest.fixture
def folder(tmp_path):
    words = tokenizer("qwen2_5")
    config = hf.Qwen3Config(**TEXT, num_labels=1, pad_token_id=0)
    torch.manual_seed(3)
    hf.Qwen3ForSequenceClassification(config).save_pretrained(tmp_path / "reward")
    words.save_pretrained(tmp_path / "reward")
    return tmp_path / "reward"


def test_reward_model_scores_equal_the_classifier_and_are_added(folder, tmp_path):
    kit = made(
        write(tmp_path / "rows.jsonl", [{"prompt": "a b"}, {"prompt": "c"}]), tokenizer("qwen2_5")
    )
    kit = MLLMDataKit(prompt_settings(kit.settings, 8), kit.processor)
    (prompts,) = prompt_loader(kit, prompts=2, shuffle=False)
    samples = [
        Sample(i % 2, list(range(5, 6 + i)) if i else [], [0.0] * i, [0] * i, "stop")
        for i in range(4)
    ]
    spec = WorkerSpec.of(str(folder), model={"type": "value_model"}, device="cpu")
    with WorkerGroup.start(spec, name="reward") as group:
        models: Any = object.__new__(ModelGroups)
        models.actor, models.reward = None, group
        generation = SimpleNamespace(temperature=1.0)
        models.config = SimpleNamespace(budget=64, generation=generation)
        scores = models.reward_scores(prompts, samples)
        episodes = Episodes(lambda row, answer: {"n": 2.0}, Letters(), settings(workers=0))
        episodes.model = models.reward_scores
        found = episodes.rewards(prompts, samples)
    model: Any = hf.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    for sample, score, reward in zip(samples, scores, found, strict=True):
        ids = prompts[sample.prompt].batch.input_ids.tolist() + sample.tokens
        with torch.no_grad():
            assert score == pytest.approx(model(torch.tensor([ids])).logits.item(), abs=1e-6)
        assert reward.parts == {"n": 2.0, "model": score}
        assert reward.value == pytest.approx(2.0 + score)


def test_rewards_without_a_function_are_the_scores_and_nan_is_named():
    samples = [Sample(0, [1], [0.0], [0], "stop")] * 2
    episodes = Episodes(None, Letters(), settings(workers=2))
    episodes.model = lambda prompts, samples: [1.5, 2.5]
    assert [one.value for one in episodes.rewards(toy_prompts(1), samples)] == [1.5, 2.5]
    episodes.model = lambda prompts, samples: [float("nan")] * 2
    with pytest.raises(RewardFailed, match=r"toy.jsonl:0.*the reward model's score is nan"):
        episodes.rewards(toy_prompts(1), samples)


def test_check_scorer_another_vocabulary_or_no_head_is_refused(folder, tmp_path):
    check = partial(check_scorer, "reward.model", has_score=True)
    check(folder, tokenizer("qwen2_5"))
    with user_error(r"reward.model=.* its tokenizer is not the policy's"):
        check(folder, tokenizer("zephyr"))
    hf.Qwen3ForCausalLM(hf.Qwen3Config(**TEXT)).save_pretrained(tmp_path / "policy")
    with user_error(r"policy has no score.weight, so it is not a reward model"):
        check(tmp_path / "policy", tokenizer("qwen2_5"))
    (tmp_path / "hf_step_20").mkdir()
    with user_error(r"is not the Hugging Face folder .* Its export is .*hf_step_20"):
        check(tmp_path, tokenizer("qwen2_5"))

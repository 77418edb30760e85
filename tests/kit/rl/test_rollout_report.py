"""pass@k, rollouts.jsonl and the report page of an RL run."""

import itertools
import json

import pytest
from tiny_vlm import made, model_config, qwen3_vl, with_images, write

from mvp_engine.kit import MLLMDataKit
from mvp_engine.kit.rl import Experience
from mvp_engine.kit.rl.episodes import Reward, reward_metrics
from mvp_engine.kit.rl.prompts import prompt_loader, prompt_settings
from mvp_engine.kit.rl.rollout import Sample
from mvp_engine.kit.rl.rollout_log import (
    RolloutLog,
    pass_at_k,
    pass_metrics,
    read_rollouts,
    rl_panels,
    rollout_sections,
    rollouts_html,
)
from mvp_engine.report import write_report
from mvp_engine.report.facts import RunFacts, metric_texts
from mvp_engine.runs import Run


@pytest.mark.parametrize("total, right", [(6, 0), (6, 1), (6, 4), (6, 6), (1, 1), (5, 2)])
def test_pass_at_k_is_the_mean_over_all_subsets(total, right):
    for k in range(1, total + 1):
        subsets = list(itertools.combinations([i < right for i in range(total)], k))
        assert pass_at_k(total, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_metrics_groups_by_prompt_and_leaves_failed_rewards_out():
    samples = [Sample(i // 3, [1], [0.0], [0], "stop") for i in range(9)]
    rewards = [Reward(value) for value in (1.0, 0.9, 0.0, None, 0.0, 2.0, None, None, None)]
    found = pass_metrics(samples, rewards, 1.0)
    assert found == {
        "pass@1": (pytest.approx(1 / 3 + 1 / 2), 2.0),
        "pass@2": (pytest.approx(2 / 3 + 1), 2.0),
        "pass@3": (1.0, 1.0),  # of the prompt with three rewards
    }


def test_pass_metrics_and_mean_reward_of_a_policy_that_is_always_right_are_1_whatever_fails():
    samples = [Sample(i // 4, [1], [0.0], [0], "stop") for i in range(200)]
    rewards = [Reward(None, error="timeout") if i % 14 == 0 else Reward(1.0) for i in range(200)]
    metrics = reward_metrics(rewards) | pass_metrics(samples, rewards, 1.0)
    means = {name: total / weight for name, (total, weight) in metrics.items()}
    assert means == {
        "reward": 1.0,
        "reward_errors": 15 / 200,
        "pass@1": 1.0,
        "pass@2": 1.0,
        "pass@4": 1.0,
    }


def test_pass_metrics_without_samples_are_none():
    assert pass_metrics([], [], 1.0) == {}
    assert metric_texts({"pass@2": 0.5}) == {"pass@2": "50.0 %"}


@pytest.fixture
def run(tmp_path):
    rows = [{**row, "answer": f"<b>{i}</b>"} for i, row in enumerate(with_images(tmp_path, 3))]
    file = write(tmp_path / "rows.jsonl", rows)
    sources = [{"path": str(file), "split": split, "name": split} for split in ("train", "eval")]
    kit = made(file, qwen3_vl(), model_config(), sources=sources)
    kit = MLLMDataKit(prompt_settings(kit.settings, 8), kit.processor, model_config=model_config())
    (prompts,) = prompt_loader(kit, "eval", prompts=8)
    return kit, prompts, RolloutLog(tmp_path, kit.processor.tokenizer, prompts=2)


def rollouts(kit, step):
    ids = kit.processor.tokenizer(f"at {step}").input_ids
    samples = [Sample(i // 2, ids, [0.0] * len(ids), [step] * len(ids), "length") for i in range(6)]
    rewards = [Reward(float(i % 2), {"exact": 1.0} if i else {}) for i in range(5)] + [
        Reward(None, error="ValueError: x")
    ]
    return samples, rewards


def test_rollout_log_a_run_that_resumes_writes_no_step_twice(run, tmp_path):
    kit, prompts, log = run
    for step in (1, 2, 3):
        log.write(step, "train", Experience(prompts, *rollouts(kit, step)))
    log.write(3, "eval", Experience(prompts, *rollouts(kit, 3)))
    with open(log.file, "a") as file:
        file.write('{"step": 4, "spl')  # a kill
    log.rewind(2)
    log.write(3, "train", Experience(prompts, *rollouts(kit, 3)))
    records = list(read_rollouts(log.file))
    assert [(one["step"], one["sample"]) for one in records] == [
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
        (3, 0),
        (3, 1),
    ]
    first = records[0]
    assert first["columns"] == {"answer": "<b>0</b>"}
    assert first["prompt"] == "How many? 0"
    assert first["completions"][1] == {
        "text": "at 1",
        "reward": 1.0,
        "tokens": len(kit.processor.tokenizer("at 1").input_ids),
        "reason": "length",
        "version": 1,
        "parts": {"exact": 1.0},
    }


def test_rl_page_shows_prompts_with_media_completions_and_rewards(run, tmp_path):
    kit, prompts, log = run
    metrics = []
    for step in (1, 2):
        for split in ("train", "eval"):
            log.write(step, split, Experience(prompts, *rollouts(kit, step)))
            metrics.append(
                {
                    "step": step,
                    "epoch": 0,
                    "split": split,
                    "reward": step / 2,
                    "reward_exact": 0.5,
                    "pass@1": 0.5,
                }
            )
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in metrics))
    facts = RunFacts(Run(tmp_path))
    assert list(rl_panels(facts))[:3] == [
        "reward",
        "parts of the reward",
        "pass@k of held-out prompts",
    ]
    sections = rollout_sections(tmp_path, kit)
    assert {title: len(found) for title, found in sections.items()} == {
        "Held-out prompts at step 2": 3,
        "The same prompts over the training": 3,
        "Rollouts of training step 2": 2,
    }
    file = tmp_path / "report.html"
    write_report(
        file,
        Run(tmp_path),
        title="RL",
        subtitle="",
        panels=rl_panels(facts),
        sections=rollouts_html(sections),
        next_steps={},
    )
    page = file.read_text()
    assert "&lt;b&gt;2&lt;/b&gt;" in page
    assert "<b>2</b>" not in page
    # Rows have 0, 1 and 2 images; the second section has none.
    assert page.count("data:image/png") == 1 + 2 + 1
    assert page.count("ValueError: x") == 1
    # Every second sample; the last of three prompts failed.
    assert page.count('class="reward good"') == 2 + 2
    assert page.count(">step 1<") == 3

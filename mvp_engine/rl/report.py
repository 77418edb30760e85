"""The report page of an RL run: curves of rewards and of the policy, and rollouts from `rollouts.jsonl`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mvp_engine.kit.data import MLLMDataKit
from mvp_engine.kit.data.read.rows import read_row
from mvp_engine.kit.examples import media_files
from mvp_engine.report import PromptRollouts, RolloutText
from mvp_engine.report.facts import RunFacts
from mvp_engine.rl.rollout_log import ROLLOUTS_FILE, Record, read_rollouts

MAX_PROMPTS = 12  # of the last evaluation
MAX_OVER_STEPS = 4  # prompts whose completions are shown over the training
MAX_STEPS = 8  # of the completions of one prompt over the training
# Metrics with a plot of their own, where the run has them.
PANELS = ("length", "kl", "entropy", "ratio", "clip_fraction", "gap", "values", "finished")


def rl_panels(facts: RunFacts) -> dict[str, dict[str, str]]:
    """Metrics to plot, by title and label: rewards first."""
    names = {name: None for record in facts.records for name in record}
    parts = [name for name in names if name.startswith("reward_") and name != "reward_errors"]
    passes = [name for name in names if name.startswith("pass@")]
    panels = {"reward": {"eval": "reward"}}
    panels["parts of the reward"] = {name.removeprefix("reward_"): name for name in parts}
    panels["pass@k of held-out prompts"] = {name: name for name in passes}
    panels |= {name: {"eval": name} for name in PANELS}
    panels["loss"] = {"eval": "loss"}
    return {title: metrics for title, metrics in panels.items() if metrics}


def rollout_sections(folder: Path, kit: MLLMDataKit) -> dict[str, Sequence[PromptRollouts]]:
    """Prompts with completions and rewards, by title, from the run folder; media are read from the data."""
    records = list(read_rollouts(folder / ROLLOUTS_FILE))
    held_out = [record for record in records if record["split"] == "eval"]
    trained = [record for record in records if record["split"] == "train"]
    sections: dict[str, Sequence[PromptRollouts]] = {}
    last = _last_step(held_out)
    # Half of them are those with the lowest rewards.
    chosen = sorted(last, key=_mean_reward)[: MAX_PROMPTS // 2]
    chosen += [record for record in last if record not in chosen][: MAX_PROMPTS - len(chosen)]
    sections[f"Held-out prompts at step {_step(last)}"] = [
        _prompt(record, kit) for record in chosen
    ]
    if _step(held_out[:1]) != _step(last):
        sections["The same prompts over the training"] = _over_steps(held_out)
    last = _last_step(trained)
    sections[f"Rollouts of training step {_step(last)}"] = [_prompt(record, kit) for record in last]
    return sections


def _step(records: Sequence[Record]) -> int:
    return int(records[0]["step"]) if records else 0


def _mean_reward(record: Record) -> float:
    """Of the completions of a prompt that have one; a prompt without any comes last."""
    rewards = [one["reward"] for one in record["completions"] if one["reward"] is not None]
    return sum(rewards) / len(rewards) if rewards else math.inf


def _last_step(records: Sequence[Record]) -> list[Record]:
    last = max((record["step"] for record in records), default=0)
    return [record for record in records if record["step"] == last]


def _prompt(record: Record, kit: MLLMDataKit) -> PromptRollouts:
    completions = []
    for one in record["completions"]:
        cut = ", cut" if one["reason"] == "length" else ""
        note = f"{one['tokens']} tokens{cut}"
        if one.get("parts"):
            note += "; " + ", ".join(f"{name} {value:g}" for name, value in one["parts"].items())
        completions.append(RolloutText(one["text"], one["reward"], one.get("error", note)))
    media = partial(_media, kit, record["split"], record["sample"])
    return PromptRollouts(record["prompt"], completions, media, record["columns"])


def _media(kit: MLLMDataKit, split: str, sample: int) -> list[bytes]:
    source, row, format = kit.row(split, sample)
    return media_files(kit, source, read_row(row, format).messages)


def _over_steps(records: Sequence[Record]) -> list[PromptRollouts]:
    """Prompts with low rewards at first: the first completion at some evaluations, from the first to the last."""
    by_prompt: dict[Any, list[Record]] = {}
    for record in records:
        by_prompt.setdefault(record["sample"], []).append(record)
    found = []
    prompts = sorted(by_prompt.values(), key=lambda each: _mean_reward(each[0]))
    for of_prompt in prompts[:MAX_OVER_STEPS]:
        last = len(of_prompt) - 1
        shown = min(MAX_STEPS, len(of_prompt))
        places = sorted({round(i * last / max(1, shown - 1)) for i in range(shown)})
        completions = []
        for record in [of_prompt[place] for place in places]:
            first = record["completions"][0]
            completions.append(
                RolloutText(first["text"], first["reward"], f"step {record['step']}")
            )
        found.append(PromptRollouts(of_prompt[0]["prompt"], completions))
    return found

"""rollouts.jsonl of a run folder: prompts, completions and rewards of training steps and evaluations."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from mvp_engine.files import atomic_write_text
from mvp_engine.kit.data import MLLMDataKit
from mvp_engine.kit.data.read.rows import read_row
from mvp_engine.kit.examples import media_files
from mvp_engine.kit.rl.collector import Experience
from mvp_engine.kit.rl.episodes import Reward
from mvp_engine.kit.rl.prompts import Prompt
from mvp_engine.kit.rl.rollout import Sample
from mvp_engine.log.format import number
from mvp_engine.report.facts import RunFacts
from mvp_engine.report.page import media_item

ROLLOUTS_FILE = "rollouts.jsonl"
TRAIN_PROMPTS = 4  # prompts of each step that are written
EVAL_PROMPTS = 24  # held-out prompts of each evaluation that are written
MAX_CHARACTERS = 300  # of a column
Record = dict[str, Any]


class RolloutLog:
    """Appends the completions of the first `prompts` prompts of each step, and of more in each evaluation."""

    def __init__(self, folder: Path, tokenizer: Any, prompts: int = TRAIN_PROMPTS) -> None:
        self.file = folder / ROLLOUTS_FILE
        self.tokenizer = tokenizer
        self.prompts = prompts

    def rewind(self, step: int) -> None:
        """Remove what was written after a step that a run resumes from: those steps come again."""
        if not self.file.is_file():
            return
        kept = [one for one in read_rollouts(self.file) if one["step"] <= step]
        atomic_write_text(self.file, "".join(map(_line, kept)))

    def has(self, step: int, split: str) -> bool:
        """Are there records of this step already?"""
        records = read_rollouts(self.file)
        return any((one["step"], one["split"]) == (step, split) for one in records)

    def write(self, step: int, split: str, made: Experience) -> None:
        """Append one record for each prompt, with all of its samples."""
        records: dict[int, Record] = {}
        most = max(self.prompts, EVAL_PROMPTS) if split == "eval" else self.prompts
        for sample, reward in zip(made.samples, made.rewards, strict=True):
            if sample.prompt >= most:
                continue
            prompt = made.prompts[sample.prompt]
            if sample.prompt not in records:
                records[sample.prompt] = {
                    "step": step,
                    "split": split,
                    "source": prompt.source,
                    "where": prompt.where,
                    "sample": prompt.sample,
                    "prompt": prompt.text or self._text(prompt.text_ids),
                    "columns": _columns(prompt),
                    "completions": [],
                }
            records[sample.prompt]["completions"].append(self._completion(sample, reward))
        with open(self.file, "a", encoding="utf-8") as out:
            out.writelines(map(_line, records.values()))

    def _completion(self, sample: Sample, reward: Reward) -> Record:
        record: Record = {
            "text": self._text(sample.tokens),
            "reward": reward.value,
            "tokens": len(sample.tokens),
            "reason": sample.reason,
            "version": sample.version,
        }
        if sample.turns:
            record["turns"] = [turn for one in sample.sequences() for turn in self._turns(one)]
        if reward.parts:
            record["parts"] = reward.parts
        if reward.error is not None:
            record["error"] = reward.error
        return record

    def _turns(self, sample: Sample) -> list[Record]:
        """What the policy wrote, each with its reward, and what it read in between."""
        found: list[Record] = []
        done = 0
        rewards = sample.turn_rewards or [0.0] * len(sample.turns)
        for (start, end), reward in zip(sample.turns, rewards, strict=True):
            if start > done:
                found.append({"by": "environment", "text": self._text(sample.tokens[done:start])})
            text = self._text(sample.tokens[start:end])
            found.append({"by": "policy", "text": text, "reward": reward})
            done = end
        return found

    def _text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


def _columns(prompt: Prompt) -> dict[str, str]:
    """What the reward reads: columns of the row that are not its prompt, as text."""
    return {name: str(prompt.row[name])[:MAX_CHARACTERS] for name in prompt.other_columns}


def read_rollouts(file: Path) -> Iterator[Record]:
    """The records of a file, without a last line that a crash cut off."""
    if not file.is_file():
        return
    with open(file, encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("}\n"):
                yield json.loads(line)


def _line(record: Record) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


# The report page of an RL run: curves of rewards and of the policy, and rollouts from `rollouts.jsonl`.

MAX_PROMPTS = 12  # of the last evaluation
MAX_OVER_STEPS = 4  # prompts whose completions are shown over the training
MAX_STEPS = 8  # of the completions of one prompt over the training
# Metrics with a plot of their own, where the run has them.
PANELS = ("length", "kl", "entropy", "ratio", "clip_fraction", "gap", "values", "finished")
MAX_SHOWN = 2000  # of a completion on the page
STYLE = """<style>
.rollouts { flex: 1 1 100%; } .rollouts td { padding: 4px 14px 4px 0; }
.rollouts .text { width: 100%; white-space: pre-wrap; overflow-wrap: anywhere; }
.policy { background: color-mix(in srgb, var(--good) 18%, transparent); border-radius: 3px; }
.environment { opacity: 0.65; }
.reward { font-weight: 600; white-space: nowrap; } .good { color: var(--good); } .bad { color: var(--bad); }
</style>"""


class RolloutText(NamedTuple):
    text: str
    reward: float | None  # None: it failed
    note: str = ""  # such as the step, or why the completion ended
    turns: Sequence[Record] = ()  # who wrote what, of several turns


@dataclass(frozen=True)
class PromptRollouts:
    """A prompt and its completions. `media` returns files as in `Example`; `facts` are other columns of the row."""

    prompt: str
    completions: Sequence[RolloutText]
    media: Callable[[], Sequence[bytes]] = list
    facts: dict[str, str] = field(default_factory=dict)


def rollouts_html(sections: Mapping[str, Sequence[PromptRollouts]]) -> list[str]:
    """Sections of cards, by title; those without prompts are left out."""
    html = [STYLE]
    for title, prompts in sections.items():
        if prompts:
            completions = [shown for prompt in prompts for shown in prompt.completions]
            rewards = [shown.reward for shown in completions if shown.reward is not None]
            html += [f"<h2>{escape(title)}</h2>", "<div class=cards>"]
            html += [_prompt_card(prompt, rewards) for prompt in prompts]
            html.append("</div>")
    return html


def _prompt_card(prompt: PromptRollouts, rewards: list[float]) -> str:
    media = "".join(media_item(data) for data in prompt.media())
    html = f"<div class=media>{media}</div>" if media else ""
    html += f"<dl><dt>prompt<dd>{escape(prompt.prompt)}"
    for name, text in prompt.facts.items():
        html += f"<dt>{escape(name)}<dd>{escape(text)}"
    html += "</dl><table class=rollouts>"
    for shown in prompt.completions:
        text = shown.text if len(shown.text) <= MAX_SHOWN else shown.text[:MAX_SHOWN] + " ..."
        written = escape(text) if text else "<span class=dim>(empty)</span>"
        if shown.turns:
            written = _turns_html(shown.turns)
        note = f"<span class=dim>{escape(shown.note)}</span>" if shown.note else ""
        html += f'<tr><td class="reward {_colour(shown.reward, rewards)}">{number(shown.reward)}'
        html += f"<td class=text>{written} {note}</tr>"
    return f"<div class=card>{html}</table></div>"


def _turns_html(turns: Sequence[Record]) -> str:
    """Turns coloured by who wrote them, each with its reward if it has one."""
    html = ""
    left = MAX_SHOWN
    for turn in turns:
        text = turn["text"]
        html += f"<span class={turn['by']}>{escape(text[:left])}</span>"
        if turn.get("reward"):
            html += f" <span class=dim>{turn['reward']:+g}</span>"
        left -= len(text)
        if left <= 0:
            return f"{html} ..."
    return html


def _colour(reward: float | None, rewards: list[float]) -> str:
    """Green in the upper third of the rewards on the page, red in the lower third."""
    if reward is None:
        return "bad"
    lowest, highest = min(rewards), max(rewards)
    if highest == lowest:
        return ""
    place = (reward - lowest) / (highest - lowest)
    return "good" if place >= 2 / 3 else "bad" if place <= 1 / 3 else ""


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
        turns = one.get("turns", ())
        completions.append(RolloutText(one["text"], one["reward"], one.get("error", note), turns))
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
            note = f"step {record['step']}"
            completions.append(RolloutText(first["text"], first["reward"], note))
        found.append(PromptRollouts(of_prompt[0]["prompt"], completions))
    return found

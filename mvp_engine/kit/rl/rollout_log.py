"""rollouts.jsonl of a run folder: prompts, completions and rewards of training steps and evaluations."""

from __future__ import annotations

import contextlib
import json
import math
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from mvp_engine.distributed import World
from mvp_engine.engine.monitor import Meter
from mvp_engine.files import atomic_write_text
from mvp_engine.kit.data import MLLMDataKit
from mvp_engine.kit.data.read.rows import read_row
from mvp_engine.kit.examples import media_files
from mvp_engine.kit.rl.buffer import Experience
from mvp_engine.kit.rl.episodes import Reward, reward_metrics
from mvp_engine.kit.rl.prompts import Prompt
from mvp_engine.kit.rl.rollout import Sample
from mvp_engine.log.format import number
from mvp_engine.report.facts import RunFacts
from mvp_engine.report.page import media_item

ROLLOUTS_FILE = "rollouts.jsonl"
TRAIN_PROMPTS = 4  # prompts of each step that are written
EVAL_PROMPTS = 24  # held-out prompts of each evaluation that are written
MAX_CHARACTERS = 300  # of a column
PLACEHOLDERS = re.compile(r"(?:<[^<>]*(image|video|audio)[^<>]*>)+")  # of the chat template
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
                between = self._text(sample.tokens[done:start], bool(sample.media))
                found.append({"by": "environment", "text": between})
            text = self._text(sample.tokens[start:end])
            found.append({"by": "policy", "text": text, "reward": reward})
            done = end
        return found

    def _text(self, tokens: list[int], has_media: bool = False) -> str:
        """Without special tokens; `has_media` writes [image] in place of the tokens of an image."""
        text = str(self.tokenizer.decode(tokens, skip_special_tokens=not has_media))
        if has_media:
            text = PLACEHOLDERS.sub(r"[\1]", text)
            for special in self.tokenizer.all_special_tokens:
                text = text.replace(special, "")
        return text


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


def rollout_metrics(made: Experience, has_reward: bool) -> dict[str, tuple[float, float]]:
    """Of rewards; the mean numbers of sampled tokens and turns, the share of samples that ended with a stop token."""
    sequences = [one for sample in made.samples for one in sample.sequences()]
    tokens = sum(end - start for one in sequences for start, end in one.written())
    finished = sum(sample.reason == "stop" for sample in made.samples)
    total = len(made.samples)
    found = {"length": (tokens, total), "finished": (finished, total)}
    if turns := sum(len(one.turns) for one in sequences):
        found["turns"] = (turns, total)
    return (reward_metrics(made.rewards) if has_reward else {}) | found


# pass@k: the probability that at least one of k completions of a prompt is right, from n >= k of them.


def pass_at_k(total: int, right: int, k: int) -> float:
    """The unbiased estimate from `total` completions, of which `right` are right (Chen et al., 2021)."""
    return 1.0 - math.comb(total - right, k) / math.comb(total, k)


def pass_metrics(
    samples: Sequence[Sample], rewards: Sequence[Reward], right_from: float = 1.0
) -> dict[str, tuple[float, float]]:
    """pass@1, pass@2, pass@4, ... up to the completions of each prompt, as (sum, prompts).

    A completion is right if its reward is `right_from` or more. One without a reward is left out, as it is of the mean
    reward: pass@k is the mean over the prompts with at least k rewards.
    """
    completions = Counter(sample.prompt for sample in samples)
    judged: dict[int, list[bool]] = {}
    for sample, reward in zip(samples, rewards, strict=True):
        if reward.value is not None:
            judged.setdefault(sample.prompt, []).append(reward.value >= right_from)
    fewest = min(completions.values(), default=0)
    found = {}
    for k in sorted({*(2**i for i in range(fewest.bit_length())), fewest} - {0}):
        groups = [group for group in judged.values() if len(group) >= k]
        if groups:
            total = sum(pass_at_k(len(group), sum(group), k) for group in groups)
            found[f"pass@{k}"] = (total, float(len(groups)))
    return found


# The report page of an RL run: curves of rewards and of the policy, and rollouts from `rollouts.jsonl`.

MAX_PROMPTS = 12  # of the last evaluation
MAX_OVER_STEPS = 4  # prompts whose completions are shown over the training
MAX_STEPS = 8  # of the completions of one prompt over the training
# Metrics with a plot of their own, where the run has them.
PANELS = ("length", "kl", "entropy", "ratio", "clip_fraction", "gap", "values", "finished")
MAX_SHOWN = 2000  # of a completion on the page
MAX_LINE = 80  # of a message between turns that is shown in one line
STYLE = """<style>
.card:has(> .rollouts) { align-content: flex-start; }
.rollouts { flex: 1 1 100%; } .rollouts td { padding: 4px 14px 4px 0; }
.rollouts .text { width: 100%; white-space: pre-wrap; overflow-wrap: anywhere; }
.policy, .environment { border-left: 3px solid; padding: 1px 8px; margin: 2px 0; }
.policy { border-color: var(--good); background: color-mix(in srgb, var(--good) 12%, transparent); }
.environment { border-color: color-mix(in srgb, currentColor 25%, transparent); color: var(--dim); }
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
        text = turn["text"][:left]
        if turn["by"] == "environment":  # the chat template has lines of its own around a message
            text = " ".join(text.split()) if len(text) < MAX_LINE else text.strip()
        reward = f" <span class=dim>{turn['reward']:+g}</span>" if turn.get("reward") else ""
        html += f"<div class={turn['by']}>{escape(text)}{reward}</div>"
        left -= len(text)
        if left <= 0:
            return f"{html} ..."
    return html


def _colour(reward: float | None, rewards: list[float]) -> str:
    """Green in the upper third of the rewards on the page, red in the lower third if it is no right answer's."""
    if reward is None:
        return "bad"
    lowest, highest = min(rewards), max(rewards)
    if highest == lowest:
        return ""
    place = (reward - lowest) / (highest - lowest)
    return "good" if place >= 2 / 3 else "bad" if place <= 1 / 3 and reward < 1 else ""


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
            turns = first.get("turns", ())
            completions.append(RolloutText(first["text"], first["reward"], note, turns))
        found.append(PromptRollouts(of_prompt[0]["prompt"], completions))
    return found


HASH = "episodes_hash"  # the total of `Experience.hash` over a training shows that nothing was lost or trained twice

# RLMeter: a Meter that also says what the steps of an RL training spend their time on.


class RLMeter(Meter):
    evaluation_keys = "eval.samples"

    def __init__(self, world: World, folder: Path, step: int) -> None:
        super().__init__(world, folder, step)
        self.seconds: dict[str, float] = {}
        self._timed = threading.local()  # what a thread is in: rollouts may run next to an update
        # Bytes of the rank that has most: the controller itself holds no model.
        self.peak_memory = 0

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """A context whose time is logged as `<name>_s` per step, without that of contexts inside."""
        outer = getattr(self._timed, "name", None)
        self._timed.name = name
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        self._timed.name = outer
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        if outer is not None:
            self.seconds[outer] = self.seconds.get(outer, 0.0) - seconds

    def peak(self) -> int:
        return self.peak_memory or super().peak()

    def read(self, totals: Any, waited: float, remaining_steps: int | None) -> dict[str, float]:
        steps = max(1, self.steps)
        totals = {name: value for name, value in totals.items() if name != HASH}  # it has no rate
        spent = {f"{name}_s": seconds / steps for name, seconds in self.seconds.items()}
        self.seconds = {}
        if self.peak_memory:
            spent["memory_gib"] = self.peak_memory / 2**30
        return {**super().read(totals, waited, remaining_steps), **spent}

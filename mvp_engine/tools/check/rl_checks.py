"""What a check finds out about an RL config: rewards that cannot teach anything, completions that are cut."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean
from typing import Any

from mvp_engine.errors import count
from mvp_engine.kit.data.read.row_format import RowFormat
from mvp_engine.kit.data.read.row_types import BadRow
from mvp_engine.kit.data.read.rows import read_row
from mvp_engine.kit.policy import ALGORITHMS
from mvp_engine.log.format import number
from mvp_engine.rl.engine import RLEngine
from mvp_engine.rl.prompts import Prompt
from mvp_engine.rl.rollout import Sample
from mvp_engine.tools.check.record import CheckRecord

ANSWER_COLUMNS = ("answer", "solution", "completion", "response", "output")
OWN_ANSWERS = 16  # rows whose own answers are scored
FEW_FINISHED = 0.5  # of the completions that end by themselves
LONG_REWARDS = 0.5  # of the step time
LONG_REWARD_SECONDS = 1.0
METRICS = ("reward", "length", "finished", "with_signal", "gap", "reward_errors")


def rollout_stage(record: CheckRecord, engine: RLEngine, records: list[dict[str, Any]]) -> None:
    """Rewards and completions of the steps, and the rewards of the rows' own answers."""
    record.begin_stage("rollouts")
    facts: dict[str, Any] = {name: [one.get(name) for one in records] for name in METRICS}
    facts["gap_by_modality"] = _largest_gaps(records)
    facts["own_answers"] = _own_answer_reward(engine)
    facts["seconds"] = _seconds([one["perf"] for one in records[1:] or records])
    record["rollouts"] = facts
    _warn(record, engine, facts)
    record.end_stage(f"rewards {' '.join(number(value) for value in facts['reward'])}")


def _seconds(timed: list[dict[str, Any]]) -> dict[str, float]:
    """The means of what the steps after the first spend their time on."""
    names = ("generate", "reward", "update")
    return {name: mean(one.get(f"{name}_s", 0.0) for one in timed) for name in names}


def _largest_gaps(records: list[dict[str, Any]]) -> dict[str, float]:
    """The largest mean gap between sampler and trainer of each modality, as text or image."""
    largest: dict[str, float] = {}
    for one in records:
        for name, value in one.items():
            if name.startswith("gap/") and value is not None:
                kind = name.removeprefix("gap/")
                largest[kind] = max(value, largest.get(kind, 0.0))
    return largest


def _warn(record: CheckRecord, engine: RLEngine, facts: dict[str, Any]) -> None:
    config = engine.config
    rewards = [value for value in facts["reward"] if value is not None]
    if ALGORITHMS[config.rl.algorithm].has_groups and not any(facts["with_signal"]):
        record.warning(
            f"all completions of each prompt have the same reward in {count(len(rewards), 'step')} (mean "
            f"{number(mean(rewards) if rewards else None)}): nothing can be learnt from them. Does the reward read the "
            "right column? Is the task too hard or too easy for this policy (a short SFT first, other rows)?"
        )
    own = facts["own_answers"]
    if own is not None and rewards and own < mean(rewards):
        record.warning(
            f"the rows' own answers have the mean reward {number(own)}, less than the completions of the policy "
            f"({number(mean(rewards))}): is the sign of the reward wrong, or does it compare other text?"
        )
    seconds = facts["seconds"]
    share = seconds["reward"] / max(sum(seconds.values()), 1e-9)
    if (
        share > LONG_REWARDS
        and seconds["reward"] > LONG_REWARD_SECONDS
        and config.reward.model is None
    ):
        record.warning(
            f"{share:.0%} of the step time are rewards: raise reward.workers (now {config.reward.workers}), which may "
            "be more than the cores where a reward waits for something else"
        )
    finished = [value for value in facts["finished"] if value is not None]
    if finished and mean(finished) < FEW_FINISHED:
        record.warning(
            f"{1 - mean(finished):.0%} of the completions were cut after rollout.max_new_tokens="
            f"{config.rollout.max_new_tokens}: raise it, or train the policy to stop (SFT)"
        )


def _own_answer_reward(engine: RLEngine) -> float | None:
    """The mean reward of the answers that rows have themselves; None without any."""
    dataset: Any = engine.feed.loader.dataset  # type: ignore[attr-defined]
    prompts: list[Prompt] = []
    samples: list[Sample] = []
    for index in range(min(len(dataset), OWN_ANSWERS)):
        prompt = dataset[index]
        if not isinstance(prompt, Prompt):
            continue
        which = int(dataset.rows[index][0])
        text = _own_answer(prompt.row, dataset.formats[which])
        if text is None:
            continue
        tokens = engine.tokenizer(text, add_special_tokens=False).input_ids
        tokens += engine.data.eos_token_ids[-1:]
        samples.append(Sample(len(prompts), tokens, [0.0] * len(tokens), 0, "stop"))
        prompts.append(prompt)
    rewards = engine.rewards(prompts, samples) if prompts else []
    values = [reward.value for reward in rewards if reward.value is not None]
    return mean(values) if values else None


def _own_answer(row: dict[str, Any], format: RowFormat) -> str | None:
    """The answer that the data kit leaves out of the prompt, or a column that is probably one."""
    try:
        messages = read_row(row, replace(format, prompt_only=False)).messages
        if messages and messages[-1].role == "assistant":
            return messages[-1].text
    except BadRow:
        pass
    found = [row[name] for name in ANSWER_COLUMNS if isinstance(row.get(name), str | int)]
    return str(found[0]) if found else None

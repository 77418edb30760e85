"""The stage `rollouts` of `mvp check`: rewards that cannot teach anything, completions that are cut."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean
from typing import TYPE_CHECKING, Any

from mvp_engine.engine.hooks import StageResult
from mvp_engine.errors import count
from mvp_engine.kit.data.read.row_types import BadRow, RowFormat
from mvp_engine.kit.data.read.rows import read_row
from mvp_engine.kit.rl.prompts import Prompt
from mvp_engine.kit.rl.rollout import Sample
from mvp_engine.log.format import number

if TYPE_CHECKING:
    from mvp_engine.kit.rl.engine import RLEngine

ANSWER_COLUMNS = ("answer", "solution", "completion", "response", "output")
OWN_ANSWERS = 16  # rows whose own answers are scored
FEW_FINISHED = 0.5  # of the completions that end by themselves
SAME_MODEL = 1e-4  # divergence in nats per token
LONG_REWARDS = 0.5  # of the step time
LONG_REWARD_SECONDS = 1.0
METRICS = ("reward", "length", "finished", "with_signal", "gap", "reward_errors")


def rollout_stage(engine: RLEngine, records: list[dict[str, Any]]) -> StageResult:
    """Rewards and completions of the steps, and the rewards of the rows' own answers."""
    timed = [record["perf"] for record in records[1:] or records]
    seconds = {}
    chat = engine.episodes.chat
    for name in ("generate", "reward", "update"):
        seconds[name] = mean(perf.get(f"{name}_s", 0.0) for perf in timed)
    facts: dict[str, Any] = {name: [record.get(name) for record in records] for name in METRICS}
    facts["gap_by_modality"] = _largest_gaps(records)
    teachers = {name for record in records for name in record if name.startswith("teacher_kl/")}
    facts["teacher_kl"] = {
        name.partition("/")[2]: [record.get(name) for record in records]
        for name in sorted(teachers)
    }
    facts["own_answers"] = _own_answer_reward(engine)
    facts["seconds"] = seconds
    if chat is not None:
        facts["turns"] = [record.get("turns") for record in records]
        facts["template"] = chat.verdicts()
        facts["drops_reasoning"] = chat.roles_that_drop_reasoning()
        facts["tool_wait_s"] = mean(perf.get("tool_wait_s", 0.0) for perf in timed)
        tools = seconds["reward"] + facts["tool_wait_s"]
        facts["tool_share"] = tools / max(sum(seconds.values()) + facts["tool_wait_s"], 1e-9)
    title = _figures(facts)[0]
    return StageResult(f"{title[0]} {title[1]}", facts, _figures(facts), _warnings(engine, facts))


def _largest_gaps(records: list[dict[str, Any]]) -> dict[str, float]:
    """The largest mean gap between sampler and trainer of each modality, as text or image."""
    largest: dict[str, float] = {}
    for record in records:
        for name, value in record.items():
            if name.startswith("gap/") and value is not None:
                kind = name.removeprefix("gap/")
                largest[kind] = max(value, largest.get(kind, 0.0))
    return largest


def _figures(facts: dict[str, Any]) -> list[tuple[str, str]]:
    figures = [
        ("teacher KL", f"{' '.join(map(number, values))} on {source}")
        for source, values in facts["teacher_kl"].items()
    ]
    if any(value is not None for value in facts["reward"]) or not figures:
        figures.append(("rewards", " ".join(number(value) for value in facts["reward"])))
    if facts["own_answers"] is not None:
        figures.append(("", f"{number(facts['own_answers'])} for the rows' own answers"))
    seconds = [f"{name} {number(value)} s" for name, value in facts["seconds"].items()]
    figures.append(("rollouts", f"{number(facts['length'][-1])} tokens each; {', '.join(seconds)}"))
    if "template" in facts:
        figures += _turn_figures(facts)
    gaps = [f"{kind} {number(gap)}" for kind, gap in facts["gap_by_modality"].items()]
    if gaps:
        figures.append(("gap", f"{', '.join(gaps)} between sampler and trainer at most"))
    return figures


def _turn_figures(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Turns, and what the chat template can continue a conversation with."""
    verdicts = facts["template"].items()
    works = " and ".join(role for role, problem in verdicts if not problem)
    figures = [
        (
            "turns",
            f"{number(facts['turns'][-1])} each; the chat template writes messages of {works}",
        )
    ]
    figures += [("", f"no messages of {role}: {problem}") for role, problem in verdicts if problem]
    if facts["drops_reasoning"]:
        roles = " or ".join(facts["drops_reasoning"])
        figures.append(
            (
                "",
                f"after a message of {roles} a chat server drops earlier reasoning; training keeps it",
            )
        )
    text = f"{facts['tool_share']:.0%} of the step time is user code between answers"
    waited = number(facts["tool_wait_s"])
    figures.append(("tools", f"{text}; rounds wait {waited} s of a step for their slowest episode"))
    return figures


def _warnings(engine: RLEngine, facts: dict[str, Any]) -> list[str]:
    config = engine.config
    warnings = [
        f"the checkpoint has a {name} with weights of its own, and this config starts none: it is left out"
        for name in engine.model_engine.left_out
    ]
    rewards = [value for value in facts["reward"] if value is not None]
    if config.rl.preset.has_groups and not any(facts["with_signal"]):
        warnings.append(
            f"all completions of each prompt have the same reward in {count(len(rewards), 'step')} (mean "
            f"{number(mean(rewards) if rewards else None)}): nothing can be learnt from them. Does the reward read the "
            "right column? Is the task too hard or too easy for this policy (a short SFT first, other rows)?"
        )
    for source, values in facts["teacher_kl"].items():
        if values[0] is not None and abs(values[0]) < SAME_MODEL:
            warnings.append(
                f"the teacher of {source} is the policy at the start, so it teaches nothing: does rl.teachers name the "
                "right folder?"
            )
    own = facts["own_answers"]
    if own is not None and rewards and own < mean(rewards):
        warnings.append(
            f"the rows' own answers have the mean reward {number(own)}, less than the completions of the policy "
            f"({number(mean(rewards))}): is the sign of the reward wrong, or does it compare other text?"
        )
    seconds = facts["seconds"]
    share = seconds["reward"] / max(sum(seconds.values()), 1e-9)
    is_long = share > LONG_REWARDS and seconds["reward"] > LONG_REWARD_SECONDS
    if is_long and config.reward.model is None and engine.episodes.chat is None:
        warnings.append(
            f"{share:.0%} of the step time are rewards: raise reward.workers (now {config.reward.workers or 2}), which "
            "may be more than the cores where a reward waits for something else"
        )
    has_judge = config.reward.model is not None or engine.episodes.has_read_last
    if engine.episodes.chat is not None and engine.has_reward and not has_judge:
        warnings.append(
            "no episode reads the last answer of the policy, so no reward depends on it: does the episode judge what "
            "chat.answer() or chat.call(...) returned last?"
        )
    finished = [value for value in facts["finished"] if value is not None]
    if finished and mean(finished) < FEW_FINISHED:
        warnings.append(
            f"{1 - mean(finished):.0%} of the completions were cut after generation.max_new_tokens="
            f"{config.generation.max_new_tokens}: raise it, or train the policy to stop (SFT)"
        )
    return warnings


def _own_answer_reward(engine: RLEngine) -> float | None:
    """The mean reward of the answers that rows have themselves; None without any, and for episodes of several turns."""
    if engine.episodes.chat is not None or not engine.has_reward:
        return None
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
        samples.append(Sample(len(prompts), tokens, [0.0] * len(tokens), [], "stop"))
        prompts.append(prompt)
    rewards = engine.episodes.rewards(prompts, samples) if prompts else []
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

"""Check a reward and the batches of an RL recipe: right answers win, labels are the sampled tokens, as they were drawn.

check.py [FILE.py:NAME]        # see SKILL.md
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch

from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.kit.tiny_processors import train_tokenizer
from mvp_engine.rl import Answer, RLEngine, Sample
from mvp_engine.rl.batches import rollout_batch
from mvp_engine.rl.prompts import Prompt
from mvp_engine.tools.skill_check import check_loss

TOKENIZER = train_tokenizer(["abab baba"] * 4, 300)
ROWS = [{"prompt": f"Say {word}", "answer": word} for word in ("one", "two", "three")]


def problems(checked: Any) -> list[str]:
    """The problems of an engine, a reward or a function that makes batches, one sentence each."""
    if isinstance(checked, type):
        rows = getattr(checked, "check_rows", ROWS)
        return reward_problems(lambda row, answer: checked.reward(None, row, answer), rows)
    if len(inspect.signature(checked).parameters) == 2 and "samples" in inspect.signature(checked).parameters:
        return batch_problems(checked)
    return reward_problems(checked, ROWS)


def reward_problems(reward: Any, rows: list[dict[str, Any]]) -> list[str]:
    found = []
    for row, other in zip(rows, [*rows[1:], rows[0]], strict=True):
        right = _reward(reward, row, str(row["answer"]))
        for wrong in (str(other["answer"]), ""):
            value = _reward(reward, row, wrong)
            if not (math.isfinite(right) and math.isfinite(value)):
                found.append(f"a reward is not finite: {right} or {value}")
            elif right <= value:
                found.append(
                    f"the answer {row['answer']!r} has the reward {right:g}, and {wrong!r} has {value:g}, which is not "
                    "lower: is the sign wrong, or does it read another column?"
                )
    return found[:3]


def _reward(reward: Any, row: dict[str, Any], text: str) -> float:
    tokens = TOKENIZER(text).input_ids
    returned = reward(row, Answer(text, tokens, "stop", [-0.1] * len(tokens), 0))
    return float(sum(returned.values()) if isinstance(returned, dict) else returned)


def batch_problems(make: Any) -> list[str]:
    """`make(prompts, samples)` must train on the tokens that were drawn, wherever a tokenizer would cut the text."""
    letters = TOKENIZER.convert_tokens_to_ids(["a", "b"])
    prompts = [_prompt(0, TOKENIZER("baba").input_ids), _prompt(1, TOKENIZER("ab ab").input_ids)]
    drawn = [letters * 2, [*letters, TOKENIZER.eos_token_id]]  # "abab" and "ab", letter by letter
    samples = [Sample(i, tokens, [-0.5] * len(tokens), 0, "stop") for i, tokens in enumerate(drawn)]
    batch: PackedBatch = make(prompts, samples)
    found = []
    lengths = batch.lengths.tolist()
    for i, (ids, labels) in enumerate(zip(batch.input_ids.split(lengths), batch.labels.split(lengths), strict=True)):
        wanted = prompts[i].batch.input_ids.tolist() + drawn[i]
        if ids.tolist() != wanted:
            found.append(f"sample {i} was drawn as {drawn[i]}, and the batch has other tokens: was it tokenized again?")
            continue
        first = len(wanted) - len(drawn[i]) - 1
        expected = [IGNORE] * first + drawn[i] + [IGNORE]
        if labels.tolist() != expected:
            found.append(
                f"sample {i}: labels[t] must be the token after t, for the sampled tokens alone; the mask is wrong"
            )
    return found


def _prompt(key: int, ids: list[int]) -> Prompt:
    batch = PackedBatch.from_sequences([torch.tensor(ids)])
    batch.labels.fill_(IGNORE)
    return Prompt(key, {}, batch, ids, [], "rows", f"row {key}", key)


def of_kit(prompts: list[Prompt], samples: list[Sample]) -> PackedBatch:
    return rollout_batch(prompts, samples)


class Example(RLEngine):
    def reward(self, row: dict[str, Any], answer: Answer) -> float:
        return float(answer.text == row["answer"])


def kit_problems(checked: Any) -> list[str]:
    """Of the kit: its batches, and the example's reward."""
    return problems(of_kit) + problems(Example) if checked is None else problems(checked)


if __name__ == "__main__":
    check_loss(kit_problems, None)

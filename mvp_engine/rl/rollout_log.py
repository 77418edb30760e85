"""rollouts.jsonl of a run folder: prompts, completions and rewards of training steps and evaluations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mvp_engine.files import atomic_write_text
from mvp_engine.rl.prompts import Prompt
from mvp_engine.rl.rewards import Reward
from mvp_engine.rl.rollout import Sample

ROLLOUTS_FILE = "rollouts.jsonl"
EVAL_PROMPTS = 24  # held-out prompts of each evaluation that are written
MAX_CHARACTERS = 300  # of a column
Record = dict[str, Any]


class RolloutLog:
    """Appends the completions of the first `prompts` prompts of each step, and of more in each evaluation."""

    def __init__(self, folder: Path, tokenizer: Any, prompts: int) -> None:
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

    def write(
        self,
        step: int,
        split: str,
        prompts: Sequence[Prompt],
        samples: Sequence[Sample],
        rewards: Sequence[Reward],
    ) -> None:
        """Append one record for each prompt, with all of its samples."""
        records: dict[int, Record] = {}
        most = max(self.prompts, EVAL_PROMPTS) if split == "eval" and self.prompts else self.prompts
        for sample, reward in zip(samples, rewards, strict=True):
            if sample.prompt >= most:
                continue
            prompt = prompts[sample.prompt]
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
        if reward.parts:
            record["parts"] = reward.parts
        if reward.error is not None:
            record["error"] = reward.error
        return record

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

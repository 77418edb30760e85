"""RewardModel: completions scored by a value model in a worker group."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mvp_engine.data.batch import PackedBatch
from mvp_engine.errors import UserError
from mvp_engine.hf.hub import local_folder
from mvp_engine.hf.load import WeightFiles
from mvp_engine.kit.data import load_processor
from mvp_engine.kit.decoding import with_completion
from mvp_engine.kit.reward import last_token_scores
from mvp_engine.rl.prompts import Prompt
from mvp_engine.rl.rollout import Sample
from mvp_engine.worker.group import WorkerGroup


class RewardModel:
    """The score of a sequence is the value at its last token, as reward models are trained (docs/reward_model.md)."""

    def __init__(self, group: WorkerGroup, budget: int) -> None:
        """`budget`: the most tokens of a forward."""
        self.group = group
        self.budget = budget

    def __call__(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[float]:
        """A score for each sample: of the tokens that were drawn, which are not tokenized again."""
        if not samples:
            return []
        sequences = []
        for sample in samples:
            sequences.append(with_completion(prompts[sample.prompt].batch, None, sample.tokens))
        batch = PackedBatch.concat(sequences)
        values_T = self.group.infer(batch, ["values"], budget=self.budget)["values"]
        scores: list[float] = last_token_scores(values_T, batch).tolist()
        return scores


def check_reward_model(name: str | Path, tokenizer: Any) -> None:
    """Refuse a folder without the head of a reward model, which would score at random, or with another vocabulary."""
    folder = local_folder(name, weights=True)
    if not (folder / "config.json").is_file():
        exports = "".join(
            f". Its export is {path}" for path in sorted(folder.glob("hf_step_*"))[-1:]
        )
        raise UserError(
            f"reward.model={name} is not the Hugging Face folder of a reward model, nor a model of the Hub{exports}"
        )
    if "score.weight" not in WeightFiles(folder):
        raise UserError(
            f"reward.model={name} has no score.weight, so it is not a reward model: train one (docs/reward_model.md)"
        )
    _check_tokenizer(folder, tokenizer)


def _check_tokenizer(folder: Path, tokenizer: Any) -> None:
    """A reward model reads the policy's token ids."""
    processor = load_processor(folder)
    own = getattr(processor, "tokenizer", processor).get_vocab()
    vocabulary = tokenizer.get_vocab()
    if own == vocabulary:
        return
    other = next(
        token for token in sorted({*own, *vocabulary}) if own.get(token) != vocabulary.get(token)
    )
    raise UserError(
        f"reward.model={folder}: its tokenizer is not the policy's (token {other!r} is {own.get(other)} there and "
        f"{vocabulary.get(other)} here), and it reads the policy's token ids. Use a reward model of the same family, "
        "or call it in the engine's reward(row, answer)"
    )

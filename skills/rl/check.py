"""Check an RL recipe by one step: the sign of its reward, the tokens and the mask that it trains on, and its update.

check.py CONFIG [key=value ...] [--answer COLUMN]    # see SKILL.md
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from mvp_engine.config import compose
from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.distributed import World
from mvp_engine.engine.state import choose_start
from mvp_engine.kit.rl import Prompt, RLEngine, Sample
from mvp_engine.kit.rl.episodes import Episodes
from mvp_engine.tools.skill_check import run_check

COLUMNS = ("answer", "solution", "completion")
MAX_GAP = 0.05
OVERRIDES = ["log.backends=[jsonl]", "log.interval=1", "train.max_steps=1", "train.epochs=null", "train.precision=fp32"]
OVERRIDES += ["device=cpu", "resume=null", "workflow=train", "checkpoint.interval=null", "checkpoint.best_metric=null"]
OVERRIDES += ["eval.steps=null", "export_link=null", "rl.updates=1", "rl.async_steps=0", "rl.critic_warmup=0"]
OVERRIDES += ["optim.warmup=0", "optim.lr=1e-4", "optim.schedule=constant", "optim.weight_decay=0"]
OVERRIDES += ["model.compile=null"]


def problems(config: str, overrides: list[str], answer: str | None = None) -> list[str]:
    """The problems of an RL recipe, one sentence each."""
    composed = compose(config, [*overrides, *OVERRIDES])
    with tempfile.TemporaryDirectory() as folder:
        world = World(0, 1, 0, 1, torch.device("cpu"))
        # Not as an override: other keys may depend on output_dir.
        settings = composed.config.model_copy(update={"output_dir": folder, "run_id": None})
        engine: Any = composed.engine_class(settings, world, choose_start(settings).run)
        step = OneStep(engine)
        with engine:
            engine.train()
        if step.trained is None:
            return ["no completion was trained on: all rewards failed, or all completions are empty"]
        columns = COLUMNS if answer is None else (answer,)
        return [*reward_problems(engine, step.prompts, columns), *batch_problems(step), *step.update_problems()]


class OneStep:
    """Records what a step of an engine samples, trains on, and changes."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.prompts: list[Prompt] = []
        self.samples: list[Sample] = []
        self.rewards: list[float] = []
        self.trained: PackedBatch | None = None
        self._train_step = engine.train_step
        engine.train_step = self._recorded

    def _recorded(self, ctx: Any, experience: Any) -> Any:
        chosen = experience.trainable()
        self.prompts = experience.prompts
        self.samples = [experience.samples[i] for i in chosen]
        self.rewards = [experience.rewards[i].value for i in chosen]
        actor = self.engine.model_engine.actor
        update = actor.update

        def recorded(batch: PackedBatch, *rest: Any, **options: Any) -> Any:
            self.trained = batch
            self.before = self._log_probs(batch)
            found = update(batch, *rest, **options)
            self.after = self._log_probs(batch)
            return found

        actor.update = recorded
        return self._train_step(ctx, experience)

    def _log_probs(self, batch: PackedBatch) -> Tensor:
        """The log-prob of each sequence's tokens with a label."""
        log_probs_T: Tensor = self.engine.model_engine.log_probs(batch)
        return torch.stack([one.sum() for one in log_probs_T.split(batch.lengths.tolist())])

    def update_problems(self) -> list[str]:
        """The log-probs of answers with a reward above the mean of their prompt rise more than those of the others."""
        rewards_S = torch.tensor(self.rewards)
        groups_S = torch.tensor([sample.prompt for sample in self.samples])
        if len(groups_S.unique()) == len(groups_S):  # one completion per prompt: compared over the step
            groups_S = torch.zeros_like(groups_S)
        centred_S = torch.empty_like(rewards_S)
        for group in groups_S.unique():
            own = groups_S == group
            centred_S[own] = rewards_S[own] - rewards_S[own].mean()
        if not bool((centred_S != 0).any()):
            return ["all completions of each prompt have the same reward: there is nothing to learn from this step"]
        if float((centred_S * (self.after - self.before)).sum()) <= 0:
            return ["the update lowers the log-probs of answers with a higher reward: are the advantages right?"]
        return []


def reward_problems(engine: Any, prompts: list[Prompt], columns: tuple[str, ...]) -> list[str]:
    """The row's own answer has a higher reward than the answer of another row, and than none."""
    found = next((name for name in columns if all(isinstance(one.row.get(name), str) for one in prompts)), None)
    if found is None:
        if columns == COLUMNS:
            return []  # nothing to compare with
        return [f"the rows have no column {columns[0]} of text"]
    if type(engine).reward is RLEngine.reward or engine.has_turns():
        return []  # a reward model alone, or episodes that are more than one answer
    right = wrong = 0.0
    # In processes, also where a training has none: a reward that hangs is named with its row.
    settings = engine.config.reward
    settings = settings.model_copy(update={"workers": max(1, settings.workers or 0), "max_errors": 0.0})
    with closing(Episodes(engine.reward, engine.tokenizer, settings)) as episodes:
        for i, prompt in enumerate(prompts):
            others = {one.row[found] for one in prompts[i + 1 :] + prompts[:i]} - {prompt.row[found]}
            texts = [prompt.row[found], "", *sorted(others)[:3]]
            own, *values = episodes.rewards([prompt], [_sample(engine, text) for text in texts])
            right += own.value or 0.0
            wrong += max(reward.value or 0.0 for reward in values)
    if right <= wrong:
        means = f"{right / len(prompts):.3f} and {wrong / len(prompts):.3f}"
        return [f"the reward does not prefer a row's own {found} to another answer: the means are {means}"]
    return []


def _sample(engine: Any, text: str) -> Sample:
    tokens = engine.tokenizer.encode(text, add_special_tokens=False)
    return Sample(0, tokens, [0.0] * len(tokens), [0] * len(tokens), "stop")


def batch_problems(step: OneStep) -> list[str]:
    """The batch of the update has the tokens that were sampled, loss on them alone, and the sampler's log-probs."""
    batch = step.trained
    assert batch is not None
    if batch.num_sequences != len(step.samples):
        return [f"the update has {batch.num_sequences} sequences for {len(step.samples)} completions"]
    found: dict[str, None] = {}
    lengths = batch.lengths.tolist()
    parts = zip(batch.input_ids.split(lengths), batch.labels.split(lengths), strict=True)
    old = batch.token_fields["old_log_probs"].split(lengths)
    for sample, (ids, labels), old_T in zip(step.samples, parts, old, strict=True):
        start = step.prompts[sample.prompt].batch.num_tokens
        if ids[start:].tolist() != sample.tokens:
            found["the tokens of a completion are not those that were sampled: it was tokenized again"] = None
            continue
        has_loss = (labels != IGNORE).nonzero()[:, 0].tolist()
        if has_loss and has_loss[0] < start - 1:
            found["the loss covers tokens of the prompt"] = None
        elif has_loss != list(range(start - 1, len(ids) - 1)):
            found["the loss leaves out tokens of a completion"] = None
        elif float((old_T[has_loss] - torch.tensor(sample.log_probs)).abs().max()) > MAX_GAP:
            found["old log-probs are not those of the sampler: another temperature, or another alignment"] = None
    return list(found)


def main() -> list[str]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--answer", metavar="COLUMN", help="the column with the right answer")
    args = parser.parse_intermixed_args()
    return problems(args.config, args.overrides, args.answer)


if __name__ == "__main__":
    run_check(main)

"""The example to copy: a transformer learns to sort digits. The engine does everything that is not special to it."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from mvp_engine.data import SampleLoader
from mvp_engine.engine import Engine, StepContext

from .data import VOCAB, SortingProblems
from .model import MagicTransformer
from .settings import MagicConfig


class MagicEngine(Engine):
    config_class = MagicConfig
    config: MagicConfig
    model: MagicTransformer

    def prepare_model(self) -> nn.Module:
        model = self.config.model
        return MagicTransformer(VOCAB, 2 * self.config.task.digits + 1, model.width, model.heads, model.layers)

    def prepare_dataloader(self, split: str) -> SampleLoader:
        task = self.config.task
        size = task.train_problems if split == "train" else task.eval_problems
        problems = SortingProblems(split, size, task.digits, self.config.seed)
        return self.sample_loader(problems, split, collate_fn=lambda rows: rows)

    def forward_step(self, ctx: StepContext, micro_batch: Tensor) -> tuple[Tensor, int]:
        answer = self.config.task.digits
        logits_BTV = self.model(micro_batch[:, :-1])[:, -answer:]  # only the answer carries loss
        labels_BT = micro_batch[:, -answer:]
        ctx.count("tokens", micro_batch.numel())
        return F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), reduction="sum"), labels_BT.numel()

    def eval_step(self, ctx: StepContext, micro_batch: Tensor) -> None:
        super().eval_step(ctx, micro_batch)
        answer = self.config.task.digits
        written = self.model.complete(micro_batch[:, : answer + 1], answer)
        right = (written == micro_batch[:, -answer:]).all(dim=1)
        ctx.log("exact_match", right.sum(), len(right))

    def solve(self) -> None:
        """A workflow of this recipe (workflow=solve): print a few held-out problems with the model's answers."""
        self.before_evaluate()
        digits = self.config.task.digits
        rows = SortingProblems("eval", 5, digits, self.config.seed + 1).rows.to(self.device)
        with self.model_engine.eval_mode():
            answers = self.model.complete(rows[:, : digits + 1], digits)
        for row, answer in zip(rows, answers, strict=True):
            verdict = "right" if bool((row[-digits:] == answer).all()) else "WRONG"
            print(f"  {_text(row[:digits])}  ->  {_text(answer)}   {verdict}")


def _text(digits: Any) -> str:
    return " ".join(str(int(d)) for d in digits)

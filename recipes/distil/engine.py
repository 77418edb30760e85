"""Distillation: a small student learns the next-token distributions of a trained teacher.

Legend: T tokens, D hidden size.
"""

from typing import Any

import torch
from torch import Tensor, nn

from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.engine import StepContext
from mvp_engine.kit import MFUKit, MLLMEngine, MLLMModelKit
from mvp_engine.kit.preference import Head, Teacher, frozen_engine, frozen_model, linear_kl
from mvp_engine.kit.row_checks import refuse_weights

from .settings import StudentConfig


class StudentEngine(MLLMEngine):
    config_class = StudentConfig
    config: StudentConfig
    title = "What the student answers"

    # ---- Model: the student, and its frozen teacher on the same layout ---------------------------

    def prepare_model(self) -> nn.Module:
        student: Any = MLLMModelKit(self.config.lora).of_engine(self)
        name = self.config.distil.teacher
        self.teacher = Teacher(name, student, frozen_engine(self, frozen_model(name)), self.divergence)
        return student

    def before_train(self) -> None:
        super().before_train()
        self.teacher_mfu = MFUKit(frozen_model(self.config.distil.teacher))

    # ---- Data: rows with an answer, as those of an SFT -------------------------------------------

    def prepare_dataloader(self, split: str) -> Any:
        return self.data.engine_loader(self, split)

    # ---- Optimizer and schedule ------------------------------------------------------------------

    def prepare_optimizer(self, model: nn.Module) -> Any:
        return self.optim.build_optimizer(model)  # of the section `optim`, by default AdamW

    def prepare_scheduler(self, optimizer: Any) -> Any:
        return self.optim.build_scheduler(optimizer, self.total_steps)

    # ---- One step --------------------------------------------------------------------------------

    def divergence(
        self, hidden_TD: Tensor, head: Head, teacher_TD: Tensor, teacher_head: Head, options: dict[str, Any]
    ) -> Tensor:
        """The KL divergence of each token over the whole vocabulary, inside of the student's forward.

        Forward: sum of q (log q - log p), for the teacher's q and the student's p. Reverse: sum of p (log p - log q).
        Both heads run in chunks of tokens, so no logits of a whole batch are in memory.
        """
        settings = self.config.distil
        is_reverse = settings.divergence == "reverse"
        temperature = settings.temperature
        return linear_kl(
            hidden_TD, head, teacher_TD, teacher_head, reverse=is_reverse, temperature=temperature, **options
        )

    def train_pre_step(self, ctx: StepContext) -> None:
        super().train_pre_step(ctx)
        self.teacher_mfu.count(ctx)

    def forward_step(self, ctx: StepContext, micro_batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """The divergence summed over tokens with a label, plus `distil.nll` times their NLL; and their number."""
        refuse_weights(micro_batch)
        nll_weight = self.config.distil.nll
        ctx.count("tokens", micro_batch.num_tokens)
        # In evaluations the NLL costs little, and compares with trainings without a teacher.
        with_nll = bool(nll_weight) or not torch.is_grad_enabled()
        with self.teacher.reading(micro_batch):
            outputs = self.model(micro_batch, ["teacher_kl", "log_probs"] if with_nll else ["teacher_kl"])
        tokens = micro_batch.num_loss_tokens
        loss_sum = torch.where(micro_batch.labels == IGNORE, 0.0, outputs["teacher_kl"]).sum()
        ctx.log("teacher_kl", loss_sum.detach(), tokens)
        if with_nll:
            nll_sum = -outputs["log_probs"].sum()
            ctx.log("nll", nll_sum.detach(), tokens)
            loss_sum = loss_sum + nll_weight * nll_sum
        return loss_sum, tokens

    # ---- Evaluation: the same loss on held-out rows, and answers to their prompts (`eval.generation`)

"""DistilLossKit and DistilEngine: a student learns the next-token distributions of a frozen teacher.

Legend: T tokens, D hidden size, V vocabulary.

The teacher is a second model engine on the student's layout. In a forward step it computes the hidden states of the
micro-batch; the divergence is an output of the student, computed from both heads in chunks (`distil_head.py`), so no
logits of a whole batch are in memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mvp_engine.config.schema import Config
from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.distributed.dtensor import full_tensor
from mvp_engine.engine import StepContext
from mvp_engine.errors import UserError
from mvp_engine.hf.language_model import LanguageModel
from mvp_engine.kit.distil_head import Head, linear_kl
from mvp_engine.kit.distil_settings import Distil, DistilConfig
from mvp_engine.kit.mfu import MFUKit
from mvp_engine.kit.mllm import MLLMEngine
from mvp_engine.kit.model import MLLMModelKit
from mvp_engine.kit.preference_reference import frozen_engine
from mvp_engine.model_engine import ModelEngine, ModelSource

OUTPUT = "teacher_kl"


class DistilLossKit:
    """The divergence from a teacher per token with a label, plus optionally the NLL of these labels."""

    def __init__(self, settings: Distil, student: LanguageModel, teacher: ModelEngine) -> None:
        """All ranks call it: it gathers the teacher's head."""
        self.settings = settings
        self.teacher = teacher
        self.teacher_head = gathered_head(teacher.model)
        self._hidden_TD: Tensor | None = None  # of the teacher, for the micro-batch at hand
        rows = [_head_rows(model) for model in (student, teacher.model)]
        if rows[0] != rows[1]:
            raise UserError(
                f"distil.teacher={settings.teacher} has {rows[1]} rows in its output embedding, the student has "
                f"{rows[0]}: their tokens differ. Choose a teacher of the same tokenizer, or set "
                f"model.config.vocab_size={rows[1]} for a student from random weights"
            )
        self.student = student
        student.add_output(OUTPUT, self._divergence)

    def __call__(
        self, ctx: StepContext, model: nn.Module, batch: PackedBatch
    ) -> tuple[Tensor, Tensor]:
        """`(loss_sum, weight)` of a micro-batch; the weight is its number of labels."""
        ctx.count("tokens", batch.num_tokens)
        # The teacher first: its activations are gone before those of the student are kept.
        with self.teacher.eval_mode():
            self._hidden_TD = self.teacher.model(batch, ["hidden_states"])["hidden_states"]
        # In evaluations the NLL costs little, and compares with trainings without a teacher.
        with_nll = bool(self.settings.nll) or not torch.is_grad_enabled()
        outputs = model(batch, [OUTPUT, "log_probs"] if with_nll else [OUTPUT])
        self._hidden_TD = None
        tokens = batch.num_loss_tokens
        loss_sum = torch.where(batch.labels == IGNORE, 0.0, outputs[OUTPUT]).sum()
        ctx.log("teacher_kl", loss_sum.detach(), tokens)
        if with_nll:
            nll_sum = -outputs["log_probs"].sum()
            ctx.log("nll", nll_sum.detach(), tokens)
            loss_sum = loss_sum + self.settings.nll * nll_sum
        return loss_sum, tokens

    def __deepcopy__(self, memo: dict[int, Any]) -> DistilLossKit:
        """Itself: copies of the student, as exports make them, need no second teacher (FSDP cannot copy one)."""
        return self

    def _divergence(self, hidden_TD: Tensor, head: dict[str, Any]) -> Tensor:
        """Called inside of the student's forward, where its head has all of its weights."""
        assert self._hidden_TD is not None
        teacher_TD = self._hidden_TD
        if self.student.shard is not None:
            teacher_TD = self.student.shard.cut(teacher_TD)
        teacher = self.teacher_head
        start = head.get("vocab_start")
        if start is not None:
            rows = slice(start, start + len(head["weight_VD"]))
            bias = None if teacher.bias is None else teacher.bias[rows]
            teacher = teacher._replace(weight=teacher.weight[rows], bias=bias)
        return linear_kl(
            hidden_TD,
            Head(head["weight_VD"], head["bias_V"], head["scale"], head["softcap"]),
            teacher_TD,
            teacher,
            reverse=self.settings.divergence == "reverse",
            temperature=self.settings.temperature,
            chunk=head["chunk"],
            group=head.get("group"),
        )


def gathered_head(model: Any) -> Head:
    """The whole output embedding of a frozen model, gathered once. All ranks call it."""
    embedding = model.hf.get_output_embeddings()
    weight = full_tensor(embedding.weight.detach())
    bias = None if embedding.bias is None else full_tensor(embedding.bias.detach())
    return Head(weight, bias, model.scale, model.softcap)


def _head_rows(model: Any) -> int:
    return int(model.hf.get_output_embeddings().weight.shape[0])


class DistilEngine(MLLMEngine):
    """An MLLMEngine whose loss is the divergence from a frozen teacher."""

    config_class: type[Config] = DistilConfig
    config: DistilConfig
    title = "What the student answers"
    distil: DistilLossKit

    def _build_model_engine(self) -> ModelEngine:
        model_engine = super()._build_model_engine()
        teacher = frozen_engine(self, self._teacher_model(), model_engine.settings)
        student: Any = model_engine.model
        self.distil = DistilLossKit(self.config.distil, student, teacher)
        return model_engine

    def _teacher_model(self) -> Any:
        source = ModelSource(self.config.distil.teacher)
        return MLLMModelKit().build(source).requires_grad_(False)

    def before_train(self) -> None:
        super().before_train()
        self.teacher_mfu = MFUKit(self._teacher_model())

    def train_pre_step(self, ctx: StepContext) -> None:
        super().train_pre_step(ctx)
        self.teacher_mfu.count(ctx)

    def forward_step(self, ctx: StepContext, micro_batch: PackedBatch) -> tuple[Tensor, Tensor]:
        return self.distil(ctx, self.model, micro_batch)

"""A tiny Qwen3-VL, trained from random weights to answer questions about handwritten digits.

An image and a question in, an answer in words out: supervised fine-tuning, of all weights or with QLoRA.
Legend: T tokens.
"""

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mvp_engine.data.batch import PackedBatch
from mvp_engine.engine import StepContext
from mvp_engine.kit import Answer, MLLMEngine, MLLMModelKit, check_rows
from mvp_engine.kit.row_checks import log_fill, refuse_preference_rows

from .data import conclusion, prepare
from .settings import DigitsConfig
from .show import show


class DigitsEngine(MLLMEngine):
    config_class = DigitsConfig
    config: DigitsConfig

    # ---- Model and data --------------------------------------------------------------------------

    def prepare_model(self) -> nn.Module:
        """Random weights by `model.config`, or those of `model.path`; with `lora` it is frozen and has adapters."""
        return MLLMModelKit(self.config.lora).of_engine(self)

    @classmethod
    def make_processor(cls, config: Any) -> Any:
        """Builds images, rows and the processor once. The rows are the sources of `data.sources`."""
        digits = config.digits
        return prepare(Path(digits.folder), digits.count, digits.drawings)

    def prepare_dataloader(self, split: str) -> Any:
        """Packs: rows side by side, without padding, up to `data.pack_tokens`."""
        return self.data.engine_loader(self, split)

    # ---- Optimizer and schedule ------------------------------------------------------------------

    def prepare_optimizer(self, model: nn.Module) -> Any:
        return self.optim.build_optimizer(model)  # of the section `optim`, by default AdamW

    def prepare_scheduler(self, optimizer: Any) -> Any:
        return self.optim.build_scheduler(optimizer, self.total_steps)

    # ---- One step --------------------------------------------------------------------------------

    def train_pre_step(self, ctx: StepContext) -> None:
        """Before the forwards, while the micro-batches are on the host: checks, FLOPs for the MFU, and metrics."""
        model: Any = self.model
        check_rows(self, ctx, model.check)
        self.mfu.count(ctx)
        log_fill(ctx, self.config.data.tokens_per_pack)

    def forward_step(self, ctx: StepContext, micro_batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """The cross-entropy summed over the tokens of answers, and their number, logged by source."""
        refuse_preference_rows(micro_batch)
        ctx.count("tokens", micro_batch.num_tokens)
        if self.loss.is_fused(self.model, micro_batch):
            # One pass over the logits computes the sum and its gradient. Without `loss.*` and token weights it is
            # the loss below; a loss of your own returns before these lines.
            outputs = self.model(micro_batch, ["loss", "losses"])
            self.data.log_sources(ctx, micro_batch, outputs["losses"])
            return outputs["loss"], micro_batch.num_loss_tokens
        outputs = self.model(micro_batch, self.loss.outputs)
        self.data.log_sources(ctx, micro_batch, -outputs["log_probs"].detach())
        loss_T = self.loss.per_token(outputs, micro_batch.labels)  # -log p of the label, 0 without one
        weight_T = self.loss.weights(micro_batch)  # 1 for a label, times the weight that the row gives it
        self.loss.log_nll(ctx, outputs, weight_T)
        return (loss_T * weight_T).sum(), weight_T.sum()

    # ---- Evaluation ------------------------------------------------------------------------------

    def eval_step(self, ctx: StepContext, micro_batch: PackedBatch) -> None:
        """The loss of held-out digits; some rows are kept, for answers to their questions (`eval.generation`)."""
        loss_sum, weight = self.forward_step(ctx, micro_batch)
        ctx.log("loss", loss_sum, weight)
        self.generation.add(ctx, micro_batch)

    def eval_end(self, ctx: StepContext) -> None:
        """Answer the kept questions, then call `score` for each source."""
        self.generation.answer(ctx)

    def score(self, ctx: StepContext, name: str, answers: list[Answer]) -> list[bool]:
        """Log how often the conclusion is right, and how often every word is."""
        right = [conclusion(answer.written) == conclusion(answer.expected) for answer in answers]
        ctx.log(f"accuracy_{name}", sum(right), len(answers))
        super().score(ctx, name, answers)
        return right

    def write_page(self, figures: Any, answers: list[Answer], export: Path | None) -> None:
        """The page of this recipe; of a training without evaluations, the general one."""
        if answers:
            show(self, answers, figures, export)
        else:
            super().write_page(figures, answers, export)

"""Qwen3-VL in stages: align the projector, pre-train, instruct, in full or with LoRA.

A stage is a config: what trains (`model.freeze`, `lora`), at which learning rates (`optim.lr_by_part`), and on which
rows (`data.sources`). Each starts from the export of the one before.
"""

from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mvp_engine.data.batch import PackedBatch
from mvp_engine.engine import StepContext
from mvp_engine.errors import UserError
from mvp_engine.kit import MLLMEngine, MLLMModelKit
from mvp_engine.kit.row_checks import refuse_preference_rows

from .data import prepare
from .settings import VLConfig


class VLEngine(MLLMEngine):
    config_class = VLConfig
    config: VLConfig
    title = "What Qwen3-VL answers"

    # ---- Model and data --------------------------------------------------------------------------

    def prepare_model(self) -> nn.Module:
        """Vision encoder, projector and language model; what a stage freezes has no gradients and no moments."""
        return MLLMModelKit(self.config.lora).of_engine(self)

    @classmethod
    def make_processor(cls, config: Any) -> Any:
        shapes = config.shapes
        processor = None if shapes is None else prepare(shapes.folder, shapes.rows)
        return processor if config.model.path is None else super().make_processor(config)

    @classmethod
    def data_kit(cls, config: Any) -> Any:
        path = config.model.path
        if config.shapes is not None and path is not None and not Path(path).is_dir():
            raise UserError(f"model.path={path} is missing: it is what the stage before exports, so train that first")
        return super().data_kit(config)

    # ---- Optimizer and schedule ------------------------------------------------------------------

    def prepare_optimizer(self, model: nn.Module) -> Any:
        # One group of parameters for each part with a learning rate of its own.
        return self.optim.build_optimizer(model)

    def prepare_scheduler(self, optimizer: Any) -> Any:
        return self.optim.build_scheduler(optimizer, self.total_steps)

    # ---- One step --------------------------------------------------------------------------------

    def forward_step(self, ctx: StepContext, micro_batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """The cross-entropy summed over the tokens of answers and captions, and their number, logged by source.

        recipes/sft/engine.py has the same loss token by token.
        """
        refuse_preference_rows(micro_batch)
        log_sources = partial(self.data.log_sources, ctx, micro_batch)
        loss: tuple[Tensor, Tensor] = self.loss(ctx, self.model, micro_batch, log_sources)
        return loss

    # ---- Evaluation ------------------------------------------------------------------------------

    def eval_step(self, ctx: StepContext, micro_batch: PackedBatch) -> None:
        """The loss of held-out rows; some of them are kept, for answers to their prompts (`eval.generation`)."""
        loss_sum, weight = self.forward_step(ctx, micro_batch)
        ctx.log("loss", loss_sum, weight)
        self.generation.add(ctx, micro_batch)

    def eval_end(self, ctx: StepContext) -> None:
        """Complete the kept prompts, and log for each source the share of answers that are the expected text."""
        self.generation.answer(ctx)

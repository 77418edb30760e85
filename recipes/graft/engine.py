"""Graft: a vision encoder and a language model of other folders become a vision-language model, as in LLaVA.

A stage is a config. `align` writes the grafted folder, and trains the projector alone on captions; `instruct` starts
from its export, and trains projector and language model, or adapters of it, on chats. Legend: T tokens.
"""

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mvp_engine.data.batch import PackedBatch
from mvp_engine.engine import StepContext
from mvp_engine.errors import UserError
from mvp_engine.kit import Answer, MLLMDataKit, MLLMEngine, MLLMModelKit
from mvp_engine.kit.row_checks import refuse_preference_rows

from .data import conclusion, prepare
from .graft import graft
from .settings import GraftConfig


class GraftEngine(MLLMEngine):
    config_class = GraftConfig
    config: GraftConfig
    title = "What the grafted model answers"

    # ---- Model -----------------------------------------------------------------------------------

    def prepare_model(self) -> nn.Module:
        """Encoder, projector and language model in a class of transformers, from the folder that `graft` wrote.

        `model.freeze` says what does not train: [vision, llm] to align, [vision] to instruct.
        """
        return MLLMModelKit(self.config.lora).of_engine(self)

    # ---- Data ------------------------------------------------------------------------------------

    @classmethod
    def data_kit(cls, config: Any) -> MLLMDataKit:
        """Write what the first stages start from, then read rows: captions to align, chats to instruct."""
        if config.digits is not None:
            prepare(config.digits.folder, config.digits.count)
        if config.graft is not None:
            graft(config.graft)
        path = config.model.path
        if config.digits is not None and path is not None and not Path(path).is_dir():
            raise UserError(f"model.path={path} is missing: it is what the stage before exports, so train that first")
        return super().data_kit(config)

    def prepare_dataloader(self, split: str) -> Any:
        """Packs: rows side by side, without padding, up to `data.pack_tokens`. Each is a micro-batch."""
        return self.data.engine_loader(self, split)

    # ---- Optimizer and schedule ------------------------------------------------------------------

    def prepare_optimizer(self, model: nn.Module) -> Any:
        """AdamW; `optim.lr_by_part` gives projector and language model learning rates of their own."""
        return self.optim.build_optimizer(model)

    def prepare_scheduler(self, optimizer: Any) -> Any:
        return self.optim.build_scheduler(optimizer, self.total_steps)

    # ---- One step --------------------------------------------------------------------------------

    def forward_step(self, ctx: StepContext, micro_batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """The cross-entropy summed over the tokens of captions and answers, and their number."""
        refuse_preference_rows(micro_batch)
        ctx.count("tokens", micro_batch.num_tokens)
        if self.loss.is_fused(self.model, micro_batch):
            # One pass over the logits computes the sum and its gradient; it is the loss below.
            outputs = self.model(micro_batch, ["loss", "losses"])
            self.data.log_sources(ctx, micro_batch, outputs["losses"])
            return outputs["loss"], micro_batch.num_loss_tokens
        outputs = self.model(micro_batch, self.loss.outputs)
        self.data.log_sources(ctx, micro_batch, -outputs["log_probs"].detach())
        loss_T = self.loss.per_token(outputs, micro_batch.labels)  # -log p of the label, 0 without one
        weight_T = self.loss.weights(micro_batch)
        self.loss.log_nll(ctx, outputs, weight_T)
        return (loss_T * weight_T).sum(), weight_T.sum()

    # ---- Evaluation ------------------------------------------------------------------------------

    def score(self, ctx: StepContext, name: str, answers: list[Answer]) -> list[bool] | None:
        """How often a generated answer is the expected one; of the digits, how often its conclusion is."""
        super().score(ctx, name, answers)
        if self.config.digits is None:
            return None
        right = [conclusion(answer.written) == conclusion(answer.expected) for answer in answers]
        ctx.log(f"accuracy_{name}", sum(right), len(answers))
        return right

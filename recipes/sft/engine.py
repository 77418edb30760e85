"""Supervised fine-tuning: a pretrained model, of text or with images, video and audio, learns the answers of your rows.

This file is the whole experiment: model, data, optimizer, one step, evaluation. Each method calls a kit, which does
the work. `mvp recipe mine --from sft` gives a copy, and docs/changes.md has diffs for it. Legend: T tokens.
"""

from typing import Any

from torch import Tensor, nn

from mvp_engine.data.batch import PackedBatch
from mvp_engine.engine import StepContext
from mvp_engine.hf.model.config_source import read_config
from mvp_engine.kit import Answer, MLLMDataKit, MLLMEngine, MLLMModelKit, check_rows, load_processor, make_data
from mvp_engine.kit.row_checks import log_fill, refuse_preference_rows

from .settings import SFTConfig


class SFTEngine(MLLMEngine):
    config_class = SFTConfig
    config: SFTConfig

    # ---- Model -----------------------------------------------------------------------------------

    def prepare_model(self) -> nn.Module:
        """The model of `model.path`, without weights: each rank reads those that it holds, when it is sharded.

        With the section `lora` it is frozen and has adapters; `model.freeze` names other parts that do not train.
        """
        return MLLMModelKit(self.config.lora).of_engine(self)

    # ---- Data ------------------------------------------------------------------------------------

    @classmethod
    def make_processor(cls, config: Any) -> Any:
        """The tokenizer, or the processor of a model with media."""
        return load_processor(config.processor or config.model.path)

    @classmethod
    def data_kit(cls, config: Any) -> MLLMDataKit:
        """Reads rows, renders them by the chat template, and marks the answers: only their tokens have a label."""
        config.check_engine()
        make_data(config.made)
        model_config = read_config(config.model.path, config.model.config)
        processor = cls.make_processor(config)
        return MLLMDataKit(config.data, processor, model_config=model_config, num_workers=config.data.num_workers)

    def prepare_dataloader(self, split: str) -> Any:
        """Packs: rows side by side, without padding, up to `data.pack_tokens`. Each is a micro-batch."""
        return self.data.engine_loader(self, split)

    # ---- Optimizer and schedule ------------------------------------------------------------------

    def prepare_optimizer(self, model: nn.Module) -> Any:
        """By default AdamW, without weight decay on norms, biases and embeddings."""
        return self.optim.build_optimizer(model)

    def prepare_scheduler(self, optimizer: Any) -> Any:
        """A warm-up, then `optim.schedule` over all steps."""
        return self.optim.build_scheduler(optimizer, self.total_steps)

    # ---- One step --------------------------------------------------------------------------------

    def train_pre_step(self, ctx: StepContext) -> None:
        """Before the forwards, while the micro-batches are on the host: checks, FLOPs for the MFU, and metrics."""
        check_rows(self, ctx)
        self.mfu.count(ctx)
        log_fill(ctx, self.config.data.tokens_per_pack, self.num_positions)

    def forward_step(self, ctx: StepContext, micro_batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """The cross-entropy summed over the tokens with a label, and their number. Change the loss here.

        The engine adds both over all micro-batches and ranks of the step, and divides once.
        """
        refuse_preference_rows(micro_batch)
        ctx.count("tokens", micro_batch.num_tokens)
        if self.loss.is_fused(self.model, micro_batch):
            # One pass over the logits computes the sum and its gradient. Without `loss.*` and token weights it is
            # the loss below; a loss of your own returns before these lines.
            outputs = self.model(micro_batch, ["loss", "losses"])
            self.data.log_sources(ctx, micro_batch, outputs["losses"])
            return outputs["loss"], micro_batch.num_loss_tokens
        outputs = self.model(micro_batch, self.loss.outputs)  # per token: log_probs, and what `loss.*` needs
        self.data.log_sources(ctx, micro_batch, -outputs["log_probs"].detach())
        loss_T = self.loss.per_token(outputs, micro_batch.labels)  # -log p of the label, 0 without one
        weight_T = self.loss.weights(micro_batch)  # 1 for a label, times the weight that the row gives it
        self.loss.log_nll(ctx, outputs, weight_T)
        return (loss_T * weight_T).sum(), weight_T.sum()

    # ---- Evaluation ------------------------------------------------------------------------------

    def eval_step(self, ctx: StepContext, micro_batch: PackedBatch) -> None:
        """The loss of held-out rows; some of them are kept, for answers to their prompts (`eval.generation`)."""
        loss_sum, weight = self.forward_step(ctx, micro_batch)
        ctx.log("loss", loss_sum, weight)
        self.generation.add(ctx, micro_batch)

    def eval_end(self, ctx: StepContext) -> None:
        """Complete the kept prompts, then call `score` for each source."""
        self.generation.answer(ctx)

    def score(self, ctx: StepContext, name: str, answers: list[Answer]) -> list[bool] | None:
        """Log the share of answers that are the expected text. A metric of your own goes here.

        It may return which answers are right, for the report page; None: nobody can say it of free text.
        """
        judged = [answer for answer in answers if not answer.is_continuation]
        if judged:
            ctx.log(f"exact_{name}", sum(answer.right for answer in judged), len(judged))
        return None

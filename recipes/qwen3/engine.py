"""Qwen3: pre-training from random weights on texts, and chat SFT from the exported model, with one engine."""

import math
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.engine import StepContext
from mvp_engine.kit import MLLMEngine, MLLMModelKit, build_once
from mvp_engine.kit.row_checks import refuse_preference_rows

from .settings import Qwen3Config


class Qwen3Engine(MLLMEngine):
    config_class = Qwen3Config
    config: Qwen3Config
    title = "A small Qwen3"

    # ---- Model and data --------------------------------------------------------------------------

    def prepare_model(self) -> nn.Module:
        """Random weights by `model.config`, or those of `model.path`; with `lora` it is frozen and has adapters."""
        return MLLMModelKit(self.config.lora).of_engine(self)

    @classmethod
    def data_kit(cls, config: Any) -> Any:
        made = config.made
        if made is not None:
            from .data import build

            sizes = {"modules": made.modules, "chats": made.chats}
            build_once(Path(made.folder), {**sizes, "version": 1}, partial(build, **sizes), "made.folder")
        return super().data_kit(config)

    # ---- Optimizer and schedule ------------------------------------------------------------------

    def prepare_optimizer(self, model: nn.Module) -> Any:
        return self.optim.build_optimizer(model)  # Muon for matrices of blocks with optim.name=muon, else AdamW

    def prepare_scheduler(self, optimizer: Any) -> Any:
        return self.optim.build_scheduler(optimizer, self.total_steps)

    # ---- One step --------------------------------------------------------------------------------

    def forward_step(self, ctx: StepContext, micro_batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """The cross-entropy summed over the tokens with a label, and their number. Change the loss here.

        In a pre-training every token of a text has a label, in an SFT those of answers.
        """
        refuse_preference_rows(micro_batch)
        ctx.count("tokens", micro_batch.num_tokens)
        if self.loss.is_fused(self.model, micro_batch):
            # One pass over the logits computes the sum and its gradient. Without `loss.*` and token weights it is
            # the loss below; a loss of your own replaces both.
            outputs = self.model(micro_batch, ["loss", "losses"])
            self.data.log_sources(ctx, micro_batch, outputs["losses"])
            self.log_bits(ctx, micro_batch, outputs["loss"].detach())
            return outputs["loss"], micro_batch.num_loss_tokens
        outputs = self.model(micro_batch, self.loss.outputs)  # per token: log_probs, and what `loss.*` needs
        nll_T = -outputs["log_probs"].detach()
        self.data.log_sources(ctx, micro_batch, nll_T)
        self.log_bits(ctx, micro_batch, nll_T.sum())
        loss_T = self.loss.per_token(outputs, micro_batch.labels)  # -log p of the label, 0 without one
        weight_T = self.loss.weights(micro_batch)  # 1 for a label, times the weight that the row gives it
        self.loss.log_nll(ctx, outputs, weight_T)
        return (loss_T * weight_T).sum(), weight_T.sum()

    def log_bits(self, ctx: StepContext, micro_batch: PackedBatch, nll: Tensor) -> None:
        """In evaluations, the bits per byte of text: comparable between tokenizers, unlike the loss.

        `nll` is the sum of -log p of the labels, whatever loss is made of it.
        """
        if ctx.split != "train":
            labels = micro_batch.labels[micro_batch.labels != IGNORE]
            num_bytes = self.token_bytes.to(labels.device)[labels].sum()
            ctx.log("bits_per_byte", nll / math.log(2), num_bytes)

    # ---- Evaluation ------------------------------------------------------------------------------

    def eval_step(self, ctx: StepContext, micro_batch: PackedBatch) -> None:
        """The loss of held-out rows; some of them are kept, for completions of their prompts (`eval.generation`)."""
        loss_sum, weight = self.forward_step(ctx, micro_batch)
        ctx.log("loss", loss_sum, weight)
        self.generation.add(ctx, micro_batch)

    @cached_property
    def token_bytes(self) -> Tensor:
        """The bytes of text of each token: in byte-level BPE its characters; 0 for special tokens."""
        special = {id for id, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        tokens = self.tokenizer.convert_ids_to_tokens(range(len(self.tokenizer)))
        return torch.tensor([0 if id in special else len(token) for id, token in enumerate(tokens)])

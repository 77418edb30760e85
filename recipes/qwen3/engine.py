"""A Qwen3 from random weights on a text corpus, and chat SFT from what that exported: one engine, two kinds of rows."""

import math
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mvp_engine.config import Section
from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.engine import StepContext
from mvp_engine.kit import MLLMConfig, MLLMEngine, build_once


class Made(Section):
    folder: str  # where corpus, tokenizer and chats are made, once
    modules: int  # of Python's standard library; every twentieth is held out
    chats: int  # of each task, for training


class Qwen3Config(MLLMConfig):
    made: Made | None = None


class Qwen3Engine(MLLMEngine):
    config_class = Qwen3Config
    config: Qwen3Config
    title = "A small Qwen3"

    @classmethod
    def data_kit(cls, config: Any) -> Any:
        if config.made is not None:
            from .data import make

            about = {"modules": config.made.modules, "chats": config.made.chats}
            build_once(Path(config.made.folder), about | {"version": 1}, lambda to: make(to, **about), "made.folder")
        return super().data_kit(config)

    def forward_step(self, ctx: StepContext, micro_batch: PackedBatch) -> tuple[Tensor, Tensor]:
        loss_sum, weight = super().forward_step(ctx, micro_batch)
        if ctx.split == "eval":  # can be compared between tokenizers, which a loss per token cannot
            told = micro_batch.labels[micro_batch.labels != IGNORE]
            ctx.log("bits_per_byte", loss_sum.detach() / math.log(2), self.token_bytes.to(told.device)[told].sum())
        return loss_sum, weight

    @cached_property
    def token_bytes(self) -> Tensor:
        """How many bytes of text each token stands for: in byte-level BPE its characters, and none if it is special."""
        special = {id for id, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        tokens = self.tokenizer.convert_ids_to_tokens(range(len(self.tokenizer)))
        return torch.tensor([0 if id in special else len(token) for id, token in enumerate(tokens)])

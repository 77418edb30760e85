"""A tiny Qwen3-VL, from random weights, learns to read handwritten digits and to talk about them."""

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from mvp_engine.batch import PackedBatch
from mvp_engine.config import Config, Section
from mvp_engine.engine import Engine, StepContext
from mvp_engine.kit import MLLMData, MLLMDataKit, answer
from mvp_engine.model_engine.source import read_config

from .data import conclusion, prepare
from .show import show


class Digits(Section):
    folder: str  # where pictures, rows and processor are made, once
    count: int  # of the 1,797 digits; a fifth is held out
    drawings: int  # of each, on paper of other sizes


class DigitsConfig(Config):
    digits: Digits
    mllm: MLLMData


class DigitsEngine(Engine):
    config_class = DigitsConfig
    config: DigitsConfig

    @classmethod
    def data_kit(cls, config: DigitsConfig) -> MLLMDataKit:
        digits = config.digits
        processor = prepare(Path(digits.folder), digits.count, digits.drawings)
        about = read_config(None, config.model.config)
        return MLLMDataKit(config.mllm, processor, model_config=about, num_workers=config.data.num_workers)

    @cached_property
    def kit(self) -> MLLMDataKit:
        return self.data_kit(self.config)

    def prepare_model(self) -> nn.Module:
        torch.set_num_threads(1)  # tensors are tiny: threads would wait for each other; other cores load data
        model: Any = super().prepare_model()
        model.side_files = self.run.dir / "processor"  # goes with the model into checkpoints and exports
        if self.world.is_main:
            self.kit.processor.save_pretrained(model.side_files)
            stop = self.kit.processor.tokenizer.eos_token_id  # nothing else of the model says where answers end
            GenerationConfig(eos_token_id=stop, pad_token_id=stop).save_pretrained(model.side_files)
        return model

    def prepare_dataloader(self, split: str) -> Any:
        self.asked: list[PackedBatch] = []
        return self.kit.engine_loader(self, split)

    def forward_step(self, ctx: StepContext, micro_batch: PackedBatch) -> tuple[Tensor, Tensor]:
        log_probs = self.model(micro_batch, ["log_probs"])["log_probs"]
        ctx.count("tokens", micro_batch.num_tokens)
        for name, (loss_sum, weight) in self.kit.source_losses(log_probs, micro_batch, ctx.split).items():
            ctx.log(name, loss_sum, weight)
        return -log_probs.sum(), micro_batch.weight

    def eval_step(self, ctx: StepContext, micro_batch: PackedBatch) -> None:
        super().eval_step(ctx, micro_batch)
        self.asked += [micro_batch] if ctx.counts else []

    def eval_end(self, ctx: StepContext) -> None:
        """By generation: whether the answer is right, and whether every word of it is."""
        budget, tokenizer = self.config.mllm.micro_batch_tokens, self.kit.processor.tokenizer
        self.answers = answer(self.model_engine, self.asked, tokenizer, max_new_tokens=12, budget=budget)
        self.asked = []
        for i, name in enumerate(self.kit.names("eval")):
            mine = [one for one in self.answers if one.source == i]
            ctx.log(
                f"accuracy_{name}", sum(conclusion(one.written) == conclusion(one.expected) for one in mine), len(mine)
            )
            ctx.log(f"exact_{name}", sum(one.right for one in mine), len(mine))

    def report(self) -> None:
        """A workflow: evaluate a checkpoint, export it, ask the export once more, and show it all on a page."""
        figures = self.evaluate()
        export = self.run.dir / f"hf_step_{self.step}"
        if not self.world.broadcast(export.exists()):
            self.model_engine.export_hf(export)
        every = self.world.all_gather(self.answers if self.layout.speaks else [])
        if self.world.is_main:
            answers = sorted((one for part in every for one in part), key=lambda one: one.sample)
            show(self, answers, figures, export)

"""This engine's sides: packed micro-batches, nothing padded, that lie in memory or come from JPEG files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from mvp_engine.config import Config, Section
from mvp_engine.data.batch import PackedBatch
from mvp_engine.engine import Engine, StepContext
from mvp_engine.errors import UserError
from mvp_engine.kit import Lora, MFUKit, MLLMModelKit, OptimKit
from mvp_engine.kit.optim import OptimSettings
from mvp_engine.model_engine import ModelSource, engine_class

from .data import Pixels, balanced, packed, rows, shape
from .files import data_kit


class Sft(Section):
    shape: str
    mix: str
    longest: int
    source: Literal["memory", "files"]  # files: JPEG, by the data kit; only for images
    folder: str  # where they are made, once


class SftConfig(Config):
    sft: Sft
    optim: OptimSettings
    lora: Lora | None = None


class SftEngine(Engine):
    config_class = SftConfig
    config: SftConfig

    def prepare_model(self) -> nn.Module:
        kind = engine_class("language_model", self.config.model.backend)
        return MLLMModelKit(self.config.lora).adapt(kind.build_model(ModelSource(None, shape(self.config.sft.shape))))

    def prepare_optimizer(self, model: nn.Module) -> Optimizer:
        return OptimKit(self.config.optim, self.config.seed).build_optimizer(model)

    def before_train(self) -> None:
        super().before_train()
        self.mfu = MFUKit(self.model)

    def prepare_dataloader(self, split: str) -> Any:
        data, sft, pixels = self.config.data, self.config.sft, Pixels()
        steps, size = self.config.train.max_steps or 1, data.global_batch_size or data.micro_batch_size
        if sft.source == "files":
            if sft.mix != "images":
                raise UserError(f"sft.source=files: rows of {sft.mix} have no images. Set sft.mix=images")
            # Rows for two steps more: what ends an epoch, such as stopping the workers, is not what is measured.
            kit = data_kit(sft.shape, steps + 2, size, Path(sft.folder), data.num_workers)
            return kit.engine_loader(self, split)
        every = rows(sft.mix, steps, sft.longest)
        by_step = [every[i : i + size] for i in range(0, len(every), size)]
        chosen = [pack for step in by_step for pack in balanced(step, size // data.micro_batch_size)]
        packs = [packed(pack, sft.shape, pixels) for pack in chosen]
        return [pack.pin_memory() for pack in packs] if self.device.type == "cuda" else packs

    def train_pre_step(self, ctx: StepContext) -> None:
        self.mfu.count(ctx)

    def forward_step(self, ctx: StepContext, micro_batch: PackedBatch) -> tuple[Tensor, Tensor]:
        ctx.count("tokens", micro_batch.num_tokens)
        return self.model(micro_batch, ["loss"])["loss"], micro_batch.num_loss_tokens

    def save(self) -> None:
        """No checkpoint: 20 GB that nobody wants."""

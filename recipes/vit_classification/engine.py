"""Image classification with a vision transformer: no tokens, no packing, a plain module on the plain engine."""

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mvp_engine.data import SampleLoader
from mvp_engine.engine import Engine, StepContext
from mvp_engine.kit import OptimKit

from .data import IGNORE, BadImageLog, ImageDataset, collate
from .model import make_model, make_processor, save
from .settings import VitConfig
from .show import show


class VitEngine(Engine):
    config_class = VitConfig
    config: VitConfig

    @cached_property
    def optim(self) -> OptimKit:
        return OptimKit(self.config.optim, self.config.seed)

    @cached_property
    def processor(self) -> Any:
        return make_processor(self.config.model.path, self.config.images.size)

    @cached_property
    def bad_images(self) -> BadImageLog:
        return BadImageLog(self.run.dir / f"bad_images.{self.world.rank}.jsonl", self.logger)

    @cached_property
    def held_out(self) -> ImageDataset:
        return ImageDataset("eval", self.config.images, self.processor)

    def prepare_model(self) -> nn.Module:
        return make_model(self.config.model, self.config.images.size, self.held_out.classes, self.config.lora)

    def prepare_optimizer(self, model: nn.Module) -> Any:
        return self.optim.build_optimizer(model)

    def prepare_scheduler(self, optimizer: Any) -> Any:
        return self.optim.build_scheduler(optimizer, self.total_steps)

    def prepare_dataloader(self, split: str) -> SampleLoader:
        dataset = self.held_out if split == "eval" else ImageDataset(split, self.config.images, self.processor)
        return self.sample_loader(dataset, split, collate)

    def forward_step(self, ctx: StepContext, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Images that could not be read have no label and no weight."""
        logits_BC = self.model(pixel_values=batch["pixel_values"]).logits.float()
        labels_B = batch["labels"]
        weight = (labels_B != IGNORE).sum()
        self.bad_images.add(batch["bad"], ctx)
        smoothing = 0.0 if ctx.split == "eval" else self.config.label_smoothing
        if ctx.split == "eval":
            guesses_B = logits_BC.argmax(-1)
            ctx.log("accuracy", (guesses_B == labels_B).sum(), weight)
            if not ctx.is_dummy:
                self.guesses.append(torch.stack([batch["index"], labels_B, guesses_B], 1))
        loss = F.cross_entropy(logits_BC, labels_B, reduction="sum", ignore_index=IGNORE, label_smoothing=smoothing)
        return loss, weight

    def evaluate(self) -> dict[str, float | None]:
        self.guesses: list[Tensor] = []  # rows of index, label, guess
        return super().evaluate()

    def after_train(self) -> None:
        super().after_train()
        show(self)

    def export(self) -> Path:
        """Write a folder for `from_pretrained` with the averaged weights; with LoRA, also its adapters for peft."""
        if not hasattr(self, "model_engine"):
            self.before_evaluate()
        folder = self.run.dir / f"hf_step_{self.step}"
        with self.eval_weights():
            save(self.model_engine, self.processor, folder)
        return folder

    def report(self) -> None:
        """Evaluate a checkpoint, export it, and write a page with images, guesses and a confusion matrix."""
        show(self, self.evaluate(), self.export())

"""A vision transformer tells classes of pictures apart: no tokens, no packing, a plain module on the plain engine."""

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mvp_engine.config import Config
from mvp_engine.data import SampleLoader
from mvp_engine.engine import Engine, StepContext
from mvp_engine.kit import OptimKit, OptimSettings

from .data import IGNORE, Images, LeftOut, Pictures, collate
from .model import make_model, make_processor, save
from .show import show


class VitConfig(Config):
    images: Images
    optim: OptimSettings
    label_smoothing: float = 0.0


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
    def left_out(self) -> LeftOut:
        return LeftOut(self.run.dir / f"bad_images.{self.world.rank}.jsonl", self.logger)

    @cached_property
    def held_out(self) -> Pictures:
        return Pictures("eval", self.config.images, self.processor)

    def prepare_model(self) -> nn.Module:
        return make_model(self.config.model, self.config.images.size, self.held_out.classes)

    def prepare_optimizer(self, model: nn.Module) -> Any:
        return self.optim.build_optimizer(model)

    def prepare_scheduler(self, optimizer: Any) -> Any:
        return self.optim.build_scheduler(optimizer, self.total_steps)

    def prepare_dataloader(self, split: str) -> SampleLoader:
        pictures = Pictures(split, self.config.images, self.processor) if split == "train" else self.held_out
        return self.sample_loader(pictures, split, collate)

    def forward_step(self, ctx: StepContext, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Pictures that could not be read have no label and do not count."""
        logits_BC, labels_B = self.model(pixel_values=batch["pixel_values"]).logits.float(), batch["labels"]
        if batch["bad"]:
            ctx.count("bad_images", len(batch["bad"]))
            self.left_out.note(batch["bad"], ctx.step, ctx.split)
        known_B, smooth = labels_B != IGNORE, self.config.label_smoothing
        if ctx.split == "eval":
            ctx.log("accuracy", (logits_BC.argmax(-1) == labels_B).sum(), known_B.sum())
            guesses = torch.stack([batch["index"], labels_B, logits_BC.argmax(-1)], 1)
            self.guesses += [] if ctx.is_dummy else [guesses]
            smooth = 0.0
        loss = F.cross_entropy(logits_BC, labels_B, reduction="sum", ignore_index=IGNORE, label_smoothing=smooth)
        return loss, known_B.sum()

    def before_evaluate(self) -> None:
        super().before_evaluate()
        self.optim.load_averages(self.model_engine, self.checkpoint)

    def evaluate(self) -> dict[str, float | None]:
        self.guesses: list[Tensor] = []  # rows of index, label, guess
        with self.optim.averaged():
            return super().evaluate()

    def export(self) -> Path:
        """A folder for `from_pretrained`, of the averaged weights."""
        if not hasattr(self, "model_engine"):
            self.before_evaluate()
        folder = self.run.dir / f"hf_step_{self.step}"
        with self.optim.averaged():
            save(self.model, self.processor, folder, self.world)
        return folder

    def report(self) -> None:
        """Evaluate a checkpoint, export it, and show pictures, guesses and what was taken for what on a page."""
        figures, folder = self.evaluate(), self.export()
        every = self.world.all_gather([row for part in self.guesses for row in part.tolist()])
        if self.world.is_main:
            show(self, figures, sorted(row for part in every for row in part if row[1] != IGNORE), folder)

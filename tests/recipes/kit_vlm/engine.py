"""A tiny Qwen3-VL on the data kit. It records its training rows, and can kill itself in the middle of a step."""

import json
import os
import signal
from typing import Any

from tiny_vlm import model_config, qwen3_vl
from torch import Tensor, nn

from mvp_engine.config import Config, Section
from mvp_engine.data.batch import PackedBatch
from mvp_engine.engine import Engine, StepContext
from mvp_engine.hf import LanguageModel
from mvp_engine.kit import MLLMData, MLLMDataKit


class Fate(Section):
    kill_step: int | None = None  # SIGKILL, on rank 1
    stop_step: int | None = None  # SIGTERM, on rank 0


class KitConfig(Config):
    data: MLLMData
    fate: Fate


class KitEngine(Engine):
    config_class = KitConfig
    config: KitConfig

    def prepare_model(self) -> nn.Module:
        return LanguageModel.from_config(model_config())

    def prepare_dataloader(self, split: str) -> Any:
        return MLLMDataKit(self.config.data, qwen3_vl(), model_config=model_config()).engine_loader(
            self, split
        )

    def before_train(self) -> None:
        super().before_train()
        self.began = self.step

    def train_pre_step(self, ctx: StepContext) -> None:
        rows = [batch.sequence_fields["sample"].tolist() for batch in ctx.micro_batches]
        note = {
            "began": self.began,
            "step": ctx.step,
            "rank": self.world.rank,
            "ranks": self.world.size,
            "rows": rows,
        }
        with open(self.run.dir / f"seen-{self.world.rank}.jsonl", "a") as out:
            out.write(json.dumps(note) + "\n")

    def forward_step(self, ctx: StepContext, micro_batch: PackedBatch) -> tuple[Tensor, Tensor]:
        if (
            ctx.step == self.config.fate.kill_step
            and self.world.rank == 1
            and micro_batch is ctx.micro_batches[-1]
        ):
            os.kill(os.getpid(), signal.SIGKILL)
        ctx.count("tokens", micro_batch.num_tokens)
        return -self.model(micro_batch, ["log_probs"])[
            "log_probs"
        ].sum(), micro_batch.num_loss_tokens

    def train_post_step(self, ctx: StepContext) -> None:
        if ctx.step == self.config.fate.stop_step and self.world.is_main:
            os.kill(os.getpid(), signal.SIGTERM)

"""A tiny Hugging Face language model, trained on packed sequences of consecutive token ids."""

from typing import Any

import torch
from families import config_of, overrides_of
from torch import Tensor, nn
from torch.utils.data import Dataset

from mvp_engine.config import Config, Section
from mvp_engine.data.batch import PackedBatch
from mvp_engine.engine import Engine, StepContext
from mvp_engine.hf import LanguageModel
from mvp_engine.kit import Lora, MLLMModelKit


class Lm(Section):
    family: str
    sequences: int
    weights: bool = (
        False  # create weights at once instead of on the meta device, for backends that need them
    )


class LmConfig(Config):
    lm: Lm
    lora: Lora | None = None


class Sequences(Dataset[Tensor]):
    """Consecutive token ids from a random start, 2 to 13 tokens: quickly learnt."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        starts = torch.randint(60, (size,), generator=generator).tolist()
        lengths = torch.randint(2, 14, (size,), generator=generator).tolist()
        self.rows = [torch.arange(a, a + n) for a, n in zip(starts, lengths, strict=True)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class LmEngine(Engine):
    config_class = LmConfig
    config: LmConfig

    def prepare_model(self) -> nn.Module:
        if self.config.model.path:
            return MLLMModelKit(self.config.lora).build(self.config.model)
        if self.config.lm.weights:
            return LanguageModel.from_config(config_of(self.config.lm.family), chunk=16)
        model = LanguageModel.on_meta(None, overrides_of(self.config.lm.family))
        model.chunk = 16
        return model

    def prepare_dataloader(self, split: str) -> Any:
        size = self.config.lm.sequences if split == "train" else 5
        return self.sample_loader(Sequences(size), split, collate_fn=PackedBatch.from_sequences)

    def forward_step(self, ctx: StepContext, micro_batch: PackedBatch) -> tuple[Tensor, Tensor]:
        if ctx.split == "train":
            ctx.count("tokens", micro_batch.num_tokens)
        return self.model(micro_batch, ["loss"])["loss"], micro_batch.num_loss_tokens

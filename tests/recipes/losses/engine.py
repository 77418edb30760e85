"""A recipe with losses that are right, and losses that depend on the split into micro-batches."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from mvp_engine.config import Config, Section
from mvp_engine.engine import Engine, StepContext


class Losses(Section):
    kind: str = "sum"
    layer: str = "none"  # between the two linear layers: none, dropout, batch_norm
    unused: bool = False  # a layer that the forward does not use


class LossesConfig(Config):
    losses: Losses = Losses()


class Model(nn.Module):
    def __init__(self, layer: str, unused: bool) -> None:
        super().__init__()
        layers = {
            "none": nn.Identity(),
            "dropout": nn.Dropout(0.5),
            "batch_norm": nn.BatchNorm1d(16),
        }
        self.layers = nn.Sequential(nn.Linear(4, 16), layers[layer], nn.Tanh(), nn.Linear(16, 4))
        if unused:
            self.unused = nn.Linear(4, 4)
            self.factor = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y + 0 * self.factor if hasattr(self, "unused") else y


class LossesEngine(Engine):
    config_class = LossesConfig
    config: LossesConfig

    def prepare_model(self) -> nn.Module:
        return Model(self.config.losses.layer, self.config.losses.unused)

    def prepare_dataloader(self, split: str) -> Any:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(64, 4, generator=generator)
        tokens = torch.randint(1, 9, (64,), generator=generator)  # the length of a row
        return self.sample_loader(TensorDataset(x, tokens), split)

    def forward_step(self, ctx: StepContext, micro_batch: Any) -> tuple[Tensor, Tensor | float]:
        x, tokens = micro_batch
        y = self.model(x)
        loss_B = (y - 2 * x).square().sum(-1)
        rows = len(x)
        match self.config.losses.kind:
            case "sum":
                return loss_B.sum(), rows
            case "no_weight":
                return loss_B.sum()  # type: ignore[return-value]
            case "cancel":  # rows of both signs whose sum is nearly 0, as advantages have
                sign = torch.tensor([1.0, -1.0]).repeat(rows)[:rows]
                return (sign * (loss_B / loss_B.detach())).sum(), rows
            case "mean_of_means":
                return loss_B.mean(), 1
            case "mean":
                return loss_B.mean(), rows
            case "mean_over_tokens":
                return rows * (loss_B * tokens).sum() / tokens.sum(), rows
            case "negatives":
                return F.cross_entropy(y @ x.T, torch.arange(rows), reduction="sum"), rows
            case "noise":
                noise = torch.randn_like(x)
                return (self.model(x + noise) - noise).square().sum(), rows
            case "growing":  # as gradients are that nothing clears: the loss is as with "sum"
                self.calls = getattr(self, "calls", 0) + 1
                grown = self.calls * self.model.layers[3].weight.sum()
                return loss_B.sum() + (grown - grown.detach()), rows
            case "random_gradient":
                drawn = 9 * torch.randn_like(y) * y
                return loss_B.sum() + (drawn - drawn.detach()).sum(), rows
            case "random_weight":
                keep = torch.rand(rows) < 0.5
                return loss_B[keep].sum() + 0 * loss_B.sum(), keep.sum() + 1e-6
        raise ValueError(self.config.losses.kind)

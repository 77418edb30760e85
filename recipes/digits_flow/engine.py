"""Flow matching on handwritten digits: a small diffusion transformer learns to draw the digit it is asked for."""

from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from mvp_engine.data import SampleLoader
from mvp_engine.engine import Engine, StepContext
from mvp_engine.kit import OptimKit, flow

from .judge import Judge, digits
from .model import CLASSES, NO_CLASS, SIDE, DigitsDiT
from .settings import FlowConfig
from .show import show


class FlowEngine(Engine):
    config_class = FlowConfig
    config: FlowConfig
    images: Tensor | None = None  # of the last evaluation, (N, 64)

    @cached_property
    def optim(self) -> OptimKit:
        return OptimKit(self.config.optim, self.config.seed)

    @cached_property
    def judge(self) -> Judge:
        return Judge()

    @property
    def wanted(self) -> Tensor:
        """The class that each generated digit should show."""
        return torch.arange(self.config.generated) % CLASSES

    def prepare_model(self) -> nn.Module:
        return DigitsDiT(self.config.dit)

    def prepare_optimizer(self, model: nn.Module) -> Any:
        return self.optim.build_optimizer(model)

    def prepare_scheduler(self, optimizer: Any) -> Any:
        return self.optim.build_scheduler(optimizer, self.total_steps)

    def prepare_dataloader(self, split: str) -> SampleLoader:
        items = [{"clean": image, "label": label} for image, label in zip(*digits(split), strict=True)]
        return self.sample_loader(flow.FlowDataset(items, self.config.flow, self.config.seed), split)

    def forward_step(self, ctx: StepContext, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        """All draws of a digit in one forward: (B, N) draws are B * N rows. The weight is the number of pixels."""
        noise = batch["noise"].flatten(0, 1)
        times = batch["times"].flatten()
        clean = batch["clean"][:, None].expand_as(batch["noise"]).flatten(0, 1)
        labels = torch.where(batch["keep"], batch["label"][:, None], NO_CLASS).flatten()
        predicted = self.model(flow.noisy_sample(clean, noise, times), times, labels)
        return flow.velocity_losses(predicted, clean, noise).sum(), noise.numel()

    def eval_end(self, ctx: StepContext) -> None:
        """Generate digits and judge them, on every rank alike: sharded ranks run each forward together."""
        self.images = self.generate(self.wanted.to(self.device)).cpu()
        if self.layout.is_metrics_rank:
            for name, (total, weight) in self.judge.metrics(self.images, self.wanted).items():
                ctx.log(name, total, weight)

    def generate(self, labels_N: Tensor) -> Tensor:
        """A digit (64,) for each label; the noise of the i-th depends on the seed and i alone."""
        noise = flow.start_noise(self.config.seed, range(len(labels_N)), (SIDE**2,)).to(self.device)
        return flow.euler_sample(partial(self.velocity, labels_N), noise, self.config.flow.steps)

    def velocity(self, labels_N: Tensor, x: Tensor, times: Tensor) -> Tensor:
        scale = self.config.flow.guidance
        with_label: Tensor = self.model(x, times, labels_N)
        if scale == 1.0:
            return with_label
        return flow.guided_velocity(with_label, self.model(x, times, torch.full_like(labels_N, NO_CLASS)), scale)

    def after_train(self) -> None:
        super().after_train()
        show(self)

    def report(self) -> None:
        """Evaluate a checkpoint and write a page with generated digits."""
        show(self, self.evaluate())

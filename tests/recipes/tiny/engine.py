"""A recipe that trains in milliseconds, with faults that tests can turn on."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from mvp_engine.config import Config, Section
from mvp_engine.engine import Engine, StepContext


class Tiny(Section):
    samples: int
    dropout: float = 0.0
    noise: float = 0.0  # random augmentation of every sample
    loader: Literal["sample", "torch", "iterable", "uneven", "empty", "none"] = "sample"
    fault: str | None = None
    fault_step: int = 3
    fault_rank: int = 0
    step_seconds: float = 0.0
    load_seconds: float = 0.0  # of a sample
    slow_row: int | None = None  # takes `slow_seconds` to load
    slow_seconds: float = 0.0  # of that row, and of the hook with fault=slow_hook
    bad_rows: list[int] = Field(default=[])  # samples with a fault of their own:
    bad_kind: Literal["weight", "huge", "log", "label"] = "weight"


class TinyConfig(Config):
    tiny: Tiny


class Lines(Dataset[Any]):
    """Points of a linear function, each with its own weight, as sentences have different lengths."""

    def __init__(self, size: int, noise: float, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.slow_row: tuple[int | None, float] = (None, 0.0)
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(size, 4, generator=generator)
        self.y = self.x @ torch.tensor([1.0, -2.0, 0.5, 3.0])
        self.weight = torch.randint(1, 9, (size,), generator=generator).float()
        self.noise = noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(self.seconds)
        if index == self.slow_row[0]:
            time.sleep(self.slow_row[1])  # the slow row
        x = self.x[index]
        if self.noise:
            x = x + self.noise * torch.randn(4) + self.noise * float(np.random.rand())
        return {"x": x, "y": self.y[index], "weight": self.weight[index], "index": index}


class Stream(IterableDataset[Any]):
    def __init__(self, data: Lines) -> None:
        self.data = data

    def __len__(self) -> int:
        if len(self.data) == 44:
            raise TypeError("a stream of unknown length")
        return len(self.data)

    def __iter__(self) -> Iterator[Any]:
        return (self.data[i] for i in range(len(self.data)))


class TinyEngine(Engine):
    config_class = TinyConfig
    config: TinyConfig

    def prepare_model(self) -> nn.Module:
        dropout = nn.Dropout(self.config.tiny.dropout)
        return nn.Sequential(
            nn.Linear(4, 16), nn.LayerNorm(16), nn.Tanh(), dropout, nn.Linear(16, 1)
        )

    def prepare_dataloader(self, split: str) -> Any:
        tiny, batch = self.config.tiny, self.config.data.micro_batch_size
        data = Lines(
            tiny.samples if split == "train" else 20,
            tiny.noise if split == "train" else 0.0,
            tiny.load_seconds,
        )
        if split == "train":
            data.slow_row = tiny.slow_row, tiny.slow_seconds
        if tiny.fault == "hang_before_training":
            print("preparing", flush=True)
            time.sleep(60)
        if split == "eval" or tiny.loader == "sample":
            return self.sample_loader(data, split)
        if tiny.loader == "torch":
            return DataLoader(data, batch, shuffle=True, num_workers=self.config.data.num_workers)
        if tiny.loader == "iterable":
            return DataLoader(Stream(data), batch)
        if tiny.loader == "uneven":  # on each rank an iterable of its own length
            return DataLoader(Stream(Lines(16 + 16 * self.world.rank, 0.0)), batch)
        return None if tiny.loader == "none" else self.sample_loader(Lines(0, 0.0), split)

    def forward_step(
        self, ctx: StepContext, micro_batch: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        micro_batch, extra = self.plant(micro_batch)
        error = self.model(micro_batch["x"]).squeeze(-1) - micro_batch["y"]
        loss = (micro_batch["weight"] * error.square()).sum() + extra
        if ctx.split == "train":
            ctx.count("tokens", micro_batch["weight"].sum())
            if ctx.step % 2 == self.world.rank % 2:  # a metric that is missing on some ranks
                ctx.log("sometimes", error.detach().abs().sum(), len(error))
            loss = self.inject_fault(ctx, loss)
        return loss, micro_batch["weight"].sum()

    def plant(self, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor | float]:
        """The batch with the faults of its bad rows, and a term of the loss."""
        tiny = self.config.tiny
        if not tiny.bad_rows:
            return batch, 0.0
        index = batch["index"]
        is_bad = torch.isin(index, torch.tensor(tiny.bad_rows, device=index.device))
        if tiny.bad_kind == "weight":
            return {**batch, "weight": batch["weight"].masked_fill(is_bad, torch.nan)}, 0.0
        if tiny.bad_kind == "huge":
            return {**batch, "x": batch["x"].masked_fill(is_bad[:, None], 1e25)}, 0.0
        if tiny.bad_kind == "log":
            return batch, -(~is_bad).float().log().sum()
        return batch, F.cross_entropy(torch.zeros(len(is_bad), 3), 7 * is_bad.long())

    def inject_fault(self, ctx: StepContext, loss: Tensor) -> Tensor:
        tiny = self.config.tiny
        time.sleep(tiny.step_seconds)
        if tiny.fault == "raise_everywhere" and ctx.step == tiny.fault_step:
            raise KeyError("the bug of a user")
        if (
            tiny.fault == "raise"
            and self.world.rank != tiny.fault_rank
            and ctx.step == tiny.fault_step
        ):
            for _ in range(100):  # a rank that still prints while another one fails
                print("still printing", flush=True)
                time.sleep(0.01)
        if tiny.fault is None or self.world.rank != tiny.fault_rank or ctx.step < tiny.fault_step:
            return loss
        if tiny.fault == "nan_forever":
            return loss * float("nan")
        if ctx.step > tiny.fault_step:
            return loss
        if tiny.fault == "nan_once":
            return loss * float("nan")
        if tiny.fault == "nan_grad":  # a finite loss with a non-finite gradient
            return loss + (self.model[0].weight - self.model[0].weight.detach()).abs().sqrt().sum()
        if tiny.fault == "zero_weight":
            return loss
        if tiny.fault == "stop_iteration":
            raise StopIteration("from a hook")
        if tiny.fault == "raise":
            raise KeyError("the bug of a user")
        if tiny.fault == "exit":
            os._exit(9)
        if tiny.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if (
            tiny.fault == "crash_once"
            and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0
        ):
            raise RuntimeError("only the first time")
        return loss

    def train_post_step(self, ctx: StepContext) -> None:
        tiny = self.config.tiny
        if ctx.step != tiny.fault_step or self.world.rank != tiny.fault_rank:
            return
        if tiny.fault == "stop":
            ctx.stop = True
        if tiny.fault == "slow_hook":
            time.sleep(tiny.slow_seconds)  # the slow hook
        if tiny.fault == "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)
        if tiny.fault == "hang":
            print("hanging", flush=True)
            time.sleep(600)
        if tiny.fault == "busy":  # in C code, where no Python signal handler can run
            print("hanging", flush=True)
            torch.linalg.svd(torch.randn(6000, 6000))

    def shout(self) -> None:
        """A workflow of this recipe."""
        (self.run.dir / "shouted").write_text(self.config.run_name)

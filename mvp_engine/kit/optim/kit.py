"""What a recipe calls in `prepare_optimizer` and `prepare_scheduler`."""

from __future__ import annotations

import math
import weakref
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from mvp_engine.checkpoint.format import Reader
from mvp_engine.checkpoint.state import ema_name
from mvp_engine.config.schema import Count, Optim
from mvp_engine.distributed.collective_errors import raise_on_all_ranks
from mvp_engine.distributed.fsdp import blocks
from mvp_engine.errors import UserError
from mvp_engine.hf.parts import matching
from mvp_engine.kit.optim.optimizer import KitOptimizer
from mvp_engine.model_engine import ModelEngine
from mvp_engine.model_engine.optim import build_scheduler, parameter_groups, without_decay


class OptimSettings(Optim):
    """The `optim` section of a recipe that uses this kit: that of the engine, and more."""

    kind: Literal["adamw", "muon"] = (
        "adamw"  # muon: for the matrices of blocks, and adamw for all else
    )
    state_dtype: Literal["float32", "bfloat16", "int8"] = "float32"  # what they are kept as
    momentum: float = Field(default=0.95, ge=0, lt=1)  # of muon
    adamw: list[str] = Field(
        default_factory=list
    )  # patterns of parameter names, or parts, that muon is not to take
    ema: float | None = Field(
        default=None, gt=0, lt=1
    )  # keep an average of the weights, such as 0.999
    warmup_tokens: Count | None = None  # or warmup_steps, or warmup_ratio

    @model_validator(mode="after")
    def _agree(self) -> OptimSettings:
        if self.warmup_tokens is not None and (self.warmup_steps or self.warmup_ratio is not None):
            raise ValueError("give one of warmup_steps, warmup_ratio and warmup_tokens")
        if self.adamw and self.kind == "adamw":
            raise ValueError("adamw names what muon is not to take: set kind=muon, or leave it out")
        return self


class OptimKit:
    def __init__(self, settings: OptimSettings, seed: int = 0) -> None:
        """`seed` is for the rounding of moments in few bits."""
        self.settings, self.seed = settings, seed
        self.optimizer: KitOptimizer | None = None

    def build_optimizer(self, model: nn.Module) -> KitOptimizer:
        settings = self.settings
        groups = parameter_groups(model, settings)
        if settings.kind == "muon":
            groups = self._with_muon(model, groups)
        self.optimizer = KitOptimizer(
            groups,
            {param: name for name, param in model.named_parameters()},
            lr=settings.lr,
            betas=(settings.betas[0], settings.betas[1]),
            eps=settings.eps,
            momentum=settings.momentum,
            moments=settings.state_dtype,
            ema=settings.ema,
            seed=self.seed,
        )
        return self.optimizer

    def build_scheduler(
        self, optimizer: Optimizer, total_steps: int | None, tokens_per_step: int | None = None
    ) -> LambdaLR:
        settings = self.settings
        if settings.warmup_tokens is not None:
            if not tokens_per_step:
                raise UserError(
                    "optim.warmup_tokens: this recipe does not say how many tokens a step has. Set optim.warmup_steps"
                )
            steps = math.ceil(settings.warmup_tokens / tokens_per_step)
            settings = settings.model_copy(update={"warmup_steps": steps})
        return build_scheduler(optimizer, settings, total_steps)

    def averaged(self) -> AbstractContextManager[None]:
        """The averaged weights are in place for the time of this context, if there are any in this process."""
        if self.optimizer is None or self.settings.ema is None:
            return nullcontext()
        return self.optimizer.averaged()

    def load_averages(self, engine: ModelEngine, checkpoint: Path | None) -> None:
        """Give an engine without an optimizer the averaged weights of a checkpoint, if such are kept."""
        if checkpoint is None or self.settings.ema is None:
            return
        with raise_on_all_ranks(engine.world.host_group):
            reader = Reader(checkpoint)
            named = {
                ema_name(name): param.detach() for name, param in engine.model.named_parameters()
            }
            found = {name: param for name, param in named.items() if name in reader.entries}
            if not found:
                raise UserError(
                    f"checkpoint {checkpoint} has no averaged weights: it was trained without optim.ema"
                )
            reader.fill(found)

    _loaded: weakref.ref[ModelEngine] | None = (
        None  # the model engine with EMA weights of a checkpoint
    )

    def eval_weights(
        self, model_engine: ModelEngine, checkpoint: Path | None
    ) -> AbstractContextManager[None]:
        """A context in which the model has its EMA weights: what `Engine.eval_weights` returns.

        In a training the optimizer swaps them in and out. A model engine without an optimizer loads them from the
        checkpoint at the first call, and keeps them.
        """
        if hasattr(model_engine, "optimizer"):
            return self.averaged()
        if self._loaded is None or self._loaded() is not model_engine:
            self.load_averages(model_engine, checkpoint)
            self._loaded = weakref.ref(model_engine)
        return nullcontext()

    def _with_muon(self, model: nn.Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Groups that decay, each in two: what muon takes, and the rest."""
        chosen = _matrices(model) - without_decay(model)
        for pattern in self.settings.adamw:
            chosen -= {
                model.get_parameter(name) for name in matching(model, pattern, "optim.adamw")
            }
        found = []
        for group in groups:
            taken = [param for param in group["params"] if param in chosen]
            rest = [param for param in group["params"] if param not in chosen]
            name = group["name"].removesuffix("decay") + "muon"
            found += [{**group, "params": rest}] if rest else []
            found += [{**group, "params": taken, "kind": "muon", "name": name}] if taken else []
        if all(group.get("kind") != "muon" for group in found):
            raise UserError(
                f"optim.kind=muon: {type(model).__name__} has no matrix for it that trains. It takes those inside of "
                "blocks, which are the entries of a model's lists (nn.ModuleList). Set optim.kind=adamw"
            )
        return found


def _matrices(model: nn.Module) -> set[nn.Parameter]:
    """Matrices, and stacks of them, inside of the blocks of a model; no kernels of convolutions."""
    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    return {
        param
        for block in blocks(model)
        for module in block.modules()
        if not isinstance(module, convolutions)
        for param in module.parameters(recurse=False)
        if param.ndim in (2, 3) and param.requires_grad
    }

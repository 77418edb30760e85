"""OptimKit: builds the optimizer and the schedule of a recipe, and serves its EMA weights."""

from __future__ import annotations

import math
import weakref
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from mvp_engine.checkpoint.format import Reader
from mvp_engine.checkpoint.state import ema_name
from mvp_engine.distributed.collective_errors import raise_on_all_ranks
from mvp_engine.distributed.fsdp import blocks
from mvp_engine.errors import UserError
from mvp_engine.hf.parts import matching
from mvp_engine.kit.optim.optimizer import KitOptimizer
from mvp_engine.kit.optim.settings import OptimSettings
from mvp_engine.model_engine import ModelEngine
from mvp_engine.model_engine.optim import build_scheduler, parameter_groups, without_decay

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class OptimKit:
    """The optimizer of one model. `seed` is that of the stochastic rounding of low-precision states."""

    def __init__(self, settings: OptimSettings, seed: int = 0) -> None:
        self.settings = settings
        self.seed = seed
        self.optimizer: KitOptimizer | None = None
        # The model engine that has the EMA weights of its checkpoint; a kit does not keep a model alive.
        self._ema_loaded_into: weakref.ref[ModelEngine] | None = None

    def build_optimizer(self, model: nn.Module) -> KitOptimizer:
        settings = self.settings
        groups = parameter_groups(model, settings)
        if settings.kind == "muon":
            groups = self._split_off_muon(model, groups)
        names: dict[Tensor, str] = {}
        for name, param in model.named_parameters():
            names[param] = name
        self.optimizer = KitOptimizer(
            groups,
            names,
            lr=settings.lr,
            betas=(settings.betas[0], settings.betas[1]),
            eps=settings.eps,
            momentum=settings.momentum,
            state_dtype=settings.state_dtype,
            ema=settings.ema,
            seed=self.seed,
            offload=settings.offload,
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

    # ---- EMA weights ----------------------------------------------------------------------------------------------

    def eval_weights(
        self, model_engine: ModelEngine, checkpoint: Path | None
    ) -> AbstractContextManager[None]:
        """A context in which the model has the weights to evaluate and to export; for `Engine.eval_weights`.

        With `optim.ema` these are the EMA weights. In training they are swapped in for the context. A model engine
        without an optimizer loads them from the checkpoint at the first call, and keeps them.
        """
        if hasattr(model_engine, "optimizer"):
            return self.averaged()
        loaded_into = self._ema_loaded_into and self._ema_loaded_into()
        if loaded_into is not model_engine:
            self.load_averages(model_engine, checkpoint)
            self._ema_loaded_into = weakref.ref(model_engine)
        return nullcontext()

    def averaged(self) -> AbstractContextManager[None]:
        """A context in which the model has the optimizer's EMA weights, if this process keeps any."""
        if self.optimizer is None or self.settings.ema is None:
            return nullcontext()
        return self.optimizer.averaged()

    def load_averages(self, model_engine: ModelEngine, checkpoint: Path | None) -> None:
        """Load the EMA weights of a checkpoint into the model, for a process without an optimizer."""
        if checkpoint is None or self.settings.ema is None:
            return
        with raise_on_all_ranks(model_engine.world.host_group):
            reader = Reader(checkpoint)
            averages: dict[str, Tensor] = {}
            for name, param in model_engine.model.named_parameters():
                if ema_name(name) in reader.entries:  # frozen parameters have none
                    averages[ema_name(name)] = param.detach()
            if not averages:
                raise UserError(
                    f"checkpoint {checkpoint} has no EMA weights: it was trained without optim.ema"
                )
            reader.fill(averages)

    # ---- Muon -----------------------------------------------------------------------------------------------------

    def _split_off_muon(
        self, model: nn.Module, groups: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Split each group in two: what AdamW updates, and what Muon updates."""
        for_muon = _matrices_of_blocks(model) - without_decay(model)
        for pattern in self.settings.adamw:
            for name in matching(model, pattern, "optim.adamw"):
                for_muon.discard(model.get_parameter(name))
        split: list[dict[str, Any]] = []
        for group in groups:
            rest = [param for param in group["params"] if param not in for_muon]
            taken = [param for param in group["params"] if param in for_muon]
            if rest:
                split.append({**group, "params": rest})
            if taken:
                name = group["name"].removesuffix("decay") + "muon"
                split.append({**group, "params": taken, "kind": "muon", "name": name})
        if all(group.get("kind") != "muon" for group in split):
            raise UserError(
                f"optim.kind=muon: {type(model).__name__} has no trainable matrix for Muon. It updates those inside of "
                "blocks, which are the entries of a model's lists (nn.ModuleList). Set optim.kind=adamw"
            )
        return split


def _matrices_of_blocks(model: nn.Module) -> set[nn.Parameter]:
    """Trainable matrices, and stacks of them, inside of a model's blocks; not the kernels of convolutions."""
    found: set[nn.Parameter] = set()
    for block in blocks(model):
        for module in block.modules():
            if isinstance(module, CONVOLUTIONS):
                continue
            for param in module.parameters(recurse=False):
                if param.ndim in (2, 3) and param.requires_grad:
                    found.add(param)
    return found

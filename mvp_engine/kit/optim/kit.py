"""OptimKit: builds the optimizer and the schedule of a recipe."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from mvp_engine.distributed.data_parallel import blocks
from mvp_engine.errors import UserError
from mvp_engine.hf.model.model_parts import matching
from mvp_engine.kit.optim.optimizer import KitOptimizer
from mvp_engine.kit.optim.settings import OptimSettings
from mvp_engine.model_engine import ModelEngine
from mvp_engine.model_engine.base import eval_weights
from mvp_engine.model_engine.optim import build_scheduler, parameter_groups, without_decay

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class OptimKit:
    """The optimizer of one model. `seed` is that of the stochastic rounding of low-precision states."""

    def __init__(self, settings: OptimSettings, seed: int = 0) -> None:
        self.settings = settings
        self.seed = seed

    def build_optimizer(self, model: nn.Module) -> KitOptimizer:
        settings = self.settings
        groups = parameter_groups(model, settings)
        if settings.name == "muon":
            groups = self._split_off_muon(model, groups)
        names: dict[Tensor, str] = {}
        for name, param in model.named_parameters():
            names[param] = name
        return KitOptimizer(
            groups,
            names,
            lr=settings.lr,
            betas=(settings.betas[0], settings.betas[1]),
            eps=settings.eps,
            state_dtype=settings.state_dtype,
            ema=settings.ema,
            seed=self.seed,
            offload=settings.offload,
        )

    def build_scheduler(self, optimizer: Optimizer, total_steps: int | None) -> LambdaLR:
        return build_scheduler(optimizer, self.settings, total_steps)

    def eval_weights(
        self, model_engine: ModelEngine, checkpoint: Path | None
    ) -> AbstractContextManager[None]:
        """What `Engine.eval_weights` returns, for a model engine without an engine around it."""
        return eval_weights(model_engine, self.settings.ema, checkpoint)

    # ---- Muon -----------------------------------------------------------------------------------------------------

    def _split_off_muon(
        self, model: nn.Module, groups: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Split each group in two: what AdamW updates, and what Muon updates."""
        for_muon = _matrices_of_blocks(model) - without_decay(model)
        for pattern in self.settings.muon_exclude:
            for name in matching(model, pattern, "optim.muon_exclude"):
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
                f"optim.name=muon: {type(model).__name__} has no trainable matrix for Muon. It updates those inside of "
                "blocks, which are the entries of a model's lists (nn.ModuleList). Set optim.name=adamw"
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

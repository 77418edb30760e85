"""MLLMModelKit: a Hugging Face model from a folder or a config, its parts by name, and LoRA adapters.

    def prepare_model(self):
        return MLLMModelKit(self.config.lora).build(self.config.model)

Freezing, learning rates, activation checkpointing and compilation by part are config keys of the engine.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from mvp_engine.config.schema import Model, Part
from mvp_engine.distributed.dtensor import full_tensor
from mvp_engine.errors import UserError
from mvp_engine.hf.lora.lora_export import export_adapter
from mvp_engine.hf.lora.lora_layers import add_adapters
from mvp_engine.hf.lora.lora_settings import Lora
from mvp_engine.hf.model.model_parts import parts_of, table, trained_parts
from mvp_engine.model_engine import ModelEngine, ModelSource, engine_class


class MLLMModelKit:
    """Builds the model; `lora=None` is full fine-tuning."""

    def __init__(self, lora: Lora | None = None) -> None:
        self.lora = lora

    def build(self, model: Model | ModelSource, model_type: str = "language_model") -> nn.Module:
        """The model that the config names, without weights: the model engine loads or initializes them.

        `model_type` is for a `ModelSource`; a config has its own.
        """
        if isinstance(model, Model):
            if model.type == "module":
                raise UserError(
                    "model.type=module has nothing to build: set model.type=language_model, or value_model, or "
                    "call adapt() on the module of prepare_model()"
                )
            kind = engine_class(model.type, model.backend)
            source = ModelSource(model.path, model.config)
        else:
            kind = engine_class(model_type)
            source = model
        return self.adapt(kind.build_model(source))

    def adapt(self, model: nn.Module) -> nn.Module:
        """Freeze a model and add its adapters, if `lora` is set; any module with linear layers can have them.

        Parameters that match the patterns of an attribute `fresh` of the model, such as a new head, train in full.
        """
        if self.lora is not None:
            add_adapters(model, self.lora)
        return model

    @staticmethod
    def parts(model: nn.Module) -> dict[str, Part]:
        """The part of each parameter, by the parameter's name."""
        return parts_of(model)

    @staticmethod
    def table(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> str:
        """A table of what trains, by part, as the engine logs it at the start."""
        return table(trained_parts(model, optimizer.param_groups if optimizer else ()))

    @staticmethod
    def export_adapter(engine: ModelEngine, folder: str | Path) -> None:
        """Write the adapter alone, as a folder for `peft`; all ranks call it. `engine.export_hf` merges instead."""
        params = dict(engine.model.named_parameters())
        path = Path(folder).expanduser().resolve()
        export_adapter(
            engine.model, path, lambda name: full_tensor(params[name].detach()), engine.world
        )

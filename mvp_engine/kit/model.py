"""MLLMModelKit: a Hugging Face model from a folder or a config, its parts by name, and LoRA adapters beside them.

    def prepare_model(self):
        return MLLMModelKit(self.config.lora).build(self.config.model)

Freezing, learning rates, recomputing and compiling by part are settings of the engine itself, and take part names.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from mvp_engine.config.schema import Model, Part
from mvp_engine.distributed.dtensor import full_tensor
from mvp_engine.errors import UserError
from mvp_engine.hf.adapter_export import export_adapter
from mvp_engine.hf.lora import Lora, add_adapters
from mvp_engine.hf.packed_model import PackedModel
from mvp_engine.hf.parts import parts_of, table
from mvp_engine.model_engine import ModelEngine, ModelSource, engine_class


class MLLMModelKit:
    """`lora`: None trains the model's own weights."""

    def __init__(self, lora: Lora | None = None) -> None:
        self.lora = lora

    def build(self, model: Model | ModelSource, model_type: str = "language_model") -> nn.Module:
        """The model that the config names, without weights yet: the model engine reads or draws them.

        `model_type` is for a `ModelSource`; a config says its own.
        """
        if isinstance(model, Model):
            if model.type == "module":
                raise UserError(
                    "model.type=module has nothing to build: set model.type=language_model, or value_model"
                )
            kind, source = (
                engine_class(model.type, model.backend),
                ModelSource(model.path, model.config),
            )
        else:
            kind, source = engine_class(model_type), model
        return self.adapt(kind.build_model(source))

    def adapt(self, model: nn.Module) -> nn.Module:
        """Freeze a model that is built already and give it adapters, if there are to be some."""
        if self.lora is not None:
            if not isinstance(model, PackedModel):
                raise UserError(
                    f"lora: {type(model).__name__} is no Hugging Face model, so it takes no adapters"
                )
            add_adapters(model, self.lora)
        return model

    @staticmethod
    def parts(model: nn.Module) -> dict[str, Part]:
        """The part of each parameter, by its name."""
        return parts_of(model)

    @staticmethod
    def table(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> str:
        """What trains, by part, as the engine logs it at the start."""
        return table(model, optimizer)

    @staticmethod
    def export_adapter(engine: ModelEngine, folder: str | Path) -> None:
        """The adapter alone, as a folder for `peft`. All ranks call it. Merged weights are `engine.export_hf`."""
        params = dict(engine.model.named_parameters())
        path = Path(folder).expanduser().resolve()
        export_adapter(
            engine.model, path, lambda name: full_tensor(params[name].detach()), engine.world
        )

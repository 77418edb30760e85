"""ValueModel: a scalar per token from a linear head on any backbone, as value functions need it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mvp_engine.hf.auto_model import from_auto
from mvp_engine.hf.export_plan import Target
from mvp_engine.hf.packed_model import Outputs, PackedModel


class ValueModel(PackedModel):
    """A backbone with a linear head: `values`, one float32 per token."""

    model_type = "value_model"
    provides = ("values", "hidden_states")
    fresh = ("score.weight",)

    def __init__(self, backbone: Any) -> None:
        super().__init__(backbone)
        hidden_size = backbone.config.get_text_config().hidden_size
        self.score = nn.Linear(hidden_size, 1, bias=False)
        self._init_weights(self.score)

    def _init_weights(self, module: nn.Module) -> None:
        if module is self.score:
            nn.init.normal_(self.score.weight, std=0.02)

    @classmethod
    def from_config(cls, config: Any) -> ValueModel:
        from transformers import AutoModel

        return cls(from_auto(AutoModel, config))

    def export_target(self, dtype: torch.dtype | None = None) -> Target:
        """A sequence classifier with one label, if transformers has one; else backbone plus head."""
        from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING as CLASSIFIERS

        config_class: Any = type(self.hf.config)
        if config_class not in CLASSIFIERS:
            return super().export_target(dtype)
        skeleton = self._skeleton(CLASSIFIERS[config_class], num_labels=1)
        prefix = f"{skeleton.base_model_prefix}."
        names = {}
        for name in skeleton.state_dict():
            in_backbone = name.startswith(prefix)
            names[name] = f"hf.{name.removeprefix(prefix)}" if in_backbone else name
        folder = self.side_files or self.source
        return Target(skeleton, names, (), dtype or self.export_dtype, folder)

    def outputs(self, hidden_TD: Tensor, labels_T: Tensor, wanted: tuple[str, ...]) -> Outputs:
        values_T = self.score(hidden_TD).float()[:, 0]
        computed = {"values": values_T, "hidden_states": hidden_TD}
        return {name: computed[name] for name in wanted}

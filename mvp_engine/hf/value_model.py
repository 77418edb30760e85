"""A value model on packed batches: a Hugging Face backbone with a linear head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mvp_engine.hf.export_plan import Target
from mvp_engine.hf.packed_model import Outputs, PackedModel, from_auto


class ValueModel(PackedModel):
    """One number per token, in float32: a linear head on any backbone."""

    model_type = "value_model"
    provides = ("values", "hidden_states")
    fresh = ("score.weight",)

    def __init__(self, backbone: Any) -> None:
        super().__init__(backbone)
        width = backbone.config.get_text_config().hidden_size
        self.score = nn.Linear(width, 1, bias=False)
        self._init_weights(self.score)

    def _init_weights(self, module: nn.Module) -> None:
        if module is self.score:
            nn.init.normal_(self.score.weight, std=0.02)

    @classmethod
    def from_config(cls, config: Any) -> ValueModel:
        from transformers import AutoModel

        return cls(from_auto(AutoModel, config))

    def export_target(self, dtype: torch.dtype | None = None) -> Target:
        """transformers' sequence classifier with one label, where the family has one; else backbone and head apart."""
        from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

        kind: Any = type(self.hf.config)
        if kind not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
            return super().export_target(dtype)
        skeleton = self._skeleton(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[kind], num_labels=1)
        prefix = f"{skeleton.base_model_prefix}."
        names = {
            n: f"hf.{n.removeprefix(prefix)}" if n.startswith(prefix) else n
            for n in skeleton.state_dict()
        }
        return Target(
            skeleton, names, (), dtype or self.export_dtype, self.side_files or self.source
        )

    def outputs(self, hidden_TD: Tensor, labels_T: Tensor, wanted: tuple[str, ...]) -> Outputs:
        values_T = self.score(hidden_TD).float()[:, 0]
        every = {"values": values_T, "hidden_states": hidden_TD}
        return {name: every[name] for name in wanted}

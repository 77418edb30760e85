"""Multimodal RoPE positions (time, height, width), as the model itself computes them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mvp_engine.data.batch import Media
from mvp_engine.kit.data.read.row_types import BadRow


class RopePositions:
    """Positions on three axes by the model's own `get_rope_index`.

    The model is built on the meta device, so no weights are needed.
    """

    def __init__(self, config: Any) -> None:
        # Of an Omni model, the thinker reads the sequence.
        self.config = copy.deepcopy(getattr(config, "thinker_config", config))

    @classmethod
    def for_config(cls, config: Any) -> RopePositions | None:
        """None for a model with one-dimensional positions."""
        if getattr(config, "depth_decoder_config", None) is not None:
            return None  # CSM, which is no language model
        if not config.sub_configs:
            return None  # a text model, which rows need not wait for: its imports take a second
        positions = cls(config)
        return positions if hasattr(positions._model, "get_rope_index") else None

    @cached_property
    def _model(self) -> Any:
        from mvp_engine.hf import LanguageModel

        with torch.device("meta"):
            return LanguageModel.from_config(copy.deepcopy(self.config)).base()

    @property
    def _num_axes(self) -> int:
        """Three: time, height and width; HunYuan-VL has the index of the token as well."""
        rope = getattr(self.config.get_text_config(), "rope_parameters", None) or {}
        return max(3, len(rope.get("mrope_section") or ()))

    def __getstate__(self) -> dict[str, Any]:
        # Workers build the model again: it does not pickle.
        return {"config": self.config}

    def __call__(
        self,
        ids: Tensor,
        types: Mapping[str, Tensor],
        media: Mapping[str, Media],
    ) -> Tensor:
        """(3, tokens), for the ids of one sequence and its per-token types."""
        fields: dict[str, Tensor] = {}
        has_media = False
        for items in media.values():
            if len(items.row_counts):
                has_media = True
                fields |= items.fields
        if not has_media:
            return torch.arange(len(ids)).expand(self._num_axes, -1)
        # get_rope_index has other names for some fields of processors.
        if "feature_attention_mask" in fields:
            fields["audio_seqlens"] = fields["feature_attention_mask"].sum(-1)
        if "video_second_per_grid" in fields:
            fields["second_per_grids"] = fields["video_second_per_grid"]
        for name, value in types.items():
            fields[name] = value[None]
        parameters = inspect.signature(self._model.get_rope_index).parameters
        arguments = {name: value for name, value in fields.items() if name in parameters}
        try:
            positions = self._model.get_rope_index(
                ids[None], attention_mask=torch.ones_like(ids)[None], **arguments
            )[0]
        except (RuntimeError, LookupError, ValueError, StopIteration) as error:
            # Such as two images without a token between them.
            name = type(self._model).__name__
            raise BadRow("positions", f"{name} finds no positions for the media: {error}") from None
        positions = positions[:, 0]
        # Videos of Qwen3-Omni have fractions where its seconds per grid times positions per second is no whole number.
        whole = positions.long()
        return whole if bool((whole == positions).all()) else positions

"""PlanFacts: what `mvp plan` asks of a model, next to its modules and its FLOPs.

A model with more than text and encoders names a subclass in `PackedModel.plan_facts`.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from mvp_engine.data.batch import Media, PackedBatch


class PlanFacts:
    """`config`: the config of the recipe, or None."""

    has_text_model = True
    splits_sequences = True  # over context and Ulysses ranks
    shares_experts = True  # over expert-parallel ranks
    is_simulated = True  # its loss runs on tensors without values

    def __init__(self, model: Any, config: Any = None) -> None:
        self.model = model
        self.config = config

    @property
    def backbone(self) -> Any:
        """The vision-language model whose modules and config are walked."""
        return self.model.hf

    def unused_parameters(self) -> set[str]:
        """Names of trained parameters that get no gradient."""
        return set()

    def rows_of(self, block: nn.Module, part: str) -> str:
        """The kind of rows that a block processes: a key of `num_rows`, or `encoder` or `projector`."""
        return {"llm": "text", "projector": "projector"}.get(part, "encoder")

    def num_rows(self, batch: PackedBatch) -> dict[str, float]:
        """The rows of each kind, apart from those of encoders."""
        return {"text": float(batch.num_tokens)}

    def encoder_media(self, batch: PackedBatch) -> dict[str, Media]:
        return batch.media

    def runs_last(self, rows: str) -> bool:
        """Whether blocks with these rows run behind everything else that trains."""
        return False

    def experts_config(self, rows: str) -> Any:
        """The config with the number of experts of a row; None for encoders."""
        is_encoder = rows in ("encoder", "projector")
        return None if is_encoder else self.backbone.config.get_text_config()

    def attends_within_images(self) -> bool:
        """Whether tokens of an image attend to each other in the text layers (Gemma 3, PaliGemma)."""
        text: Any = self.model.hf.config.get_text_config()
        has_types = "token_type_ids" in inspect.signature(self.model.hf.forward).parameters
        return has_types or bool(getattr(text, "use_bidirectional_attention", False))

    def head(self, batch: PackedBatch) -> Tensor | None:
        """The weight that computes the logits of the batch; None without logits."""
        head = self.model.hf.get_output_embeddings()
        return None if head is None else head.weight

    def loss_bytes(self, batch: PackedBatch, size: int) -> float:
        """Memory of losses other than that of text, for elements of `size` bytes."""
        return 0.0

    def assumed_batch(self, tokens: int) -> tuple[PackedBatch, int, str] | None:
        """A full pack where the data is not known, the tokens of its rows, and its description.

        None: rows of text, and images or audio for the encoders.
        """
        return None

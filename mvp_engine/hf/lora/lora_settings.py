"""The config section of LoRA, apart from its layers: a config is validated without torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from mvp_engine.config.schema import Count, Positive, Section


class Lora(Section):
    """The LoRA keys of a recipe's config."""

    rank: Count = 16
    """The inner size of the adapters (lora_r)."""
    alpha: Positive | None = None
    """The adapter output is scaled by alpha / rank; null: alpha is twice the rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Applied to the adapter's input."""
    target_modules: Annotated[list[str], Field(min_length=1)] | None = None
    """Linear layers to adapt: part names, or patterns of layer names; null: the part llm, or the
    linear layers of all blocks in a module without parts. Stacked experts are named, too, as in
    [llm, experts.gate_up_proj, experts.down_proj]."""
    modules_to_save: list[str] = Field([])
    """Trained in full, without an adapter: part names, or patterns of parameter names."""

    @property
    def resolved_alpha(self) -> float:
        return 2 * self.rank if self.alpha is None else self.alpha

    @property
    def scaling(self) -> float:
        return self.resolved_alpha / self.rank

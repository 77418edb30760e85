"""The model types on the Megatron backend: the FSDP engine, with Megatron's layers inside of the decoder."""

from __future__ import annotations

from torch import nn

from mvp_engine.distributed import Layout
from mvp_engine.distributed.pipeline import StageLink
from mvp_engine.errors import UserError
from mvp_engine.hf.adapter import HFAdapter
from mvp_engine.model_engine.base import Settings
from mvp_engine.model_engine.fsdp.engine import FSDPEngine
from mvp_engine.model_engine.megatron.families import check_supported
from mvp_engine.model_engine.megatron.layers import (
    mark_ends,
    require_megatron,
    use_megatron_layers,
)
from mvp_engine.model_engine.registry import register
from mvp_engine.model_engine.types import LanguageModelEngine, ValueModelEngine


class MegatronAdapter(HFAdapter):
    compiles_by_default = False

    def replace_layers(self, layout: Layout, settings: Settings) -> None:
        sequence = settings.sequence_parallel is not False
        self._layers = use_megatron_layers(self.model, layout, sequence)

    def cut_stage(self, link: StageLink, skeleton: nn.Module | None) -> None:
        super().cut_stage(link, skeleton)
        held = set(self.model.modules())
        mark_ends([forward for forward in self._layers if forward.layer in held])

    def preflight(self, layout: Layout, exact: bool) -> None:
        super().preflight(layout, exact)
        if self.model.padded_rows:  # which run transformers' own layers
            raise UserError(
                f"model.backend=megatron runs packed sequences only: {self.model.padded_rows}. "
                "Set model.backend=fsdp"
            )


class _MegatronEngine(FSDPEngine):
    check_packages = staticmethod(require_megatron)

    def __init__(self, model: nn.Module, layout: Layout, settings: Settings | None = None) -> None:
        super().__init__(model, layout, settings)
        check_supported(model, layout, self.settings)
        require_megatron()
        self.adapter = MegatronAdapter(model)  # type: ignore[arg-type, assignment]


@register("language_model", "megatron")
class MegatronLanguageModelEngine(_MegatronEngine, LanguageModelEngine):
    """A language model: per-token log-probs, entropy and loss."""


@register("value_model", "megatron")
class MegatronValueModelEngine(_MegatronEngine, ValueModelEngine):
    """A value model: one number per token."""

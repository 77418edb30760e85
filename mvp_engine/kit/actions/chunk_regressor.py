"""ChunkRegressor: a chunk of actions by parallel decoding on any multimodal language model, learnt with an L1 loss.

Legend: T prefix tokens, S sequences, C steps of a chunk, A action dimensions, D hidden size.

Behind the prefix of each sequence stand a state token and C learnt query tokens, as in OpenVLA-OFT: one forward decodes
the whole chunk. They run through the same layers as the prefix. The prefix keeps its causal attention and does not see
them, so text outputs of the model do not change; they attend to all of their prefix and to each other.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from mvp_engine.data.batch import PackedBatch
from mvp_engine.errors import UserError
from mvp_engine.hf.model.flop_costs import FlopCosts
from mvp_engine.hf.model.language_model import LanguageModel
from mvp_engine.hf.model.packed_model import Outputs
from mvp_engine.kit.actions import query_groups
from mvp_engine.kit.actions.act import chunk_head, suffix_positions, with_suffix
from mvp_engine.kit.actions.action_model import (
    ACTION_OUTPUTS,
    ActionModel,
    ActionSpec,
    Appended,
    field,
    run_base,
)
from mvp_engine.kit.actions.costs import add_regressor_costs
from mvp_engine.kit.actions.pi0 import suffix_groups
from mvp_engine.kit.actions.plugin import CHUNK, MASK, STATE
from mvp_engine.kit.actions.query_groups import QueryGroup


class ChunkRegressor(ActionModel, LanguageModel):  # type: ignore[misc]
    """A language model with `actions` (S, C, A) and their absolute errors, next to all outputs of text."""

    provides = ("action_losses", "actions", *LanguageModel.provides)
    fresh = ("action_queries.*", "state_proj.*", "action_head.*")
    action_queries: nn.Embedding
    state_proj: nn.Module
    action_head: nn.Module

    def __init__(self, causal_lm: Any) -> None:
        LanguageModel.__init__(self, causal_lm)
        config = causal_lm.config
        self.action_spec = spec = ActionSpec.of(config, "regression")
        if reason := self._unsupported():
            raise UserError(
                f"model.type=action_model: {config.model_type} {reason}. Choose pi0, or a causal vision-language model "
                "such as qwen3_vl"
            )
        text_config = config.get_text_config()
        query_groups.use(text_config)
        sizes = (spec.chunk, spec.state_dim, spec.action_dim)
        head = chunk_head(text_config.hidden_size, *sizes)
        self.own_parts = dict.fromkeys(head.values(), "action")
        for name, module in head.items():
            self.add_module(name, module)
            module.apply(self._init_weights)
        self._suffix: tuple[Tensor, list[QueryGroup]] | None = None  # of the forward that runs
        self.decoder().register_forward_pre_hook(self._insert_suffix, with_kwargs=True)

    @classmethod
    def build(cls, config: Any) -> ChunkRegressor:
        ActionSpec.of(config, "regression")  # raises before a model is built
        model: Any = LanguageModel.from_config.__func__(cls, config)  # type: ignore[attr-defined]
        return model

    def flop_costs(self) -> FlopCosts:
        costs = super().flop_costs()
        add_regressor_costs(costs, self)
        return costs

    @property
    def text_parameters(self) -> set[str]:
        """Parameters that only text outputs use: a head that is not tied to the embeddings."""
        hf: Any = self.hf
        tied = {hf.get_input_embeddings().weight}
        own = set(hf.get_output_embeddings().parameters()) - tied
        return {name for name, param in self.named_parameters() if param in own}

    def _unsupported(self) -> str:
        """Why chunks cannot be decoded behind the prefixes of this model; empty if they can."""
        if self.decoder() is self.base():
            return "has no encoder of images"
        if self.mixers.modules or self.padded_rows:
            return "has layers that are not attention of transformers' interface"
        if "token_type_ids" in inspect.signature(self.base().forward).parameters:
            return "has a prefix that is not causal"
        return ""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
        if getattr(module, "bias", None) is not None:
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]

    def _compute(
        self, batch: PackedBatch, wanted: tuple[str, ...], kv_cache: Any = None
    ) -> Outputs:
        text = tuple(name for name in wanted if name not in ACTION_OUTPUTS)
        if len(text) == len(wanted):
            return LanguageModel._compute(self, batch, wanted, kv_cache)
        hidden_TD, chunks_SCD = self._hidden_with_suffix(batch)
        actions = self.action_head(chunks_SCD).float()
        computed: Outputs = {"actions": actions}
        if "action_losses" in wanted:
            mask = field(batch, MASK, "`action_losses`")
            errors = (actions - field(batch, CHUNK, "`action_losses`").float()).abs()
            computed["action_losses"] = torch.where(mask, errors, 0.0)
        if text:
            computed |= self.outputs(hidden_TD, batch.labels, text)
        return {name: computed[name] for name in wanted}

    def _hidden_with_suffix(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Hidden states of the prefixes (T, D) and of the query tokens (S, C, D)."""
        count = batch.num_sequences
        chunk = self.action_spec.chunk
        suffix = suffix_groups(batch, 1, 1, chunk)
        prefix = QueryGroup(batch.cu_seqlens, batch.max_seqlen, causal=True)
        state_SD = self.state_proj(field(batch, STATE, "an action model"))
        queries = self.action_queries.weight.repeat(count, 1)
        self._suffix = torch.cat([state_SD, queries])[None], [prefix, *suffix.groups]
        ends = batch.position_ids[..., batch.cu_seqlens[1:].long() - 1]
        appended = Appended(self._filler, suffix_positions(ends, chunk))
        try:
            out = run_base(self, batch, appended=appended)
        finally:
            self._suffix = None
        hidden = self._hidden_of(out)[0]
        chunks_SCD = hidden[batch.num_tokens + count :].view(count, chunk, -1)
        return hidden[: batch.num_tokens], chunks_SCD

    @property
    def _filler(self) -> int:
        """A token that is no placeholder of media. Its embedding is replaced."""
        taken = set(self.placeholders)
        return next(token for token in range(len(taken) + 1) if token not in taken)

    def _insert_suffix(
        self, decoder: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        """Forward pre-hook of the decoder: states and queries in place of the embeddings of filler tokens."""
        if self._suffix is None:
            return None
        suffix_1UD, groups = self._suffix
        return args, {**with_suffix(kwargs, suffix_1UD), "query_groups": groups}

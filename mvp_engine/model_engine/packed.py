"""Hugging Face models on packed batches: the backbone as transformers has it, the head composed around it.

`LanguageModel` gives log-probs and entropy of the labels, `ValueModel` one number per token. Neither rewrites a class
of transformers, and neither ever holds the logits of a whole batch. `check_packing` finds the models that look across
boundaries, or whose head does something that is not known here, before they train on wrong numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mvp_engine.batch import PackedBatch
from mvp_engine.distributed.sequence import SequenceShard, check_heads
from mvp_engine.errors import UserError
from mvp_engine.ops import attention
from mvp_engine.ops.linear_cross_entropy import linear_log_probs

Outputs = dict[str, Tensor]


def packed_config(config: Any) -> Any:
    """The Hugging Face config, set to packed attention in its text backbone."""
    config._attn_implementation = attention.register()
    config.use_cache = False
    return config


class PackedModel(nn.Module):
    """A backbone on packed batches. Subclasses turn its hidden states into what they are asked for by name."""

    provides: tuple[str, ...] = ("hidden_states",)

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.hf = backbone
        self.sequence_group: dist.ProcessGroup | None = None

    def share_sequences(self, group: dist.ProcessGroup) -> None:
        """From now on the ranks of `group` share the tokens of each batch. They must be given the same batches."""
        config: Any = self.hf.config.get_text_config()  # type: ignore[union-attr, operator]
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        check_heads(config.num_attention_heads, kv_heads, dist.get_world_size(group))
        self.sequence_group = group

    def base(self) -> nn.Module:
        """The part of the model that ends with hidden states."""
        return self.hf

    def hidden(self, batch: PackedBatch, shard: SequenceShard | None = None) -> Tensor:
        """The last hidden states, (T, D), or this rank's part of them."""
        ids, positions = batch.input_ids, batch.position_ids
        if shard is not None:
            ids, positions = shard.cut(ids), shard.cut(positions, dim=-1)
        out = self.base()(
            input_ids=ids[None],
            position_ids=positions[None] if positions.ndim == 1 else positions[:, None],
            use_cache=False,
            **attention.boundaries(batch.cu_seqlens, batch.max_seqlen),
            **({} if shard is None else {"sequence_shard": shard}),
        )
        return out.last_hidden_state[0]

    def forward(self, batch: PackedBatch, outputs: Iterable[str]) -> Outputs:
        """Each output by its name, over all tokens of the batch, on every rank that shares it."""
        wanted = tuple(outputs)
        unknown = [name for name in wanted if name not in self.provides]
        if unknown:
            raise ValueError(f"{type(self).__name__} does not give {unknown}; it gives {', '.join(self.provides)}")
        if self.sequence_group is None:
            return self.outputs(self.hidden(batch), batch.labels, wanted)
        shard = SequenceShard.of(self.sequence_group, batch.num_tokens)
        local = self.outputs(self.hidden(batch, shard), shard.cut(batch.labels), wanted)
        return {name: shard.gather(value) for name, value in local.items()}

    def outputs(self, hidden_TD: Tensor, labels_T: Tensor, wanted: tuple[str, ...]) -> Outputs:
        return {"hidden_states": hidden_TD}


class LanguageModel(PackedModel):
    """Log-probs of the labels (0 where there is none) and entropy of the distribution, per token, in float32."""

    provides = ("log_probs", "entropy", "hidden_states")

    def __init__(self, causal_lm: Any, temperature: float = 1.0, chunk: int = 2048) -> None:
        super().__init__(causal_lm)
        config = causal_lm.config.get_text_config()
        self.temperature, self.chunk = temperature, chunk
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        # Granite divides its logits, Cohere multiplies them.
        self.scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> LanguageModel:
        from transformers import AutoModelForCausalLM

        return cls(AutoModelForCausalLM.from_config(packed_config(config)), **options)

    def base(self) -> nn.Module:
        return self.hf.base_model  # type: ignore[return-value]

    def outputs(self, hidden_TD: Tensor, labels_T: Tensor, wanted: tuple[str, ...]) -> Outputs:
        head: Any = self.hf.get_output_embeddings()  # type: ignore[operator]
        log_probs_T, entropy_T = linear_log_probs(
            hidden_TD,
            head.weight,
            labels_T,
            head.bias,
            scale=self.scale,
            softcap=self.softcap,
            temperature=self.temperature,
            chunk=self.chunk,
        )
        every = {"log_probs": log_probs_T, "entropy": entropy_T, "hidden_states": hidden_TD}
        return {name: every[name] for name in wanted}


class ValueModel(PackedModel):
    """One number per token, in float32: a linear head on any backbone."""

    provides = ("values", "hidden_states")

    def __init__(self, backbone: Any) -> None:
        super().__init__(backbone)
        width = backbone.config.get_text_config().hidden_size
        self.score = nn.Linear(width, 1, bias=False)
        nn.init.normal_(self.score.weight, std=0.02)

    @classmethod
    def from_config(cls, config: Any) -> ValueModel:
        from transformers import AutoModel

        return cls(AutoModel.from_config(packed_config(config)))

    def outputs(self, hidden_TD: Tensor, labels_T: Tensor, wanted: tuple[str, ...]) -> Outputs:
        values_T = self.score(hidden_TD).float()[:, 0]
        every = {"values": values_T, "hidden_states": hidden_TD}
        return {name: every[name] for name in wanted}


@torch.no_grad()
def check_packing(model: PackedModel) -> None:
    """Two short sequences packed must give what each gives alone, and what transformers' own forward gives.

    Refuses state-space and linear-attention mixers, position schemes that ignore `position_ids`, heads with unknown
    steps, and layers that ask attention for something it does not have.
    """
    config: Any = model.hf.config
    first = next(model.parameters())
    tolerance = 1e-5 if first.dtype == torch.float32 else 3e-2
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(config.get_text_config().vocab_size, (n,), generator=generator) for n in (9, 6)]
    training = model.training
    model.eval()
    try:
        together = model.hidden(PackedBatch.from_sequences(ids).to(first.device))
        singles = [PackedBatch.from_sequences([i]).to(first.device) for i in ids]
        alone = torch.cat([model.hidden(batch) for batch in singles])
        if isinstance(model, LanguageModel):
            ours = torch.cat([model(batch, ["log_probs"])["log_probs"] for batch in singles])
            theirs = torch.cat([_own_log_probs(model, batch.input_ids) for batch in singles])
    except NotImplementedError as error:
        raise UserError(f"{config.model_type} cannot be trained on packed sequences: {error}") from None
    finally:
        model.train(training)
    if (worst := _difference(together, alone)) > tolerance:
        raise UserError(
            f"{config.model_type} cannot be trained on packed sequences: two in one batch differ from the same two "
            f"alone by {worst:.1e}. Its layers look across boundaries (state-space or linear-attention mixers do)."
        )
    if isinstance(model, LanguageModel) and (worst := _difference(ours, theirs)) > tolerance:
        raise UserError(
            f"{config.model_type}: log-probs differ from those of transformers' own forward by {worst:.1e}. "
            "The model does something between its backbone and its logits, or in attention, that is not known here."
        )


def _difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-6))


def _own_log_probs(model: LanguageModel, ids: Tensor) -> Tensor:
    """What transformers itself makes of one sequence, with its own attention."""
    config: Any = model.hf.config
    before = config._attn_implementation
    config._attn_implementation = "eager"
    try:
        log_p = model.hf(ids[None], use_cache=False).logits[0].float().div(model.temperature).log_softmax(-1)
    finally:
        config._attn_implementation = before
    picked = log_p[:-1].gather(-1, ids[1:, None])[:, 0]
    return torch.cat([picked, picked.new_zeros(1)])

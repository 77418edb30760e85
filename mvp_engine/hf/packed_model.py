"""Hugging Face models on packed batches: the backbone as transformers has it, the head composed around it.

The backbone may have encoders: what `batch.media` holds is handed to its forward under its own names.
`LanguageModel` gives log-probs and entropy of the labels, `ValueModel` one number per token. Neither rewrites a class
of transformers, and neither ever holds the logits of a whole batch. `probe.py` finds the models that do not fit.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.distributed.ulysses import UlyssesShard, check_heads
from mvp_engine.errors import UserError
from mvp_engine.hf import attention, encoders, experts
from mvp_engine.hf import input_hooks as hooks
from mvp_engine.hf.config_source import read_config
from mvp_engine.hf.export_plan import Target

if TYPE_CHECKING:
    from mvp_engine.hf.lora import Lora

Outputs = dict[str, Tensor]


def packed_config(config: Any) -> Any:
    """The Hugging Face config of a model that will be wrapped, set to packed attention."""
    config._attn_implementation = attention.register()
    return config


def from_auto(auto: Any, config: Any) -> Any:
    """The model that one of transformers' auto classes makes of a config, set to packed attention."""
    kind = config.model_type
    if type(config) not in auto._model_mapping:
        raise UserError(
            f"transformers has no {kind} for {auto.__name__}: take another model.type, or another model"
        )
    try:
        return auto.from_config(packed_config(config))
    except Exception as error:
        if isinstance(error, KeyError) and attention.NAME in error.args:
            raise UserError(
                f"{kind} has attention of its own, which takes no packed sequences"
            ) from None
        raise UserError(
            f"{kind} cannot be built from this config: {type(error).__name__}: {error}"
        ) from error


def heads_of(config: Any) -> tuple[int, int]:
    """How many query heads and key/value heads a text config has; the fewest, where layers differ."""
    view = getattr(config, "per_layer_config", None)
    layers = (
        [config] if view is None else [view[index] for index in range(config.num_hidden_layers)]
    )
    heads = [
        (part.num_attention_heads, getattr(part, "num_key_value_heads", None)) for part in layers
    ]
    return min(q for q, _ in heads), min(kv or q for q, kv in heads)


class PackedModel(nn.Module):
    """A backbone on packed batches. Subclasses turn its hidden states into what they are asked for by name."""

    model_type = ""  # the name that it is registered under
    provides: tuple[str, ...] = ("hidden_states",)
    fresh: tuple[str, ...] = ()  # patterns of parameters that a pretrained folder need not have
    source: Path | None = None  # the Hugging Face folder that the weights come from
    side_files: Path | None = None  # the folder with tokenizer, processor and the like, if another
    export_dtype = torch.float32
    lora: Lora | None = None  # the adapters that it has
    from_folder: frozenset[str] = frozenset()  # the tensors whose values were read there

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.hf = backbone
        attention.use(backbone.config)
        experts.use(backbone.config)
        self.ulysses_group: dist.ProcessGroup | None = None
        if self.decoder() is self.base():
            backbone.get_input_embeddings().register_forward_hook(hooks.low)  # type: ignore[operator]
        else:  # only then are the features of media, in whatever precision, in place
            self.decoder().register_forward_pre_hook(hooks.low_inputs, with_kwargs=True)
            if (
                "token_type_ids" in inspect.signature(self.base().forward).parameters
            ):  # it makes the decoder's masks
                self.base().register_forward_pre_hook(attention.without_mask, with_kwargs=True)
        self.decoder().register_forward_pre_hook(attention.without_mask, with_kwargs=True)
        encoders.tune(backbone, self.decoder())
        self.longest = _longest(backbone.config)

    @classmethod
    def from_config(cls, config: Any) -> Self:
        raise NotImplementedError(f"{cls.__name__} must define from_config(config)")

    @classmethod
    def on_meta(cls, path: str | Path | None, overrides: dict[str, Any] | None = None) -> Self:
        """The model of a Hugging Face folder, or of a config alone, without weights: a model engine gives them."""
        config = read_config(path, overrides or {})
        dtype, config.dtype = (
            config.dtype,
            torch.float32,
        )  # weights are float32, whatever the folder has
        with torch.device("meta"):
            model = cls.from_config(config)
        model.source = Path(path) if path else None
        model.export_dtype = dtype or torch.float32
        return model

    def enable_sequence_parallel(self, group: dist.ProcessGroup, tensor: int = 1) -> None:
        """From now on the ranks of `group` share the tokens of each batch. They must be given the same batches.

        `tensor`: how many ranks share the heads of each layer already.
        """
        config: Any = self.hf.config.get_text_config()  # type: ignore[union-attr, operator]
        heads, kv_heads = heads_of(config)
        check_heads(heads // tensor, kv_heads // tensor, dist.get_world_size(group))
        self.ulysses_group = group
        if (decoder := self.decoder()) is not self.base():
            decoder.register_forward_pre_hook(hooks.cut_inputs, with_kwargs=True)

    def decoder(self) -> nn.Module:
        """The text layers, which see tokens and media as one sequence of embeddings."""
        base: Any = self.base()
        return base.get_decoder() if hasattr(base, "get_decoder") else base

    def base(self) -> nn.Module:
        """The part of the model that ends with hidden states."""
        return self.hf

    def export_target(self, dtype: torch.dtype | None = None) -> Target:
        """What a Hugging Face folder of this model holds."""
        skeleton = self._skeleton(type(self.hf))
        names = {name: f"hf.{name}" for name in skeleton.state_dict()}
        beside = tuple(name for name in self.state_dict() if not name.startswith("hf."))
        return Target(
            skeleton, names, beside, dtype or self.export_dtype, self.side_files or self.source
        )

    def _skeleton(self, kind: Any, **changes: Any) -> Any:
        """A model of transformers like this one, without weights."""
        config: Any = copy.deepcopy(self.hf.config)
        config._attn_implementation = "eager"  # in all its parts
        for name, value in changes.items():
            setattr(config, name, value)
        with torch.device("meta"):
            return kind(config)

    def hidden(self, batch: PackedBatch, shard: UlyssesShard | None = None) -> Tensor:
        """The last hidden states, (T, D), or this rank's part of them."""
        if self.longest is not None and batch.max_seqlen > self.longest:
            raise UserError(
                f"a sequence of {batch.max_seqlen} tokens: rotary positions of this model change for a batch in which "
                f"one is longer than {self.longest}, so packed sequences would change each other. Keep them shorter"
            )
        if (
            batch.beside
        ):  # a slice sends zeros back to what was run along, never a product with zero
            return self.hidden(batch.with_beside(), shard)[: batch.num_tokens]
        ids, positions, more = (
            batch.input_ids,
            batch.position_ids,
            _beside_tokens(self.base(), batch),
        )
        if shard is not None:
            if self.decoder() is self.base():  # else it is cut where media are in place
                ids, positions = shard.cut(ids), shard.cut(positions, dim=-1)
            more["ulysses_shard"] = shard
        ids = ids[None]
        if batch.media:
            encoders.remember(ids, batch.host_input_ids)
        out = self.base()(
            input_ids=ids,
            position_ids=positions[None] if positions.ndim == 1 else positions[:, None],
            use_cache=False,
            **attention.boundaries(batch.cu_seqlens, batch.max_seqlen),
            **more,
        )
        return out.last_hidden_state[0]

    def forward(self, batch: PackedBatch, outputs: Iterable[str]) -> Outputs:
        """Each output by its name, over all tokens of the batch, on every rank that shares it."""
        wanted = tuple(outputs)
        unknown = [name for name in wanted if name not in self.provides]
        if unknown:
            raise UserError(
                f"{type(self).__name__} does not give {unknown}; it gives {', '.join(self.provides)}"
            )
        if (
            not batch.labels.is_cuda
        ):  # else it was done on the way to the GPU, where nobody waits for an answer
            self.check(batch)
        made = self._made(
            batch, wanted
        )  # FSDP2 warns of views: changing one in place would lose its hooks
        return {name: value.clone() if value._is_view() else value for name, value in made.items()}

    def _made(self, batch: PackedBatch, wanted: tuple[str, ...]) -> Outputs:
        if self.ulysses_group is None:
            return self.outputs(self.hidden(batch), batch.labels, wanted)
        if "loss" in wanted and not set(wanted) <= {
            "loss",
            "losses",
        }:  # then it is made of what there is anyway
            others = tuple(
                name
                for name in dict.fromkeys((*wanted, "log_probs"))
                if name not in ("loss", "losses")
            )
            given = self._made(batch, others)
            given |= losses_of(given["log_probs"])
            return {name: given[name] for name in wanted}
        spare = dist.get_world_size(self.ulysses_group) - batch.num_tokens
        if spare > 0:  # a token for every rank
            batch = dataclasses.replace(batch, beside=[*batch.beside, *[batch.filler()] * spare])
        if batch.beside:  # which has no labels, so no part in the loss
            longer = self._made(batch.with_beside(), wanted)
            return {
                name: value[: batch.num_tokens] if value.ndim else value
                for name, value in longer.items()
            }
        shard = UlyssesShard.of(self.ulysses_group, batch.num_tokens)
        local = self.outputs(self.hidden(batch, shard), shard.cut(batch.labels), wanted)
        return {
            name: shard.gather(value) if value.ndim else shard.total(value)
            for name, value in local.items()
        }

    def outputs(self, hidden_TD: Tensor, labels_T: Tensor, wanted: tuple[str, ...]) -> Outputs:
        return {"hidden_states": hidden_TD}

    def check(self, batch: PackedBatch) -> None:
        """Refuse a batch, on the host, that this model would take for something else."""
        config: Any = self.hf.config
        if (
            not config.sub_configs
        ):  # encoders may have tokens of their own outside of the embeddings
            check_token_range(batch, "input_ids", self.hf.get_input_embeddings())  # type: ignore[operator]

    def own_log_probs(self, batch: PackedBatch) -> Tensor | None:
        """What transformers' own forward gives for the labels, where there is such a thing to compare with."""
        return None


def _longest(config: Any) -> int | None:
    """The length from which on rotary frequencies depend on the longest sequence of a batch, if they ever do."""
    found = []
    for part in attention.config_tree(config):
        given = getattr(part, "rope_parameters", None) or {}
        for rope in (given, *(value for value in given.values() if isinstance(value, dict))):
            if rope.get("rope_type") in ("longrope", "dynamic"):
                before = rope.get("original_max_position_embeddings")
                before = (
                    before
                    or getattr(part, "original_max_position_embeddings", None)
                    or part.max_position_embeddings
                )
                found.append(int(before))
    return min(found, default=None)


def check_token_range(batch: PackedBatch, field: str, layer: Any) -> None:
    """A token that is none would be scored as another, or end in an index error without a place."""
    values, size = getattr(batch, field), layer.weight.shape[0]
    bad = ((values < 0) | (values >= size)) & ((values != IGNORE) | (field != "labels"))
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        sequence = int((batch.cu_seqlens <= at).sum()) - 1
        place = f"position {at - int(batch.cu_seqlens[sequence])} of sequence {sequence}"
        ignored = f"; {IGNORE} says that there is none" if field == "labels" else ""
        raise UserError(
            f"{field}: {int(values[at])} at {place} is none of the model's {size} tokens{ignored}"
        )


def _beside_tokens(base: nn.Module, batch: PackedBatch) -> dict[str, Any]:
    """What the forward of `base` is given beside tokens: each kind of media that has items, its fields, token types.

    Models that read token types see images in another way than text, and those with positions on three axes need all
    three: without them transformers would go on as if images were text, so here it is an error.
    """
    given: dict[str, Any] = {}
    for kind, media in batch.media.items():
        if len(media.row_counts):
            given |= {kind: media.values, **media.fields}
    sees, who, axes = bool(given), type(base).__name__, hasattr(base, "get_rope_index")
    if sees and axes and batch.position_ids.ndim == 1:
        raise UserError(
            f"{who} has positions on three axes: build the batch's position_ids with its get_rope_index"
        )
    for types in ("token_type_ids",) if axes else ("token_type_ids", "mm_token_type_ids"):
        if (
            not (sees or types in batch.token_fields)
            or types not in inspect.signature(base.forward).parameters
        ):
            continue
        if types not in batch.token_fields:
            raise UserError(
                f"{who} reads {types} to see images: give them in the batch's tokens[{types!r}]"
            )
        given[types] = batch.token_fields[types][None]
    return given


def losses_of(log_probs_T: Tensor) -> Outputs:
    """Their sum, and each without a gradient."""
    return {"loss": -log_probs_T.sum(), "losses": -log_probs_T.detach()}

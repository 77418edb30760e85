"""PackedModel: a Hugging Face backbone on packed batches, the base class of models with a head.

transformers' classes are not modified. Attention and experts are registered in transformers' registries, inputs are
changed by forward hooks, and the packages `hf.media` and `hf.mixers` change single layers and methods of the
*instance*. `batch.media` (images, videos, audio) is passed to the backbone by the names of its own forward arguments.
Models with a head are subclasses, such as those in `language_model.py`. Models that cannot be packed are found by
running them, in `preflight.py`, not by a list.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mvp_engine.data.batch import Media, PackedBatch
from mvp_engine.distributed.sequence_parallel import SequenceGroups, UlyssesShard, check_heads
from mvp_engine.errors import UserError
from mvp_engine.hf.experts import moe_layers
from mvp_engine.hf.media import encoders, media_features, shared_media
from mvp_engine.hf.mixers.packed_mixers import PackedMixers
from mvp_engine.hf.model import attention, input_hooks
from mvp_engine.hf.model.auto_model import (
    check_token_range,
    hidden_of_rows,
    media_inputs,
    own_attention,
    use_own_attention,
)
from mvp_engine.hf.model.config_source import num_heads, packed_length_limit, read_config
from mvp_engine.hf.model.flop_costs import FlopCosts, Work, flop_costs
from mvp_engine.hf.weights.export import FolderView, Target, WholeFolder, check_folder
from mvp_engine.hf.weights.hub import base_of_adapter, local_folder

if TYPE_CHECKING:
    from mvp_engine.config.schema import Part
    from mvp_engine.hf.experts.expert_balance import ExpertBalance
    from mvp_engine.hf.experts.router_replay import RouterReplay
    from mvp_engine.hf.lora.lora_settings import Lora
    from mvp_engine.hf.model.adapter import HFAdapter
    from mvp_engine.hf.model.kv_cache import KVCache
    from mvp_engine.hf.model.pipeline import Stage
    from mvp_engine.hf.weights.load import NewRows

Outputs = dict[str, Tensor]


class PackedModel(nn.Module):
    """A transformers backbone that runs on packed batches and returns named outputs per token.

    Subclasses define `from_config` and `outputs`. One that adds parameters to the backbone lists them in `fresh`.
    """

    # Constants of the subclass.
    model_type = ""  # the name that it is registered by: model.type in a config
    provides: tuple[str, ...] = ("hidden_states",)  # names that forward accepts in `outputs`
    # Outputs that are neither per token nor per sequence, and never hold those of dummy sequences (lockstep.py).
    drops_dummies: tuple[str, ...] = ()
    has_causal_text = True  # a token of the text layers attends to those before it
    adapted: tuple[str, ...] = ("hf.",)  # prefixes of layers that LoRA may adapt
    fresh: tuple[str, ...] = ()  # name patterns of parameters that pretrained folders may lack
    plan_facts = "mvp_engine.hf.model.flop_costs:PlanFacts"  # the class by which `mvp plan` queries the model
    casts_frozen = False  # True: frozen weights are in half precision even without LoRA

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.hf = backbone
        # Each attribute below is written by the methods that the comment above it names; other code calls these.
        # Folders: written by `use_folder` and `use_side_files`, later by `HFAdapter.set_export_dtype` and
        # `load_pretrained`.
        self.source: Path | None = None  # the Hugging Face folder that the weights are loaded from
        self.side_files: Path | None = None  # the folder of its tokenizer, if not `source`
        self.adapter_folder: Path | None = None  # the LoRA adapter of `model.path`, if it names one
        self.export_dtype = torch.float32  # of exported weights: the dtype of the source folder
        self.from_folder: frozenset[str] = frozenset()  # names of tensors loaded from `source`
        self.not_in_folder: list[str] = []  # of those that have values from the seed
        # Written by the constructors of subclasses.
        self.own_parts: dict[nn.Module, Part] = {}  # modules that belong to another part than "llm"
        self.whole: WholeFolder | None = None  # a source folder that holds more than this model
        # Written later: the first six by `add_adapters`, `quantize_layers`, `MLLMModelKit.build`,
        # `HFAdapter.balance_experts`, `Worker`, `cut_model`.
        self.lora: Lora | None = None
        self.quantize: dict[str, str] | None = None  # formats of quantized weights by part
        self.new_rows: NewRows | None = None  # of tokens that `source` does not know
        self.expert_balance: ExpertBalance | None = None  # in training
        self.router_replay: RouterReplay | None = None  # in RL
        self.stage: Stage | None = None  # this rank's stage of the model, with pipeline parallel
        self.sequence_groups: SequenceGroups | None = None
        self.windows: tuple[int, ...] = ()  # the sizes of the sliding windows of its layers
        self.shard: UlyssesShard | None = None  # during a forward with sequence parallel
        self.packed_length_limit = packed_length_limit(backbone.config)
        # Why each sequence runs in a padded row of its own; empty: sequences are packed.
        self.padded_rows = str(getattr(backbone, "needs_padded_rows", ""))
        if not self.padded_rows:
            attention.use(backbone.config)
            attention.use_own_masks(backbone)
        moe_layers.use(backbone.config)
        self._register_hooks()
        self.mixers = PackedMixers(self.decoder(), own_attention(type(backbone)))
        encoders.apply_sync_free_vision(backbone)
        encoders.apply_sync_free_audio(backbone)
        media_features.apply_sync_free_features(backbone, self.decoder())
        shared_media.apply_shared_features(self.base())

    def _register_hooks(self) -> None:
        base = self.base()
        decoder = self.decoder()
        if decoder is base:
            embedding: Any = self.hf.get_input_embeddings()  # type: ignore[operator]
            embedding.register_forward_hook(input_hooks.cast_embeddings)
        else:  # encoder features come in any dtype, so the cast waits until they are inserted
            decoder.register_forward_pre_hook(input_hooks.cast_decoder_inputs, with_kwargs=True)
            if "token_type_ids" in inspect.signature(base.forward).parameters:
                # Then the base, not the decoder, builds the attention mask.
                base.register_forward_pre_hook(attention.without_mask, with_kwargs=True)
        decoder.register_forward_pre_hook(attention.without_mask, with_kwargs=True)

    def engine_adapter(self) -> HFAdapter:
        """Returns the interface by which model engines use this model; see `hf/model/adapter.py`."""
        from mvp_engine.hf.model.adapter import HFAdapter

        return HFAdapter(self)

    @classmethod
    def from_config(cls, config: Any) -> Self:
        raise NotImplementedError(f"{cls.__name__} must define from_config(config)")

    @classmethod
    def on_meta(cls, path: str | Path | None, overrides: dict[str, Any] | None = None) -> Self:
        """Builds the model of a Hugging Face folder or of the Hub, or of a config alone, on the meta device.

        The model engine materializes the weights.
        """
        folder = local_folder(path) if path else None
        adapter = folder
        folder = folder and (base_of_adapter(folder) or folder)
        config = read_config(folder, overrides or {})
        folder_dtype = config.dtype
        for part in attention.config_tree(config):
            part.dtype = torch.float32  # master weights are float32, whatever the folder holds
        with torch.device("meta"):
            model = cls.from_config(config)
        model.use_folder(folder)
        model.adapter_folder = None if adapter == folder else adapter
        model.export_dtype = folder_dtype or torch.float32
        model.check_source()
        return model

    def use_folder(self, source: Path | None, side_files: Path | None = None) -> None:
        """Load the weights from another folder. `side_files`: where its tokenizer and processor are, if not there."""
        self.source = source
        self.side_files = side_files

    def use_side_files(self, folder: Path) -> None:
        """Export the tokenizer and processor files of this folder."""
        self.side_files = folder

    def check_source(self) -> None:
        """Raise if this model cannot be trained and exported without the folder that it lacks."""
        check_folder(self)

    def enable_sequence_parallel(self, groups: SequenceGroups, tensor: int = 1) -> None:
        """Split the tokens of each batch over the ranks of `groups`, which must get equal batches.

        `tensor`: the tensor-parallel size, by which the heads are already divided.
        """
        config: Any = self.hf.config.get_text_config()  # type: ignore[union-attr, operator]
        heads, kv_heads = num_heads(config)
        if heads and groups.ulysses is not None:
            ranks = dist.get_world_size(groups.ulysses)
            check_heads(heads // tensor, kv_heads // tensor, ranks)
        self.sequence_groups = groups
        windows = [getattr(module, "sliding_window", None) for module in self.decoder().modules()]
        self.windows = tuple(sorted({window for window in windows if isinstance(window, int)}))
        decoder = self.decoder()
        if decoder is not self.base():
            decoder.register_forward_pre_hook(input_hooks.slice_decoder_inputs, with_kwargs=True)

    def use_padded_rows(self, reason: str) -> None:
        """Run each sequence in a padded row with transformers' own attention. With `reason` "", pack them again."""
        self.padded_rows = reason
        if reason:
            use_own_attention(self.hf)
        else:
            attention.use(self.hf.config)
            attention.use_own_masks(self.hf)

    @property
    def can_cache(self) -> bool:
        """Whether generation can use a KV cache. Otherwise each forward runs on all tokens so far."""
        return not self.padded_rows and self.mixers.can_cache and self.stage is None

    def decoder(self) -> nn.Module:
        """The text layers, which process text and media as one sequence of embeddings."""
        base: Any = self.base()
        return base.get_decoder() if hasattr(base, "get_decoder") else base

    def base(self) -> nn.Module:
        """The part of the backbone that returns hidden states."""
        return self.hf

    @property
    def backbone(self) -> Any:
        """The transformers model from whose modules and config the FLOP costs are derived."""
        return self.hf

    def flop_costs(self) -> FlopCosts:
        """Returns the FLOPs for a row of each kind, such as a text token, and for a pair of rows in attention.

        They depend on which parameters are frozen now.
        """
        return flop_costs(self.backbone)

    def target_work(self, costs: FlopCosts, media: Media) -> Iterator[Work]:
        """Yields the rows and attention pairs of media that the model is trained to predict; by default none."""
        yield from ()

    def other_work(self, costs: FlopCosts, batch: PackedBatch) -> Iterator[Work]:
        """Yields the rows and attention pairs other than those of text tokens and media; by default none."""
        yield from ()

    def text_share(self, batch: PackedBatch) -> float:
        """Returns the fraction of the text layers that run for a batch."""
        return 1.0

    def heads(self) -> list[nn.Module | None]:
        """Returns the output layers whose weights are read without calling the layer, so its hooks do not run."""
        return [self.hf.get_output_embeddings()]  # type: ignore[operator]

    def export_target(self, dtype: torch.dtype | None = None) -> Target:
        """Describes the Hugging Face folder that this model is exported to."""
        if self.whole is not None:
            return self.whole.export_target(self, dtype or self.export_dtype)
        skeleton = self._skeleton(type(self.hf))
        names = {name: f"hf.{name}" for name in skeleton.state_dict()}
        whole = self if self.stage is None else self.stage.whole
        # Weights of the subclass, which the transformers model does not have.
        own_weights = tuple(name for name in whole.state_dict() if not name.startswith("hf."))
        folder = self.side_files or self.source
        return Target(skeleton, names, own_weights, dtype or self.export_dtype, folder)

    def folder_view(self) -> FolderView:
        """Returns the mapping between the tensors of this model and their names in a Hugging Face folder."""
        return FolderView(self.hf, {"hf.": ""}) if self.whole is None else self.whole.view()

    def _skeleton(self, model_class: Any, **changes: Any) -> Any:
        """A plain transformers model with this config, on the meta device."""
        config: Any = copy.deepcopy(self.hf.config)
        config._attn_implementation = "eager"  # transformers sets it in all sub-configs
        for name, value in changes.items():
            setattr(config, name, value)
        with torch.device("meta"):
            return model_class(config)

    def hidden(
        self, batch: PackedBatch, shard: UlyssesShard | None = None, kv_cache: KVCache | None = None
    ) -> Tensor:
        """Returns the last hidden states (T, D); with `shard`, those of this rank's tokens."""
        limit = self.packed_length_limit
        longest = max(batch.max_seqlen, 0 if kv_cache is None else kv_cache.max_length + 1)
        if limit is not None and longest > limit:
            raise UserError(
                f"a sequence of {longest} tokens: this model changes its rotary positions "
                f"for the whole batch when one sequence is longer than {limit}, so the other "
                "packed sequences would change too. Shorten the sequences"
            )
        if "experts" in batch.token_fields and (self.padded_rows or self.router_replay is None):
            raise UserError(
                f"the token field experts: {type(self.base()).__name__} has no routers that it could be given to. "
                "Leave it out of the batch"
            )
        if self.padded_rows:
            self._check_padded_rows(kv_cache)
            return hidden_of_rows(self.base(), self._hidden_of, batch)
        if kv_cache is not None and not self.can_cache:
            raise UserError(
                "this model has mixers whose state is not cached: call it without a KV cache"
            )
        if kv_cache is not None and self.stage is not None:
            raise UserError("a KV cache does not support parallel.pipeline > 1: call without it")
        input_ids = batch.input_ids
        position_ids = batch.position_ids  # (T,), or (3, T) for three axes
        is_first = self.stage is None or self.stage.link.is_first
        inputs = media_inputs(self.base(), batch, shard) if is_first else {}
        if shard is not None:
            if self.decoder() is self.base():  # others are cut after the features are inserted
                self._check_no_media(inputs)
                input_ids = shard.cut(input_ids)
                position_ids = shard.cut(position_ids, dim=-1)
            inputs["ulysses_shard"] = shard
        if kv_cache is not None:
            inputs["kv_cache"] = kv_cache
        input_ids_1T = input_ids[None]
        options = {
            "position_ids": position_ids.unsqueeze(-2),
            "use_cache": False,
            **attention.boundaries(batch.cu_seqlens, batch.max_seqlen),
            **inputs,
        }
        if batch.media and is_first:
            media_features.register_host_ids(input_ids_1T, batch.host_input_ids)
            media_features.register_video_tokens(input_ids_1T, batch, self.hf.config)
        with ExitStack() as contexts:
            if self.mixers.is_used:
                contexts.enter_context(self.mixers.packing(batch, shard, kv_cache))
            if self.expert_balance is not None:
                contexts.enter_context(self.expert_balance.routing(batch, shard))
            if self.router_replay is not None:
                contexts.enter_context(self.router_replay.routing(batch, shard))
            if self.stage is not None:
                return self.stage.hidden(self, batch, shard, input_ids_1T, options)
            out = self.base()(input_ids=input_ids_1T, **options)
        if kv_cache is not None:
            kv_cache.advance()
        return self._hidden_of(out)[0]

    def _hidden_of(self, out: Any) -> Tensor:
        """The last hidden states in an output of `base()`."""
        return out.last_hidden_state

    def _check_no_media(self, inputs: dict[str, Any]) -> None:
        if inputs and self.sequence_groups is not None:
            keys = self.sequence_groups.keys
            raise UserError(
                f"{keys} > 1: {type(self.base()).__name__} inserts the features of media inside of its text layers, "
                f"where ranks have a part of the tokens. Set {keys}=1"
            )

    def _check_padded_rows(self, kv_cache: KVCache | None) -> None:
        model_type = self.hf.config.model_type  # type: ignore[union-attr]
        if self.sequence_groups is not None:
            keys = self.sequence_groups.keys
            raise UserError(
                f"{keys} > 1: {model_type} runs on padded rows ({self.padded_rows}), which have no tokens "
                f"to share between ranks. Set {keys}=1"
            )
        if self.expert_balance is not None:
            raise UserError(
                f"experts: {model_type} runs on padded rows ({self.padded_rows}), whose padding would count as tokens "
                "of experts. Leave out the section experts"
            )
        if kv_cache is not None:
            raise UserError(
                f"{model_type} runs on padded rows, which have no KV cache: call without it"
            )

    def forward(
        self,
        batch: PackedBatch,
        outputs: Iterable[str],
        kv_cache: KVCache | None = None,
        temperature: float | None = None,
    ) -> Outputs:
        """Returns outputs by name, for all tokens of the batch, on every rank that shares the batch.

        `kv_cache`: for generation. The first batch holds the prompts, each later one a token of each sequence.
        `temperature`: of the distribution over tokens, in models that have one.
        """
        names = tuple(outputs)
        unknown = [name for name in names if name not in self.provides]
        if unknown:
            hint = (
                ". Logits of a whole batch are never in memory: see skills/change-the-loss"
                if "logits" in unknown
                else ""
            )
            raise UserError(
                f"{type(self).__name__} does not provide {unknown}; "
                f"it provides {', '.join(self.provides)}{hint}"
            )
        if not batch.labels.is_cuda:  # GPU batches were checked on the host, before the copy
            self.check(batch)
        if self.stage is not None and not self.stage.link.is_last:
            return self.stage.forward(self, batch)
        computed = self._compute(batch, names, kv_cache)
        # FSDP2 registers hooks on outputs. It warns about views, since an in-place change would lose the hooks.
        return {
            name: value.clone() if value._is_view() else value for name, value in computed.items()
        }

    def _compute(
        self, batch: PackedBatch, wanted: tuple[str, ...], kv_cache: KVCache | None = None
    ) -> Outputs:
        if self.sequence_groups is None:
            hidden_TD = self.hidden(batch, kv_cache=kv_cache)
            return self.outputs(hidden_TD, batch.labels, wanted)
        if kv_cache is not None:
            keys = self.sequence_groups.keys
            raise UserError(f"a KV cache does not support {keys} > 1: call without it")
        losses = {"loss", "losses"}
        if "loss" in wanted and not set(wanted) <= losses:
            # The loss then follows from the log-probs, which are computed anyway.
            names = [name for name in (*wanted, "log_probs") if name not in losses]
            others = self._compute(batch, tuple(dict.fromkeys(names)))
            others |= losses_of(others["log_probs"])
            return {name: others[name] for name in wanted}
        device = batch.input_ids.device
        shard = self.sequence_groups.shard(batch.host_lengths, device, self.windows)
        self.shard = shard
        try:
            local = self.outputs(self.hidden(batch, shard), shard.cut(batch.labels), wanted)
        finally:
            self.shard = None
        return {
            name: shard.gather(value) if value.ndim else shard.total(value)
            for name, value in local.items()
        }

    def outputs(self, hidden_TD: Tensor, labels_T: Tensor, wanted: tuple[str, ...]) -> Outputs:
        """The head: compute the `wanted` outputs from hidden states. Subclasses override it."""
        return {"hidden_states": hidden_TD}

    def check(self, batch: PackedBatch) -> None:
        """Raise for token ids that the model does not have. It reads values, so the batch should be on the host."""
        config: Any = self.hf.config
        if not config.sub_configs:  # encoders may have placeholder ids outside of the embeddings
            check_token_range(batch, "input_ids", self.hf.get_input_embeddings())  # type: ignore[operator]

    def reference_hidden(self, batch: PackedBatch) -> Tensor:
        """Returns the hidden states of one sequence from transformers' own forward, for `preflight_media`."""
        with attention.eager_attention(self.hf.config):
            out = self.base()(
                input_ids=batch.input_ids[None],
                position_ids=batch.position_ids.unsqueeze(-2),
                # Without it, transformers would take repeated positions for the start of another sequence.
                attention_mask=torch.ones_like(batch.input_ids)[None],
                use_cache=False,
                **media_inputs(self.base(), batch),
            )
        return self._hidden_of(out)[0]

    def reference_log_probs(self, batch: PackedBatch) -> Tensor | None:
        """Returns log-probs of the labels from transformers' own forward, for `preflight`; None without a head."""
        return None


def losses_of(log_probs_T: Tensor) -> Outputs:
    """Returns the summed loss, and the detached loss of each token."""
    return {"loss": -log_probs_T.sum(), "losses": -log_probs_T.detach()}

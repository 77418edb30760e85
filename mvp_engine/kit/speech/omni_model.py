"""OmniModel: a thinker and a talker on packed batches, in one teacher-forced pass.

`hf` is the thinker, a language model with encoders; `talker` is transformers' talker with its code predictor. The
vocoder is not part of the model: an export copies it from the source folder. `talker.py` holds the talker's pass.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed.context import SequenceGroups
from mvp_engine.distributed.ulysses import UlyssesShard, check_heads
from mvp_engine.errors import UserError
from mvp_engine.hf.experts import moe_layers
from mvp_engine.hf.model import attention, input_hooks
from mvp_engine.hf.model.auto_model import from_auto
from mvp_engine.hf.model.config_source import num_heads
from mvp_engine.hf.model.language_model import LanguageModel
from mvp_engine.hf.model.model_parts import parts_of
from mvp_engine.hf.model.packed_model import Outputs
from mvp_engine.hf.weights.enclosing_folder import WholeFolder
from mvp_engine.hf.weights.export import Target
from mvp_engine.hf.weights.load import Entries
from mvp_engine.hf.weights.weight_stream import TensorEntries
from mvp_engine.kit.speech.layout import FIRST_CODE, SPEECH
from mvp_engine.kit.speech.omni_config import check_talker
from mvp_engine.kit.speech.plugin import OmniModelFolder
from mvp_engine.kit.speech.rows import SPEECH_OUTPUTS, SpeechRows, SpeechSizes, speech_outputs
from mvp_engine.kit.speech.talker import Qwen3Talker
from mvp_engine.model_engine.types import PackedModelEngine

if TYPE_CHECKING:
    from mvp_engine.hf.model.adapter import HFAdapter
    from mvp_engine.hf.model.kv_cache import KVCache

VOCODER = "code2wav"


class OmniModel(LanguageModel):
    """A language model that also speaks. Its outputs are those of the thinker, and of the speech of a batch:

    - `speech_log_probs`, `speech_entropy`: (P, K) float32, one row for each frame and each end of speech, one column
      for each codebook; 0 where there is no label
    - `speech_loss`: (2,), minus the summed log-probs of the first codebook, and minus the sum over frames of the mean
      log-prob of the other codebooks

    Where only speech is asked for and the batch has no media, no block of the thinker runs: its embeddings suffice.
    With media, the blocks run up to the one whose output the talker reads.
    """

    model_type = "omni_model"
    casts_frozen = True  # talker SFT: 32 of 35 G parameters are frozen
    provides = (*LanguageModel.provides, *SPEECH_OUTPUTS)
    drops_dummies = SPEECH_OUTPUTS
    adapted = ("hf.", "talker.")

    def __init__(self, thinker: Any, talker: Any, config: Any) -> None:
        super().__init__(thinker)
        self.talker = talker
        self.own_parts = {talker: "talker"}
        self.whole = WholeFolder(config, {"hf.": "thinker.", "talker.": "talker."})
        attention.use(talker.config)
        moe_layers.use(talker.config)
        for decoder in (talker.model, talker.code_predictor.model):
            decoder.register_forward_pre_hook(input_hooks.cast_decoder_inputs, with_kwargs=True)
        talker.model.register_forward_pre_hook(attention.without_mask, with_kwargs=True)
        for of_codebooks in (
            talker.code_predictor.lm_head,
            talker.code_predictor.model.codec_embedding,
        ):
            of_codebooks.holds_no_blocks = True
        _add_missing_init_rules(talker)
        self._media_hidden: Tensor | None = None  # of this forward, (T, D)
        depth = talker.config.accept_hidden_layer
        layers: Any = self.decoder().layers
        # transformers' hidden_states: outputs of layers, before deepstack features are added; at last, of the norm.
        read: Any = layers[depth - 1] if depth < len(layers) else self.decoder().norm
        read.register_forward_hook(self._keep_media_hidden)

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> Any:
        """The model of the config's family: this class, or `CsmModel`."""
        from transformers import AutoModelForMultimodalLM
        from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
            Qwen3OmniMoeTalkerForConditionalGeneration,
        )

        if config.model_type == "csm":
            from mvp_engine.kit.speech.csm import CsmModel

            return CsmModel.from_config(config)
        check_talker(config)
        OmniModelFolder.complete_config(config)
        thinker = from_auto(AutoModelForMultimodalLM, config.thinker_config)
        talker_config = config.talker_config
        talker_config._attn_implementation = attention.register()
        talker = Qwen3OmniMoeTalkerForConditionalGeneration._from_config(talker_config)
        return cls(thinker, talker, config, **options)

    def heads(self) -> list[nn.Module | None]:
        return [*super().heads(), self.talker.codec_head, *self.talker.code_predictor.lm_head]

    def engine_adapter(self) -> HFAdapter:
        from mvp_engine.kit.speech.omni_adapter import OmniAdapter

        return OmniAdapter(self)

    def check_source(self) -> None:
        """Without a folder, an export has a vocoder with random weights."""

    def export_target(self, dtype: torch.dtype | None = None) -> Target:
        assert self.whole is not None
        fresh = None if self.source is not None else self._random_vocoder()
        return self.whole.export_target(self, dtype or self.export_dtype, fresh)

    def _random_vocoder(self) -> Entries:
        from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

        assert self.whole is not None
        config = copy.deepcopy(self.whole.config.code2wav_config)
        config._attn_implementation = "eager"
        with torch.random.fork_rng([]), torch.device("cpu"):
            torch.default_generator.manual_seed(0)
            vocoder = Qwen3OmniMoeCode2Wav._from_config(config)
        return TensorEntries({f"{VOCODER}.{n}": v for n, v in vocoder.state_dict().items()})

    def check(self, batch: PackedBatch) -> None:
        super().check(batch)
        speech = batch.media.get(SPEECH)
        books = self.talker.config.num_code_groups
        if speech is not None and speech.values.shape[1] != FIRST_CODE + books:
            found = speech.values.shape[1] - FIRST_CODE
            raise UserError(
                f"speech has {found} codebooks, and the talker {books}: set mllm.speech.books={books}"
            )

    # ---- Forward --------------------------------------------------------------------------------------------------

    def _compute(
        self, batch: PackedBatch, wanted: tuple[str, ...], kv_cache: KVCache | None = None
    ) -> Outputs:
        of_speech = tuple(name for name in wanted if name in SPEECH_OUTPUTS)
        of_text = tuple(name for name in wanted if name not in SPEECH_OUTPUTS)
        if not of_text:
            with self.media_hidden(batch) as hidden_TD:
                return self._speech(batch, of_speech, hidden_TD)
        try:
            computed = super()._compute(batch, of_text, kv_cache)
            if of_speech:
                computed |= self._speech(batch, of_speech, self._kept_hidden(batch))
        finally:
            self._media_hidden = None
        return {name: computed[name] for name in wanted}

    @contextmanager
    def media_hidden(self, batch: PackedBatch) -> Iterator[Tensor | None]:
        """(T, D): the hidden states that the talker reads at media; None, and no thinker block runs, without any."""
        try:
            if _has_media(batch):
                self.shard = self._shard_of(batch.host_lengths, batch.input_ids.device)
                with self._first_layers():
                    self.hidden(batch, self.shard)
            yield self._kept_hidden(batch)
        finally:
            self._media_hidden = None
            self.shard = None

    @property
    def predictor(self) -> nn.Module:
        """The code predictor."""
        return self.talker.code_predictor

    @property
    def speech_sizes(self) -> SpeechSizes:
        config = self.talker.config.code_predictor_config
        return SpeechSizes(config.num_code_groups, config.vocab_size, config.hidden_size)

    def passes(self) -> Qwen3Talker:
        """The passes of the talker."""
        embed: Any = self.hf.get_input_embeddings()  # type: ignore[operator]
        return Qwen3Talker(self.talker, embed)

    def _speech(
        self, batch: PackedBatch, wanted: tuple[str, ...], hidden_TD: Tensor | None
    ) -> Outputs:
        rows = SpeechRows.of(batch)
        shard = None if rows is None else self._shard_of(rows.lengths, rows.values.device)
        return speech_outputs(
            self.passes(), rows, wanted, shard=shard, hidden_TD=hidden_TD, chunk=self.chunk
        )

    def _kept_hidden(self, batch: PackedBatch) -> Tensor | None:
        """Of all tokens, also where ranks share them: each reads others."""
        if not _has_media(batch):
            return None
        assert self._media_hidden is not None
        hidden_tD = self._media_hidden[0]
        shard = self._shard_of(batch.host_lengths, hidden_tD.device)
        return hidden_tD if shard is None else shard.gather_shared(hidden_tD)

    def _shard_of(self, lengths: list[int], device: torch.device) -> UlyssesShard | None:
        groups = self.sequence_groups
        return None if groups is None else groups.shard(lengths, device, self.windows)

    def enable_sequence_parallel(self, groups: SequenceGroups, tensor: int = 1) -> None:
        super().enable_sequence_parallel(groups, tensor)
        if groups.ulysses is not None:
            heads = num_heads(self.talker.config.text_config)
            check_heads(*heads, dist.get_world_size(groups.ulysses))

    def _keep_media_hidden(self, _: nn.Module, args: Any, output: Any) -> None:
        self._media_hidden = output[0] if isinstance(output, tuple) else output

    @contextmanager
    def _first_layers(self) -> Iterator[None]:
        """The thinker ends with the layer that the talker reads: nothing uses the layers above."""
        decoder: Any = self.decoder()
        layers = decoder.layers
        depth = self.talker.config.accept_hidden_layer
        decoder.layers = nn.ModuleList(list(layers)[:depth])
        try:
            yield
        finally:
            decoder.layers = layers


def _has_media(batch: PackedBatch) -> bool:
    """Whether a batch has images, videos or audio; sharded ranks have the same kinds in a forward (`lockstep.py`)."""
    return any(len(media.row_counts) and not media.is_target for media in batch.media.values())


def _add_missing_init_rules(talker: Any) -> None:
    """Rules for the talker's experts and routers: transformers' `_init_weights` has none for these classes."""
    std = talker.config.initializer_range
    for layer in talker.model.layers:
        for module in (layer.mlp.experts, layer.mlp.gate):
            module._init_weights = partial(_init_normal, std)


def _init_normal(std: float, module: nn.Module) -> None:
    for param in module.parameters(recurse=False):
        nn.init.normal_(param, std=std)


def trains_text(model: nn.Module) -> bool:
    """Whether any parameter trains that the model's text depends on."""
    parts = parts_of(model)
    return any(p.requires_grad and parts[name] != "talker" for name, p in model.named_parameters())


class OmniModelEngine(PackedModelEngine):
    """A language model that also speaks: the outputs of its thinker, and log-probs, entropy and loss of speech."""

    model_class = OmniModel

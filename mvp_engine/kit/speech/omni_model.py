"""OmniModel: a thinker and a talker on packed batches, in one teacher-forced pass.

`hf` is the thinker, a language model with encoders; `talker` is transformers' talker with its code predictor. The
vocoder is not part of the model: an export copies it from the source folder. The talker reads speech rows (`rows.py`).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mvp_engine.config.schema import Experts
from mvp_engine.data.batch import Media, PackedBatch
from mvp_engine.distributed import Layout
from mvp_engine.distributed.pipeline import StageLink
from mvp_engine.distributed.sequence_parallel import SequenceGroups, UlyssesShard, check_heads
from mvp_engine.distributed.world import raise_on_all_ranks
from mvp_engine.errors import UserError
from mvp_engine.hf.experts import moe_layers
from mvp_engine.hf.model import attention, input_hooks
from mvp_engine.hf.model.adapter import HFAdapter
from mvp_engine.hf.model.auto_model import from_auto
from mvp_engine.hf.model.config_source import num_heads
from mvp_engine.hf.model.flop_costs import FlopCosts, Work
from mvp_engine.hf.model.input_hooks import embedding_dtype
from mvp_engine.hf.model.language_model import LanguageModel
from mvp_engine.hf.model.model_parts import parts_of
from mvp_engine.hf.model.packed_model import Outputs, PackedModel
from mvp_engine.hf.model.preflight import (
    BOUNDS,
    NEIGHBOUR_BOUNDS,
    TRIALS,
    eager_eval,
    max_difference,
    mean_difference,
    special_tokens,
)
from mvp_engine.hf.weights.export import Target, WholeFolder
from mvp_engine.hf.weights.load import Entries
from mvp_engine.hf.weights.pretrained import TensorEntries
from mvp_engine.kit.speech.costs import add_speech_costs, speech_work
from mvp_engine.kit.speech.plugin import OmniModelFolder
from mvp_engine.kit.speech.protocol import SpeechProtocol, SpokenTurn, check_talker
from mvp_engine.kit.speech.rows import (
    FIRST_CODE,
    SPEECH,
    SPEECH_OUTPUTS,
    TEXT,
    SpeechRows,
    SpeechSizes,
    packed_hidden,
    speech_outputs,
)
from mvp_engine.model_engine.fsdp.engine import PackedModelEngine

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
    plan_facts = "mvp_engine.kit.speech.costs:SpeechFacts"
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
                f"speech has {found} codebooks, and the talker {books}: set data.speech.books={books}"
            )

    def flop_costs(self) -> FlopCosts:
        costs = super().flop_costs()
        add_speech_costs(costs, self)
        return costs

    def target_work(self, costs: FlopCosts, media: Media) -> Iterator[Work]:
        yield from speech_work(costs, media)

    def text_share(self, batch: PackedBatch) -> float:
        """All layers run; for speech alone none, or those below the one whose output the talker reads."""
        if trains_text(self):
            return 1.0
        if not _has_media(batch):
            return 0.0
        layers: Any = self.decoder().layers
        return self.talker.config.accept_hidden_layer / len(layers)

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


# The talker and its code predictor, teacher forced.
#
# Legend: R talker positions of all spoken turns, F frames, K codebooks, D hidden size, M positions that read a hidden
# state of the thinker.

# Masks of the predictor's layers: none, since attention is causal by itself. Without a dict, transformers would look
# for packed sequences in the positions, which is a host sync.
_CAUSAL = {"full_attention": None, "sliding_attention": None}


class Qwen3Talker:
    """The passes of a talker, as `speech_outputs` calls them."""

    def __init__(self, talker: Any, embed: nn.Module) -> None:
        """`embed` are the thinker's embeddings."""
        self.talker = talker
        self.embed = embed
        self.books = int(talker.config.num_code_groups)

    @property
    def decoder(self) -> Any:
        return self.talker.model

    @property
    def predictor(self) -> Any:
        return self.talker.code_predictor.model

    @property
    def first_head(self) -> Tensor:
        """(V, D) of the first codebook"""
        return self.talker.codec_head.weight

    def rest_heads(self) -> Tensor:
        """(K - 1, V, D) of the others"""
        return torch.stack([head.weight for head in self.talker.code_predictor.lm_head])

    def embeddings(self, codes_FK: Tensor) -> Tensor:
        """(F, K, D): the embeddings of the codes of each frame; the first codebook is the talker's own."""
        first_FD = self.talker.get_input_embeddings()(codes_FK[:, 0])
        tables = [table.weight for table in self.talker.code_predictor.get_input_embeddings()]
        # One lookup in one table, instead of one in each of K - 1.
        offsets_K = torch.arange(len(tables), device=codes_FK.device) * len(tables[0])
        rest_FKD = F.embedding(codes_FK[:, 1:] + offsets_K, torch.cat(tables))
        embeds_FKD = torch.cat([first_FD[:, None], rest_FKD], dim=1)
        return embeds_FKD.to(embedding_dtype(embeds_FKD))

    def embedding(self, codes_F: Tensor, book: int) -> Tensor:
        """(F, D): of one codebook."""
        if book == 0:
            return self.talker.get_input_embeddings()(codes_F)
        return self.talker.code_predictor.get_input_embeddings()[book - 1](codes_F)

    def text(self, ids_R: Tensor) -> Tensor:
        """(R, D): the text channel."""
        return self.talker.text_projection(self.embed(ids_R))

    def inputs(self, rows: SpeechRows, embeds_FKD: Tensor, hidden_TD: Tensor | None) -> Tensor:
        """(R, D): the text channel (projected embeddings, or hidden states at media) plus the codec channel.

        `hidden_TD` are the thinker's hidden states, needed where rows have media.
        """
        inputs_RD = self.text(rows.values[:, TEXT])
        if rows.sources is not None:
            assert hidden_TD is not None
            assert rows.source_tokens is not None
            media_MD = self.talker.hidden_projection(hidden_TD[rows.source_tokens])
            inputs_RD = inputs_RD.index_copy(0, rows.sources, media_MD.to(inputs_RD.dtype))
        first_R = rows.values[:, FIRST_CODE]
        header_RD = self.talker.get_input_embeddings()(first_R.clamp(min=0))
        inputs_RD = inputs_RD + header_RD.masked_fill((first_R < 0)[:, None], 0.0)
        rest_FD = embeds_FKD[:, 1:].sum(1)
        return inputs_RD.index_add(0, rows.frames, rest_FD.to(inputs_RD.dtype))

    def hidden(self, rows: SpeechRows, inputs_RD: Tensor, shard: UlyssesShard | None) -> Tensor:
        """(R, D): the last hidden states, each spoken turn a sequence of its own."""
        return packed_hidden(self.decoder, rows, inputs_RD, rows.positions, shard)

    def rest_hidden(self, hidden_FD: Tensor, embeds_FKD: Tensor) -> Tensor:
        """(K - 1, F, D): the inputs of the heads after the first. `hidden_FD`: of the rows that predict the frames."""
        inputs_FKD = torch.cat([hidden_FD[:, None].to(embeds_FKD.dtype), embeds_FKD[:, :-1]], dim=1)
        out = self.predictor(inputs_embeds=inputs_FKD, attention_mask=_CAUSAL, use_cache=False)
        return out.last_hidden_state[:, 1:].transpose(0, 1)


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


# OmniAdapter: an Omni model as model engines see it; what its talker does not support is refused by name.


class OmniAdapter(HFAdapter):
    def preflight(self, layout: Layout, exact: bool) -> None:
        if isinstance(self.model, LanguageModel):  # CSM has no text to compare
            super().preflight(layout, exact)
        group = layout.world.host_group
        with raise_on_all_ranks(group):
            check_speech(self.model, exact=exact, group=group)

    def apply_tensor_parallel(self, mesh: DeviceMesh) -> NoReturn:
        raise _unsupported("parallel.tensor > 1", "parallel.tensor=1 and parallel.shard")

    def apply_expert_parallel(self, mesh: DeviceMesh) -> list[nn.Module]:
        raise _unsupported("parallel.expert > 1", "parallel.expert=1 and parallel.shard")

    def cut_stage(self, link: StageLink, skeleton: nn.Module | None) -> NoReturn:
        raise _unsupported("parallel.pipeline > 1", "parallel.pipeline=1 and parallel.shard")

    def balance_experts(self, settings: Experts, device: torch.device) -> NoReturn:
        raise _unsupported(
            "experts.aux_loss_coef, experts.bias_update_rate or experts.router_z_loss_coef",
            "experts.aux_loss_coef=null, experts.bias_update_rate=null and experts.router_z_loss_coef=0",
        )


def _unsupported(key: str, fix: str) -> UserError:
    return UserError(
        f"model.type=omni_model does not support {key}: thinker and talker run on different tokens. Set {fix}"
    )


# Preflight of speech: a few random spoken turns before training; a talker that fails is rejected by name.
#
# Three questions, each on the model as it is placed on its layout, so all ranks must call `check_speech`:
#
# - packs: do two spoken turns in one pack give what each gives alone, whatever its neighbour says?
# - causality: does the distribution of a code depend on that code, or on later ones?
# - protocol: does the talker read what transformers' `generate` feeds it step by step?

QUESTION = 3  # words of the user, after a line break
ANSWER = 4  # words that are spoken, after a line break
FRAMES = (7, 5)  # of the two turns: longer than the text, so that its end and pads are read
CHANGED = 3  # the frame whose codes after the first are replaced
LEAKS = "two spoken turns in one pack change each other by {:.1e}"
PACKS = "two spoken turns in one pack differ from the same two alone by {:.1e}"
LATER = "distributions depend on codes that are spoken later, or on the code itself, by {:.1e}"
DEAF = "the codes of a frame do not change what is spoken after it"
PROTOCOL = "it does not read what transformers' generate feeds it: inputs differ by {:.1e}"


@torch.no_grad()
def check_speech(model: PackedModel, *, exact: bool, group: dist.ProcessGroup | None) -> None:
    """Raise unless the talker answers all three questions right, in one trial of three.

    `exact`: the model computes in float32. `group`: all ranks.
    """
    assert model.whole is not None
    protocol = SpeechProtocol.for_config(model.whole.config)
    assert protocol is not None
    rejected = f"the talker of {protocol.name} cannot be trained"
    reason = ""
    try:
        with eager_eval(model), warnings.catch_warnings():
            # The probe runs once, uncompiled on purpose.
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
            for seed in range(TRIALS):  # rounding may switch an expert in one of them
                reason = _Trial(model, protocol, seed).failure(exact, group)
                if not reason:
                    return
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{rejected}: its code fails on packed turns ({type(error).__name__}: {error})"
        ) from error
    raise UserError(f"{rejected}: {reason}")


class _Trial:
    """Two random spoken turns, each in a batch of its own."""

    def __init__(self, model: PackedModel, protocol: SpeechProtocol, seed: int) -> None:
        self.model = model
        self.protocol = protocol
        self.family: _Family = (_Csm if protocol.name == "csm" else _Qwen3)(model, protocol)
        self.device = next(model.parameters()).device
        self.dice = torch.Generator().manual_seed(seed)
        self.ids = [self.family.chat(self._words(QUESTION + ANSWER + 3)) for _ in range(2)]

    def failure(self, exact: bool, group: dist.ProcessGroup | None) -> str:
        """What is wrong, on any rank; empty if nothing is."""
        first = self._turn(0, self._codes(FRAMES[0]))
        second, other = (self._turn(1, self._codes(FRAMES[1])) for _ in range(2))
        codes_FK = first.codes.clone()
        codes_FK[CHANGED, 1:] = 1 + codes_FK[CHANGED, 1:] % (self.protocol.codec_size - 1)
        changed = self._turn(0, codes_FK)
        packed, difference = self._outputs(second, first)
        beside_other = self._outputs(other, first)[0]
        of_first, of_second = self._outputs(first)[0], self._outputs(second)[0]
        of_changed = self._outputs(changed)[0]
        length = len(of_first)
        values = [
            max_difference(beside_other[-length:], packed[-length:]),
            mean_difference(packed, torch.cat([of_second, of_first])),
            max_difference(_before(of_changed), _before(of_first)),
            float(torch.equal(_after(of_changed), _after(of_first))),
            difference,
        ]
        found = torch.tensor(values, dtype=torch.float64).nan_to_num(nan=torch.inf)
        if group is not None:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        near = NEIGHBOUR_BOUNDS[exact]
        bounds = {
            LEAKS: near,
            PACKS: BOUNDS[exact],
            LATER: near,
            DEAF: 0.5,
            PROTOCOL: BOUNDS[exact],
        }
        for value, (text, bound) in zip(found.tolist(), bounds.items(), strict=True):
            if value == float("inf"):
                return "its outputs are not finite: check its weights for NaN and infinity"
            if value > bound:
                return text.format(value)
        return ""

    def _words(self, count: int) -> list[int]:
        """Random tokens without those that configs name, such as starts of turns."""
        assert self.model.whole is not None
        special = special_tokens(self.model.whole.config)
        config: Any = self.model.hf.config.get_text_config()  # type: ignore[operator, union-attr]
        # The vocab_size of CSM is that of codes.
        vocab_size = getattr(config, "text_vocab_size", config.vocab_size)
        words = torch.tensor([token for token in range(vocab_size) if token not in special])
        return words[torch.randint(len(words), (count,), generator=self.dice)].tolist()

    def _codes(self, frames: int) -> Tensor:
        size = (frames, self.protocol.books)
        return torch.randint(1, self.protocol.codec_size, size, generator=self.dice)

    def _turn(self, index: int, codes_FK: Tensor) -> _Turn:
        ids = self.ids[index]
        last = self.protocol.num_answers(ids) - 1
        media = self.protocol.plan(ids, torch.arange(len(ids)), [SpokenTurn(last, codes_FK)])
        batch = PackedBatch.from_sequences([ids], media={SPEECH: media}).to(self.device)
        return _Turn(batch, codes_FK)

    def _outputs(self, *turns: _Turn) -> tuple[Tensor, float]:
        """Log-probs and entropies, (P, 2, K), and how much the inputs of the talker differ from transformers'."""
        batch = PackedBatch.concat([turn.batch for turn in turns])
        difference = 0.0

        def compare(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
            # Inside of the forward, where the weights of a sharded model are whole.
            nonlocal difference
            inputs = [
                self.family.inputs(turn.batch.input_ids, turn.codes.to(self.device))
                for turn in turns
            ]
            shard = kwargs.get("ulysses_shard")
            inputs_RD = torch.cat(inputs)
            own_RD = inputs_RD if shard is None else shard.cut(inputs_RD)
            difference = mean_difference(kwargs["inputs_embeds"][0], own_RD)

        handle = self.family.decoder.register_forward_pre_hook(compare, with_kwargs=True)
        try:
            found = self.model(batch, ["speech_log_probs", "speech_entropy"])
        finally:
            handle.remove()
        return torch.stack([found["speech_log_probs"], found["speech_entropy"]], 1), difference


class _Turn(NamedTuple):
    batch: PackedBatch
    codes: Tensor  # (F, K)


def _before(outputs_P2K: Tensor) -> Tensor:
    """The entropies of distributions that know nothing of the changed codes: also that of the first of these."""
    entropy_PK = outputs_P2K[:, 1]
    return torch.cat([entropy_PK[:CHANGED].flatten(), entropy_PK[CHANGED, :2]])


def _after(outputs_P2K: Tensor) -> Tensor:
    return outputs_P2K[CHANGED + 1 :, 1]


class _Family(Protocol):
    """What transformers feeds a talker."""

    decoder: nn.Module

    def chat(self, words: list[int]) -> Tensor:
        """The tokens of a question and an answer."""
        ...

    def inputs(self, ids_T: Tensor, codes_FK: Tensor) -> Tensor:
        """(R, D), by transformers' own layers and functions."""
        ...


class _Qwen3:
    def __init__(self, model: Any, protocol: SpeechProtocol) -> None:
        self.model = model
        self.protocol = protocol
        self.decoder: nn.Module = model.talker.model

    def chat(self, words: list[int]) -> Tensor:
        start, end = self.protocol.im_start, self.protocol.im_end
        user = [start, self.protocol.user, *words[: QUESTION + 1], end, words[-1]]
        return torch.tensor([*user, start, self.protocol.assistant, *words[-ANSWER - 1 :], end])

    def inputs(self, ids_T: Tensor, codes_FK: Tensor) -> Tensor:
        """As `generate`: the thinker's last token, which ends the turn, is never read."""
        from transformers import Qwen3OmniMoeForConditionalGeneration as Whole

        talker = self.model.talker
        embed = self.model.hf.get_input_embeddings()
        make: Any = Whole._get_talker_assistant_parts
        tokens = torch.tensor(self.protocol.tts, device=ids_T.device)
        bos, eos, pad = talker.text_projection(embed(tokens))[:, None, None]
        start = QUESTION + 5
        embeds_1TD = embed(ids_T[:-1])[None]
        whole = SimpleNamespace(config=self.model.whole.config, talker=talker)
        speaker = next(iter(self.protocol.speakers.values()))
        length = embeds_1TD.shape[1]
        header, _, text = make(whole, start, length, speaker, embeds_1TD, pad, bos, eos)
        tables = [talker.get_input_embeddings(), *talker.code_predictor.get_input_embeddings()]
        frames = [table(codes_FK[:, book]) for book, table in enumerate(tables)]
        count = len(codes_FK)
        channel_FD = torch.cat([text[0], pad[0].expand(count, -1).to(text.dtype)])[:count]
        users_UD = talker.text_projection(embed(ids_T[:start]))
        return torch.cat([users_UD, header[0], torch.stack(frames).sum(0) + channel_FD])


class _Csm:
    def __init__(self, model: Any, protocol: SpeechProtocol) -> None:
        self.csm = model.hf
        self.protocol = protocol
        self.decoder: nn.Module = self.csm.backbone_model

    def chat(self, words: list[int]) -> Tensor:
        return torch.tensor(words)

    def inputs(self, ids_T: Tensor, codes_FK: Tensor) -> Tensor:
        end = torch.full_like(codes_FK[:1], self.protocol.codec_eos)
        frames = self.csm.backbone_model.embed_tokens(torch.cat([codes_FK, end])[None])
        return torch.cat([self.csm.embed_text_tokens(ids_T), frames[0]])

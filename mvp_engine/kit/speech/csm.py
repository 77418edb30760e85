"""CSM: a backbone that reads text and frames and predicts first codes, and a depth decoder for the other codebooks.

Legend: R positions of all spoken rows, F frames, K codebooks, D hidden size.

A turn is its text, then its frames, then a frame of `codebook_eos_token_id` in every codebook: it ends the speech and
is predicted as any other. A row has one turn or several, which are one sequence. The codec of the folder is not part of
the model; an export copies it.
transformers' own training encodes audio in the forward and runs the heads one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from mvp_engine.data.batch import IGNORE, Media, PackedBatch
from mvp_engine.distributed.sequence_parallel import SequenceGroups, UlyssesShard, check_heads
from mvp_engine.errors import UserError
from mvp_engine.hf.model import input_hooks
from mvp_engine.hf.model.auto_model import from_auto
from mvp_engine.hf.model.config_source import num_heads
from mvp_engine.hf.model.flop_costs import FlopCosts, Work
from mvp_engine.hf.model.input_hooks import embedding_dtype
from mvp_engine.hf.model.packed_model import Outputs, PackedModel
from mvp_engine.hf.weights.export import WholeFolder
from mvp_engine.kit.speech.costs import speech_costs_alone, speech_work
from mvp_engine.kit.speech.protocol import SpeechError, SpeechProtocol, SpokenTurn, media_of
from mvp_engine.kit.speech.rows import (
    CODES,
    FIRST_CODE,
    LABEL,
    POSITION_UNITS,
    POSITIONS,
    SPEECH,
    SPEECH_OUTPUTS,
    TEXT,
    SpeechRows,
    SpeechSizes,
    packed_hidden,
    speech_outputs,
)

if TYPE_CHECKING:
    from mvp_engine.hf.model.adapter import HFAdapter
    from mvp_engine.hf.model.kv_cache import KVCache

CODEC_RATE = 24_000  # of Mimi
_PARTS = ("lm_head", "embed_text_tokens", "backbone_model", "depth_decoder")


class CsmModel(PackedModel):
    """A model of speech alone: its outputs are `SPEECH_OUTPUTS`, all of it is the part `talker`."""

    model_type = "omni_model"
    plan_facts = "mvp_engine.kit.speech.costs:CsmFacts"
    provides = drops_dummies = SPEECH_OUTPUTS

    def __init__(self, csm: Any, config: Any) -> None:
        super().__init__(csm)
        self.whole = WholeFolder(config, {f"hf.{part}.": f"{part}." for part in _PARTS})
        self.own_parts = {self: "talker"}
        self.chunk = 2048
        for decoder in (csm.backbone_model, csm.depth_decoder.model):
            decoder.register_forward_pre_hook(input_hooks.cast_decoder_inputs, with_kwargs=True)

    @classmethod
    def from_config(cls, config: Any) -> CsmModel:
        from transformers import AutoModelForTextToWaveform

        predictor = config.depth_decoder_config
        for name, other in (
            ("num_codebooks", "num_codebooks"),
            ("hidden_size", "backbone_hidden_size"),
        ):
            if getattr(config, name) != getattr(predictor, other):
                raise UserError(
                    f"model.config.{name}={getattr(config, name)} and model.config.depth_decoder_config.{other}="
                    f"{getattr(predictor, other)} must be the same"
                )
        csm = from_auto(AutoModelForTextToWaveform, config)
        del csm.codec_model
        return cls(csm, config)

    def engine_adapter(self) -> HFAdapter:
        from mvp_engine.kit.speech.omni_model import OmniAdapter

        return OmniAdapter(self)

    def check_source(self) -> None:
        if self.source is None:
            raise UserError(
                "model.config.model_type=csm without model.path: an export copies the codec from the folder. Set "
                "model.path"
            )

    def base(self) -> nn.Module:
        csm: Any = self.hf
        return csm.backbone_model

    def decoder(self) -> nn.Module:
        return self.base()

    def heads(self) -> list[nn.Module | None]:
        csm: Any = self.hf
        return [csm.lm_head]

    @property
    def predictor(self) -> nn.Module:
        csm: Any = self.hf
        return csm.depth_decoder

    @property
    def speech_sizes(self) -> SpeechSizes:
        config: Any = self.hf.config
        return SpeechSizes(config.num_codebooks, config.vocab_size, config.hidden_size)

    def enable_sequence_parallel(self, groups: SequenceGroups, tensor: int = 1) -> None:
        if groups.ulysses is not None:
            heads = num_heads(self.hf.config)
            check_heads(*heads, dist.get_world_size(groups.ulysses))
        self.sequence_groups = groups

    def flop_costs(self) -> FlopCosts:
        return speech_costs_alone(self)

    def target_work(self, costs: FlopCosts, media: Media) -> Iterator[Work]:
        yield from speech_work(costs, media)

    def check(self, batch: PackedBatch) -> None:
        speech = batch.media.get(SPEECH)
        books = self.speech_sizes.books
        if speech is not None and speech.values.shape[1] != FIRST_CODE + books:
            found = speech.values.shape[1] - FIRST_CODE
            raise UserError(
                f"speech has {found} codebooks, and the model {books}: set data.speech.books={books}"
            )

    def _compute(
        self, batch: PackedBatch, wanted: tuple[str, ...], kv_cache: KVCache | None = None
    ) -> Outputs:
        rows = SpeechRows.of(batch)
        shard = None
        if rows is not None and self.sequence_groups is not None:
            shard = self.sequence_groups.shard(rows.lengths, rows.values.device)
        return speech_outputs(CsmPasses(self.hf), rows, wanted, shard=shard, chunk=self.chunk)


class CsmPasses:
    """The passes of CSM, as `speech_outputs` calls them."""

    def __init__(self, csm: Any) -> None:
        self.csm = csm
        self.books = int(csm.config.num_codebooks)

    @property
    def decoder(self) -> Any:
        return self.csm.backbone_model

    @property
    def predictor(self) -> Any:
        return self.csm.depth_decoder.model

    @property
    def first_head(self) -> Tensor:
        return self.csm.lm_head.weight

    def rest_heads(self) -> Tensor:
        return self.csm.depth_decoder.codebooks_head.weight.transpose(1, 2)

    def embeddings(self, codes_FK: Tensor) -> Tensor:
        """(F, K, D), of the depth decoder; those of the backbone are mostly tied to them."""
        embeds_FKD = self._lookup(self.csm.depth_decoder.model.embed_tokens, codes_FK)
        return embeds_FKD.to(embedding_dtype(embeds_FKD))

    def embedding(self, codes_F: Tensor, book: int) -> Tensor:
        """(F, D): of one codebook."""
        table = self.csm.depth_decoder.model.embed_tokens
        return F.embedding(codes_F + book * (table.num_embeddings // self.books), table.weight)

    @property
    def frame_table(self) -> nn.Embedding:
        """The backbone's embeddings of codes."""
        table: nn.Embedding = self.csm.backbone_model.embed_tokens.embed_audio_tokens
        return table

    @property
    def is_tied(self) -> bool:
        return self.frame_table.weight is self.csm.depth_decoder.model.embed_tokens.weight

    def frame_inputs(self, codes_FK: Tensor) -> Tensor:
        """(F, D): frames as the backbone reads them."""
        return self._lookup(self.frame_table, codes_FK).sum(1)

    def inputs(self, rows: SpeechRows, embeds_FKD: Tensor, hidden_TD: Tensor | None) -> Tensor:
        """(R, D): embeddings of text; in frames, the sum of the embeddings of the codes."""
        text_R = rows.values[:, TEXT]
        inputs_RD = self.csm.embed_text_tokens(text_R.clamp(min=0))
        inputs_RD = inputs_RD.masked_fill((text_R < 0)[:, None], 0.0)
        if not self.is_tied:
            embeds_FKD = self._lookup(self.frame_table, rows.codes)
        return inputs_RD.index_add(0, rows.frames, embeds_FKD.sum(1).to(inputs_RD.dtype))

    def hidden(self, rows: SpeechRows, inputs_RD: Tensor, shard: UlyssesShard | None) -> Tensor:
        return packed_hidden(self.decoder, rows, inputs_RD, rows.positions[0], shard)

    def rest_hidden(self, hidden_FD: Tensor, embeds_FKD: Tensor) -> Tensor:
        inputs_FKD = torch.cat([hidden_FD[:, None].to(embeds_FKD.dtype), embeds_FKD[:, :-1]], dim=1)
        # With a mask of four dimensions, transformers does not look for packed sequences, which is a host sync.
        size = (self.books, self.books)
        mask = torch.ones(size, dtype=torch.bool, device=hidden_FD.device).tril()[None, None]
        out = self.predictor(inputs_embeds=inputs_FKD, attention_mask=mask, use_cache=False)
        return out.last_hidden_state[:, 1:].transpose(0, 1)

    def _lookup(self, table: nn.Embedding, codes_FK: Tensor) -> Tensor:
        offsets_K = torch.arange(self.books, device=codes_FK.device) * (
            table.num_embeddings // self.books
        )
        return F.embedding(codes_FK + offsets_K, table.weight)


@dataclass(frozen=True)
class CsmProtocol(SpeechProtocol):
    """Rows of CSM: for each turn its text, its frames and a frame that ends them; later turns read earlier ones.

    A turn starts with the tokenizer's bos token; tokens without any are one turn.
    """

    reads_answers = True

    @classmethod
    def of(cls, config: Any) -> CsmProtocol:
        rate = getattr(config.codec_config, "frame_rate", None) or getattr(
            config.codec_config, "_frame_rate", None
        )
        return cls(
            books=config.num_codebooks,
            codebook_size=min(config.codebook_pad_token_id, config.vocab_size),
            codec_size=config.codec_config.codebook_size,
            speakers={},
            frame_rate=rate,
            sampling_rate=CODEC_RATE,
            im_start=-1 if config.bos_token_id is None else config.bos_token_id,
            im_end=-1,
            user=-1,
            assistant=-1,
            tts=(-1, -1, -1),
            media_tokens=(),
            header_codes=(),
            codec_eos=config.codebook_eos_token_id,
            name="csm",
        )

    def num_answers(self, ids_T: Tensor) -> int:
        return len(self._segments(ids_T)) - 1

    def num_text_tokens(self, ids_T: Tensor, turn: int) -> int:
        segments = self._checked_segments(ids_T, turn)
        return segments[turn + 1] - segments[turn]

    def num_rows(self, ids_T: Tensor, turns: Sequence[tuple[int, int]]) -> int:
        last = max(turn for turn, _ in turns)
        frames = sum(count + 1 for _, count in turns)
        return self._checked_segments(ids_T, last)[last + 1] + frames

    def plan(self, ids_T: Tensor, position_ids: Tensor, turns: Sequence[SpokenTurn]) -> Media:
        """One item: all turns up to the last spoken one."""
        if not turns:
            return self.empty()
        by_turn = {turn.turn: turn for turn in turns}
        last = max(by_turn)
        segments = self._checked_segments(ids_T, last)
        pieces = []
        for turn in range(last + 1):
            text = ids_T[segments[turn] : segments[turn + 1]]
            rows = torch.full((len(text), FIRST_CODE + self.books), -1)
            rows[:, TEXT] = text
            rows[:, LABEL] = IGNORE
            pieces.append(rows)
            if turn in by_turn:
                pieces.append(self._frames(by_turn[turn]))
                rows[-1, LABEL] = pieces[-1][0, FIRST_CODE] if by_turn[turn].learnt else IGNORE
        item = torch.cat(pieces)
        item[:, POSITIONS] = POSITION_UNITS * torch.arange(len(item))[:, None]
        return media_of([item], torch.tensor([len(by_turn)]))

    def _frames(self, spoken: SpokenTurn) -> Tensor:
        if spoken.speaker is not None:
            raise SpeechError(
                "speech_speaker",
                f"CSM has no list of speakers: write {spoken.speaker!r} into the text, as [0]",
            )
        codes_FK = self._checked_codes(spoken)
        if spoken.ends:
            codes_FK = torch.cat([codes_FK, torch.full_like(codes_FK[:1], self.codec_eos)])
        rows = torch.full((len(codes_FK), FIRST_CODE + self.books), -1)
        rows[:, CODES] = codes_FK
        rows[:, LABEL] = IGNORE
        if spoken.learnt:
            rows[:-1, LABEL] = codes_FK[1:, 0]
        return rows

    def _segments(self, ids_T: Tensor) -> list[int]:
        """The first token of each turn, and the end; what is before the first bos token is part of the first turn."""
        starts: list[int] = (ids_T == self.im_start).nonzero()[:, 0].tolist()
        return [0, *starts[1:], len(ids_T)]

    def _checked_segments(self, ids_T: Tensor, turn: int) -> list[int]:
        segments = self._segments(ids_T)
        if turn >= len(segments) - 1:
            raise SpeechError(
                "speech_turn",
                f"answer {turn} is not in the tokens of the row, which have {len(segments) - 1} turns of CSM: the chat "
                f"template must begin each turn with the token {self.im_start} (bos_token_id), and no other",
            )
        return segments

"""From a row to the tokens that a model reads, and with its media decoded, to a batch of one sequence.

A plan counts with `prepare`, a worker goes on from it with `load`: what is counted is what is trained on.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mvp_engine.data.batch import IGNORE, Media, PackedBatch
from mvp_engine.errors import UserError
from mvp_engine.kit.data.encode import processor_calls as asking
from mvp_engine.kit.data.encode.limits import Info, Limits
from mvp_engine.kit.data.encode.media import MediaHandler
from mvp_engine.kit.data.encode.processor_calls import Span, expand
from mvp_engine.kit.data.encode.template import Placeholder, Rendered, Template, Tokens, cut
from mvp_engine.kit.data.read.rows import BadRow, Message, Part, Row, read_row

LOGGER = logging.getLogger("mvp_engine")
Positions = Callable[[Tensor, Mapping[str, Tensor], Mapping[str, Media]], Tensor]
OVERLONG = ("drop", "truncate", "shrink", "error")
# Raise it with every change to kit/data/read or kit/data/encode that changes the tokens or the encoder work of any row:
# costs that were measured and cached before are then measured again.
ENCODER_VERSION = 1


@dataclass(frozen=True)
class Prepared:
    """A row in tokens, its media not decoded yet: in the order of the text, without those that were cut off."""

    ids: list[int]
    loss: list[bool]
    parts: list[Part]
    infos: list[Info]
    expansions: list[str]
    spans: list[Span]  # the tokens of each item, with those that enclose it
    media: dict[str, Media] | None = None  # decoded, where that was asked for


@dataclass(frozen=True)
class _Draft:
    """A row on its way to being prepared, still whole."""

    rendered: Rendered
    parts: list[Part]
    infos: list[Info]
    tokens: Tokens = field(default_factory=lambda: Tokens([], [], []))
    expansions: list[str] = field(default_factory=list)
    media: dict[str, Media] | None = None

    def whole(self) -> Prepared:
        spans = [place.outer for place in self.tokens.media]
        return Prepared(
            self.tokens.ids,
            self.tokens.loss,
            self.parts,
            self.infos,
            self.expansions,
            spans,
            self.media,
        )

    def cut(self, most: int) -> Prepared:
        one = self.whole()
        ids, loss, kept = cut(one.ids, one.loss, one.spans, most)
        return Prepared(
            ids, loss, one.parts[:kept], one.infos[:kept], one.expansions[:kept], one.spans[:kept]
        )


class RopePositions:
    """Positions on three axes as the model itself makes them, by its `get_rope_index`; no weights are needed."""

    def __init__(self, config: Any) -> None:
        self.config = copy.deepcopy(config)

    @classmethod
    def of(cls, config: Any) -> RopePositions | None:
        """None where the model counts its tokens like any other."""
        made = cls(config)
        return made if hasattr(made._model, "get_rope_index") else None

    @cached_property
    def _model(self) -> Any:
        from mvp_engine.hf import LanguageModel

        with torch.device("meta"):
            return LanguageModel.from_config(copy.deepcopy(self.config)).base()

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self.config}

    def __call__(
        self, ids: Tensor, types: Mapping[str, Tensor], media: Mapping[str, Media]
    ) -> Tensor:
        fields = {
            name: value
            for one in media.values()
            if len(one.row_counts)
            for name, value in one.fields.items()
        }
        if not any(len(one.row_counts) for one in media.values()):
            return torch.arange(len(ids)).expand(3, -1)
        if "feature_attention_mask" in fields:
            fields["audio_seqlens"] = fields["feature_attention_mask"].sum(-1)
        if "video_second_per_grid" in fields:
            fields["second_per_grids"] = fields["video_second_per_grid"]
        fields |= {name: value[None] for name, value in types.items()}
        known = inspect.signature(self._model.get_rope_index).parameters
        given = {name: value for name, value in fields.items() if name in known}
        found = self._model.get_rope_index(
            ids[None], attention_mask=torch.ones_like(ids)[None], **given
        )[0]
        return found[:, 0].long()


class Sampler:
    """Rows for one model: its processor (or tokenizer) with its chat template, under limits."""

    def __init__(
        self,
        processor: Any,
        limits: Limits | None = None,
        *,
        most_tokens: int,
        overlong: str = "drop",
        pairs: bool = False,
        options: Mapping[str, Any] | None = None,
        positions: Positions | None = None,
    ) -> None:
        self.media, self.template = (
            MediaHandler(processor, limits),
            Template(processor, **(options or {})),
        )
        self.most_tokens, self.overlong, self.pairs, self.positions = (
            most_tokens,
            overlong,
            pairs,
            positions,
        )
        kinds = [kind for kind in self.media.kinds if kind in self.template.placeholders]
        self.dtype = torch.float32  # of media on their way to the device
        self._with_outer = {
            kind: _takes_outer(self.media, kind, self.template.placeholders[kind]) for kind in kinds
        }

        self._warn_of_no_stop()

    def _warn_of_no_stop(self) -> None:
        turns = [Message(role, (Part("text", role),)) for role in ("user", "assistant") * 2]
        try:
            stops = (
                not self.template.speaker.chat_template
                or self.template.render(Row(tuple(turns))).stops
            )
        except BadRow:  # a template for something else; each row will be told
            return
        if not stops:
            LOGGER.warning(
                "the chat template writes no special token behind an answer: the model learns no stopping"
            )

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that a row's cost depends on, except `most_tokens` and `overlong`."""
        import transformers

        tokenizer, processor = self.media.tokenizer, self.media.processor
        told = [
            str(ENCODER_VERSION),
            transformers.__version__,
            tokenizer.backend_tokenizer.to_str(),
            repr(tokenizer.special_tokens_map),
        ]
        told += [
            json.dumps(self.template.speaker.chat_template),
            repr(sorted(self.template.options.items())),
        ]
        told += [
            repr((self.pairs, self.media.limits)),
            processor.to_json_string() if self.media.kinds else "",
        ]
        return hashlib.blake2b("\0".join(told).encode(), digest_size=16).hexdigest()

    def prepare(
        self,
        raw: Mapping[str, Any],
        format: str | None,
        root: Path,
        fit: bool = True,
        decode: bool = False,
    ) -> list[Prepared]:
        """The row's sequence; with `pairs`, of a preference row the chosen side and the rejected one.

        BadRow if it cannot be trained on; with `fit`, an over-long row is cut or its media shrink, if asked for. With
        `decode`, media that will not be cut or shrink are decoded on the way, so that nothing is asked for twice.
        """
        row = read_row(raw, format)
        decode = decode and self.overlong not in ("truncate", "shrink")
        drafts = [self._draft(row, root, decode)]
        if self.pairs and row.rejected:
            try:
                drafts.append(self._draft(replace(row, messages=row.rejected), root, decode))
            except BadRow as bad:
                raise BadRow(bad.reason, f"the rejected side: {bad.detail}") from None
        total = sum(len(draft.tokens.ids) for draft in drafts)
        if not fit or total <= self.most_tokens:
            return [draft.whole() for draft in drafts]
        if self.overlong == "shrink":
            infos = iter(self._shrunk([info for draft in drafts for info in draft.infos], total))
            drafts = [
                _Draft(draft.rendered, draft.parts, [next(infos) for _ in draft.infos])
                for draft in drafts
            ]
            drafts = [self._tokens(draft) for draft in drafts]
            if sum(len(draft.tokens.ids) for draft in drafts) <= self.most_tokens:
                return [draft.whole() for draft in drafts]
        elif self.overlong == "truncate":
            least = min(len(draft.tokens.ids) for draft in drafts)
            room = (
                self.most_tokens
                if len(drafts) == 1
                else max(self.most_tokens - least, self.most_tokens // 2)
            )
            return [draft.cut(room) for draft in drafts]
        raise BadRow("overlong", f"{total} tokens; {self.most_tokens} are allowed")

    def encoder_cost(self, sides: Sequence[Prepared]) -> int:
        """Numbers that encoders read."""
        return sum(self.media.cost(info).encoder for side in sides for info in side.infos)

    def load(
        self, sides: Sequence[Prepared], root: Path, fields: Mapping[str, int]
    ) -> list[PackedBatch]:
        """Decode the media. `fields` go into the batches' `sequences`; so does the token that ends the last medium, as
        `media_end`, and with `pairs` the `side`."""
        signs = (1, -1) if len(sides) == 2 else (0,)
        return [
            self._load(one, root, self._sided(fields, sign))
            for one, sign in zip(sides, signs, strict=True)
        ]

    def _load(self, one: Prepared, root: Path, fields: Mapping[str, int]) -> PackedBatch:
        media = one.media
        if media is None:
            decoded = [
                self.media.decode(part, info, root)
                for part, info in zip(one.parts, one.infos, strict=True)
            ]
            texts, media = self.media.collate(one.infos, decoded)
            if texts != one.expansions:
                what = "the processor makes other tokens of the media than it did without their content"
                raise BadRow("changed", what)
        seen = {"media_end": max((end for _, end in one.spans), default=0)}
        return self._batch(torch.tensor(one.ids), torch.tensor(one.loss), media, {**fields, **seen})

    def _sided(self, fields: Mapping[str, int], sign: int) -> Mapping[str, int]:
        return {**fields, "side": sign} if self.pairs else fields

    def nothing(self, fields: Mapping[str, int]) -> PackedBatch:
        """The smallest batch of this kind that trains nothing, for a pack of which no row is left."""
        eos, fields = self.media.tokenizer.eos_token_id, {**fields, "media_end": 0}
        batch = self._batch(
            torch.tensor([eos or 0]),
            torch.tensor([False]),
            self.media.empty(),
            self._sided(fields, 0),
        )
        return replace(batch, labels=torch.full_like(batch.labels, IGNORE))

    def _batch(
        self, ids: Tensor, loss: Tensor, media: dict[str, Media], fields: Mapping[str, int]
    ) -> PackedBatch:
        types = self.media.token_types(ids)
        media = {kind: self._light(one) for kind, one in media.items()}
        positions = (
            torch.arange(len(ids)) if self.positions is None else self.positions(ids, types, media)
        )
        return PackedBatch.from_sequences(
            [ids],
            [loss],
            position_ids=[positions],
            token_fields={name: [value] for name, value in types.items()},
            sequence_fields={name: torch.tensor([value]) for name, value in fields.items()},
            media=media,
        )

    def _light(self, media: Media) -> Media:
        return (
            replace(media, values=media.values.to(self.dtype))
            if media.values.is_floating_point()
            else media
        )

    def _draft(self, row: Row, root: Path, decode: bool) -> _Draft:
        rendered, every = self.template.render(row), row.media()
        parts = [every[place.index] for place in rendered.media]
        if not decode or not parts:
            return self._tokens(
                _Draft(rendered, parts, [self.media.probe(part, root) for part in parts])
            )
        fetched = [self.media.fetch(part, root) for part in parts]
        draft = _Draft(rendered, parts, [info for info, _ in fetched])
        try:
            texts, media = self.media.collate(draft.infos, [item for _, item in fetched])
        except (ValueError, ArithmeticError, RuntimeError):
            self._tokens(draft)  # BadRow, if the processor refuses a size
            raise
        return self._tokens(replace(draft, expansions=texts, media=media) if all(texts) else draft)

    def _tokens(self, draft: _Draft) -> _Draft:
        """With the tokens of its text, each placeholder expanded to what the processor makes of the item."""
        rendered = draft.rendered
        expansions = draft.expansions or [self.media.expansion(info) for info in draft.infos]
        if not expansions:
            return replace(draft, tokens=self.template.tokenize(rendered))
        places = [
            place.outer if self._with_outer[place.kind] else place.span for place in rendered.media
        ]
        text, moved = expand(rendered.text, places, expansions)
        found = []
        for place, (start, end) in zip(rendered.media, places, strict=True):
            piece = self.template.special_pattern.search(
                text, moved(start), moved(end)
            )  # any will do
            if piece is None:
                raise UserError(
                    f"what the processor makes of {place.kind} has no special token of the tokenizer"
                )
            outer = moved(place.outer[0]), moved(place.outer[1])
            found.append(Placeholder(place.index, place.kind, piece.span(), outer))
        loss = tuple((moved(start), moved(end)) for start, end in rendered.loss)
        expanded = replace(rendered, text=text, loss=loss, media=tuple(found))
        return replace(draft, tokens=self.template.tokenize(expanded), expansions=expansions)

    def _shrunk(self, infos: Sequence[Info], tokens: int) -> list[Info]:
        """Each item in the same proportion, so that the row fits. Sounds stay as they are."""
        costs = [self.media.cost(info).tokens for info in infos]
        fixed = tokens - sum(
            cost for cost, info in zip(costs, infos, strict=True) if info.kind != "audio"
        )
        share = (self.most_tokens - fixed) / max(1, tokens - fixed)
        new = []
        for cost, info in zip(costs, infos, strict=True):
            small = (
                info
                if info.kind == "audio"
                else self.media.shrink(info, int(cost * share))
                if share > 0
                else None
            )
            if small is None:
                raise BadRow(
                    "overlong",
                    f"{tokens} tokens, and its media cannot shrink to fit {self.most_tokens}",
                )
            new.append(small)
        return new


def _takes_outer(media: MediaHandler, kind: str, written: Sequence[str]) -> bool:
    """Whether what a processor makes of an item already has the tokens that a chat template writes around it.

    Some processors write them where they are not there, or take them away with the placeholder, so it is asked.
    """
    before, token, behind = written
    if token != media.placeholder(kind):
        who = type(media.processor).__name__
        raise UserError(
            f"the chat template writes {token!r} for {kind}, but {who} looks for {media.placeholder(kind)!r}"
        )
    info = Info(kind, 64, 48, 4, 2.0, 4, media.rate // 2, media.rate)
    asked = [(info, asking.blank(info, "cpu"))]
    alone, inside = (
        asking.ask(media.processor, asked, text, media.rate)[0][0]
        for text in (token, before + token + behind)
    )
    if inside not in (before + alone + behind, alone):
        raise UserError(
            f"cannot tell what the processor makes of {before + token + behind!r}: it gives {inside[:200]!r}"
        )
    return bool(before + behind) and inside == alone

"""RowEncoder: from a raw row to token ids, and with its media decoded, to a batch of one sequence.

A packing plan counts the tokens of `encode`; a worker encodes the row again and calls `load`. So what
is counted is what is trained on.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mvp_engine.data.batch import IGNORE, WEIGHT, Media, PackedBatch
from mvp_engine.errors import UserError
from mvp_engine.kit.data.encode.media import MediaHandler
from mvp_engine.kit.data.encode.processor import concat_media
from mvp_engine.kit.data.encode.processor_runner import expands_outer
from mvp_engine.kit.data.encode.template import ChatTemplate
from mvp_engine.kit.data.encode.template_marks import Span
from mvp_engine.kit.data.encode.tokenization import (
    Loss,
    Placeholder,
    Rendered,
    TokenizedText,
    check_has_loss,
    expand_placeholders,
    has_weights,
    truncate,
    weighted,
)
from mvp_engine.kit.data.read.decoders import MediaInfo
from mvp_engine.kit.data.read.row_files import PreparedRow, PreparedSide
from mvp_engine.kit.data.read.row_types import (
    BadRow,
    FieldType,
    Limits,
    Message,
    Part,
    Row,
    RowFormat,
    TokenIds,
)
from mvp_engine.kit.data.read.rows import read_row
from mvp_engine.kit.data.read.sources import Source

TARGET = "target"  # the kind of media that a row part adds, where kinds of media are listed


class RowPart(ABC):
    """What a kit adds to rows: targets in assistant turns (`Message.target`), as media that a model predicts.

    The row encoder calls it for every row. It is pickled to worker processes.
    """

    name: str  # its key in `PackedBatch.media`
    positions: str  # what its positions are called, where a row has too many

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """What the cost of a row depends on."""

    def prepare(self, name: str, source: Source, row_format: RowFormat) -> None:
        """Make what the rows of a source need, before their costs are measured."""
        return

    @abstractmethod
    def read(self, row: Row, root: Path) -> Sequence[Any]:
        """The targets of a row, empty without any. Raises BadRow."""

    @abstractmethod
    def num_positions(self, ids: list[int], targets: Sequence[Any]) -> int:
        """What targets cost in a pack, next to the tokens `ids` of their sequence. Raises BadRow."""

    @abstractmethod
    def media(self, ids_T: Tensor, positions: Tensor, targets: Sequence[Any]) -> Media:
        """The targets of one sequence, for a batch. Raises BadRow."""

    def facts(self, sequence: EncodedSequence) -> dict[str, Any]:
        """What `mvp data inspect` shows of targets: entries of the extension point `inspect`."""
        return {}


@dataclass(frozen=True)
class EncodedSequence:
    """Token ids and loss mask of a sequence, and its media in the order of the text, not decoded yet.

    Media that were truncated away are not in it.
    """

    ids: list[int]
    loss: Sequence[Loss]
    parts: list[Part]
    infos: list[MediaInfo]
    expansions: list[str]
    spans: list[Span]  # the tokens of each item, with those that enclose it
    media: dict[str, Media] | None = None  # decoded, where `encode` was called with decode=True
    fields: Mapping[str, float] = field(default_factory=dict)  # numbers of the row
    targets: Sequence[Any] = ()  # of the row part
    target_positions: int = 0

    @property
    def num_positions(self) -> int:
        """What the sequence costs in a pack: its tokens, and the positions of its targets."""
        return len(self.ids) + self.target_positions

    def facts(self) -> dict[str, Any]:
        """What `mvp data inspect` shows more: entries of the extension point `inspect`."""
        return {}


class InsertedTurn(NamedTuple):
    """Messages between two answers: their tokens and media, for a sequence whose answers were sampled."""

    ids: list[int]
    text_ids: list[int]  # with one placeholder for each item of media
    parts: list[Part]
    media: dict[str, Media]  # decoded


@dataclass(frozen=True)
class FullSequence:
    """A sequence before it is made to fit: rendered, and tokenized once `tokens` is set."""

    rendered: Rendered
    parts: list[Part]
    infos: list[MediaInfo]
    tokens: TokenizedText = field(default_factory=lambda: TokenizedText([], [], []))
    expansions: list[str] = field(default_factory=list)
    media: dict[str, Media] | None = None
    targets: Sequence[Any] = ()  # of the row part
    target_positions: int = 0

    @property
    def num_positions(self) -> int:
        """As that of an `EncodedSequence`."""
        return len(self.tokens.ids) + self.target_positions

    @property
    def media_order(self) -> list[int]:
        """The items of the row in the order of the text."""
        return [place.index for place in self.rendered.media]

    def encoded(self) -> EncodedSequence:
        return EncodedSequence(
            self.tokens.ids,
            self.tokens.loss,
            self.parts,
            self.infos,
            self.expansions,
            [place.outer for place in self.tokens.media],
            self.media,
            targets=self.targets,
            target_positions=self.target_positions,
        )

    def truncated(self, max_tokens: int) -> EncodedSequence:
        """The first `max_tokens` tokens, or fewer: media are kept whole or not at all."""
        full = self.encoded()
        if self.rendered.prompt_only:
            raise BadRow(
                "overlong",
                f"{len(full.ids)} tokens; {max_tokens} are allowed, and a prompt is not truncated",
            )
        cut = truncate(full.ids, list(full.loss), full.spans, max_tokens)
        kept = cut.num_media
        return EncodedSequence(
            cut.ids,
            cut.loss,
            full.parts[:kept],
            full.infos[:kept],
            full.expansions[:kept],
            full.spans[:kept],
        )


def same_items(ones: Sequence[Part], others: Sequence[Part]) -> bool:
    """Whether two lists have the same media: the same objects, or equal paths or bytes."""

    def is_same(one: Part, other: Part) -> bool:
        same = one.value is other.value
        if isinstance(one.value, str | bytes):
            same = one.value == other.value
        return same and one.kind == other.kind and one.options == other.options

    return len(ones) == len(others) and all(map(is_same, ones, others))


class RopePositions:
    """Positions on three axes by the model's own `get_rope_index`.

    The model is built on the meta device, so no weights are needed.
    """

    def __init__(self, config: Any) -> None:
        # Of an Omni model, the thinker reads the sequence.
        self.config = copy.deepcopy(getattr(config, "thinker_config", config))

    @classmethod
    def for_config(cls, config: Any) -> RopePositions | None:
        """None for a model with one-dimensional positions."""
        if getattr(config, "depth_decoder_config", None) is not None:
            return None  # CSM, which is no language model
        if not config.sub_configs:
            return None  # a text model, which rows need not wait for: its imports take a second
        positions = cls(config)
        return positions if hasattr(positions._model, "get_rope_index") else None

    @cached_property
    def _model(self) -> Any:
        from mvp_engine.hf import LanguageModel

        with torch.device("meta"):
            return LanguageModel.from_config(copy.deepcopy(self.config)).base()

    def prepare(self) -> None:
        """Build the model now."""
        assert self._model is not None

    @property
    def _num_axes(self) -> int:
        """Three: time, height and width; HunYuan-VL has the index of the token as well."""
        rope = getattr(self.config.get_text_config(), "rope_parameters", None) or {}
        return max(3, len(rope.get("mrope_section") or ()))

    def __getstate__(self) -> dict[str, Any]:
        # Workers build the model again: it does not pickle.
        return {"config": self.config}

    def __call__(
        self,
        ids: Tensor,
        types: Mapping[str, Tensor],
        media: Mapping[str, Media],
    ) -> Tensor:
        """(3, tokens), for the ids of one sequence and its per-token types."""
        fields: dict[str, Tensor] = {}
        has_media = False
        for items in media.values():
            if len(items.row_counts):
                has_media = True
                fields |= items.fields
        if not has_media:
            return torch.arange(len(ids)).expand(self._num_axes, -1)
        # get_rope_index has other names for some fields of processors.
        if "feature_attention_mask" in fields:
            fields["audio_seqlens"] = fields["feature_attention_mask"].sum(-1)
        if "video_second_per_grid" in fields:
            fields["second_per_grids"] = fields["video_second_per_grid"]
        for name, value in types.items():
            fields[name] = value[None]
        parameters = inspect.signature(self._model.get_rope_index).parameters
        arguments = {name: value for name, value in fields.items() if name in parameters}
        try:
            positions = self._model.get_rope_index(
                ids[None], attention_mask=torch.ones_like(ids)[None], **arguments
            )[0]
        except (RuntimeError, LookupError, ValueError, StopIteration) as error:
            # Such as two images without a token between them.
            name = type(self._model).__name__
            raise BadRow("positions", f"{name} finds no positions for the media: {error}") from None
        positions = positions[:, 0]
        # Videos of Qwen3-Omni have fractions where its seconds per grid times positions per second is no whole number.
        whole = positions.long()
        return whole if bool((whole == positions).all()) else positions


LOGGER = logging.getLogger("mvp_engine")
# (token ids, per-token types, media) -> position ids
Positions = Callable[[Tensor, Mapping[str, Tensor], Mapping[str, Media]], Tensor]
# Raise it with every change to kit/data/read or kit/data/encode that changes the tokens or the encoder
# work of any row: costs that were measured and cached before are then measured again.
ENCODER_VERSION = 4


class RowEncoder:
    """Encodes rows for one model: its processor (or tokenizer) with its chat template, under limits."""

    def __init__(
        self,
        processor: Any,
        limits: Limits | None = None,
        *,
        max_tokens: int,
        overlong: str = "drop",
        pairs: bool = False,
        options: Mapping[str, Any] | None = None,
        positions: Positions | None = None,
        fields: Mapping[str, FieldType] | None = None,
        row_part: RowPart | None = None,
    ) -> None:
        """`overlong` is "drop", "truncate", "shrink" or "error"; `options` are the template's.

        `fields` are the columns of numbers that rows have, as in their `RowFormat`.
        """
        self.media = MediaHandler(processor, limits)
        self.template = ChatTemplate(self.media.with_template(processor), **(options or {}))
        self.max_tokens = max_tokens
        self.overlong = overlong
        self.pairs = pairs
        self.positions = positions
        self.fields = dict(fields or {})
        self.row_part = row_part
        self.tools: tuple[Any, ...] = ()  # declarations for rows without tools of their own
        self.dtype = torch.float32  # of media values in batches
        # Whether an expansion replaces the special tokens around a placeholder too, by kind.
        self.expands_outer: dict[str, bool] = {}
        for kind in self.media.kinds:
            if kind in self.template.placeholders:
                written = self.template.placeholders[kind]
                self.expands_outer[kind] = expands_outer(self.media.runner, kind, written)
        self._warn_without_stop_token()

    def _warn_without_stop_token(self) -> None:
        if not self.template.renderer.chat_template:
            return
        turns = [Message(role, (Part("text", role),)) for role in ("user", "assistant") * 2]
        try:
            rendered = self.template.render(Row(tuple(turns)))
        except BadRow:  # a template for another kind of conversation; its rows will show that
            return
        if not rendered.stops:
            LOGGER.warning(
                "the chat template writes no special token after an answer: "
                "the model does not learn to stop"
            )

    def prepare(self) -> None:
        """Build what processes that are forked from this one would each build again."""
        if isinstance(self.positions, RopePositions):
            self.positions.prepare()

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that a row's cost depends on, except `max_tokens` and `overlong`."""
        import transformers

        tokenizer = self.media.tokenizer
        renderer = self.template.renderer
        processor = self.media.processor.to_json_string() if self.media.kinds else ""
        values = [
            str(ENCODER_VERSION),
            transformers.__version__,
            tokenizer.backend_tokenizer.to_str(),
            repr(tokenizer.special_tokens_map),
            json.dumps(renderer.chat_template),
            repr(sorted(renderer.options.items())),
            repr((self.pairs, self.media.limits)),
            processor,
            "" if self.row_part is None else self.row_part.fingerprint,
            *([repr(self.tools)] if self.tools else []),
        ]
        return hashlib.blake2b("\0".join(values).encode(), digest_size=16).hexdigest()

    def encode(
        self,
        raw: Mapping[str, Any],
        format: RowFormat | str | None,
        root: Path,
        fit: bool = True,
        decode: bool = False,
    ) -> list[EncodedSequence]:
        """The row's sequence; of a preference row with `pairs`, the chosen side and the rejected one.

        Raises BadRow. With `fit`, an over-long row is handled as `overlong` says. With `decode`, media
        that will not be truncated or shrunk are decoded on the way; images are opened once in any case.
        """
        if isinstance(raw, PreparedRow):  # as it is, and never too long: its cost says so
            return [self._prepared(side, raw.numbers) for side in raw.sides]
        row = self.read(raw, format) if self.tools else read_row(raw, format)
        sides = self._encode_row(row, root, fit, decode)
        return [replace(side, fields=row.fields) for side in sides]

    def _prepared(self, side: PreparedSide, numbers: Mapping[str, float]) -> EncodedSequence:
        media = side.parts, side.infos, self.media.expansions(side.infos), side.spans
        return EncodedSequence(side.ids, side.loss, *media, fields=numbers)

    def read(self, raw: Mapping[str, Any], format: RowFormat | str | None) -> Row:
        """The row, with `tools` unless it has its own."""
        row = read_row(raw, format)
        if self.tools and row.text is None and not row.tools:
            row = replace(row, tools=self.tools)
        return row

    def encode_turn(
        self, before: Sequence[Message], new: Sequence[Message], tools: Sequence[Any]
    ) -> InsertedTurn:
        """The messages `new` between an answer, which ends the conversation `before`, and the next answer."""
        rendered = self.template.between_turns(before, new, tools)
        row = Row(tuple(new))
        side = self._full_sequence(row, Path(), decode=True, rendered=rendered).encoded()
        media = self._load_media(side, Path()) if side.parts else {}
        first = 1 if self.template.stop_token else 0  # which the answer has already
        text_ids = self.template.tokenize(rendered).ids[first:]
        return InsertedTurn(side.ids[first:], text_ids, side.parts, media)

    def extend(
        self, batch: PackedBatch, new: Sequence[int], media: Mapping[str, Media], answer: int
    ) -> PackedBatch:
        """One sequence with more tokens and the media in them, without labels.

        `answer`: the index of the first token after the prompt.
        """
        ids = torch.cat([batch.input_ids, torch.tensor(new, dtype=batch.input_ids.dtype)])
        merged = dict(batch.media)
        for name, items in media.items():
            had = [merged[name]] if name in merged and len(merged[name].row_counts) else []
            merged[name] = concat_media([self.media.empty()[name], *had, items])
        extended = self._batch(ids, torch.arange(len(ids)) >= answer, merged, {})
        return replace(extended, labels=torch.full_like(ids, IGNORE))

    def _encode_row(self, row: Row, root: Path, fit: bool, decode: bool) -> list[EncodedSequence]:
        sides = [self._full_sequence(row, root, decode)]
        if self.pairs and row.rejected:
            sides.append(self._rejected_side(row, root, decode, sides[0]))
            if any(has_weights(side.tokens.loss) for side in sides):
                raise BadRow(
                    "bad_weight",
                    "the row has weights, which losses of preference pairs do not read",
                )
        if self.row_part is not None:
            targets = self.row_part.read(row, root)
            sides = [self._with_targets(sides[0], targets)]
        total = sum(side.num_positions for side in sides)
        if not fit or total <= self.max_tokens:
            return [side.encoded() for side in sides]
        if self.overlong == "truncate" and not sides[0].targets:  # their end would not be learnt
            return self._truncate(sides)
        if self.overlong == "shrink":
            sides = self._shrink(sides, total)
            if sum(side.num_positions for side in sides) <= self.max_tokens:
                return [side.encoded() for side in sides]
        detail = f"{total} tokens; {self.max_tokens} are allowed"
        if self.row_part is not None and sides[0].target_positions:
            detail += f" ({sides[0].target_positions} of them are {self.row_part.positions})"
        raise BadRow("overlong", detail)

    def _token_sequence(self, row: Row, tokens: TokenIds) -> FullSequence:
        size = len(self.media.tokenizer)
        if wrong := [id for id in tokens.ids if not 0 <= id < size]:
            raise BadRow("bad_token", f"input_ids has {wrong[0]}; the tokenizer has {size} tokens")
        if not row.prompt_only:
            check_has_loss(tokens.loss, len(tokens.ids), len(tokens.ids))
        loss: list[Loss] = [*tokens.loss]
        if row.weight != 1:
            loss = weighted(loss, row.weight)
        return FullSequence(Rendered("", ()), [], [], TokenizedText(tokens.ids, loss, []))

    def _rejected_side(
        self, row: Row, root: Path, decode: bool, chosen: FullSequence
    ) -> FullSequence:
        rejected = replace(row, messages=row.rejected)
        same = same_items(row.media(), rejected.media())
        try:
            return self._full_sequence(rejected, root, decode, chosen if same else None)
        except BadRow as bad:
            raise BadRow(bad.reason, f"the rejected side: {bad.detail}") from None

    def _full_sequence(
        self,
        row: Row,
        root: Path,
        decode: bool,
        chosen: FullSequence | None = None,
        rendered: Rendered | None = None,
    ) -> FullSequence:
        """The sequence of one side, or of a text that is `rendered` already.

        `chosen` is the other side, if both have the same media.
        """
        if row.tokens is not None:
            return self._token_sequence(row, row.tokens)
        rendered = rendered or self.template.render(row)
        if chosen is not None and chosen.media_order == [place.index for place in rendered.media]:
            return self._tokenize(replace(chosen, rendered=rendered))
        row_media = row.media()
        parts = [row_media[place.index] for place in rendered.media]
        if decode and self.overlong in ("truncate", "shrink"):
            decode = False  # not before it is known what of them is needed
            parts = [self.media.keep_open(part, root) for part in parts]
        if not decode or not parts:
            infos = [self.media.probe(part, root) for part in parts]
            return self._tokenize(FullSequence(rendered, parts, infos))
        decoded = [self.media.probe_and_decode(part, root) for part in parts]
        infos = [info for info, _ in decoded]
        items = [item for _, item in decoded]
        sequence = FullSequence(rendered, parts, infos)
        try:
            texts, media = self.media.collate(infos, items)
        except (ValueError, ArithmeticError, RuntimeError):
            self._tokenize(sequence)  # raises a BadRow if the processor refuses a size
            raise
        if all(texts):
            sequence = replace(sequence, expansions=texts, media=media)
        return self._tokenize(sequence)

    def _tokenize(self, sequence: FullSequence) -> FullSequence:
        """The sequence with its tokens, each placeholder expanded as the processor does it."""
        rendered = sequence.rendered
        expansions = sequence.expansions
        if not expansions:
            expansions = self.media.expansions(sequence.infos)
        if not expansions:
            return replace(sequence, tokens=self.template.tokenize(rendered))
        expanded = self._expand(rendered, expansions)
        return replace(sequence, tokens=self.template.tokenize(expanded), expansions=expansions)

    def _expand(self, rendered: Rendered, expansions: Sequence[str]) -> Rendered:
        places = []
        for place in rendered.media:
            places.append(place.outer if self.expands_outer[place.kind] else place.span)
        for context in self.media.runner.contexts.values():
            expansions = context.apply(rendered.text, places, expansions)
        text, moved = expand_placeholders(rendered.text, places, expansions)
        media = []
        for place, (start, end) in zip(rendered.media, places, strict=True):
            # Any special token of the expansion identifies its tokens.
            token = self.template.special.pattern.search(text, moved(start), moved(end))
            if token is None:
                raise UserError(
                    f"the processor's expansion of {place.kind} has no special token of the tokenizer"
                )
            outer = (moved(place.outer[0]), moved(place.outer[1]))
            media.append(Placeholder(place.index, place.kind, token.span(), outer))
        loss = tuple((moved(start), moved(end)) for start, end in rendered.loss)
        return replace(rendered, text=text, loss=loss, media=tuple(media))

    def _truncate(self, sides: Sequence[FullSequence]) -> list[EncodedSequence]:
        """One sequence cut to `max_tokens`; of two sides, the longer one gives way first."""
        if len(sides) == 1:
            return [sides[0].truncated(self.max_tokens)]
        shorter = min(len(side.tokens.ids) for side in sides)
        room = max(self.max_tokens - shorter, self.max_tokens // 2)
        return [side.truncated(room) for side in sides]

    def _shrink(self, sides: Sequence[FullSequence], total: int) -> list[FullSequence]:
        """The sides with smaller media, tokenized again."""
        infos: list[MediaInfo] = []
        for side in sides:
            infos += side.infos
        shrunk = iter(self._shrink_infos(infos, total))
        smaller = []
        for side in sides:
            side_infos = [next(shrunk) for _ in side.infos]
            shrunk_side = self._tokenize(FullSequence(side.rendered, side.parts, side_infos))
            smaller.append(self._with_targets(shrunk_side, side.targets))
        return smaller

    def _with_targets(self, side: FullSequence, targets: Sequence[Any]) -> FullSequence:
        if self.row_part is None or not targets:
            return side
        count = self.row_part.num_positions(side.tokens.ids, targets)
        return replace(side, targets=targets, target_positions=count)

    def _shrink_infos(self, infos: Sequence[MediaInfo], total: int) -> list[MediaInfo]:
        """Each item in the same proportion, so that the row fits. Audio cannot shrink."""
        costs = [self.media.cost(info).tokens for info in infos]
        shrinkable = 0
        for cost, info in zip(costs, infos, strict=True):
            if info.kind != "audio":
                shrinkable += cost
        fixed = total - shrinkable
        share = (self.max_tokens - fixed) / max(1, shrinkable)
        shrunk = []
        for cost, info in zip(costs, infos, strict=True):
            smaller: MediaInfo | None = info
            if info.kind != "audio":
                smaller = self.media.shrink(info, int(cost * share)) if share > 0 else None
            if smaller is None:
                raise BadRow(
                    "overlong",
                    f"{total} tokens, and its media cannot shrink to fit {self.max_tokens}",
                )
            shrunk.append(smaller)
        return shrunk

    def encoder_cost(self, sides: Sequence[EncodedSequence]) -> int:
        """Numbers that encoders read, as packing plans count them: for each side.

        The sides of a pair share most items, but a plan with other costs would not fit checkpoints of today's.
        """
        cost = 0
        for side in sides:
            cost += sum(self.item_cost(info) for info in side.infos)
        return cost

    def item_cost(self, info: MediaInfo) -> int:
        """Numbers that an encoder reads of one item."""
        return self.media.cost(info).encoder

    def media_names(self, kinds: Iterable[str]) -> frozenset[str]:
        """The keys that items of these kinds have in `PackedBatch.media`."""
        names = dict(self.media.runner.value_names)
        if self.row_part is not None:
            names[TARGET] = self.row_part.name
        return frozenset(names[kind] for kind in kinds)

    def load(
        self,
        sides: Sequence[EncodedSequence],
        root: Path,
        fields: Mapping[str, float],
    ) -> list[PackedBatch]:
        """Decode the media: one batch of one sequence for each side. Sides with the same items hold the same Media.

        `sequence_fields` of the batches are `fields`, the numbers of the row, `media_end` (the index
        of the token after the last media item), and with `pairs` the `side`: 1 chosen, -1 rejected, 0 no pair.
        """
        signs = (1, -1) if len(sides) == 2 else (0,)
        batches = []
        media: dict[str, Media] = {}
        for index, (side, sign) in enumerate(zip(sides, signs, strict=True)):
            first = sides[0]
            same = side.infos == first.infos and same_items(side.parts, first.parts)
            if index == 0 or not same:
                media = self._load_media(side, root)
            media_end = max((end for _, end in side.spans), default=0)
            numbers = {**side.fields, **fields}
            if self.pairs:
                numbers["side"] = sign
            numbers["media_end"] = media_end
            ids = torch.tensor(side.ids)
            loss = torch.tensor(side.loss)  # of floats, if some tokens have a weight
            batches.append(self._batch(ids, loss, media, numbers, side.targets))
        return batches

    def _load_media(self, side: EncodedSequence, root: Path) -> dict[str, Media]:
        media = side.media
        if media is None:
            items = []
            for part, info in zip(side.parts, side.infos, strict=True):
                items.append(self.media.decode(part, info, root))
            texts, media = self.media.collate(side.infos, items)
            if texts != side.expansions:
                raise BadRow(
                    "changed",
                    "the processor expands the decoded media differently than their sizes alone",
                )
        return {name: self._cast(items) for name, items in media.items()}

    def empty_batch(self, fields: Mapping[str, float]) -> PackedBatch:
        """The smallest batch without loss, for a pack that lost all of its rows."""
        ids = torch.tensor([self.media.tokenizer.eos_token_id or 0])
        numbers = {name: 0 if kind == "int" else 0.0 for name, kind in self.fields.items()}
        fields = {**numbers, **fields, "media_end": 0, **({"side": 0} if self.pairs else {})}
        media = {name: self._cast(items) for name, items in self.media.empty().items()}
        batch = self._batch(ids, torch.tensor([False]), media, fields)
        return replace(batch, labels=torch.full_like(batch.labels, IGNORE))

    def _batch(
        self,
        ids: Tensor,
        loss: Tensor,
        media: dict[str, Media],
        fields: Mapping[str, float],
        targets: Sequence[Any] = (),
    ) -> PackedBatch:
        types = self.media.token_types(ids, loss != 0)
        if loss.is_floating_point():
            # Of the label of each position, which is the next token.
            types = {**types, WEIGHT: F.pad(loss[1:], (0, 1))}
        positions = torch.arange(len(ids))
        if self.positions is not None:
            of_media = {name: value for name, value in types.items() if name != WEIGHT}
            positions = self.positions(ids, {**self.media.mm_types(ids), **of_media}, media)
        if self.row_part is not None:
            media = {**media, self.row_part.name: self.row_part.media(ids, positions, targets)}
        return PackedBatch.from_sequences(
            [ids],
            [loss],
            position_ids=[positions],
            token_fields={name: [value] for name, value in types.items()},
            sequence_fields={name: torch.tensor([value]) for name, value in fields.items()},
            media=media,
        )

    def _cast(self, media: Media) -> Media:
        if not media.values.is_floating_point():
            return media
        return replace(media, values=media.values.to(self.dtype))

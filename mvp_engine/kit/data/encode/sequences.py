"""One sequence of a row, at full length and as it goes into a pack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mvp_engine.data.batch import Media
from mvp_engine.kit.data.encode.text_spans import Span
from mvp_engine.kit.data.encode.tokenization import Rendered, TokenizedText, truncate
from mvp_engine.kit.data.read.media_info import MediaInfo
from mvp_engine.kit.data.read.row_types import BadRow, Part
from mvp_engine.kit.speech.protocol import SpokenTurn


@dataclass(frozen=True)
class EncodedSequence:
    """Token ids and loss mask of a sequence, and its media in the order of the text, not decoded yet.

    Media that were truncated away are not in it.
    """

    ids: list[int]
    loss: list[bool]
    parts: list[Part]
    infos: list[MediaInfo]
    expansions: list[str]
    spans: list[Span]  # the tokens of each item, with those that enclose it
    media: dict[str, Media] | None = None  # decoded, where `encode` was called with decode=True
    fields: Mapping[str, float] = field(default_factory=dict)  # numbers of the row
    spoken: Sequence[SpokenTurn] = ()
    talker_positions: int = 0  # of the spoken turns

    @property
    def num_positions(self) -> int:
        """What the sequence costs in a pack: its tokens, and the talker's positions."""
        return len(self.ids) + self.talker_positions

    def shares_media(self, other: EncodedSequence) -> bool:
        """Whether both have the same items, of the same sizes."""
        return self.infos == other.infos and same_items(self.parts, other.parts)


@dataclass(frozen=True)
class FullSequence:
    """A sequence before it is made to fit: rendered, and tokenized once `tokens` is set."""

    rendered: Rendered
    parts: list[Part]
    infos: list[MediaInfo]
    tokens: TokenizedText = field(default_factory=lambda: TokenizedText([], [], []))
    expansions: list[str] = field(default_factory=list)
    media: dict[str, Media] | None = None
    spoken: Sequence[SpokenTurn] = ()
    talker_positions: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.tokens.ids)

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
            spoken=self.spoken,
            talker_positions=self.talker_positions,
        )

    def truncated(self, max_tokens: int) -> EncodedSequence:
        """The first `max_tokens` tokens, or fewer: media are kept whole or not at all."""
        full = self.encoded()
        if self.rendered.prompt_only:
            raise BadRow(
                "overlong",
                f"{self.num_tokens} tokens; {max_tokens} are allowed, and a prompt is not truncated",
            )
        cut = truncate(full.ids, full.loss, full.spans, max_tokens)
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


def total_tokens(sequences: Sequence[FullSequence]) -> int:
    """The tokens of all sides of a row, and the talker's positions."""
    return sum(sequence.num_tokens + sequence.talker_positions for sequence in sequences)

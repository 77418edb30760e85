"""One sequence of a row, at full length and as it goes into a pack."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from mvp_engine.data.batch import Media
from mvp_engine.kit.data.encode.text_spans import Span
from mvp_engine.kit.data.encode.tokenization import Rendered, TokenizedText, truncate
from mvp_engine.kit.data.read.media_info import MediaInfo
from mvp_engine.kit.data.read.row_format import RowFormat
from mvp_engine.kit.data.read.row_types import BadRow, Part, Row
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
    loss: list[bool]
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
    targets: Sequence[Any] = ()  # of the row part
    target_positions: int = 0

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
            targets=self.targets,
            target_positions=self.target_positions,
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
    """The tokens of all sides of a row, and the positions of targets."""
    return sum(sequence.num_tokens + sequence.target_positions for sequence in sequences)

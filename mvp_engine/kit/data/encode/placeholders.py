"""Placeholders of media in rendered text: how a chat template writes them, where they are, their expansion."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mvp_engine.kit.data.encode.text_spans import Span, any_of
from mvp_engine.kit.data.read.row_types import BadRow, Part


class PlaceholderToken(NamedTuple):
    """What a chat template writes for one item: the token, and special tokens that enclose it."""

    before: str
    token: str
    after: str


@dataclass(frozen=True)
class Placeholder:
    """The place of one media item in a text, by character or by token."""

    index: int  # in row.media()
    kind: str
    span: Span  # replaced by the item's expansion
    outer: Span  # with the special tokens that enclose it: a truncation must not split it


def locate_placeholders(
    text: str,
    media: Sequence[Part],
    tokens: Mapping[str, PlaceholderToken],
) -> tuple[Placeholder, ...]:
    """The placeholders of all media in a rendered text, in its order.

    The n-th placeholder of a kind is the n-th item of that kind: no text of the row holds a
    placeholder, and their numbers must be equal.
    """
    waiting = {index: part.kind for index, part in enumerate(media)}
    places = []
    for found in any_of({token.token for token in tokens.values()}).finditer(text):
        index = _first_with_token(waiting, tokens, found[0])
        if index is None:
            raise BadRow(
                "placeholder_in_text",
                f"the text has more {found[0]!r} than the row has media",
            )
        kind = waiting.pop(index)
        outer = _outer_span(text, found.span(), tokens[kind])
        places.append(Placeholder(index, kind, found.span(), outer))
    if waiting:
        raise BadRow("template", f"the chat template leaves out {len(waiting)} of the row's media")
    return tuple(places)


def _first_with_token(
    waiting: Mapping[int, str],
    tokens: Mapping[str, PlaceholderToken],
    token: str,
) -> int | None:
    return next((index for index, kind in waiting.items() if tokens[kind].token == token), None)


def _outer_span(text: str, span: Span, written: PlaceholderToken) -> Span:
    start, end = span
    if text.endswith(written.before, 0, start):
        start -= len(written.before)
    if text.startswith(written.after, end):
        end += len(written.after)
    return start, end


def expand_placeholders(
    text: str,
    places: Sequence[Span],
    expansions: Sequence[str],
) -> tuple[str, Callable[[int], int]]:
    """The text with each placeholder replaced, and a map of positions outside of placeholders."""
    pieces = []
    starts = []
    shifts = [0]  # how far a position moves, by the number of placeholders before it
    done = 0
    for (start, end), expansion in zip(places, expansions, strict=True):
        pieces += [text[done:start], expansion]
        starts.append(start)
        shifts.append(shifts[-1] + len(expansion) - (end - start))
        done = end
    pieces.append(text[done:])

    def moved(position: int) -> int:
        return position + shifts[bisect_right(starts, position - 1)]

    return "".join(pieces), moved

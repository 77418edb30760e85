"""Spans of text by character, and patterns that match one of several words."""

from __future__ import annotations

import re
from collections.abc import Iterable

Span = tuple[int, int]  # first position, and the one after the last


def any_of(words: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches any of the words, the longest first; without words, nothing."""
    longest_first = sorted(words, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def merge_spans(
    length: int,
    spans: Iterable[Span],
    excluded: Iterable[Span],
) -> tuple[Span, ...]:
    """The union of `spans` without `excluded`, as disjoint spans in order, in a text of that length."""
    flags = bytearray(length)
    for start, end in spans:
        flags[start:end] = b"\1" * (end - start)
    for start, end in excluded:
        flags[start:end] = bytes(end - start)
    return tuple(map(re.Match.span, re.finditer(b"\1+", flags)))

"""Errors of a transcript, in words."""

from __future__ import annotations


def word_errors(written: list[str], expected: list[str]) -> int:
    """The Levenshtein distance: how many words must be inserted, deleted or replaced."""
    row = list(range(len(expected) + 1))
    for i, word in enumerate(written, 1):
        diagonal = row[0]
        row[0] = i
        for j, other in enumerate(expected, 1):
            cost = min(row[j] + 1, row[j - 1] + 1, diagonal + (word != other))
            diagonal = row[j]
            row[j] = cost
    return row[-1]

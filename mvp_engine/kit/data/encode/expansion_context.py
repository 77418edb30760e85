"""ExpansionContext: a processor that changes the expansion of an item by what stands next to it (Idefics 2).

It writes the token between two items in a row once, and a space between an item and a word. Both are found by calling
the processor: for two items side by side, and for an item with each character that comes after one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mvp_engine.kit.data.encode.text_spans import Span

# (text after the placeholder of a small item) -> the processor's text
Trial = Callable[[str], str]


class ExpansionContext:
    """The rules of one kind of media."""

    def __init__(self, trial: Trial, overlap: int) -> None:
        self._trial = trial
        self._alone = trial("")
        self._gaps: dict[str, str] = {}
        self.overlap = overlap  # characters that two expansions in a row share

    @classmethod
    def find(cls, trial: Trial, in_a_row: str) -> ExpansionContext | None:
        """`in_a_row`: the text of two small items side by side. None: it is more than an overlap."""
        alone = trial("")
        overlap = 2 * len(alone) - len(in_a_row)
        fits = 0 <= overlap < len(alone) and in_a_row == alone + alone[overlap:]
        return cls(trial, overlap) if fits else None

    def gap(self, character: str) -> str:
        """What the processor writes between an item and this character."""
        if character not in self._gaps:
            text = self._trial(character)
            self._gaps[character] = text.removeprefix(self._alone).removesuffix(character)
        return self._gaps[character]

    def apply(self, text: str, places: Sequence[Span], expansions: Sequence[str]) -> list[str]:
        """The expansions of items at these places of a text, from those of the items alone."""
        found = []
        before = -1  # where the item before ends
        starts = {start for start, _ in places}
        for (start, end), expansion in zip(places, expansions, strict=True):
            own = expansion[self.overlap :] if start == before else expansion
            after = text[end : end + 1]
            found.append(own + self.gap(after) if after and end not in starts else own)
            before = end
        return found

r"""The number that a text ends with: of a model's answer, or of the solution in a row.

It is read exactly, as a fraction: thousands separators, currencies, units, decimals, signs, fractions and `\boxed{}`
make no difference. A percentage is the number in front of its sign.
"""

import re
from fractions import Fraction

# Where answers are announced. The last announcement counts; without one, the last number of the text does.
_MARKS = re.compile(r"####|answer\s*(?:is\s*:?|[:=])", re.IGNORECASE)
_DIGITS = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
# A minus is a sign if nothing is in front that it could be subtracted from. Then a fraction: 1 3/4, or 3/4.
_NUMBER = re.compile(rf"(?:(?<![\w.)])-)?{_DIGITS}(?:\s+\d+/\d+|/\d+)?")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}|\\[dt]?frac\s*(\d)\s*(\d)")
_LATEX = re.compile(r"\\(?:text|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")


def is_right(written: str, solution: str) -> bool:
    """Whether both end with the same number."""
    expected = final_answer(solution)
    if expected is None:
        raise ValueError(f"the solution ends with no number: {solution[-80:]!r}")
    return final_answer(written) == expected


def final_answer(text: str) -> Fraction | None:
    """The number in the last box, after the last announcement, or else the last one of a text; None without any."""
    boxes = _boxes(text)
    if boxes:
        return number(boxes[-1])
    text = _plain(text)
    for mark in reversed(list(_MARKS.finditer(text))):
        announced = number(text[mark.end() :].strip().partition("\n")[0])
        if announced is not None:
            return announced
    numbers = list(_NUMBER.finditer(text))
    return number(numbers[-1][0]) if numbers else None


def number(text: str) -> Fraction | None:
    """The first number of a short text, of an equation the first one on its right side; None without any."""
    found = _NUMBER.search(_plain(text).rpartition("=")[2])
    if found is None:
        return None
    whole, _, rest = found[0].replace(",", "").partition(" ")
    try:
        value = _fraction(whole)
        part = _fraction(rest.strip()) if rest.strip() else Fraction(0)
    except (ZeroDivisionError, ValueError):  # or more digits than Python converts
        return None
    return value - part if whole.startswith("-") else value + part


def _fraction(text: str) -> Fraction:
    top, _, bottom = text.partition("/")
    return Fraction(top) / Fraction(bottom or "1")


def _boxes(text: str) -> list[str]:
    r"""The contents of each \boxed{...}, whose braces may be nested."""
    boxes = []
    for start in re.finditer(r"\\(?:boxed|fbox)\s*\{", text):
        depth, end = 1, start.end()
        while end < len(text) and depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        if not depth:
            boxes.append(text[start.end() : end - 1])
    return boxes


def _plain(text: str) -> str:
    """The text without markup: LaTeX, emphasis, currency signs, and other characters for a minus sign."""
    text = re.sub("[\u2212\u2013\u2014]", "-", text)  # minus, en dash, em dash
    text = re.sub("(?<=[0-9])[\u00a0\u2009\u202f](?=[0-9]{3})", "", text)  # blanks between thousands
    text = _LATEX.sub(r" \1 ", text)
    text = _FRACTION.sub(lambda found: f" {found[1] or found[3]}/{found[2] or found[4]} ", text)
    text = re.sub(r"\\(?:left|right|!|,|;|:| )|\{,\}", lambda found: "," if found[0] == "{,}" else "", text)
    text = re.sub(r"-\s+(?=\d+/\d)", "-", text)
    text = re.sub(r"\\?[$€£¥]|\*\*|`|\\[()\[\]]", "", text)
    return re.sub(r"(?<=\d)\s+(?=/\s*\d)|(?<=\d/)\s+(?=\d)", "", text)

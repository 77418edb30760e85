"""RowFormat: how the rows of one source are read. The columns of a raw row, renamed and tracked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from mvp_engine.kit.data.read.limits import Limits
from mvp_engine.kit.data.read.row_types import BadRow
from mvp_engine.kit.data.read.value_checks import check_object, type_name

FieldType = Literal["int", "float"]
OPTIONAL = "?"  # after a name in `columns`: the column may be null or empty


@dataclass(frozen=True)
class RowFormat:
    """The settings of a source that say what its columns mean."""

    name: str | None = None  # one of FORMATS; None: detected for each row
    columns: Mapping[str, str | None] = field(default_factory=dict)  # old name -> new; None: drop
    media_tags: bool = True  # <image> in a text stands for an image
    fields: Mapping[str, FieldType] = field(default_factory=dict)  # columns of numbers
    # True: rows need no answer. "always": the answers that they have are left out.
    prompt_only: bool | Literal["always"] = False
    targets: tuple[str, ...] = ()  # media of assistant turns that the model predicts
    max_text: int = Limits.text_characters
    downloaded: bool = False  # media may not be paths that lead out of the dataset's folder

    @property
    def drops_answers(self) -> bool:
        return self.prompt_only == "always"

    def read_columns(self, raw: Any) -> Columns:
        """The columns of a raw row under their new names."""
        row = check_object(raw, "the row")
        renamed = {}
        for old, new in self.columns.items():
            value = row.pop(old, None)
            if value is not None and new is not None:
                renamed[column_name(new)] = value
        twice = sorted(renamed.keys() & row.keys())
        if twice:
            raise BadRow("two_columns", f"columns maps another column to {twice[0]!r}: map both")
        return Columns(row | renamed)

    @cached_property
    def optional(self) -> set[str]:
        """The columns that may be null or empty."""
        return {column_name(new) for new in self.columns.values() if new and new.endswith(OPTIONAL)}

    def null_columns(self, raw: Mapping[str, Any]) -> set[str]:
        """The columns, under their new names, that a raw row has without a value."""
        nulls = [key for key, value in raw.items() if value is None and isinstance(key, str)]
        named = {column_name(self.columns.get(key, key) or "") for key in nulls}
        return named - self.optional

    def take_fields(self, row: Columns) -> dict[str, float]:
        """The numbers of the row, by column. These columns mean nothing else then."""
        return {
            name: _number(row.pop(name, None), name, kind) for name, kind in self.fields.items()
        }


def column_name(new: str) -> str:
    """The name of a column in a value of `columns`, without the mark of an optional one."""
    return new.removesuffix(OPTIONAL)


class Columns(dict[str, Any]):
    """The columns of a row, and which of them nothing has read."""

    def __init__(self, columns: Mapping[str, Any]) -> None:
        super().__init__(columns)
        self._read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return super().get(key, default)

    def unused(self) -> list[str]:
        return [key for key in self if key not in self._read]


def _number(value: Any, name: str, kind: FieldType) -> float:
    where = f"the column {name!r} of mllm.fields"
    if value is None:
        raise BadRow("missing_field", f"the row has no value in {where}")
    try:
        number = float(value)  # also of bool, and of text as csv files have it
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        number = float(value.strip().lower() == "true")
    if not math.isfinite(number) or (kind == "int" and number != int(number)):
        shown = f"{value!r:.40}" if isinstance(value, str | int | float) else type_name(value)
        raise BadRow("bad_field", f"{where} is {shown}, wanted a finite {kind}")
    return int(number) if kind == "int" else number

"""Files of plain lines and tables: .txt with one text per line, .csv and .tsv with a header."""

from __future__ import annotations

import csv
import functools
import io
from pathlib import Path
from typing import Any, NamedTuple

from mvp_engine.errors import UserError
from mvp_engine.kit.data.read.json_files import JsonLines
from mvp_engine.kit.data.read.row_files import RowFile, content_hash
from mvp_engine.kit.data.read.row_types import BadRow


class TextLines(JsonLines):
    """One text per line, as the text loader of `datasets` reads it; blank lines are no rows."""

    def may_fit(self, start: int, end: int) -> bool:
        return self.max_text is None or end - start <= 4 * self.max_text  # bytes of a character

    def row(self, index: int) -> dict[str, Any]:
        line = self.read_line(index)
        try:
            return {"text": line.decode("utf-8-sig").rstrip("\r\n")}
        except UnicodeDecodeError as error:
            raise BadRow("bad_text", f"the line is not UTF-8: {error}") from None


class _Record(NamedTuple):
    line: int  # of the file, from 1; a record may have several
    cells: list[str]


class CsvFile(RowFile):
    """A table with a header. It is kept in memory; each process parses the file again.

    An empty cell is an absent value. All others are text.
    """

    def __init__(self, file: Path, name: str, delimiter: str = ",") -> None:
        super().__init__(file, name)
        self.delimiter = delimiter
        self.fingerprint = content_hash(file.read_bytes()).hexdigest()
        try:
            self.size = len(self._table) - 1
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"data: {file} is not a table in UTF-8: {error}") from None
        names = self._table[0].cells
        if len(set(names)) < len(names) or not all(names):
            raise UserError(f"data: {file}: each column needs a name of its own, not {names}")

    @functools.cached_property
    def _table(self) -> list[_Record]:
        """The header, then the records."""
        text = io.StringIO(self.file.read_bytes().decode("utf-8-sig"), newline="")
        reader = csv.reader(text, delimiter=self.delimiter, strict=True)
        records = []
        start = 1
        for cells in reader:
            if cells:
                records.append(_Record(start, cells))
            start = reader.line_num + 1
        return records

    def row(self, index: int) -> dict[str, Any]:
        names = self._table[0].cells
        cells = self._table[index + 1].cells
        if len(cells) != len(names):
            raise BadRow("bad_csv", f"{len(cells)} cells, but the header has {len(names)}")
        return {name: cell or None for name, cell in zip(names, cells, strict=True)}

    def where(self, index: int) -> str:
        return f"{self.name}:{self._table[index + 1].line}"

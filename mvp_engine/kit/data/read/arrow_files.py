"""Arrow and Parquet files by row number."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np

from mvp_engine.errors import UserError
from mvp_engine.kit.data.read.media_source import require_package
from mvp_engine.kit.data.read.row_files import RowFile, content_hash, file_edges
from mvp_engine.kit.data.read.row_types import BadRow


class ArrowFile(RowFile):
    """Arrow streams and files by memory-mapped record batches; Parquet files by row groups.

    Random access to Parquet is fast where row groups are small: a whole group is read for one row.
    """

    def __init__(self, file: Path, name: str, parquet: bool = False) -> None:
        super().__init__(file, name)
        self.parquet = parquet
        require_package("pyarrow", f"reading {file}")
        try:
            batch_sizes = [batch.num_rows for batch in self._batches]
        except (OSError, ValueError) as error:
            raise UserError(f"data: {file} cannot be read: {error}") from None
        self.ends = np.cumsum([0, *batch_sizes])
        self.size = int(self.ends[-1])
        self.fingerprint = content_hash(file_edges(file)).hexdigest()

    @functools.cached_property
    def _batches(self) -> list[Any]:
        """Record batches, or the metadata of row groups."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        if self.parquet:
            metadata = pq.read_metadata(self.file)
            return [metadata.row_group(index) for index in range(metadata.num_row_groups)]
        data = pa.memory_map(str(self.file))
        if pa.memory_map(str(self.file)).read(6) != b"ARROW1":
            return list(pa.ipc.open_stream(data))
        reader = pa.ipc.open_file(data)
        return [reader.get_batch(index) for index in range(reader.num_record_batches)]

    def row(self, index: int) -> dict[str, Any]:
        number = int(np.searchsorted(self.ends, index, side="right")) - 1
        batch = self._batches[number]
        if self.parquet:
            batch = _read_row_group(self.file, self.fingerprint, number)
        try:
            rows = batch.slice(index - int(self.ends[number]), 1).to_pylist()
        except UnicodeDecodeError as error:
            raise BadRow("bad_text", f"the row is not valid Unicode: {error}") from None
        return dict(rows[0])


@functools.lru_cache(maxsize=8)  # for all files of a process
def _read_row_group(file: Path, fingerprint: str, index: int) -> Any:
    import pyarrow.parquet as pq

    return pq.ParquetFile(file).read_row_group(index)

"""Frames: the numbers of all frames of a LeRobot folder, read from its parquet files into memory.

No video is opened. A frame that is missing, has another size or a value that is not finite is a bad row, with episode
and frame. Memory: 4 bytes for each value that is read, so 1.4 GB for 25 million frames of 14 values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mvp_engine.errors import UserError, did_you_mean
from mvp_engine.kit.actions.lerobot import LeRobotFolder
from mvp_engine.kit.data.read.media_source import require_package

_INDEX_COLUMNS = ("timestamp", "frame_index", "episode_index")
_TASK_COLUMN = "task_index"  # a folder without tasks has none


@dataclass
class Frames:
    """The numbers of all frames, in the order of the metadata; the row of a frame is its index here."""

    episode: np.ndarray  # (F,) int64: position in `LeRobotFolder.episodes`
    frame: np.ndarray  # (F,) int64: number in the episode, from 0
    timestamp: np.ndarray  # (F,) float64, in seconds from the start of the episode
    task: np.ndarray  # (F,) int64: task_index, -1 without one
    columns: dict[str, np.ndarray]  # (F, size) float32 each
    first: np.ndarray  # (E,) int64: the row of the first frame of each episode
    bad: dict[int, tuple[str, str]]  # why a row cannot be used: (reason, detail)

    def __len__(self) -> int:
        return len(self.frame)

    @cached_property
    def ends(self) -> np.ndarray:
        """(E,) int64: the row after the last frame of each episode."""
        return np.append(self.first[1:], len(self))

    @property
    def good(self) -> np.ndarray:
        """(F,) bool: the rows that are not bad."""
        mask = np.ones(len(self), bool)
        mask[list(self.bad)] = False
        return mask


def read_frames(folder: LeRobotFolder, keys: Sequence[str], images: Sequence[str] = ()) -> Frames:
    """Read the features `keys` of all frames; the files must also have the columns `images`, which are read later."""
    lengths = np.array([episode.length for episode in folder.episodes], np.int64)
    first = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    total = int(lengths.sum())
    frame = np.arange(total) - np.repeat(first, lengths)
    frames = Frames(
        episode=np.repeat(np.arange(len(lengths)), lengths),
        frame=frame,
        timestamp=frame / folder.fps,
        task=np.full(total, -1),
        columns={key: np.zeros((total, folder.size_of(key)), np.float32) for key in keys},
        first=first,
        bad={},
    )
    reader = _Reader(folder, frames, lengths, np.zeros(total, bool), images)
    by_file: dict[Path, list[int]] = {}
    for number, episode in enumerate(folder.episodes):
        by_file.setdefault(episode.data_file, []).append(number)
    for file, numbers in by_file.items():
        reader.read_file(file, numbers)
    reader.find_missing()
    return frames


@dataclass
class _Reader:
    folder: LeRobotFolder
    frames: Frames
    lengths: np.ndarray
    seen: np.ndarray  # (F,) bool: rows that a file has
    images: Sequence[str]

    def read_file(self, file: Path, numbers: list[int]) -> None:
        """Read a file that should hold the episodes at the positions `numbers`."""
        table = self._table(file, numbers)
        if table is None:
            return
        position = {self.folder.episodes[number].index: number for number in numbers}
        episodes = _values(table["episode_index"])
        number_R = np.array([position.get(int(one), -1) for one in episodes], np.int64)
        frame_R = _values(table["frame_index"]).astype(np.int64)
        # Rows of the file that the metadata announce.
        known = (number_R >= 0) & (frame_R >= 0) & (frame_R < self.lengths[number_R])
        rows = (self.frames.first[number_R] + frame_R)[known]
        self.seen[rows] = True
        self.frames.timestamp[rows] = _values(table["timestamp"])[known]
        if _TASK_COLUMN in table.column_names:
            self.frames.task[rows] = _values(table[_TASK_COLUMN])[known]
        for key in self.frames.columns:
            self._read_column(table[key], key, rows, known)

    def _table(self, file: Path, numbers: list[int]) -> Any:
        pq = require_package("pyarrow.parquet", f"reading {file}")
        wanted = [*_INDEX_COLUMNS, *self.frames.columns]
        try:
            names = pq.read_schema(file).names
            missing = [name for name in [*wanted, *self.images] if name not in names]
            if not missing:
                wanted += [_TASK_COLUMN] if _TASK_COLUMN in names else []
                return pq.read_table(file, columns=wanted)
        except FileNotFoundError:
            self._all_bad(numbers, "missing_file", f"there is no {self._short(file)}")
            return None
        except (OSError, ValueError) as error:
            self._all_bad(numbers, "corrupt", f"{self._short(file)}: {error}"[:300])
            return None
        raise UserError(
            f"{file} has no column {missing[0]!r}.{did_you_mean(missing[0], names)} It has {', '.join(names)}"
        )

    def _read_column(self, column: Any, key: str, rows: np.ndarray, known: np.ndarray) -> None:
        values = self.frames.columns[key]
        size = values.shape[1]
        flat, all_sizes = _flat_values(column, key)
        sizes = all_sizes[known]
        starts = (np.cumsum(all_sizes) - all_sizes)[known]
        right = sizes == size
        values[rows[right]] = flat[starts[right][:, None] + np.arange(size)]
        for row, found in zip(rows[~right].tolist(), sizes[~right].tolist(), strict=True):
            detail = f"{key} has {found} values, info.json announces {size}"
            self.frames.bad.setdefault(row, ("wrong_size", detail))
        for row in rows[~np.isfinite(values[rows]).all(axis=1)].tolist():
            detail = f"{key} has a value that is not finite"
            self.frames.bad.setdefault(row, ("not_finite", detail))

    def find_missing(self) -> None:
        for row in np.flatnonzero(~self.seen).tolist():
            episode = self.folder.episodes[self.frames.episode[row]]
            text = f"{self._short(episode.data_file)} has no such frame; {episode.length} are announced"
            self.frames.bad.setdefault(row, ("missing_frame", text))

    def _all_bad(self, numbers: list[int], reason: str, detail: str) -> None:
        for number in numbers:
            first = int(self.frames.first[number])
            for row in range(first, first + int(self.lengths[number])):
                self.frames.bad[row] = (reason, detail)

    def _short(self, file: Path) -> str:
        return str(file.relative_to(self.folder.root))


def _flat_values(column: Any, key: str) -> tuple[np.ndarray, np.ndarray]:
    """All values of a column one after the other, and the number of values of each row."""
    import pyarrow as pa

    array = pa.concat_arrays(column.chunks)
    if not pa.types.is_nested(array.type):  # a feature of shape (1,) is a plain column
        return _values(array).astype(np.float32), np.ones(len(array), np.int64)
    flat = array.flatten()
    if pa.types.is_nested(flat.type):
        raise UserError(f"feature {key!r} is no vector: its rows are {array.type}")
    sizes = array.value_lengths().fill_null(0)
    return _values(flat).astype(np.float32), np.asarray(sizes).astype(np.int64)


def _values(column: Any) -> np.ndarray:
    """A column of numbers; a null is not a number."""
    import pyarrow as pa

    array = pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column
    return np.asarray(array.to_numpy(zero_copy_only=False))

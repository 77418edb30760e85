"""FrameRows: the frames of a LeRobot folder as rows of a source; and FrameRow, one of them.

A row is one observation (camera images, state, instruction) with the chunk of actions that follows it. A chunk never
crosses the end of its episode: the steps after it are masked.
"""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mvp_engine.errors import UserError, did_you_mean
from mvp_engine.files import is_inside, leads_out
from mvp_engine.kit.actions.lerobot import LeRobotFolder
from mvp_engine.kit.actions.plugin import LeRobotData
from mvp_engine.kit.actions.settings import ActionData
from mvp_engine.kit.actions.stats import column_stats
from mvp_engine.kit.data.read.decoders import open_container
from mvp_engine.kit.data.read.media_source import decoder_errors, require_package
from mvp_engine.kit.data.read.row_files import RowFile, content_hash
from mvp_engine.kit.data.read.row_types import BadRow, Message, ParsedRow, Part, Row

IMAGE_CACHE_BYTES = 1 << 29  # row groups with images that a process keeps


def is_lerobot(path: Any) -> bool:
    """Whether a source's path is one LeRobot folder."""
    return isinstance(path, str) and (Path(path).expanduser() / LeRobotData.marker).is_file()


class FrameRows(RowFile):
    """The frames of one LeRobot folder by index. The numbers are in memory, images are decoded on use."""

    def __init__(
        self,
        root: str | Path,
        name: str,
        settings: ActionData,
        chunk: int,
        order: list[str] | None = None,
    ) -> None:
        """`order`: the cameras of the training's first folder, whose order those of all folders have."""
        super().__init__(Path(root), name)
        self.folder = LeRobotFolder(root)
        self.settings = settings
        self.chunk = chunk
        self.cameras = self._chosen_cameras(order)
        self.videos = VideoFrames()
        self.size = len(self.frames)
        self.fingerprint = self._hash()

    def _chosen_cameras(self, order: list[str] | None) -> list[str]:
        known = self.folder.cameras
        if order is not None and not self.settings.cameras:
            if unknown := [camera for camera in known if camera not in order]:
                raise UserError(
                    f"{self.folder.root} has the camera {unknown[0]!r}, which the first folder of split train has not "
                    f"({', '.join(order) or 'none'}): one policy has one list of cameras. Set actions.features.cameras"
                )
            return [camera for camera in order if camera in known]
        for camera in self.settings.cameras:
            if camera not in known:
                raise UserError(
                    f"actions.features.cameras: {self.folder.root} has no camera {camera!r}."
                    f"{did_you_mean(camera, known)} It has {', '.join(known) or 'none'}"
                )
        return self.settings.cameras or known

    @property
    def frames(self) -> Frames:
        return self._frames

    @cached_property
    def _frames(self) -> Frames:  # not pickled: another process reads it again
        images = [camera for camera in self.cameras if not self.folder.is_video(camera)]
        frames = read_frames(self.folder, [self.settings.state, self.settings.action], images)
        self._find_missing_videos(frames)
        return frames

    def _find_missing_videos(self, frames: Frames) -> None:
        found: dict[Path, bool] = {}
        for number, episode in enumerate(self.folder.episodes):
            for camera in filter(self.folder.is_video, self.cameras):
                file = episode.clips[camera].file
                if file not in found:
                    found[file] = file.is_file()
                if not found[file]:
                    text = f"there is no {file.relative_to(self.folder.root)}"
                    for row in range(frames.first[number], frames.ends[number]):
                        frames.bad.setdefault(row, ("missing_file", text))

    def _hash(self) -> str:
        frames = self.frames
        hashed = content_hash(f"{self.cameras} {self.chunk} {self.folder.tasks}".encode())
        for array in (frames.timestamp, frames.task, frames.first, *frames.columns.values()):
            hashed.update(np.ascontiguousarray(array).tobytes())
        return str(hashed.hexdigest())

    @property
    def state_size(self) -> int:
        return self.folder.size_of(self.settings.state)

    @property
    def action_size(self) -> int:
        return self.folder.size_of(self.settings.action)

    @property
    def image_sizes(self) -> list[tuple[int, int]]:
        """(height, width) of the frames of each camera, as info.json announces them."""
        found = []
        for camera in self.cameras:
            shape = self.folder.features[camera]["shape"]
            names = self.folder.features[camera].get("names") or []
            # Some folders write (channels, height, width).
            first = 1 if len(names) == 3 and str(names[0]).startswith("channel") else 0
            found.append((int(shape[first]), int(shape[first + 1])))
        return found

    @property
    def states(self) -> np.ndarray:
        return self.frames.columns[self.settings.state]

    @property
    def actions(self) -> np.ndarray:
        return self.frames.columns[self.settings.action]

    def row(self, index: int) -> dict[str, Any]:
        if index in self.frames.bad:
            raise BadRow(*self.frames.bad[index])
        return FrameRow(self, index)

    def where(self, index: int) -> str:
        episode = self.folder.episodes[self.frames.episode[index]]
        return self.folder.where(episode, int(self.frames.frame[index]))

    def task(self, index: int) -> str:
        """The instruction of a frame; of a folder without task_index, that of its episode."""
        number = int(self.frames.task[index])
        if number in self.folder.tasks:
            return self.folder.tasks[number]
        episode = self.folder.episodes[self.frames.episode[index]]
        if not episode.tasks:
            raise BadRow("no_task", f"task_index {number} is not in the folder's tasks")
        return episode.tasks[0]

    def image_file(self, index: int, camera: str) -> str:
        """The file that holds a frame, relative to the folder: a video, or a parquet file."""
        episode = self.folder.episodes[self.frames.episode[index]]
        is_video = self.folder.is_video(camera)
        file = episode.clips[camera].file if is_video else episode.data_file
        return str(file.relative_to(self.folder.root))

    def image(self, index: int, camera: str) -> np.ndarray:
        """The frame of a camera, (H, W, 3) uint8."""
        frames = self.frames
        episode = self.folder.episodes[frames.episode[index]]
        if not self.folder.is_video(camera):
            cell = self._image_files.cell(
                episode.data_file, camera, episode.index, frames.frame[index]
            )
            return image_from_cell(cell, self.folder.root)
        clip = episode.clips[camera]
        seconds = clip.start + float(frames.timestamp[index])
        return self.videos.frame(clip.file, seconds, self.folder.fps)

    @cached_property
    def _image_files(self) -> _ImageFiles:
        return _ImageFiles()


class FrameRow(ParsedRow):
    """One frame with what a model reads at it and what it predicts."""

    def __init__(self, rows: FrameRows, index: int) -> None:
        super().__init__()
        self.rows = rows
        self.index = index

    def parsed(self) -> Row:
        """The frame as tools show rows: a prompt of images and the instruction."""
        parts = []
        for camera in self.rows.cameras:
            parts.append(Part("image", self.rows.image_file(self.index, camera)))
        message = Message("user", (*parts, Part("text", self.task)))
        return Row((message,), prompt_only=True, format="lerobot")

    @property
    def task(self) -> str:
        return self.rows.task(self.index)

    @property
    def state(self) -> np.ndarray:
        return self.rows.states[self.index]

    def action_chunk(self) -> tuple[np.ndarray, np.ndarray]:
        """The next actions (chunk, size), and (chunk,) which of them are in the episode; the others are zeros."""
        frames = self.rows.frames
        end = int(frames.ends[frames.episode[self.index]])
        steps = self.index + np.arange(self.rows.chunk)
        mask = steps < end
        for bad in steps[mask].tolist():
            if bad in frames.bad:  # an action that cannot be read ends the chunk
                mask &= steps < bad
                break
        actions = self.rows.actions[np.minimum(steps, end - 1)]
        return np.where(mask[:, None], actions, np.float32(0)), mask

    def images(self) -> list[np.ndarray]:
        return [self.rows.image(self.index, camera) for camera in self.rows.cameras]


class _ImageFiles:
    """Image cells of parquet files by episode and frame; row groups are kept while they fit into memory."""

    def __init__(self) -> None:
        self.files: dict[Path, Any] = {}
        self.places: dict[Path, dict[tuple[int, int], int]] = {}
        self.groups: OrderedDict[tuple[Path, str, int], Any] = OrderedDict()
        self.num_bytes = 0

    def cell(self, file: Path, camera: str, episode: int, frame: int) -> Any:
        if file not in self.files:
            self._open(file)
        opened = self.files[file]
        place = self.places[file].get((episode, int(frame)))
        if place is None:
            raise BadRow("missing_frame", f"{file.name} has no such frame")
        group = 0
        while place >= opened.metadata.row_group(group).num_rows:
            place -= opened.metadata.row_group(group).num_rows
            group += 1
        return self._group(file, camera, group)[place].as_py()

    def _open(self, file: Path) -> None:
        pq = require_package("pyarrow.parquet", f"reading {file}")
        opened = pq.ParquetFile(file)
        index = opened.read(columns=["episode_index", "frame_index"])
        pairs = zip(
            index["episode_index"].to_pylist(), index["frame_index"].to_pylist(), strict=True
        )
        self.places[file] = {pair: place for place, pair in enumerate(pairs)}
        self.files[file] = opened

    def _group(self, file: Path, camera: str, group: int) -> Any:
        key = (file, camera, group)
        if key not in self.groups:
            column = self.files[file].read_row_group(group, columns=[camera])[camera]
            self.groups[key] = column.combine_chunks()
            self.num_bytes += column.nbytes
            while self.num_bytes > IMAGE_CACHE_BYTES and len(self.groups) > 1:
                self.num_bytes -= self.groups.popitem(last=False)[1].nbytes
        self.groups.move_to_end(key)
        return self.groups[key]


# Frames: the numbers of all frames of a LeRobot folder, read from its parquet files into memory.
#
# No video is opened. A frame that is missing, has another size or a value that is not finite is a bad row, with episode
# and frame. Memory: 4 bytes for each value that is read, so 1.4 GB for 25 million frames of 14 values.

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


# Single frames of videos by time, for random access: a seek to the key frame, then a few frames are decoded.
#
# Each process keeps some containers open. A frame that shortly follows the one before it is decoded without a seek, so
# reading in order costs no more than decoding the file.

MAX_OPEN = 32  # containers of one process; the oldest is closed
# Frames after the last decoded one that are decoded without a seek: LeRobot writes a key frame every 2 frames.
NEAR_FRAMES = 3


class OpenVideo:
    """An open container, and the last frame that was decoded from it."""

    def __init__(self, file: Path) -> None:
        self.container = open_container(file)
        self.stream = self.container.streams.video[0]
        # Decoder threads read ahead of the frame, which random access throws away.
        self.stream.codec_context.thread_count = 1
        self.start = float((self.stream.start_time or 0) * self.stream.time_base)
        self.decoded: Any = None
        self.time = -1.0
        self._frames: Any = iter(())

    def frame_at(self, seconds: float, fps: float) -> np.ndarray:
        """The pixels (H, W, 3) of the frame that is shown at this time; it is at most half a frame away."""
        half = 0.5 / fps
        if self.decoded is None or not 0 <= seconds - self.time + half < (NEAR_FRAMES + 0.5) / fps:
            self._seek(seconds + half)
        while self.time < seconds - half:
            frame = next(self._frames, None)
            if frame is None:
                end = max(self.time, 0.0)
                raise BadRow(
                    "missing_frame", f"the video ends at {end:.3f} s, before {seconds:.3f} s"
                )
            self.decoded = frame
            self.time = frame.time - self.start
        if self.time > seconds + half:
            text = f"the frame nearest to {seconds:.3f} s is at {self.time:.3f} s"
            self.decoded = None
            raise BadRow("missing_frame", text)
        return np.asarray(self.decoded.to_ndarray(format="rgb24"))

    def _seek(self, seconds: float) -> None:
        target = int((seconds + self.start) / self.stream.time_base)
        self.container.seek(target, stream=self.stream)
        self._frames = self.container.decode(self.stream)
        self.decoded = None
        self.time = -1.0

    def close(self) -> None:
        self.container.close()


class VideoFrames:
    """Frames of many files. A pickled copy has no open containers: each process opens its own."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, OpenVideo] = OrderedDict()
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        VideoFrames.__init__(self)

    def frame(self, file: Path, seconds: float, fps: float) -> np.ndarray:
        """The frame of `file` at a time; BadRow if the file is missing, broken or too short."""
        if not file.is_file():
            raise BadRow("missing_file", f"there is no {file}")
        try:
            with decoder_errors(f"video {file.name}"):
                return self._opened(file).frame_at(seconds, fps)
        except BadRow:
            self._forget(file)
            raise

    def _opened(self, file: Path) -> OpenVideo:
        if self._process != os.getpid():  # forked: the parent's file offsets are not ours to move
            VideoFrames.__init__(self)
        if file in self._open:
            self._open.move_to_end(file)
            return self._open[file]
        while len(self._open) >= MAX_OPEN:
            self._open.popitem(last=False)[1].close()
        self._open[file] = OpenVideo(file)
        return self._open[file]

    def _forget(self, file: Path) -> None:
        video = self._open.pop(file, None)
        if video is not None:
            video.close()


def image_from_cell(cell: Any, root: Path) -> np.ndarray:
    """The pixels of an image in a parquet cell: {"bytes", "path"}, as `datasets` writes it."""
    if not isinstance(cell, dict) or not (cell.get("bytes") or cell.get("path")):
        raise BadRow("wrong_type", f"an image is {{bytes, path}}, not {type(cell).__name__}")
    source: Any = cell.get("bytes")
    if source is None:
        source = root / cell["path"]
        if not is_inside(cell["path"]) or leads_out(source, root):
            raise BadRow("path_escape", f"{cell['path']} leads out of {root}")
    with decoder_errors("image"):
        opened = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
        return np.array(opened.convert("RGB"))


# Facts of a folder for `mvp data inspect`: what it holds, and the statistics of states and actions.

MAX_TASKS = 5
MAX_VALUES = 16


def robot_facts(rows: FrameRows) -> dict[str, str]:
    """A few lines by name."""
    folder = rows.folder
    good = rows.frames.good
    tasks = list(dict.fromkeys(folder.tasks.values()))
    shown = ", ".join(repr(task) for task in tasks[:MAX_TASKS])
    cameras = []
    for camera, (height, width) in zip(rows.cameras, rows.image_sizes, strict=True):
        kind = "video" if folder.is_video(camera) else "images"
        cameras.append(f"{camera} {width}x{height} {kind}")
    facts = {
        "robot": f"LeRobot {folder.version}: {len(folder.episodes):,} episodes at {folder.fps:g} frames per second",
        "tasks": f"{len(tasks):,}: {shown}{', ...' if len(tasks) > MAX_TASKS else ''}",
        "cameras": ", ".join(cameras) or "none",
    }
    for key, values in ((rows.settings.state, rows.states), (rows.settings.action, rows.actions)):
        if not good.any():
            continue
        stats = column_stats(values[good])
        names = folder.names_of(key) or [str(number) for number in range(values.shape[1])]
        words = []
        for number, name in enumerate(names[:MAX_VALUES]):
            words.append(f"{name} {stats.mean[number]:.3g} ± {stats.std[number]:.3g}")
        more = ", ..." if values.shape[1] > MAX_VALUES else ""
        facts[key.rpartition(".")[2]] = f"{values.shape[1]} values: {', '.join(words)}{more}"
    return facts

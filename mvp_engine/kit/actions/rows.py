"""FrameRows: the frames of a LeRobot folder as rows of a source; and FrameRow, one of them.

A row is one observation (camera images, state, instruction) with the chunk of actions that follows it. A chunk never
crosses the end of its episode: the steps after it are masked.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mvp_engine.errors import UserError, did_you_mean
from mvp_engine.kit.actions.frames import Frames, read_frames
from mvp_engine.kit.actions.lerobot import LeRobotFolder
from mvp_engine.kit.actions.settings import ActionData
from mvp_engine.kit.actions.video import VideoFrames, image_from_cell
from mvp_engine.kit.data.read.dataset_info import LEROBOT_INFO
from mvp_engine.kit.data.read.media_source import require_package
from mvp_engine.kit.data.read.row_files import RowFile, content_hash
from mvp_engine.kit.data.read.row_types import BadRow, Message, ParsedRow, Part, Row

IMAGE_CACHE_BYTES = 1 << 29  # row groups with images that a process keeps


def is_lerobot(path: Any) -> bool:
    """Whether a source's path is one LeRobot folder."""
    return isinstance(path, str) and (Path(path).expanduser() / LEROBOT_INFO).is_file()


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
        if order is not None and self.settings.cameras is None:
            if unknown := [camera for camera in known if camera not in order]:
                raise UserError(
                    f"{self.folder.root} has the camera {unknown[0]!r}, which the first folder of split train has not "
                    f"({', '.join(order) or 'none'}): one policy has one list of cameras. Set actions.cameras"
                )
            return [camera for camera in order if camera in known]
        for camera in self.settings.cameras or ():
            if camera not in known:
                raise UserError(
                    f"actions.cameras: {self.folder.root} has no camera {camera!r}.{did_you_mean(camera, known)} It "
                    f"has {', '.join(known) or 'none'}"
                )
        return list(self.settings.cameras or known)

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

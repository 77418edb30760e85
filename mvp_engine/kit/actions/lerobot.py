"""LeRobot dataset folders, versions 2.1 and 3.0: their metadata.

Version 2.1 has one parquet file and one video per episode and camera; version 3.0 joins many episodes in one file, and
its metadata say where an episode begins. `rows.py` reads the numbers of the frames and their images.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mvp_engine.errors import UserError, did_you_mean
from mvp_engine.files import is_inside, leads_out
from mvp_engine.kit.actions.plugin import LeRobotData
from mvp_engine.kit.data.read.media_source import require_package

VERSIONS = ("v2.0", "v2.1", "v3.0")
CAMERA_TYPES = ("video", "image")


@dataclass(frozen=True)
class Clip:
    """Where the frames of an episode are in a video file: from `start` seconds on."""

    file: Path
    start: float = 0.0


@dataclass(frozen=True)
class Episode:
    """One recorded episode: its number of frames, and the files that hold them."""

    index: int
    length: int
    data_file: Path
    clips: Mapping[str, Clip] = field(default_factory=dict)  # by camera
    tasks: tuple[str, ...] = ()


class LeRobotFolder:
    """The metadata of a LeRobot dataset folder: features, cameras, tasks and episodes."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).expanduser().absolute()
        file = self.root / LeRobotData.marker
        if not file.is_file():
            raise UserError(
                f"{self.root} is no LeRobot dataset: it has no {LeRobotData.marker}. Name the folder that "
                "holds meta, data and videos"
            )
        self.info = _read_json(file)
        self.version = str(self.info.get("codebase_version"))
        if self.version not in VERSIONS:
            raise UserError(
                f"{file}: codebase_version {self.version!r} is not supported; versions 2.1 and 3.0 are. lerobot "
                "converts older folders (lerobot.scripts.convert_dataset_v21_to_v30)"
            )
        missing = [key for key in ("fps", "features", "data_path") if key not in self.info]
        if missing:
            raise UserError(f"{file} has no {missing[0]}, which LeRobot writes: is it complete?")
        self.fps = float(self.info["fps"])
        self.features: dict[str, Any] = self.info["features"]
        require_package("pyarrow", f"reading {self.root}")
        is_v3 = self.version == "v3.0"
        self.tasks: dict[int, str] = _tasks_v3(self.root) if is_v3 else _tasks_v2(self.root)
        where = f"{self.root}/meta/{'episodes' if is_v3 else 'episodes.jsonl'}"
        try:
            self.episodes: list[Episode] = self._episodes_v3() if is_v3 else self._episodes_v2()
        except KeyError as error:
            raise UserError(
                f"{where}: an episode has no {error}, which LeRobot writes: is it complete?"
            ) from None
        if not self.episodes:
            raise UserError(f"{where} has no episodes: is the download complete?")

    @property
    def cameras(self) -> list[str]:
        """The features that hold colour images, in the order of info.json; depth maps are no cameras."""
        images = {key: one for key, one in self.features.items() if one["dtype"] in CAMERA_TYPES}
        return [key for key, one in images.items() if not _is_depth(one)]

    def size_of(self, key: str) -> int:
        """The number of values of a feature such as `action`."""
        if key not in self.features:
            numeric = [name for name in self.features if name not in self.cameras]
            raise UserError(
                f"{self.root / LeRobotData.marker} has no feature {key!r}.{did_you_mean(key, numeric)} It has "
                f"{', '.join(numeric)}. In a config, actions.features names them"
            )
        return int(np.prod(self.features[key]["shape"]))

    def is_video(self, camera: str) -> bool:
        return bool(self.features[camera]["dtype"] == "video")

    def names_of(self, key: str) -> list[str]:
        """The names of a feature's values, such as joints; empty where the folder gives none."""
        names = self.features[key].get("names")
        if isinstance(names, Mapping):
            names = next(iter(names.values()), None)
        return [str(name) for name in names] if isinstance(names, list) else []

    def where(self, episode: Episode, frame: int) -> str:
        return f"{self.root.name}: episode {episode.index}, frame {frame}"

    # ---- Metadata -------------------------------------------------------------------------------------

    def _path(self, template: str | None, **values: Any) -> Path:
        """A file that info.json names; it lies inside of the folder."""
        if not template:
            raise UserError(
                f"{self.root / LeRobotData.marker} has no video_path, but features of dtype video"
            )
        name = template.format(**values)
        if not is_inside(name) or leads_out(self.root / name, self.root):
            raise UserError(f"{self.root / LeRobotData.marker}: {template} leads out of the folder")
        return self.root / name

    def _episodes_v2(self) -> list[Episode]:
        episodes = []
        chunk_size = int(self.info.get("chunks_size", 1000))
        for entry in _read_lines(self.root / "meta/episodes.jsonl"):
            index = int(entry["episode_index"])
            where = {"episode_chunk": index // chunk_size, "episode_index": index}
            clips = {}
            for camera in filter(self.is_video, self.cameras):
                clips[camera] = Clip(
                    self._path(self.info.get("video_path"), video_key=camera, **where)
                )
            data_file = self._path(self.info["data_path"], **where)
            tasks = tuple(entry.get("tasks", ()))
            episodes.append(Episode(index, int(entry["length"]), data_file, clips, tasks))
        return episodes

    def _episodes_v3(self) -> list[Episode]:
        episodes = []
        for file in sorted((self.root / "meta/episodes").glob("*/*.parquet")):
            for entry in _read_parquet(file, without="stats/").to_pylist():
                episodes.append(self._episode_v3(entry))
        return sorted(episodes, key=lambda episode: episode.index)

    def _episode_v3(self, entry: Mapping[str, Any]) -> Episode:
        clips = {}
        for camera in filter(self.is_video, self.cameras):
            start = f"videos/{camera}"
            file = self._path(
                self.info.get("video_path"),
                video_key=camera,
                chunk_index=entry[f"{start}/chunk_index"],
                file_index=entry[f"{start}/file_index"],
            )
            clips[camera] = Clip(file, float(entry[f"{start}/from_timestamp"]))
        data_file = self._path(
            self.info["data_path"],
            chunk_index=entry["data/chunk_index"],
            file_index=entry["data/file_index"],
        )
        tasks = tuple(entry.get("tasks") or ())
        return Episode(int(entry["episode_index"]), int(entry["length"]), data_file, clips, tasks)


def _is_depth(feature: Mapping[str, Any]) -> bool:
    """Versions of lerobot note it in different places."""
    notes: dict[str, Any] = {**(feature.get("video_info") or {}), **(feature.get("info") or {})}
    return bool(notes.get("is_depth_map") or notes.get("video.is_depth_map"))


def _tasks_v2(root: Path) -> dict[int, str]:
    file = root / "meta/tasks.jsonl"
    if not file.is_file():
        return {}
    return {int(entry["task_index"]): entry["task"] for entry in _read_lines(file)}


def _tasks_v3(root: Path) -> dict[int, str]:
    file = root / "meta/tasks.parquet"
    if not file.is_file():
        return {}
    table = _read_parquet(file)
    # The text is the index of a pandas frame, whose column name depends on who wrote it.
    name = next(name for name in table.column_names if name != "task_index")
    texts = table[name].to_pylist()
    return dict(zip(table["task_index"].to_pylist(), texts, strict=True))


def _read_parquet(file: Path, without: str = "\0") -> Any:
    """The table of a file of metadata, without columns whose names begin with `without`."""
    pq = require_package("pyarrow.parquet", f"reading {file}")
    try:
        names = [name for name in pq.read_schema(file).names if not name.startswith(without)]
        return pq.read_table(file, columns=names)
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}. Is the download complete?") from None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_bytes()))
    except (ValueError, TypeError) as error:
        raise UserError(f"{file} is not valid JSON: {error}") from None


def _read_lines(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        raise UserError(f"{file} is missing: a LeRobot folder of version 2.1 has it")
    try:
        return [json.loads(line) for line in file.read_text("utf-8").splitlines() if line.strip()]
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON: {error}") from None

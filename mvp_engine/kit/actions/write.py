"""LeRobotWriter: writes LeRobot dataset folders, versions 2.1 and 3.0.

    with LeRobotWriter(folder, fps=10, cameras={"observation.images.top": (64, 64)}, sizes={"observation.state": 4,
                       "action": 3}) as writer:
        writer.add({"observation.state": state_TQ, "action": action_TA}, {"observation.images.top": frames_THWC}, task)

Version 3.0 appends episodes to one parquet file and one video per camera until a file holds `file_frames` frames.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mvp_engine.errors import UserError
from mvp_engine.kit.actions.stats import column_stats
from mvp_engine.kit.data.read.media_source import require_package

INDEX_FEATURES = {
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}
PATHS = {
    "v2.1": (
        "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    ),
    "v3.0": (
        "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    ),
}
CHUNK = 1000  # files in one chunk folder
# LeRobot's own: a key frame every 2 frames, so a random frame costs at most two decoded ones.
CODEC_OPTIONS = {
    "libsvtav1": {"g": "2", "crf": "30", "preset": "12", "svtav1-params": "rc=0"},
    "libx264": {"g": "2", "crf": "18", "preset": "veryfast"},
}
STATS_FRAMES = 8  # of each episode and camera, for the image statistics that LeRobot reads


class LeRobotWriter:
    """Writes episodes one after the other; `close` (or the end of a `with` block) writes the metadata."""

    def __init__(
        self,
        root: str | Path,
        *,
        fps: int,
        sizes: Mapping[str, int],
        cameras: Mapping[str, tuple[int, int]] | None = None,
        version: str = "v3.0",
        codec: str | None = "libsvtav1",
        names: Mapping[str, list[str]] | None = None,
        file_frames: int = 100_000,
        robot_type: str | None = None,
    ) -> None:
        """`sizes` are the numbers of values of vector features, `cameras` the (height, width) of image features.

        `codec` is the encoder of the videos, libsvtav1 (AV1) or libx264 (H.264); None stores PNG images in parquet.
        """
        if version not in PATHS:
            raise UserError(f"version {version!r} cannot be written: use {' or '.join(PATHS)}")
        if codec is not None and codec not in CODEC_OPTIONS:
            raise UserError(
                f"codec {codec!r}: use one of {', '.join(CODEC_OPTIONS)}, or None for images"
            )
        self.root = Path(root)
        if self.root.exists() and any(self.root.iterdir()):
            raise UserError(f"{self.root} exists and is not empty: write into another folder")
        self.fps = fps
        self.version = version
        self.codec = codec
        self.sizes = dict(sizes)
        self.cameras = dict(cameras or {})
        self.names = dict(names or {})
        self.file_frames = file_frames
        self.robot_type = robot_type
        self.tasks: dict[str, int] = {}
        self.episodes: list[dict[str, Any]] = []
        self.total_frames = 0
        self._tables: list[Any] = []  # of the parquet file that is being filled
        self._table_frames = 0
        self._file = 0  # its number
        self._videos: dict[str, _VideoFile] = {}
        self._image_stats: dict[str, list[np.ndarray]] = {camera: [] for camera in self.cameras}
        self._columns: dict[str, list[np.ndarray]] = {}

    def __enter__(self) -> LeRobotWriter:
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if kind is None:
            self.close()

    def add(
        self, columns: Mapping[str, np.ndarray], images: Mapping[str, np.ndarray], task: str
    ) -> None:
        """Append an episode: `columns` are (frames, size), `images` are (frames, H, W, 3) uint8 by camera."""
        length = self._check(columns, images)
        index = len(self.episodes)
        task_index = self.tasks.setdefault(task, len(self.tasks))
        numbers: dict[str, np.ndarray] = {
            "timestamp": (np.arange(length) / self.fps).astype(np.float32),
            "frame_index": np.arange(length),
            "episode_index": np.full(length, index),
            "index": np.arange(length) + self.total_frames,
            "task_index": np.full(length, task_index),
        }
        entry: dict[str, Any] = {"episode_index": index, "tasks": [task], "length": length}
        for key, values in {**columns, **numbers}.items():
            self._columns.setdefault(key, []).append(np.asarray(values))
        every = max(1, length // STATS_FRAMES)
        for camera, frames in images.items():
            self._image_stats[camera].append(frames[::every].reshape(-1, 3) / np.float32(255))
        if self.version == "v3.0":
            entry |= self._place_v3(length)
        self._write_images(images, entry, index)
        self._tables.append(_table(columns, numbers, {} if self.codec else images))
        self._table_frames += length
        if self.version == "v2.1":
            self._flush(self._data_file(episode_chunk=index // CHUNK, episode_index=index))
        self.episodes.append(entry)
        self.total_frames += length

    def close(self) -> None:
        for video in self._videos.values():
            video.close()
        if self._tables:
            self._flush(self._data_file(**_numbered(self._file)))
        self._write_meta()

    # ---- Files ----------------------------------------------------------------------------------------

    def _check(self, columns: Mapping[str, np.ndarray], images: Mapping[str, np.ndarray]) -> int:
        if columns.keys() != self.sizes.keys() or images.keys() != self.cameras.keys():
            raise UserError(
                f"an episode has {sorted([*columns, *images])}, the folder {sorted([*self.sizes, *self.cameras])}"
            )
        length = len(next(iter(columns.values())))
        shapes: dict[str, tuple[int, ...]] = {}
        shapes |= {key: (length, size) for key, size in self.sizes.items()}
        shapes |= {key: (length, *size, 3) for key, size in self.cameras.items()}
        for key, values in {**columns, **images}.items():
            if values.shape != shapes[key]:
                raise UserError(f"{key} of an episode is {values.shape}, it must be {shapes[key]}")
        return length

    def _place_v3(self, length: int) -> dict[str, Any]:
        """Where the next episode lies; a full file is closed first."""
        if self._tables and self._table_frames + length > self.file_frames:
            self._flush(self._data_file(**_numbered(self._file)))
            for video in self._videos.values():
                video.close()
            self._videos = {}
            self._file += 1
        number = _numbered(self._file)
        return {
            **{f"data/{key}": value for key, value in number.items()},
            "dataset_from_index": self.total_frames,
            "dataset_to_index": self.total_frames + length,
            "meta/episodes/chunk_index": 0,
            "meta/episodes/file_index": 0,
        }

    def _write_images(
        self, images: Mapping[str, np.ndarray], entry: dict[str, Any], index: int
    ) -> None:
        if not self.codec:
            return
        number = _numbered(self._file)
        for camera, frames in images.items():
            if self.version == "v2.1":
                where = {"episode_chunk": index // CHUNK, "episode_index": index}
                file = self.root / PATHS["v2.1"][1].format(video_key=camera, **where)
                with _VideoFile(file, self.codec, self.fps, self.cameras[camera]) as video:
                    video.add(frames)
                continue
            if camera not in self._videos:
                file = self.root / PATHS["v3.0"][1].format(video_key=camera, **number)
                self._videos[camera] = _VideoFile(file, self.codec, self.fps, self.cameras[camera])
            video = self._videos[camera]
            entry |= {f"videos/{camera}/{key}": value for key, value in number.items()}
            entry[f"videos/{camera}/from_timestamp"] = video.num_frames / self.fps
            video.add(frames)
            entry[f"videos/{camera}/to_timestamp"] = video.num_frames / self.fps

    def _data_file(self, **where: int) -> Path:
        return self.root / PATHS[self.version][0].format(**where)

    def _flush(self, file: Path) -> None:
        pa = require_package("pyarrow", f"writing {file}")
        pq = require_package("pyarrow.parquet", f"writing {file}")
        file.parent.mkdir(parents=True, exist_ok=True)
        table = pa.concat_tables(self._tables)
        # lerobot reads columns by the types that the library datasets notes here: without them, images are dicts.
        noted = {"info": {"features": self._column_types(table.column_names)}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(noted)})
        # Small row groups: images in parquet are read by group.
        pq.write_table(table, file, row_group_size=256)
        self._tables = []
        self._table_frames = 0

    # ---- Metadata -------------------------------------------------------------------------------------

    def _column_types(self, names: list[str]) -> dict[str, Any]:
        """The types of columns as the library `datasets` names them."""
        types: dict[str, Any] = {}
        for name in names:
            if name in self.cameras:
                types[name] = {"_type": "Image"}
            elif name in self.sizes:
                values = {"dtype": "float32", "_type": "Value"}
                kind = "List" if self.version == "v3.0" else "Sequence"  # before datasets 4
                types[name] = {"feature": values, "length": self.sizes[name], "_type": kind}
            else:
                types[name] = {"dtype": INDEX_FEATURES[name], "_type": "Value"}
        return types

    def _write_meta(self) -> None:
        meta = self.root / "meta"
        meta.mkdir(parents=True, exist_ok=True)
        (meta / "info.json").write_text(json.dumps(self._info(), indent=4))
        stats = {}
        for key, parts in self._columns.items():
            values = np.concatenate(parts)
            stats[key] = column_stats(values.reshape(len(values), -1)).to_lerobot()
        for camera, parts in self._image_stats.items():
            stats[camera] = column_stats(np.concatenate(parts)).to_lerobot((3, 1, 1))
        if self.version == "v3.0":
            (meta / "stats.json").write_text(json.dumps(stats, indent=4))
            self._write_meta_v3(meta)
        else:
            tasks = [{"task_index": i, "task": task} for task, i in self.tasks.items()]
            _write_lines(meta / "tasks.jsonl", tasks)
            _write_lines(meta / "episodes.jsonl", self.episodes)
            _write_lines(meta / "episodes_stats.jsonl", self._episode_stats())

    def _write_meta_v3(self, meta: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        texts = list(self.tasks)
        # As pandas writes a frame whose index is the text of the task.
        index = "__index_level_0__"
        table = pa.table({"task_index": list(range(len(texts))), index: texts})
        column_info = []
        for name, kind in (("task_index", "int64"), (index, "unicode")):
            shown = None if name == index else name
            entry = {"name": shown, "field_name": name, "pandas_type": kind}
            entry |= {"numpy_type": "object" if kind == "unicode" else kind, "metadata": None}
            column_info.append(entry)
        pandas = {"index_columns": [index], "column_indexes": [], "columns": column_info}
        pq.write_table(
            table.replace_schema_metadata({"pandas": json.dumps(pandas)}), meta / "tasks.parquet"
        )
        file = meta / "episodes/chunk-000/file-000.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(self.episodes), file)

    def _info(self) -> dict[str, Any]:
        features: dict[str, Any] = {}
        for camera, (height, width) in self.cameras.items():
            features[camera] = {
                "dtype": "video" if self.codec else "image",
                "shape": [height, width, 3],
                "names": ["height", "width", "channels"],
            }
        for key, size in self.sizes.items():
            features[key] = {"dtype": "float32", "shape": [size], "names": self.names.get(key)}
        for key, dtype in INDEX_FEATURES.items():
            features[key] = {"dtype": dtype, "shape": [1], "names": None}
        data_path, video_path = PATHS[self.version]
        episodes = len(self.episodes)
        info = {
            "codebase_version": self.version,
            "robot_type": self.robot_type,
            "total_episodes": episodes,
            "total_frames": self.total_frames,
            "total_tasks": len(self.tasks),
            "chunks_size": CHUNK,
            "fps": self.fps,
            "splits": {"train": f"0:{episodes}"},
            "data_path": data_path,
            "video_path": video_path if self.codec and self.cameras else None,
            "features": features,
        }
        if self.version == "v2.1":
            info["total_chunks"] = -(-episodes // CHUNK)
            info["total_videos"] = episodes * len(self.cameras) if self.codec else 0
        else:
            info |= {"data_files_size_in_mb": 100, "video_files_size_in_mb": 200}
        return info

    def _episode_stats(self) -> list[dict[str, Any]]:
        found = []
        for index in range(len(self.episodes)):
            stats = {}
            for key, parts in self._columns.items():
                values = parts[index]
                stats[key] = column_stats(values.reshape(len(values), -1)).to_lerobot()
            for camera, samples in self._image_stats.items():
                stats[camera] = column_stats(samples[index]).to_lerobot((3, 1, 1))
            found.append({"episode_index": index, "stats": stats})
        return found


@contextmanager
def _kept_scheduler() -> Iterator[None]:
    """For root, SVT-AV1 makes the calling thread a real-time one: it and all that it starts would starve the others."""
    if not hasattr(os, "sched_getscheduler"):  # only Linux has it
        yield
        return
    policy, param = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        if os.sched_getscheduler(0) != policy:
            os.sched_setscheduler(0, policy, param)


class _VideoFile:
    """A video that is being encoded."""

    def __init__(self, file: Path, codec: str, fps: int, size: tuple[int, int]) -> None:
        av = require_package("av", "video")
        file.parent.mkdir(parents=True, exist_ok=True)
        self.container = av.open(str(file), "w")
        self.stream = self.container.add_stream(codec, fps, options=CODEC_OPTIONS[codec])
        self.stream.height, self.stream.width = size
        self.stream.pix_fmt = "yuv420p"
        self.num_frames = 0

    def add(self, frames: np.ndarray) -> None:
        av = require_package("av", "video")
        for pixels in frames:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            frame.pts = self.num_frames
            with _kept_scheduler():
                packets = self.stream.encode(frame)
            self.container.mux(packets)
            self.num_frames += 1

    def close(self) -> None:
        self.container.mux(self.stream.encode(None))
        self.container.close()

    def __enter__(self) -> _VideoFile:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def _table(
    columns: Mapping[str, np.ndarray],
    numbers: Mapping[str, np.ndarray],
    images: Mapping[str, np.ndarray],
) -> Any:
    pa = require_package("pyarrow", "writing a LeRobot folder")
    arrays: dict[str, Any] = {}
    for camera, frames in images.items():
        cells = [{"bytes": _png(pixels), "path": None} for pixels in frames]
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        arrays[camera] = pa.array(cells, kind)
    for key, values in columns.items():
        flat = pa.array(np.ascontiguousarray(values, np.float32).reshape(-1))
        arrays[key] = pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
    for key, values in numbers.items():
        arrays[key] = pa.array(values)
    return pa.table(arrays)


def _png(pixels: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "png", compress_level=1)
    return out.getvalue()


def _numbered(number: int) -> dict[str, int]:
    return {"chunk_index": number // CHUNK, "file_index": number % CHUNK}


def _write_lines(file: Path, entries: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))

"""Folders that lerobot wrote itself: they are read right, and ours have the same schema.

`lerobot_v30.tar.xz` is by lerobot 0.6.1, `lerobot_v21.tar.xz` by lerobot 0.3.3: two episodes of 5 and 3 frames, in AV1
videos. The colour of a frame is (40 + 60 * episode, 20 + 10 * frame, 60).
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import user_error
from run_files import read_json, write_json

from mvp_engine.kit.actions.lerobot import LeRobotFolder
from mvp_engine.kit.actions.rows import FrameRows
from mvp_engine.kit.actions.settings import ActionData
from mvp_engine.kit.actions.stats import column_stats
from mvp_engine.kit.actions.write import LeRobotWriter

CAMERA = "observation.images.top"
LENGTHS = (5, 3)


def theirs(folder, version):
    with tarfile.open(
        Path(__file__).with_name(f"lerobot_{version.replace('.', '')}.tar.xz")
    ) as archive:
        archive.extractall(folder, filter="data")
    return folder


def ours(folder, version, codec="libsvtav1"):
    """The same episodes by our writer; only the numbers differ."""
    dice = np.random.default_rng(0)
    sizes = {"observation.state": 4, "action": 3}
    names = {"observation.state": list("abcd"), "action": list("xyz")}
    options: dict[str, Any] = {
        "cameras": {CAMERA: (64, 96)},
        "version": version,
        "codec": codec,
        "names": names,
    }
    with LeRobotWriter(folder, fps=10, sizes=sizes, robot_type="arm", **options) as writer:
        for episode, length in enumerate(LENGTHS):
            columns = {
                key: dice.standard_normal((length, size)).astype(np.float32)
                for key, size in sizes.items()
            }
            images = np.zeros((length, 64, 96, 3), np.uint8)
            images[...] = np.stack([colour(episode, frame) for frame in range(length)])[
                :, None, None
            ]
            writer.add(columns, {CAMERA: images}, f"put block {episode % 2} away")
    return folder


def colour(episode, frame):
    return np.array([40 + 60 * episode, 20 + 10 * frame, 60])


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_folder_of_lerobot_has_the_right_frame_task_and_statistics(version, tmp_path):
    rows = FrameRows(theirs(tmp_path, version), "robot", ActionData(), chunk=4)
    assert rows.folder.version == version
    assert rows.folder.names_of("action") == ["x", "y", "z"]
    assert (len(rows.frames), rows.frames.bad, rows.image_sizes) == (8, {}, [(64, 96)])
    for index in range(len(rows.frames)):
        episode, frame = int(rows.frames.episode[index]), int(rows.frames.frame[index])
        assert (
            np.abs(rows.image(index, CAMERA).reshape(-1, 3).mean(0) - colour(episode, frame)).max()
            < 4
        )
        assert rows.task(index) == f"put block {episode} away"
    if version == "v3.0":
        noted = read_json(tmp_path / "meta/stats.json")["action"]
        found = column_stats(rows.actions).to_lerobot()
        for name in (
            "mean",
            "std",
            "min",
            "max",
            "count",
        ):  # its quantiles are averages over episodes
            assert np.allclose(found[name], noted[name], atol=1e-6)


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_written_folder_has_the_schema_of_lerobot(version, tmp_path):
    mine, other = ours(tmp_path / "ours", version), theirs(tmp_path / "theirs", version)
    files = [
        {str(file.relative_to(root)) for file in root.rglob("*") if file.is_file()}
        for root in (mine, other)
    ]
    assert files[0] == files[1]
    infos = [read_json(root / "meta/info.json") for root in (mine, other)]
    assert infos[0].keys() == infos[1].keys()
    for info in infos:
        info["features"][CAMERA].pop("info", None)  # facts of the encoder
        info["features"]["action"]["names"] = None  # by motor, or a list
    assert infos[0] == infos[1]
    data = min(file for file in files[0] if file.startswith("data"))
    schemas = [pq.read_schema(root / data) for root in (mine, other)]
    assert {(one.name, one.type) for one in schemas[0]} == {
        (one.name, one.type) for one in schemas[1]
    }
    noted = [json.loads(schema.metadata[b"huggingface"])["info"] for schema in schemas]
    assert noted[0] == noted[1]
    if version == "v2.1":
        for name in ("episodes", "tasks"):
            assert (mine / f"meta/{name}.jsonl").read_text() == (
                other / f"meta/{name}.jsonl"
            ).read_text()
        return
    tables = [
        pq.read_table(root / "meta/episodes/chunk-000/file-000.parquet") for root in (mine, other)
    ]
    rows = [
        [
            {key: value for key, value in row.items() if not key.startswith("stats/")}
            for row in table.to_pylist()
        ]
        for table in tables
    ]
    assert rows[0] == rows[1]


def test_written_images_are_noted_as_images_for_the_library_datasets(tmp_path):
    """lerobot before 3.0 gives dicts of bytes without the note."""
    schema = pq.read_schema(
        ours(tmp_path, "v2.1", codec=None) / "data/chunk-000/episode_000000.parquet"
    )
    assert json.loads(schema.metadata[b"huggingface"])["info"]["features"][CAMERA] == {
        "_type": "Image"
    }


@pytest.mark.parametrize(
    "note", [{"info": {"is_depth_map": True}}, {"video_info": {"video.is_depth_map": True}}]
)
def test_depth_map_of_a_folder_is_no_camera(note, tmp_path):
    root = theirs(tmp_path, "v3.0")
    info = read_json(root / "meta/info.json")
    info["features"]["observation.images.depth"] = {**info["features"][CAMERA], "info": {}, **note}
    write_json(root / "meta/info.json", info)
    assert LeRobotFolder(root).cameras == [CAMERA]
    with user_error(r"has no camera 'observation\.images\.depth'"):
        FrameRows(
            root, "robot", ActionData(features={"cameras": ["observation.images.depth"]}), chunk=4
        )

"""LeRobot folders, written and read: the right frame for every timestamp, bad frames by episode and frame."""

import os
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import user_error
from run_files import read_json, write_json

from mvp_engine.kit.actions.lerobot import LeRobotFolder
from mvp_engine.kit.actions.rows import VideoFrames, read_frames
from mvp_engine.kit.actions.stats import column_stats, merged_stats, relative_parts
from mvp_engine.kit.actions.write import LeRobotWriter
from mvp_engine.kit.data.read.row_types import BadRow

LENGTHS = (7, 12, 5)
CAMERA = "observation.images.top"
KEYS = ("observation.state", "action")


def color(episode, frame):
    """One colour for each frame: 16 steps of red, 60 of blue between episodes."""
    return np.array([16 * frame + 8, 128, 60 * episode + 30], np.uint8)


def write_folder(root, version, codec, lengths=LENGTHS, file_frames=100_000):
    rng = np.random.default_rng(0)
    sizes = {"observation.state": 4, "action": 3}
    writer = LeRobotWriter(
        root,
        fps=10,
        sizes=sizes,
        cameras={CAMERA: (48, 64)},
        version=version,
        codec=codec,
        file_frames=file_frames,
    )
    with writer:
        for episode, length in enumerate(lengths):
            frames = np.stack([np.tile(color(episode, i), (48, 64, 1)) for i in range(length)])
            columns = {
                key: rng.normal(3, 2, (length, size)).astype(np.float32)
                for key, size in sizes.items()
            }
            writer.add(columns, {CAMERA: frames}, f"task {episode % 2}")
    return root


@pytest.mark.parametrize("codec", ["libx264", "libsvtav1"])
@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_video_frames_in_any_order_match_their_timestamp(tmp_path, version, codec):
    scheduler = os.sched_getscheduler(0)
    folder = LeRobotFolder(write_folder(tmp_path / "data", version, codec, file_frames=15))
    assert os.sched_getscheduler(0) == scheduler  # encoders of AV1 set a real-time one
    frames = read_frames(folder, KEYS)
    assert len(frames) == sum(LENGTHS)
    assert not frames.bad
    videos = VideoFrames()
    order = np.random.default_rng(1).permutation(np.repeat(np.arange(len(frames)), 2))
    for row in [*order.tolist(), *range(len(frames))]:
        episode = folder.episodes[frames.episode[row]]
        clip = episode.clips[CAMERA]
        pixels = videos.frame(clip.file, clip.start + frames.timestamp[row], folder.fps)
        expected = color(episode.index, int(frames.frame[row]))
        assert pixels.shape == (48, 64, 3)
        assert np.abs(pixels.reshape(-1, 3).mean(0) - expected).max() < 5, (
            episode.index,
            frames.frame[row],
        )
    if version == "v3.0":  # two episodes fit into no file of 15 frames
        assert len({episode.data_file for episode in folder.episodes}) == 3 - (7 + 12 <= 15) - (
            12 + 5 <= 15
        )


def test_video_frames_with_b_frames_and_few_key_frames_match_their_timestamp(
    tmp_path,
):
    av = pytest.importorskip("av")
    file = tmp_path / "long.mp4"
    with av.open(str(file), "w") as container:
        stream = container.add_stream("libx264", 10, options={"g": "12", "bf": "3", "crf": "5"})
        stream.height = 48
        stream.width = 64
        stream.pix_fmt = "yuv420p"
        for number in range(60):
            pixels = np.full((48, 64, 3), 4 * number, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
    videos = VideoFrames()
    for number in np.random.default_rng(0).permutation(60).tolist():
        assert abs(videos.frame(file, number / 10, 10).mean() - 4 * number) < 2, number


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_folder_numbers_and_tasks_equal_what_was_written(tmp_path, version):
    folder = LeRobotFolder(write_folder(tmp_path / "data", version, None))
    frames = read_frames(folder, KEYS)
    rng = np.random.default_rng(0)
    state, action = [], []
    for length in LENGTHS:
        state.append(rng.normal(3, 2, (length, 4)).astype(np.float32))
        action.append(rng.normal(3, 2, (length, 3)).astype(np.float32))
    np.testing.assert_array_equal(frames.columns["observation.state"], np.concatenate(state))
    np.testing.assert_array_equal(frames.columns["action"], np.concatenate(action))
    assert [folder.tasks[task] for task in frames.task[frames.first]] == [
        "task 0",
        "task 1",
        "task 0",
    ]
    assert folder.cameras == [CAMERA]
    assert folder.version == version


def test_version_3_tasks_are_what_pandas_reads(tmp_path):
    pandas = pytest.importorskip("pandas")
    write_folder(tmp_path / "data", "v3.0", None)
    tasks = pandas.read_parquet(tmp_path / "data/meta/tasks.parquet")
    assert list(tasks.index) == ["task 0", "task 1"]
    assert tasks.loc["task 1"].task_index == 1


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_folder_missing_episode_is_bad_rows_by_frame(tmp_path, version):
    folder = LeRobotFolder(write_folder(tmp_path / "data", version, None, file_frames=12))
    folder.episodes[1].data_file.unlink()
    frames = read_frames(folder, KEYS)
    assert sorted(frames.bad) == list(range(7, 19))
    assert {reason for reason, _ in frames.bad.values()} == {"missing_file"}
    assert folder.where(folder.episodes[1], int(frames.frame[9])) == "data: episode 1, frame 2"


def test_folder_wrong_action_size_is_a_bad_row(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = LeRobotFolder(write_folder(tmp_path / "data", "v2.1", None))
    file = folder.episodes[1].data_file
    table = pq.read_table(file)
    actions = table["action"].to_pylist()
    actions[4] = actions[4][:2]
    actions[6] = [1.0, float("nan"), 0.0]
    column = table.column_names.index("action")
    pq.write_table(
        table.set_column(column, "action", pa.array(actions, pa.list_(pa.float32()))), file
    )
    frames = read_frames(folder, KEYS)
    assert frames.bad == {
        7 + 4: ("wrong_size", "action has 2 values, info.json announces 3"),
        7 + 6: ("not_finite", "action has a value that is not finite"),
    }
    # The row after it did not move.
    np.testing.assert_allclose(frames.columns["action"][7 + 5], actions[5])


def test_folder_short_parquet_file_misses_frames(tmp_path):
    import pyarrow.parquet as pq

    folder = LeRobotFolder(write_folder(tmp_path / "data", "v2.1", None))
    file = folder.episodes[2].data_file
    pq.write_table(pq.read_table(file).slice(0, 3), file)
    assert {row: why for row, (why, _) in read_frames(folder, KEYS).bad.items()} == {
        22: "missing_frame",
        23: "missing_frame",
    }


def test_video_broken_or_short_is_a_bad_row(tmp_path):
    folder = LeRobotFolder(write_folder(tmp_path / "data", "v2.1", "libx264"))
    file = folder.episodes[0].clips[CAMERA].file
    videos = VideoFrames()
    with pytest.raises(BadRow, match=r"missing_frame: the video ends at 0\.600 s, before 2\.000 s"):
        videos.frame(file, 2.0, 10)
    assert videos.frame(file, 0.3, 10).shape == (48, 64, 3)  # the file is usable after the error
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(BadRow, match=r"corrupt: video episode_000000\.mp4"):
        VideoFrames().frame(file, 0.3, 10)
    with pytest.raises(BadRow, match="missing_file"):
        videos.frame(file.with_name("other.mp4"), 0.3, 10)


def test_stats_equal_numpy_without_videos(tmp_path):
    folder = LeRobotFolder(write_folder(tmp_path / "data", "v3.0", "libx264"))
    folder.episodes[0].clips[CAMERA].file.unlink()
    values = read_frames(folder, KEYS).columns["action"]
    stats = column_stats(values)
    wide = values.astype(np.float64)
    for name, expected in {
        "mean": wide.mean(0),
        "std": wide.std(0),
        "min": wide.min(0),
        "max": wide.max(0),
    }.items():
        np.testing.assert_allclose(getattr(stats, name), expected, rtol=1e-6, atol=1e-6)
    for name, share in {"q01": 0.01, "q50": 0.5, "q99": 0.99}.items():
        np.testing.assert_allclose(
            stats.quantiles[name], np.quantile(wide, share, axis=0), rtol=1e-6
        )
    written = read_json(tmp_path / "data/meta/stats.json")["action"]
    np.testing.assert_allclose(written["std"], wide.std(0), rtol=1e-6)
    assert written["count"] == [24]


def test_stats_of_ten_thousand_frames_take_seconds(tmp_path):
    root = tmp_path / "data"
    sizes = {"observation.state": 14, "action": 14}
    rng = np.random.default_rng(0)
    with LeRobotWriter(root, fps=30, sizes=sizes, cameras={}) as writer:
        for _ in range(20):
            writer.add(
                {
                    key: rng.normal(size=(500, size)).astype(np.float32)
                    for key, size in sizes.items()
                },
                {},
                "go",
            )
    start = time.process_time()
    frames = read_frames(LeRobotFolder(root), list(sizes))
    stats = [column_stats(values) for values in frames.columns.values()]
    last = frames.ends[frames.episode] - 1
    stats.append(
        merged_stats(
            relative_parts(
                frames.columns["action"], frames.columns["observation.state"], last, [0], 50
            )
        )
    )
    assert time.process_time() - start < 5  # CPU seconds; less than one on an idle machine
    assert [one.count for one in stats] == [
        10_000,
        10_000,
        20 * sum(min(50, 500 - row) for row in range(500)),
    ]


def test_relative_stats_equal_a_loop_over_chunks():
    rng = np.random.default_rng(0)
    actions = rng.normal(5, 1, (24, 3)).astype(np.float32)
    states = rng.normal(5, 1, (24, 4)).astype(np.float32)
    ends = np.repeat(np.cumsum(LENGTHS), LENGTHS)
    loop = []
    for row in range(24):
        for other in range(row, min(row + 6, ends[row])):
            loop.append([*(actions[other, :2] - states[row, :2]), actions[other, 2]])
    stats = merged_stats(relative_parts(actions, states, ends - 1, [0, 1], 6))
    assert stats.count == len(loop)
    np.testing.assert_allclose(stats.mean, np.mean(loop, 0), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(stats.std, np.std(loop, 0), rtol=1e-6)
    np.testing.assert_allclose(
        stats.quantiles["q99"], np.quantile(np.array(loop), 0.99, axis=0), rtol=1e-6
    )


def test_folder_errors_name_the_file_and_the_fix(tmp_path):
    with user_error(r"no LeRobot dataset: it has no meta/info\.json"):
        LeRobotFolder(tmp_path)
    root = write_folder(tmp_path / "data", "v3.0", None)
    with user_error(r"has no feature 'actions'\. Did you mean action\?"):
        read_frames(LeRobotFolder(root), ["actions"])
    info = read_json(root / "meta/info.json")
    write_json(root / "meta/info.json", info | {"codebase_version": "v1.6"})
    with user_error(r"codebase_version 'v1\.6' is not supported"):
        LeRobotFolder(root)
    write_json(root / "meta/info.json", {key: value for key, value in info.items() if key != "fps"})
    with user_error(r"info\.json has no fps, which LeRobot writes"):
        LeRobotFolder(root)
    write_json(root / "meta/info.json", info | {"data_path": "../../{chunk_index}-{file_index}"})
    with user_error("leads out of the folder"):
        LeRobotFolder(root)
    write_json(root / "meta/info.json", info)
    for file in ("tasks.parquet", "episodes/chunk-000/file-000.parquet"):
        content = (root / "meta" / file).read_bytes()
        (root / "meta" / file).write_bytes(content[:20])
        with user_error(rf"{Path(file).name} cannot be read: .*Is the download complete"):
            LeRobotFolder(root)
        (root / "meta" / file).write_bytes(content)
    with user_error(r"file-000\.parquet has no column 'observation\.images\.side'"):
        read_frames(LeRobotFolder(root), ["action"], images=["observation.images.side"])
    pq.write_table(pq.read_table(root / "meta" / file).drop(["length"]), root / "meta" / file)
    with user_error(r"meta/episodes: an episode has no 'length'"):
        LeRobotFolder(root)
    (root / "meta" / file).unlink()
    with user_error(r"meta/episodes has no episodes"):
        LeRobotFolder(root)

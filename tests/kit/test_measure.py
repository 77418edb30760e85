"""Measuring of row costs: what is measured again after which change, and what a kill leaves behind."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, TINY, is_gone, user_error, wait_until
from tiny_vlm import chat, made, qwen3_vl, write, write_image

from mvp_engine.config import compose
from mvp_engine.kit.data import cpus
from mvp_engine.kit.data.cpus import num_processes
from mvp_engine.kit.data.pack import costs
from mvp_engine.kit.data.pack.costs import CHUNK_ROWS, ROW_RECORD, RecordFile, locked, measure_costs
from mvp_engine.kit.data.read import decoders
from mvp_engine.kit.data.read.sources import open_source


def image_rows(folder, rows):
    found = []
    for i in range(rows):
        name = write_image(folder / f"{i}.png", 16 + 8 * (i % 3), 16, i)
        found.append(
            chat([{"type": "image", "image": name}, {"type": "text", "text": f"{i}?"}], "Yes.")
        )
    return found


def measured(file, workers=0, **settings):
    kit = made(file, qwen3_vl(), **settings)
    return measure_costs(open_source(file), None, kit.row_encoder, kit.cache, workers)


def assert_same_costs(found, expected):
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.encoder.tolist() == expected.encoder.tolist()
    assert found.bad == expected.bad


@pytest.fixture
def opened(monkeypatch):
    """The images that were opened in this process."""
    found = []
    open_image = decoders.open_image

    def counted(value, *args):
        found.append(value)
        return open_image(value, *args)

    monkeypatch.setattr(decoders, "open_image", counted)
    return found


def test_measure_costs_changed_data_or_limits_opens_only_new_images(tmp_path, opened):
    rows = image_rows(tmp_path, 12)
    file = write(tmp_path / "rows.jsonl", rows[:9])
    first = measured(file)
    assert len(opened) == 9
    opened.clear()
    assert measured(file).tokens.tolist() == first.tokens.tolist()
    assert not opened  # unchanged
    write(file, rows)
    assert len(measured(file).tokens) == 12
    assert sorted(opened) == ["10.png", "11.png", "9.png"]  # appended
    opened.clear()
    write(file, [rows[3], *rows[1:5], chat("Replaced?", "Yes."), *rows[6:]])
    assert measured(file).media.tolist() == [1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1]
    assert not opened  # one row replaced, one moved
    limits = {"max_pixels": 64}
    smaller = measured(file, limits=limits)
    assert not opened
    assert (smaller.tokens[:9] <= first.tokens).all()
    assert smaller.encoder.sum() < first.encoder.sum()
    other = measured(file, limits=limits, cache=str(tmp_path / "b"))
    assert smaller.tokens.tolist() == other.tokens.tolist()


def test_measure_costs_replaced_image_is_opened_again_when_rows_are_measured(tmp_path, opened):
    rows = image_rows(tmp_path, 4)
    file = write(tmp_path / "rows.jsonl", rows[:3])
    before = measured(file)
    write_image(tmp_path / "1.png", 8, 8)
    write(file, rows)
    opened.clear()
    after = measured(file)
    assert sorted(opened) == ["1.png", "3.png"]
    assert after.tokens[1] < before.tokens[1]


def test_measure_costs_workers_find_the_costs_of_one_process(tmp_path):
    rows = image_rows(tmp_path, 2 * CHUNK_ROWS + 3)
    rows[5]["messages"][0]["content"][0]["image"] = "missing.png"
    rows[CHUNK_ROWS]["messages"] = []
    file = write(tmp_path / "rows.jsonl", rows)
    alone = measured(file)
    assert_same_costs(measured(file, 2, cache=str(tmp_path / "other")), alone)
    assert sorted(alone.bad) == [5, CHUNK_ROWS]


def in_fork(work):
    """Run `work` in a forked process, which ends with exit code 0; returns its id."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


def test_measure_costs_after_kill_has_no_orphan_and_measures_the_rest(
    tmp_path, monkeypatch, opened
):
    file = write(tmp_path / "rows.jsonl", image_rows(tmp_path, 3 * CHUNK_ROWS))
    open_image = decoders.open_image

    def hangs_in_the_last_chunk(value, *args):
        if int(value.partition(".")[0]) >= 2 * CHUNK_ROWS:
            time.sleep(600)
        return open_image(value, *args)

    with monkeypatch.context() as patched:
        patched.setattr(decoders, "open_image", hangs_in_the_last_chunk)
        pid = in_fork(lambda: measured(file, 2))

    def kept():
        return sum(
            len(RecordFile(one, ROW_RECORD).read()) for one in (tmp_path / "cache").glob("*.rows")
        )

    wait_until(lambda: kept() == 2 * CHUNK_ROWS)
    workers = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    assert workers
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    opened.clear()
    costs = measured(file)  # at once: no process holds the lock
    assert sorted(opened) == sorted(f"{i}.png" for i in range(2 * CHUNK_ROWS, 3 * CHUNK_ROWS))
    assert (costs.tokens > 0).all()
    wait_until(lambda: all(map(is_gone, workers)))


def test_measure_costs_worker_that_dies_is_a_user_error_with_its_rows(tmp_path, monkeypatch):
    file = write(tmp_path / "rows.jsonl", image_rows(tmp_path, CHUNK_ROWS + 1))
    monkeypatch.setattr(decoders, "open_image", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with user_error(
        r"a process died while it measured the rows from rows.jsonl:\d+ to rows.jsonl:"
    ):
        measured(file, 2)


def test_measure_costs_error_in_a_worker_is_raised_with_its_row(tmp_path, monkeypatch):
    file = write(tmp_path / "rows.jsonl", image_rows(tmp_path, CHUNK_ROWS + 1))
    monkeypatch.setattr(decoders, "open_image", lambda *_: [][0])
    with pytest.raises(IndexError) as raised:
        measured(file, 2)
    assert "while measuring rows.jsonl:" in "".join(raised.value.__notes__)


def test_locked_held_by_another_process_reports_what_it_waits_for(tmp_path, monkeypatch, logged):
    monkeypatch.setattr(costs, "FIRST_REPORT_SECONDS", 0.0)
    messages = logged("info")
    reader, writer = os.pipe()
    held, release = os.pipe()

    def hold():
        with locked(tmp_path / "a.lock", "chats"):
            os.write(writer, b"x")
            os.read(held, 1)

    pid = in_fork(hold)
    os.read(reader, 1)
    monkeypatch.setattr(costs, "time", ReleasingTime(release))
    with locked(tmp_path / "a.lock", "chats"):
        pass
    os.waitpid(pid, 0)
    assert f"chats: waiting for process {pid} on " in messages[0]
    assert "which measures the same rows" in messages[0]


class ReleasingTime:
    """The module `time`, except that the first sleep lets the owner of the lock go."""

    def __init__(self, release):
        self.release = release
        self.monotonic = time.monotonic

    def sleep(self, seconds):
        os.write(self.release, b"x")
        time.sleep(seconds)


def test_progress_estimates_by_what_follows_the_first_rows_of_each_process(
    tmp_path, monkeypatch, logged
):
    now = 0.0
    monkeypatch.setattr(costs.time, "monotonic", lambda: now)
    messages = logged("info")
    progress = costs.Progress("train", 1000, 2, tmp_path)
    for seconds, rows in ((20, 64), (1, 64), (10, 64), (10, 64)):  # a slow start
        now += seconds
        progress.add(rows)
    estimates = [message.partition(" (")[0] for message in messages]
    assert estimates == [
        "train: measured 64 of 1000 rows",
        "train: measured 192 of 1000 rows, about 126 s left",  # 808 rows, at 64 in 10 s
        "train: measured 256 of 1000 rows, about 116 s left",
    ]


def test_record_file_with_a_cut_off_record_keeps_the_others(tmp_path):
    file = RecordFile(tmp_path / "a.rows", ROW_RECORD)
    record = np.array([(bytes(range(15)) + b"\0", 7, 8, 1)], ROW_RECORD)
    file.append(record)
    with open(file.file, "ab") as out:
        out.write(b"cut off")
    assert file.read().tolist() == record.tolist()
    file.append(record)
    assert file.read().tolist() == 2 * record.tolist()


def test_num_processes_uses_all_cores_unless_workers_are_off():
    assert num_processes(0) == 0
    assert num_processes(1) >= len(os.sched_getaffinity(0))
    assert num_processes(100) == 100


def test_num_workers_auto_is_a_share_of_the_cores_for_the_data_kit_and_none_otherwise(
    monkeypatch,
):
    digits = ROOT / "recipes" / "digits_vlm" / "configs" / "train.yaml"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(cpus, "available_cpus", lambda: 12)
    assert compose(digits, ["data.num_workers=auto"]).config.data.num_workers == 5
    assert compose(TINY).config.data.num_workers == 0
    monkeypatch.setattr(cpus, "available_cpus", lambda: 2)
    assert compose(digits, ["data.num_workers=auto"]).config.data.num_workers == 1

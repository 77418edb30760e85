"""Rows, media, models and exports at URLs: the same rows, losses and weights as from local files."""

import gzip
import io
import json
import shutil
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import mvp, read_metrics, user_error
from tiny_vlm import made, qwen3_vl, with_images, write

from mvp_engine import stores
from mvp_engine.kit.data.read.media_source import open_media
from mvp_engine.kit.data.read.row_types import BadRow, Limits
from mvp_engine.kit.data.read.shards import Stream
from mvp_engine.kit.data.read.sources import open_source
from mvp_engine.runs import list_runs
from mvp_engine.tools import store_speed

URL = "memory://data"
ROWS = [{"prompt": f"Is {i} even?", "completion": "yes"} for i in range(10)]
CONFIG = """
model: {type: language_model, path: model}
data:
  pack_tokens: 256
  sources:
    images: {path: images.jsonl}
    held: {path: images.jsonl, split: eval}
  global_batch_size: 2
  num_workers: 1
train: {max_steps: 2}
eval: {steps: 2}
log: {interval: 1, backends: [jsonl]}
engine: sft
"""


@pytest.fixture(autouse=True)
def _stores(tmp_path, monkeypatch):
    monkeypatch.setenv("MVP_STORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MVP_STORE_SECONDS", "0.3")
    monkeypatch.setattr(stores, "FIRST_WAIT", 0.01)
    yield
    stores.remove_url(URL)


def put(name, data):
    stores.write_url(f"{URL}/{name}", data if isinstance(data, bytes) else data.encode())


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def put_folder(folder, url):
    for file in folder.rglob("*"):
        if file.is_file():
            stores.upload(file, f"{url}/{file.relative_to(folder).as_posix()}")


def test_source_at_a_url_has_the_rows_and_fingerprint_of_the_files(tmp_path):
    for name, rows in (("a/x.jsonl", ROWS[:4]), ("b/y.jsonl", ROWS[4:])):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(lines(rows))
        put(name, lines(rows))
    here = open_source(str(tmp_path / "*" / "*.jsonl"))
    there = open_source(f"{URL}/*/*.jsonl")
    assert [there[i] for i in range(10)] == [here[i] for i in range(10)] == ROWS
    assert there.fingerprint == here.fingerprint
    assert [there.where(i) for i in (0, 9)] == ["a/x.jsonl:1", "b/y.jsonl:6"]
    assert stores.as_url(there.root) == URL
    assert len(open_source([f"{URL}/a/x.jsonl", f"{URL}/b/y.jsonl"])) == 10
    with user_error("nothing at memory://data/none"):
        open_source(f"{URL}/none")


def test_folder_at_a_url_is_read_as_a_local_one():
    put("folder/metadata.jsonl", lines([{"file_name": "1.png", "text": "one"}]))
    put("folder/1.png", b"image")
    source = open_source(f"{URL}/folder")
    part = source[0]
    assert part["text"] == "one"
    assert (source.root / "1.png").read_bytes() == b"image"


def test_media_of_rows_come_from_below_the_root_alone():
    put("rows/x.jsonl", lines(ROWS))
    put("rows/images/1.png", b"image")
    put("secret.png", b"secret")
    root = open_source(f"{URL}/rows/x.jsonl").root
    for name in ("images/1.png", f"{URL}/rows/images/1.png"):
        assert open_media(name, Limits(), root, "image").read_bytes() == b"image"
    for name, reason in (
        ("images/2.png", "missing_file"),
        ("../secret.png", "path_escape"),
        (f"{URL}/secret.png", "unsupported"),
        ("http://169.254.169.254/latest/meta-data", "unsupported"),
        (f"{URL}/rows/../secret.png", "unsupported"),
    ):
        with pytest.raises(BadRow) as error:
            open_media(name, Limits(), root, "image")
        assert error.value.reason == reason, name
    outside = Limits(allow_outside=True)
    assert open_media(f"{URL}/secret.png", outside, root, "image").read_bytes() == b"secret"
    with pytest.raises(BadRow):  # rows of local files name no addresses either
        open_media(f"{URL}/secret.png", Limits(), Path("/tmp"), "image")


def test_media_in_an_outage_end_the_training_instead_of_dropping_rows():
    gone = "http://127.0.0.1:9/images"
    with pytest.raises(stores.StoreError, match="MVP_STORE_SECONDS"):
        open_media("1.png", Limits(), Path(gone), "image")


def test_streams_at_a_url_are_read_without_a_copy(tmp_path):
    put("x.jsonl.gz", gzip.compress(lines(ROWS).encode()))
    shard = io.BytesIO()
    with tarfile.open(fileobj=shard, mode="w") as tar:
        for i in range(3):
            info = tarfile.TarInfo(f"{i}.txt")
            info.size = 5
            tar.addfile(info, io.BytesIO(b"text%d" % i))
    put("y.tar", shard.getvalue())
    stream = Stream("s", [f"{URL}/x.jsonl.gz", f"{URL}/*.tar"])
    rows = [(where, read()) for where, read in stream]
    assert rows[0] == ("x.jsonl.gz:1", ROWS[0])
    assert rows[-1] == ("y.tar:2", {"text": "text2"})
    assert len(rows) == 13
    assert not (tmp_path / "cache").exists()


def test_doctor_and_check_measure_the_stores_of_a_config(tmp_path, monkeypatch):
    monkeypatch.setattr(store_speed, "SECONDS", 0.05)
    rows = with_images(tmp_path, 6)
    put("rows/x.jsonl", lines(rows))
    images = [*tmp_path.glob("*.png")]
    for file in images:
        put(f"rows/{file.name}", file.read_bytes())
    kit = made(tmp_path / "x", qwen3_vl(), sources=[{"path": f"{URL}/rows/x.jsonl"}])
    config = SimpleNamespace(data=kit.settings, checkpoint=SimpleNamespace(remote=URL))
    source, target = store_speed.check_stores(config)
    assert (source.status, target.status) == ("ok", "ok")
    assert source.facts["bytes_per_s"] > 0
    assert "can be written" in target.text
    assert not [name for name in stores.list_url(URL) if "doctor" in name]
    (facts,), warnings = store_speed.feeding(config, kit, 1e-3)
    assert not warnings
    size = len(lines(rows)) + sum(file.stat().st_size for file in images)
    assert facts["bytes_per_row"] == pytest.approx(size / 6)
    _, (warning,) = store_speed.feeding(config, kit, 1e12)
    assert "the GPU waits" in warning
    stores.remove_url(f"{URL}/rows")
    with user_error("nothing is there"):
        store_speed.check_stores(config)


@pytest.mark.slow
def test_training_from_urls_is_bit_equal_to_local_files(vlm_folder, monkeypatch):
    write(vlm_folder / "images.jsonl", with_images(vlm_folder, 8))
    (vlm_folder / "train.yaml").write_text(CONFIG)
    monkeypatch.chdir(vlm_folder)
    put_folder(vlm_folder / "model", f"{URL}/model")
    for file in (*vlm_folder.glob("*.png"), vlm_folder / "images.jsonl"):
        stores.upload(file, f"{URL}/rows/{file.name}")
    assert mvp("train train.yaml output_dir=local export_link=exported") == 0
    words = f"model.path={URL}/model export_link={URL}/exported"
    words += "".join(
        f" data.sources.{one}.path={URL}/rows/images.jsonl" for one in ("images", "held")
    )
    local = vlm_folder / "exported.local"
    shutil.copytree(vlm_folder / "exported", local)
    for name in ("images.jsonl", *(file.name for file in vlm_folder.glob("*.png"))):
        (vlm_folder / name).unlink()
    assert mvp(f"train train.yaml output_dir=there {words}") == 0
    for split in ("train", "eval"):
        assert read_metrics(vlm_folder / "local", split) == read_metrics(
            vlm_folder / "there", split
        )
    weights = "model.safetensors"
    assert stores.read_url(f"{URL}/exported/{weights}") == (local / weights).read_bytes()
    run = list_runs(vlm_folder / "there")[-1].dir
    assert mvp(f"export {run} {URL}/again") == 0
    assert stores.read_url(f"{URL}/again/{weights}") == (local / weights).read_bytes()
    assert mvp(f"export {run} {URL}/again") == 2  # not empty

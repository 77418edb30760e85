"""Checkpoints at a URL: complete or not there, resumed from either place, cleaned after a kill, pruned."""

import json
import shutil

import pytest
from conftest import TINY, read_metrics, user_error

from mvp_engine import stores
from mvp_engine.checkpoint import remote
from mvp_engine.errors import EXIT_USER_ERROR
from mvp_engine.runs import list_runs

URL = "memory://runs"
PLAIN = "optim.schedule=constant log.interval=1"
SAVES = f"checkpoint.interval=2 checkpoint.remote={URL} {PLAIN}"


@pytest.fixture(autouse=True)
def _stores(tmp_path, monkeypatch):
    monkeypatch.setenv("MVP_STORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MVP_STORE_SECONDS", "0.5")
    monkeypatch.setattr(stores, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(remote, "POLL_SECONDS", 0.01)
    yield
    stores.remove_url(URL)


def run_url(folder):
    return f"{URL}/{list_runs(folder)[-1].id}"


def test_training_uploads_checkpoints_and_files_and_continues_on_another_disk(train, tmp_path):
    assert train(f"train.max_steps=8 {PLAIN}", dir=tmp_path / "whole") == 0
    assert train(f"train.max_steps=5 {SAVES} checkpoint.keep_n=2", dir=tmp_path / "a") == 0
    url = run_url(tmp_path / "a")
    assert [*remote.manifests(url)] == [4, 5]
    copies = {name.removeprefix(f"{url}/") for name in stores.list_url(url)}
    assert {"run.json", "config.yaml", "metrics.jsonl", "log.txt"} <= copies
    assert json.loads(stores.read_url(f"{url}/run.json"))["status"] == "finished"
    assert len({name.split("/")[2] for name in copies if "/parts/" in name}) == 2  # pruned
    # Another machine, whose disk is empty.
    assert train(f"train.max_steps=8 {SAVES} resume=auto", dir=tmp_path / "b") == 0
    assert list_runs(tmp_path / "b")[-1].id == list_runs(tmp_path / "a")[-1].id
    assert read_metrics(tmp_path / "b") == read_metrics(tmp_path / "whole")
    assert max(remote.manifests(url)) == 8
    # The first machine again: what is at the URL is newer.
    assert train(f"train.max_steps=10 {SAVES} resume=auto", dir=tmp_path / "a") == 0
    assert train(f"train.max_steps=10 {PLAIN}", dir=tmp_path / "whole10") == 0
    assert read_metrics(tmp_path / "a") == read_metrics(tmp_path / "whole10")


def test_resume_url_continues_a_run_or_starts_a_new_one(train, tmp_path):
    assert train(f"train.max_steps=4 {SAVES}", dir=tmp_path / "a") == 0
    url = run_url(tmp_path / "a")
    assert train(f"train.max_steps=6 {PLAIN} resume={url}", dir=tmp_path / "b") == 0
    assert [run.id for run in list_runs(tmp_path / "b")] == [stores.url_name(url)]
    assert read_metrics(tmp_path / "b")[-1]["step"] == 6
    step = f"{url}/checkpoints/step_00000002"
    assert train(f"train.max_steps=6 {PLAIN} resume={step}", dir=tmp_path / "c") == 0
    assert read_metrics(tmp_path / "c")[-1] == read_metrics(tmp_path / "b")[-1]
    assert list_runs(tmp_path / "c")[-1].info["parent"] == step
    assert train(f"workflow=evaluate {PLAIN} resume={url}", dir=tmp_path / "d") == 0
    with user_error("neither a run with a complete checkpoint"):
        remote.cached_checkpoint(f"{url}/checkpoints/step_00000003")


def test_upload_that_was_cut_off_is_not_there_and_the_next_launch_repeats_it(
    train, tmp_path, monkeypatch
):
    write = stores.write_url

    def killed(url, data):
        """As a kill before the manifest of step 4."""
        if str(url).endswith("step_00000004.json"):
            raise stores.StoreError("no answer")
        write(url, data)

    monkeypatch.setattr(stores, "write_url", killed)
    assert train(f"train.max_steps=4 {SAVES}", dir=tmp_path / "a") == EXIT_USER_ERROR
    url = run_url(tmp_path / "a")
    assert [*remote.manifests(url)] == [2]
    assert len(attempts(url)) == 3  # that of step 2, and two of step 4
    monkeypatch.setattr(stores, "write_url", write)
    shutil.copytree(tmp_path / "a", tmp_path / "b", symlinks=True)
    assert train(f"train.max_steps=4 {SAVES} resume=auto", dir=tmp_path / "a") == 0
    assert [*remote.manifests(url)] == [2, 4]
    assert len(attempts(url)) == 2
    run = list_runs(tmp_path / "b")[-1]
    shutil.rmtree(run.checkpoints / "step_00000004")
    assert train(f"train.max_steps=5 {SAVES} resume=auto", dir=tmp_path / "b") == 0
    assert "has a newer checkpoint" in (run.dir / "log.txt").read_text()


def attempts(url):
    parts = f"{url}/checkpoints/parts"
    return {name.removeprefix(f"{parts}/").split("/")[0] for name in stores.list_url(parts)}


def test_outage_leaves_training_running_and_the_next_upload_has_the_newest(
    train, tmp_path, monkeypatch
):
    upload = stores.upload
    tries = []

    def failing(file, url):
        tries.append(url)
        if "step_00000002" in url:
            raise stores.StoreError("the store is away")
        upload(file, url)

    monkeypatch.setattr(stores, "upload", failing)
    assert train(f"train.max_steps=6 {SAVES}", dir=tmp_path) == 0
    assert 2 not in remote.manifests(run_url(tmp_path))
    assert max(remote.manifests(run_url(tmp_path))) == 6
    log = (list_runs(tmp_path)[-1].dir / "log.txt").read_text()
    assert "step_00000002 WAS NOT UPLOADED to memory://runs" in log
    assert "the store is away" in log


def test_corrupt_checkpoint_at_the_url_gives_way_to_the_one_before(train, tmp_path):
    assert train(f"train.max_steps=4 {SAVES}", dir=tmp_path / "a") == 0
    url = run_url(tmp_path / "a")
    file = next(name for name in stores.list_url(url) if "step_00000004/rank" in name)
    data = bytearray(stores.read_url(file))
    data[-5] ^= 1
    stores.write_url(file, bytes(data))
    assert train(f"train.max_steps=5 {SAVES} resume=auto", dir=tmp_path / "b") == 0
    assert train(f"train.max_steps=5 {PLAIN}", dir=tmp_path / "whole") == 0
    assert read_metrics(tmp_path / "b") == read_metrics(tmp_path / "whole")


def test_best_checkpoint_is_kept_at_the_url_and_comes_back(train, tmp_path):
    words = f"{SAVES} checkpoint.keep_n=1 eval.steps=2 checkpoint.best_mode=max"
    assert train(f"train.max_steps=6 {words}", dir=tmp_path / "a") == 0
    url = run_url(tmp_path / "a")
    stored = [*remote.manifests(url)]
    assert stored[-1] == 6
    assert len(stored) == 2
    assert train(f"train.max_steps=7 {words} resume=auto", dir=tmp_path / "b") == 0
    run = list_runs(tmp_path / "b")[-1]
    assert (run.checkpoints / "best").resolve().name == f"step_{stored[0]:08d}"


def test_remote_that_is_no_url_or_has_a_password_is_refused(train, capfd):
    assert train("train.max_steps=1 checkpoint.remote=/mnt/runs") == EXIT_USER_ERROR
    assert "file:///mnt/runs" in capfd.readouterr().err
    assert train("train.max_steps=1 checkpoint.remote=s3://me:SECRET@b/x") == EXIT_USER_ERROR
    error = capfd.readouterr().err
    assert "checkpoint.remote=s3://...@b/x has credentials" in error
    assert "SECRET" not in error


def test_two_ranks_upload_their_files_and_one_rank_continues(ranks2, train, tmp_path):
    words = SAVES.replace(URL, f"file://{tmp_path}/store")
    two = ["parallel.shard=2", "train.max_steps=4", f"output_dir={tmp_path}/a"]
    assert ranks2.launch(TINY, *words.split(), *two) == [0, 0]
    stored = remote.manifests(f"file://{tmp_path}/store/{list_runs(tmp_path / 'a')[-1].id}")
    assert [*stored] == [2, 4]
    files = json.loads(stores.read_url(stored[4]))["files"]
    assert {"rank_00000.safetensors", "rank_00001.safetensors", "meta.json"} <= files.keys()
    here = f"output_dir={tmp_path}/b"
    words = f"{words} resume=auto"
    assert ranks2.launch(TINY, *words.split(), "train.max_steps=6", here) == [0, 0]
    assert train(f"train.max_steps=7 {words}", dir=tmp_path / "c") == 0
    assert train(f"train.max_steps=7 {PLAIN}", dir=tmp_path / "whole") == 0
    for one, other in zip(
        read_metrics(tmp_path / "c"), read_metrics(tmp_path / "whole"), strict=True
    ):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)

"""A training from a local S3 server to S3 checkpoints: kills, outages, another rank count (`make test-stores`)."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import CAMPAIGN, mvp, read_metrics
from kill_resume import child_pids
from tiny_vlm import saved_model, with_images, write

from mvp_engine import stores
from mvp_engine.checkpoint.format import Reader
from mvp_engine.checkpoint.remote import manifests
from mvp_engine.runs import list_runs

pytestmark = [CAMPAIGN, pytest.mark.timeout(1200)]
CONFIG = """
model: {type: language_model, path: model}
data:
  pack_tokens: 256
  sources:
    images: {path: images.jsonl}
  global_batch_size: 2
  num_workers: 1
optim: {schedule: constant}
train: {max_steps: 12}
eval: {steps: null}
checkpoint: {interval: 2, keep_n: 3}
log: {interval: 1, backends: [jsonl, file]}
engine: sft
"""
BUCKET = "s3://bucket"
MODES = ("503", "cut", "refuse", "timeout")


class S3Server:
    """moto behind a WSGI application that fails on purpose: `mode` for a while, `on_request` for some requests."""

    def __init__(self):
        from moto.server import DomainDispatcherApplication, create_backend_app

        self.app = DomainDispatcherApplication(create_backend_app)
        self.mode = "ok"
        self.on_request = lambda method, path: None
        self.faults = dict.fromkeys(MODES, 0)
        self.bytes_read = 0
        self.port = 0
        self.open()

    def open(self):
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Quiet(WSGIRequestHandler):
            protocol_version = "HTTP/1.1"

            def log(self, *_):
                pass

        self.server = make_server(
            "127.0.0.1", self.port, self, threaded=True, request_handler=Quiet
        )
        self.server.daemon_threads = True
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def __call__(self, environ, start_response):
        self.on_request(environ["REQUEST_METHOD"], environ["PATH_INFO"])
        mode = self.mode
        if mode != "ok":
            self.faults[mode] += 1
        if mode == "503":
            body = b"<Error><Code>SlowDown</Code><Message>Please wait</Message></Error>"
            start_response("503 Service Unavailable", [("Content-Length", str(len(body)))])
            return [body]
        if mode == "timeout":
            time.sleep(40)
        if mode in ("cut", "timeout"):
            environ["werkzeug.socket"].close()
            raise ConnectionError("cut on purpose")
        return self.app(environ, start_response)

    def outage(self, mode, seconds):
        """Fail in one way for some seconds."""
        if mode == "refuse":
            self.faults[mode] += 1
            self.close()
            time.sleep(seconds)
            self.open()
        else:
            self.mode = mode
            time.sleep(seconds)
            self.mode = "ok"


@pytest.fixture
def server(monkeypatch, workspace):
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    server = S3Server()
    names = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "SECRETKEY"}
    names |= {"AWS_DEFAULT_REGION": "us-east-1", "MVP_STORE_SECONDS": "120"}
    names |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().makedirs("bucket", exist_ok=True)  # moto's buckets are those of the process
    stores.remove_url(f"{BUCKET}/runs")
    yield server
    server.mode = "ok"
    server.close()


@pytest.fixture
def folder(server, workspace):
    """A model and rows with images, here and in the bucket."""
    shutil.copytree(saved_model(workspace.parent), workspace / "model")
    write(workspace / "images.jsonl", with_images(workspace, 12))
    (workspace / "train.yaml").write_text(CONFIG)
    for file in (workspace / "model").rglob("*"):
        if file.is_file():
            stores.upload(file, f"{BUCKET}/model/{file.relative_to(workspace / 'model')}")
    for file in (*workspace.glob("*.png"), workspace / "images.jsonl"):
        stores.upload(file, f"{BUCKET}/rows/{file.name}")
    return workspace


REMOTE = f"model.path={BUCKET}/model data.sources.images.path={BUCKET}/rows/images.jsonl"
REMOTE += f" checkpoint.remote={BUCKET}/runs resume=auto output_dir=there"


def start(words, ranks):
    """`mvp train` in processes of its own."""
    command = [sys.executable, "-m", "mvp_engine.cli", "train", "train.yaml", *words.split()]
    log = open("launch.txt", "a")  # noqa: SIM115
    return subprocess.Popen(
        [*command, "--nproc", str(ranks)], stdout=log, stderr=log, start_new_session=True
    )


def kill(process):
    """kill -9 of the launcher and of all processes below it, at once."""
    pids = [process.pid]
    for pid in pids:
        pids += child_pids(pid)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    process.wait()
    return len(pids)


def killed_at(server, words, ranks, method, part, but="nothing"):
    """Start a training, and kill it when the server gets such a request, which is not answered before."""
    reached, killed = threading.Event(), threading.Event()

    def hold(verb, path):
        if verb == method and part in path and but not in path:
            reached.set()
            killed.wait(60)
            raise ConnectionError("the client is dead")

    server.on_request = hold
    process = start(words, ranks)
    try:
        deadline = time.monotonic() + 240
        while not reached.wait(0.2):
            assert process.poll() is None, Path("launch.txt").read_text()[-3000:]
            assert time.monotonic() < deadline
        assert kill(process) > ranks
    finally:
        server.on_request = lambda method, path: None
        killed.set()
        if process.poll() is None:
            kill(process)


def finish(words, ranks):
    process = start(words, ranks)
    try:
        assert process.wait(400) == 0, Path("launch.txt").read_text()[-5000:]
    finally:
        if process.poll() is None:
            kill(process)


def final_state(folder):
    """All tensors of the newest checkpoint, but the states of single ranks."""
    reader = Reader(list_runs(folder)[-1].checkpoint_list()[-1])
    names = [name for name in reader.entries if name.startswith(("model.", "optim."))]
    return {name: reader.read(name) for name in names}


def assert_equal_to_local(folder):
    assert read_metrics(folder / "there") == read_metrics(folder / "local")
    here, there = final_state(folder / "local"), final_state(folder / "there")
    assert here.keys() == there.keys()
    assert all(torch.equal(here[name], there[name]) for name in here)


def test_training_killed_three_times_continues_from_s3_bit_equal_on_another_rank_count(
    server, folder
):
    local = "output_dir=local resume=auto"
    finish(local, 2)
    finish(f"{local} train.max_steps=16", 1)
    # In mid-upload of the next checkpoint after that of step 2: it is not there.
    killed_at(server, REMOTE, 2, "PUT", "rank_00001", but="step_00000002")
    run = list_runs(folder / "there")[-1]
    url = f"{BUCKET}/runs/{run.id}"
    assert [*manifests(url)] == [2]
    # Before the next manifest is written; then the disk is lost.
    killed_at(server, REMOTE, 2, "PUT", "checkpoints/step_0")
    assert [*manifests(url)] == [2]
    shutil.rmtree(folder / "there")
    shutil.rmtree(folder / "cache")
    # While a checkpoint is downloaded to the new disk.
    killed_at(server, REMOTE, 2, "GET", "parts/")
    finish(REMOTE, 2)
    assert max(manifests(url)) == 12
    finish(f"{REMOTE} train.max_steps=16", 1)
    assert_equal_to_local(folder)
    assert [*manifests(url)] == [12, 14, 16]
    assert "older one" not in Path("launch.txt").read_text()  # what was downloaded was intact
    parts = {name.split("/")[7] for name in stores.list_url(f"{url}/checkpoints/parts")}
    assert len(parts) == 3  # what was cut off is deleted
    for file in (folder / "there").rglob("*"):
        if file.is_file():
            assert b"SECRETKEY" not in file.read_bytes()


def test_training_through_outages_loses_nothing_and_logs_what_happened(server, folder):
    finish("output_dir=local resume=auto", 1)
    modes = [*MODES]
    outages = []
    lock = threading.Lock()

    def fail(method, path):
        """The first outage begins when rows are read, each other one when the next file is uploaded."""
        with lock:
            begins = method == "GET" and "rows/" in path
            if len(modes) < len(MODES):
                begins = method == "PUT" and "parts/" in path
            if modes and begins and not any(outage.is_alive() for outage in outages):
                outages.append(threading.Thread(target=server.outage, args=(modes.pop(0), 5)))
                outages[-1].start()
                time.sleep(0.1)

    server.on_request = fail
    finish(REMOTE, 1)
    for outage in outages:
        outage.join(60)
    assert_equal_to_local(folder)
    run = list_runs(folder / "there")[-1]
    assert max(manifests(f"{BUCKET}/runs/{run.id}")) == 12
    text = Path("launch.txt").read_text() + (run.dir / "log.txt").read_text()
    assert "attempt 2 in" in text
    assert "worked at attempt" in text
    print("faults", server.faults)
    assert all(server.faults.values())


@pytest.mark.parametrize("mode", MODES)
def test_every_request_of_a_store_survives_an_outage(server, mode, monkeypatch, tmp_path):
    monkeypatch.setenv("MVP_STORE_CACHE", str(tmp_path / "copies"))
    data = os.urandom(3 << 20)
    (tmp_path / "file").write_bytes(data)
    done = []

    def work():
        stores.upload(tmp_path / "file", f"{BUCKET}/x/file")
        stores.write_url(f"{BUCKET}/x/note", b"note")
        done.append(stores.list_url(f"{BUCKET}/x"))
        done.append(stores.local_copy(f"{BUCKET}/x/file").read_bytes() == data)
        stores.remove_url(f"{BUCKET}/x")
        done.append(stores.list_url(f"{BUCKET}/x"))

    started = time.monotonic()
    thread = threading.Thread(target=work, daemon=True)
    outage = threading.Thread(target=server.outage, args=(mode, 4), daemon=True)
    outage.start()
    time.sleep(0.2)
    thread.start()
    thread.join(150)
    outage.join(60)
    assert done == [[f"{BUCKET}/x/file", f"{BUCKET}/x/note"], True, []]
    assert server.faults[mode]
    print(mode, f"{time.monotonic() - started:.1f} s", server.faults)


def test_listing_in_an_outage_is_an_error_not_an_empty_folder(server, monkeypatch):
    stores.write_url(f"{BUCKET}/runs/a/run.json", b"1")
    urls = [
        f"{BUCKET}/runs/{end}" for end in ("a/run.json", "a", "*/run.json", "a/*.json", "**/*.json")
    ]
    assert [stores.list_url(url) for url in urls] == [urls[:1]] * 5
    assert stores.list_url(f"{BUCKET}/none/*.json") == []
    monkeypatch.setenv("MVP_STORE_SECONDS", "0.5")
    server.mode = "503"
    for url in urls:
        for call in (stores.list_url, stores.remove_url):
            with pytest.raises(stores.StoreError, match="listing"):
                call(url)


def test_refused_credentials_and_missing_buckets_end_at_once(server, capfd, workspace):
    started = time.monotonic()
    with pytest.raises(stores.StoreError):
        stores.read_url("s3://no-such-bucket/x")
    assert time.monotonic() - started < 20
    (workspace / "train.yaml").write_text(CONFIG)
    assert mvp(f"train train.yaml model.path={BUCKET}/nothing") == 2
    assert f"model.path={BUCKET}/nothing" in capfd.readouterr().err
    assert json.dumps(dict(os.environ)).count("SECRETKEY") == 1

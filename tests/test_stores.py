"""Files at URLs: memory:// and an HTTP server that fails in every way, retries, range reads, and the cache."""

import http.server
import os
import pickle
import threading
import time

import pytest

from mvp_engine import stores
from mvp_engine.errors import UserError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MVP_STORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MVP_STORE_SECONDS", "2")
    monkeypatch.setattr(stores, "FIRST_WAIT", 0.02)


@pytest.fixture
def memory():
    """A folder in memory://, empty."""
    yield "memory://test"
    stores.remove_url("memory://test")


class _Handler(http.server.BaseHTTPRequestHandler):
    """Files of `server.files`, by ranges; `server.faults` has what happens to the next requests instead."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        self.server.requests.append((self.command, self.path, self.headers.get("Range")))
        fault = self.server.faults.pop(0) if self.server.faults else None
        if fault == "cut":
            self.connection.close()
            self.close_connection = True
            return
        data = self.server.files.get(self.path)
        status = fault or (404 if data is None else 200)
        body = data or b""
        begin, _, end = (self.headers.get("Range") or "").removeprefix("bytes=").partition("-")
        if status == 200 and begin and self.server.ranges:
            status = 206
            body = body[int(begin) : int(end) + 1]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hash(data)}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.files, server.faults, server.requests, server.ranges = {}, [], [], True
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def fill(folder, **files):
    for name, text in files.items():
        stores.write_url(f"{folder}/{name.replace('__', '/')}", text.encode())


def test_is_url_knows_urls_also_after_path():
    from pathlib import Path

    for url in ("s3://b/k", "https://h/x", Path("s3://b/k"), "memory://x", "file:///tmp/x"):
        assert stores.is_url(url)
    for path in ("data/x.jsonl", "/tmp/x", "file.py:function", Path("a:/b"), "hf:x", "name:train"):
        assert not stores.is_url(path)
    assert stores.as_url(Path("s3://b/k")) == "s3://b/k"


def test_list_url_lists_folders_patterns_and_files(memory):
    fill(memory, a__x="1", a__y="2", a__b__x="3")
    assert stores.list_url(f"{memory}/a") == [f"{memory}/a/{n}" for n in ("b/x", "x", "y")]
    assert stores.list_url(f"{memory}/a/x") == [f"{memory}/a/x"]
    assert stores.list_url(f"{memory}/**/x") == [f"{memory}/a/b/x", f"{memory}/a/x"]
    assert stores.list_url(f"{memory}/nothing") == []


def test_open_url_reads_ranges_and_seeks(server):
    server.files["/x"] = bytes(range(256)) * 1000
    with stores.open_url(f"{server.url}/x", block=100) as file:
        file.seek(-10, 2)
        assert file.read() == bytes(range(246, 256))
        file.seek(300)
        assert file.read(5) == bytes(range(44, 49))
    ranges = [wanted for command, _, wanted in server.requests if command == "GET"]
    assert ranges == ["bytes=255990-255999", "bytes=300-399"]
    server.ranges = False  # then the server sends all of it
    assert stores.read_url(f"{server.url}/x", 10, 20) == bytes(range(10, 20))


@pytest.fixture
def logged(monkeypatch):
    """The warnings of the package, as texts."""
    lines = []
    monkeypatch.setattr(stores.LOGGER, "warning", lambda text, *args: lines.append(text % args))
    return lines


def test_requests_survive_errors_for_a_while_and_log_them(server, logged):
    server.files["/x"] = b"content"
    server.faults += [503, 503, "cut", "cut", 500, 500]
    assert stores.local_copy(f"{server.url}/x").read_bytes() == b"content"
    assert not server.faults
    assert "asking for http://127.0.0.1" in logged[0]
    assert "503" in logged[0]
    assert "attempt 2 in" in logged[0]
    assert "worked at attempt" in logged[-1]


def test_request_that_keeps_failing_ends_with_url_attempts_and_last_error(server, monkeypatch):
    monkeypatch.setenv("MVP_STORE_SECONDS", "0.3")
    server.files["/x"] = b"content"
    server.faults += [503] * 100
    started = time.monotonic()
    with pytest.raises(stores.StoreError, match=r"/x failed \d+ times in 0 s .*503"):
        stores.read_url(f"{server.url}/x")
    assert time.monotonic() - started < 2


def test_listing_and_deleting_in_an_outage_are_errors_not_empty_folders(server, monkeypatch):
    monkeypatch.setenv("MVP_STORE_SECONDS", "0.1")
    server.files["/d/"] = b'<a href="x">x</a> <a href="?C=N">by name</a>'
    server.files["/d/x"] = b"content"
    assert stores.list_url(f"{server.url}/d/") == [f"{server.url}/d/x"]
    for call, url in (
        (stores.list_url, "/d/"),
        (stores.list_url, "/d/*"),
        (stores.remove_url, "/d/"),
    ):
        server.faults[:] = [503] * 50
        with pytest.raises(stores.StoreError, match="503"):
            call(f"{server.url}{url}")
    server.faults.clear()


def test_refusals_and_missing_files_are_not_retried(server):
    server.faults += [403, 403]
    with pytest.raises(stores.StoreError, match="refused"):
        stores.size_and_etag(f"{server.url}/x")
    assert len(server.requests) == 2  # HEAD, then GET by fsspec
    with pytest.raises(stores.MissingUrl, match="nothing is there"):
        stores.read_url(f"{server.url}/x")
    assert len(server.requests) == 3


def test_credentials_in_urls_are_refused_and_redacted():
    signed = "https://h/x?X-Amz-Signature=SECRET&y=1"
    for url in ("s3://user:SECRET@b/x", "https://SECRET@h/x", signed, "az://u:SECRET@c/x"):
        with pytest.raises(UserError, match="has credentials") as error:
            stores.open_url(url)
        assert "SECRET" not in str(error.value)
    stores.refuse_credentials("abfss://container@account.dfs.core.windows.net/x")
    stores.refuse_credentials("https://h/x?page=2")


def test_local_copy_downloads_once_and_again_after_a_change(server):
    server.files["/d/x.txt"] = b"one"
    first = stores.local_copy(f"{server.url}/d/x.txt")
    assert stores.local_copy(f"{server.url}/d/x.txt") == first
    assert [command for command, *_ in server.requests].count("GET") == 1
    assert stores.url_of(first) == f"{server.url}/d/x.txt"
    server.files["/d/x.txt"] = b"two"
    assert stores.local_copy(f"{server.url}/d/x.txt", fresh=False) == first
    assert stores.local_copy(f"{server.url}/d/x.txt").read_bytes() == b"two"
    assert first.read_bytes() == b"one"  # for those that still read it


def test_large_file_is_read_by_parallel_ranges_with_retries(server, monkeypatch):
    monkeypatch.setattr(stores, "CHUNK_BYTES", 1000)
    server.files["/x"] = os.urandom(12345)
    server.faults += [None, None, 503, "cut", None, 503]
    assert stores.local_copy(f"{server.url}/x").read_bytes() == server.files["/x"]


def test_local_folder_adds_files_to_the_same_folder(memory):
    fill(memory, config="c", weights__a="w")
    folder = stores.local_folder(memory, ["config"])
    assert [file.name for file in folder.rglob("*")] == ["config"]
    assert stores.local_folder(memory) == folder
    assert (folder / "weights" / "a").read_text() == "w"
    assert stores.url_of(folder) == memory
    assert stores.url_of(folder / "weights" / "a") == f"{memory}/weights/a"
    fill(memory, config="changed")
    assert stores.local_folder(memory) != folder


def test_cache_evicts_what_was_not_used_for_longest_but_nothing_kept(memory, monkeypatch):
    monkeypatch.setenv("MVP_STORE_CACHE_GIB", str(1000 / stores.GIB))
    monkeypatch.setattr(stores, "RECENT_SECONDS", 0)
    fill(memory, **{f"f{number}": "x" * 200 for number in range(8)})
    kept = stores.local_copy(f"{memory}/f0", keep=True)
    copies = []
    for number in range(1, 8):
        copies.append(stores.local_copy(f"{memory}/f{number}"))
        os.utime(copies[-1].parent, (number, number))
    there = [copy.is_file() for copy in copies]
    assert kept.is_file()
    assert there == [False] * 4 + [True] * 3
    fill(memory, large="x" * 900)
    with pytest.raises(stores.StoreError, match="MVP_STORE_CACHE_GIB"):
        stores.local_copy(f"{memory}/large")


def _hold(url, pipe):
    stores.local_copy(url, keep=True)
    pipe.send("kept")
    pipe.recv()


def test_cache_keeps_files_of_other_processes_until_they_end(memory, monkeypatch):
    import multiprocessing

    monkeypatch.setenv("MVP_STORE_CACHE_GIB", str(500 / stores.GIB))
    monkeypatch.setattr(stores, "RECENT_SECONDS", 0)
    fill(memory, a="x" * 200, b="x" * 200, c="x" * 200)
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_hold, args=(f"{memory}/a", there))
    process.start()
    assert here.poll(20)
    stores.local_copy(f"{memory}/b")
    stores.local_copy(f"{memory}/c")
    assert sorted(file.name for file in stores.cache_folder().glob("??/*/*/*")) == ["a", "c"]
    process.kill()
    process.join()
    stores.local_copy(f"{memory}/b")
    assert "a" not in [file.name for file in stores.cache_folder().glob("??/*/*/*")]


def test_download_leaves_no_partial_file(server, monkeypatch):
    monkeypatch.setenv("MVP_STORE_SECONDS", "0.1")
    server.files["/x"] = b"content"
    server.faults += [None] + [503] * 50
    with pytest.raises(stores.StoreError):
        stores.local_copy(f"{server.url}/x")
    assert not list(stores.cache_folder().glob("??/*/*/*"))
    server.faults.clear()
    assert stores.local_copy(f"{server.url}/x").read_bytes() == b"content"


def test_range_reader_pickles(server):
    server.files["/x"] = b"0123456789"
    reader = stores.open_url(f"{server.url}/x").raw
    reader.seek(4)
    assert pickle.loads(pickle.dumps(reader)).read(3) == b"456"

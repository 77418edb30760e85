"""Files at URLs (s3, gs, az, hf, http, https, memory, file): retries, range reads, and a local cache.

`fsspec` and the package of a store transfer the bytes, and find the credentials by the store's own chain. What is here:
retries with backoff that end with the URL and the last error, files that are read by ranges, and a local cache of a
bounded size that the processes of a machine share. Environment variables: `MVP_STORE_SECONDS` (how long a failing
request is retried, 300), `MVP_STORE_CACHE` (the folder), `MVP_STORE_CACHE_GIB` (its size). No torch is imported.

    CACHE/ab/<hash of the URL>/.store-url       which URL it is
    CACHE/ab/<hash of the URL>/<version>/NAME   a version of the file, or of a folder with files
    CACHE/kept/                                 what running processes keep: these versions are not evicted
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import hashlib
import importlib
import io
import logging
import os
import random
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

from mvp_engine.errors import UserError
from mvp_engine.files import (
    SCHEMES,
    URL_FILE,
    as_url,
    atomic_path,
    atomic_write_text,
    is_inside,
    is_url,
    remove,
    url_of,
)

__all__ = ["as_url", "is_url", "url_of"]  # and all that is defined here
LOGGER = logging.getLogger("mvp_engine")
CHUNK_BYTES = 16 << 20  # of one request
BLOCK_BYTES = 1 << 20  # the buffer of a file that is read by ranges
NUM_REQUESTS = 8  # at the same time, for one file
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds between attempts
RECENT_SECONDS = 60.0  # what was used since then is not evicted: someone may be about to open it
GIB = 1 << 30
# The package of each scheme, and the extra of mvp-engine that installs it.
PACKAGES = {"s3": ("s3fs", "s3"), "gs": ("gcsfs", "gcs"), "gcs": ("gcsfs", "gcs")}
PACKAGES |= {"az": ("adlfs", "azure"), "abfs": ("adlfs", "azure"), "abfss": ("adlfs", "azure")}
PACKAGES |= {"http": ("aiohttp", "http"), "https": ("aiohttp", "http")}
_USER = re.compile(
    r"(?<=://)[^/@\s]*:[^/@\s]*(?=@)|((?<=http://)|(?<=https://)|(?<=s3://)|(?<=gs://))[^/@\s]+(?=@)"
)
_QUERY = re.compile(r"(://[^?#\s]*\?)[^\s'\"]+")
_SIGNATURE = re.compile(r"[?&]([\w-]*signature|sig|[\w-]*token|[\w-]*key|[\w-]*credential)=", re.I)
_STAMPS = ["ETag", "etag", "content_md5", "md5Hash", "Last-Modified", "LastModified"]  # in `info`
_STAMPS += ["last_modified", "mtime", "created", "blob_id"]
_MAGIC = re.compile(r"[*?\[]")
_JITTER = random.Random()  # not the global generator, which is state of a training
T = TypeVar("T")


class StoreError(UserError):
    """A store does not answer, refuses, or has not what a URL names."""


class MissingUrl(StoreError):
    """There is nothing at a URL."""


class Entry(NamedTuple):
    """What a store says of a file."""

    size: int | None  # some HTTP servers do not say
    etag: str  # changes with the content


# ---- URLs ---------------------------------------------------------------------------------------


def join_url(folder: str | Path, name: str) -> str:
    """The URL of a file in a folder; a `name` that leads out of it raises `UserError`."""
    if not is_inside(name):
        raise UserError(f"{redacted(name)} leads out of {redacted(as_url(folder))}")
    return f"{as_url(folder).rstrip('/')}/{name}"


def parent_url(url: str | Path) -> str:
    return as_url(url).partition("?")[0].rstrip("/").rpartition("/")[0]


def url_name(url: str | Path) -> str:
    """The name of the file that a URL names."""
    return as_url(url).partition("?")[0].rstrip("/").rpartition("/")[2]


def redacted(text: object) -> str:
    """A text without the user names, passwords and signatures of the URLs in it, for messages."""
    return _QUERY.sub(r"\1...", _USER.sub("...", str(text)))


def refuse_credentials(text: str, where: str = "") -> None:
    """Raise `UserError` for a URL with a password or a signature in it, which configs and logs would keep."""
    if "://" in text and (_USER.search(text) or ("?" in text and _SIGNATURE.search(text))):
        raise UserError(
            f"{where}{redacted(text)} has credentials in it, which are not kept in configs or logs: leave them "
            "out, and give them in the way of the store (AWS_PROFILE and the like; docs/stores.md)"
        )


def _filesystem(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it. One is made for each process and kept by fsspec."""
    refuse_credentials(url)
    scheme = url.partition("://")[0]
    if scheme not in SCHEMES:
        raise UserError(f"{redacted(url)}: there is no store {scheme}://; {', '.join(SCHEMES)} are")
    package, extra = PACKAGES.get(scheme, ("fsspec", ""))
    try:
        importlib.import_module(package)
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise UserError(
            f"{redacted(url)} needs {error.name}: pip install 'mvp-engine[{extra}]'"
        ) from None
    options: dict[str, Any] = {"use_listings_cache": False} if extra else {}
    if scheme == "file":
        options["auto_mkdir"] = True
    elif extra == "s3":
        waits = {"connect_timeout": 10, "read_timeout": 30}
        options["config_kwargs"] = {**waits, "retries": {"max_attempts": 0}}
    elif extra == "http":
        from aiohttp import ClientTimeout

        limits = ClientTimeout(total=None, sock_connect=10, sock_read=30)
        options["client_kwargs"] = {"timeout": limits, "trust_env": True}
    elif extra == "azure":
        options |= {"connection_timeout": 10, "read_timeout": 30}
    found: tuple[Any, str] = url_to_fs(url, **options)
    if extra == "s3":
        found[0].retries = 2  # more of them, without a word, would take minutes
    return found


# ---- Requests -----------------------------------------------------------------------------------


def retry_seconds() -> float:
    return _number("MVP_STORE_SECONDS", 300.0)


def _number(name: str, default: float) -> float:
    try:
        return float(os.environ.get(name) or default)
    except ValueError:
        raise UserError(f"{name}={os.environ[name]} is not a number") from None


def _request(url: str, verb: str, work: Callable[[Any, str], T]) -> T:
    """Call `work(file system, path)` until it succeeds, for at most `retry_seconds`, and log what happens."""
    url = as_url(url)
    what = f"{verb} {redacted(url)}"
    started = time.monotonic()
    attempts = 0
    while True:
        attempts += 1
        try:
            done = work(*_filesystem(url))
            if attempts > 1:
                seconds = time.monotonic() - started
                LOGGER.warning("%s: worked at attempt %d, after %.0f s", what, attempts, seconds)
            return done
        except Exception as error:
            if _is_missing(error, url):
                raise MissingUrl(f"{what}: nothing is there") from None
            if isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
                error = error.__cause__
            reason = redacted(f"{type(error).__name__}: {error}")[:500]
            if isinstance(error, UserError | NotImplementedError | TypeError | AttributeError):
                raise
            if _is_refused(error):
                raise StoreError(
                    f"{what}: refused ({reason}). The credentials are those of the store's own chain: docs/stores.md"
                ) from None
            wait = min(LONGEST_WAIT, FIRST_WAIT * 2 ** min(attempts - 1, 10))
            wait *= 0.5 + _JITTER.random() / 2
            left = started + retry_seconds() - time.monotonic()
            if left < wait or _is_local(error):
                seconds = time.monotonic() - started
                raise StoreError(
                    f"{what} failed {attempts} times in {seconds:.0f} s (MVP_STORE_SECONDS); the last error: {reason}"
                ) from None
        LOGGER.warning("%s: %s; attempt %d in %.1f s", what, reason, attempts + 1, wait)
        time.sleep(wait)


def _is_missing(error: Exception, url: str) -> bool:
    """Whether an error says that there is no such file. That of HTTP may stand for any other one."""
    if not isinstance(error, FileNotFoundError):
        return False
    cause = error.__cause__
    is_other = url.startswith("http") and cause is not None
    return not is_other or getattr(cause, "status", None) in (404, 410)


def _is_refused(error: Exception) -> bool:
    """Whether trying again is of no use: no access, no credentials, a wrong request."""
    status = getattr(error, "status", 0)
    is_client_error = isinstance(status, int) and 400 <= status < 500 and status not in (408, 429)
    is_refused = isinstance(error, PermissionError | ValueError) or is_client_error
    return is_refused or re.search("Credential|Validation", type(error).__name__) is not None


def _is_local(error: Exception) -> bool:
    """Whether this machine's disk is full or read-only."""
    return isinstance(error, OSError) and error.errno in (28, 30, 122)


def size_and_etag(url: str | Path) -> Entry:
    """The size of a file, and a text that changes with its content; raises `MissingUrl`."""
    return _request(as_url(url), "asking for", lambda fs, path: _entry(fs.info(path)))


def _entry(info: dict[str, Any]) -> Entry:
    if info.get("type") == "directory":
        raise FileNotFoundError(info.get("name"))
    stamp = next((str(info[name]) for name in _STAMPS if info.get(name)), "")
    return Entry(info.get("size"), f"{stamp.strip(chr(34))} {info.get('size')}")


def list_files(url: str | Path) -> dict[str, Entry]:
    """The files that a URL names, sorted: itself, all below a folder, or those that match a pattern; maybe none.

    By `ls`: `find` and `glob` of fsspec take an outage for an empty folder.
    """
    url = as_url(url)
    is_web = url.startswith("http")
    is_pattern = _is_pattern(url)
    # The part before the first pattern: names that a store returns may lack the scheme, or have another one.
    fixed = _MAGIC.split(url)[0].rpartition("/")[0] if is_pattern else url.rstrip("/")
    pattern = url.removeprefix(f"{fixed}/") if is_pattern else "**"
    depth = 10**9 if "**" in pattern else pattern.count("/")

    def work(fs: Any, path: str) -> dict[str, Entry]:
        from fsspec.utils import glob_translate

        if is_web and not is_pattern and not path.endswith("/"):
            return {url: _entry(fs.info(path))}
        root = fs._strip_protocol(fixed)
        matches = re.compile(glob_translate(pattern)).match
        files: dict[str, Entry] = {}
        folders = [f"{root}/" if is_web else root]
        for folder in folders:
            for info in _entries(fs, folder, url, folder == folders[0]):
                below = info["name"].removeprefix(root).strip("/")
                if info["type"] == "directory":
                    if below and below.count("/") < depth and info["name"] not in folders:
                        folders.append(info["name"])
                elif (
                    not info["name"].endswith("/")
                    and "?" not in below
                    and (not below or matches(below))
                ):
                    entry = _entry(fs.info(info["name"]) if is_web else info)
                    files[f"{fixed}/{below}" if below else fixed] = entry
        return files

    try:
        return dict(sorted(_request(url, "listing", work).items()))
    except MissingUrl:
        return {}


def _entries(fs: Any, folder: str, url: str, is_root: bool) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = fs.ls(folder, detail=True)
        return found
    except FileNotFoundError as error:
        if is_root or not _is_missing(error, url):
            raise
        return []  # deleted meanwhile


def _is_pattern(url: str) -> bool:
    """Whether it is a glob pattern; in an address of the web, `?` begins the query."""
    return re.search(r"[*\[]" if url.startswith("http") else _MAGIC, url) is not None


def list_url(url: str | Path) -> list[str]:
    """The URLs of `list_files`."""
    return list(list_files(url))


def read_url(url: str | Path, start: int | None = None, end: int | None = None) -> bytes:
    """The bytes of a file from `start` to `end`, in one request."""

    def work(fs: Any, path: str) -> bytes:
        data: bytes = fs.cat_file(path, start=start, end=end)
        if start is not None and end is not None and len(data) != end - start:
            if len(data) < end:  # a server without range requests sends the whole file
                raise OSError(f"{len(data)} bytes came, not {end - start}")
            data = data[start:end]
        return data

    return _request(as_url(url), "reading", work)


def write_url(url: str | Path, data: bytes) -> None:
    """Write a file in one request: it is there as a whole, or not."""
    if as_url(url).startswith("file://"):
        file = local_copy(url)
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(file) as temporary:
            temporary.write_bytes(data)
        return
    _request(as_url(url), "writing", lambda fs, path: _writable(fs, url).pipe_file(path, data))


def upload(file: Path, url: str | Path) -> None:
    """Copy a local file to a URL, by parts if it is large, and compare the sizes."""

    def work(fs: Any, path: str) -> None:
        _writable(fs, url).put_file(str(file), path)
        size = fs.info(path)["size"]
        if size != file.stat().st_size:
            raise OSError(f"the store has {size} bytes of {file.stat().st_size}")

    _request(as_url(url), f"uploading {file.name} to", work)


def upload_folder(folder: Path, url: str | Path, last: str) -> None:
    """Copy a folder to a URL, the file that makes it readable `last`; other files that are there are deleted."""
    names = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
    targets = {
        join_url(url, name): name for name in sorted(names, key=lambda name: (name == last, name))
    }
    remove_url(join_url(url, last))
    for target, name in targets.items():
        upload(folder / name, target)
    for extra in set(list_url(url)) - {*targets}:
        remove_url(extra)


def remove_url(url: str | Path) -> None:
    """Delete a file, or a folder with all its files; one that is not there is no error."""
    for file in list_files(url):
        with contextlib.suppress(MissingUrl):
            _request(file, "deleting", lambda fs, path: fs.rm_file(path))


def _writable(fs: Any, url: str | Path) -> Any:
    if as_url(url).startswith("http"):
        raise UserError(
            f"{redacted(as_url(url))}: nothing is written by http; use s3://, gs:// or az://"
        )
    return fs


def open_url(url: str | Path, mode: str = "rb", block: int = BLOCK_BYTES) -> Any:
    """A file for reading by ranges of at least `block` bytes, with `seek`; or, with mode "wb", for writing.

    A local path is opened as it is. What is written is at the URL when the file is closed.
    """
    if not is_url(url):
        return open(url, mode)
    if mode == "wb":
        return _request(
            as_url(url), "opening", lambda fs, path: _writable(fs, url).open(path, mode)
        )
    if mode != "rb":
        raise ValueError(f"mode {mode}: rb or wb")
    size = size_and_etag(url).size
    if size is None:
        return io.BytesIO(read_url(url))
    return io.BufferedReader(_RangeReader(as_url(url), size), block)


class _RangeReader(io.RawIOBase):
    """Reads a file of a store by ranges. It pickles, and each process makes its own requests."""

    def __init__(self, url: str, size: int) -> None:
        self.name = url
        self.size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        origin = (0, self._position, self.size)[whence]
        self._position = max(0, origin + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        end = min(self._position + min(len(buffer), CHUNK_BYTES), self.size)
        if end <= self._position:
            return 0
        data = read_url(self.name, self._position, end)
        buffer[: len(data)] = data
        self._position = end
        return len(data)


# ---- The cache ----------------------------------------------------------------------------------


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    default = Path(base) / "mvp_engine" / "store"
    return Path(os.environ.get("MVP_STORE_CACHE") or default).expanduser().absolute()


def cache_limit() -> int:
    """The most bytes of the cache; by default 100 GiB, or what leaves a tenth of the disk free."""
    if os.environ.get("MVP_STORE_CACHE_GIB"):
        return int(_number("MVP_STORE_CACHE_GIB", 0) * GIB)
    root = cache_folder()
    root.mkdir(parents=True, exist_ok=True)
    disk = shutil.disk_usage(root)
    return min(100 * GIB, max(GIB, disk.free - disk.total // 10 + _Cache.of(root).total))


def local_copy(url: str | Path, *, keep: bool = False, fresh: bool = True) -> Path:
    """A local copy of a file, in the cache; a local path and `file://` are returned as they are.

    Use it at once: it may be evicted when it was not used for a minute. `keep`: it stays until this process ends.
    `fresh`: ask the store whether a copy is still its version; False: media, which are taken as they were.
    """
    if not is_url(url):
        return Path(url)
    url = as_url(url)
    if url.startswith("file://"):
        return Path(unquote(urlsplit(url).path))
    home = _home(url)
    if not fresh:
        for version in sorted(home.glob("*/")) if home.is_dir() else []:
            if (version / url_name(url)).is_file():
                return _used(version, keep) / url_name(url)
    entry = size_and_etag(url)
    version = home / _hash(entry.etag)
    _fetch(url, version, {url_name(url): (url, entry)}, keep)
    return version / url_name(url)


def local_folder(url: str | Path, patterns: Sequence[str] | None = None) -> Path:
    """A local copy of the files below a URL, or of those whose relative paths match a pattern; kept by this process.

    Calls with other patterns add files to the same folder. When a file of the store changes, it is another folder.
    """
    url = as_url(url).rstrip("/")
    if url.startswith("file://"):
        return Path(unquote(urlsplit(url).path))
    listed = list_files(f"{url}/" if url.startswith("http") else url)
    files = {name.removeprefix(f"{url}/"): (name, entry) for name, entry in listed.items()}
    if not files or url in listed:
        raise MissingUrl(f"{redacted(url)} is not a folder with files")
    version = _home(url) / _hash(str(sorted((name, one.etag) for name, (_, one) in files.items())))
    name = url_name(url)
    chosen: dict[str, tuple[str, Entry]] = {}
    for below, file in files.items():
        join_url(url, below)  # raises for a name that leads out
        if patterns is None or any(fnmatch.fnmatchcase(below, pattern) for pattern in patterns):
            chosen[f"{name}/{below}"] = file
    _fetch(url, version, chosen, keep=True)
    return version / name


def local_paths(url: str | Path) -> list[Path]:
    """Local copies of what a source names: of files and patterns the files, of a folder the folder. Kept."""
    url = as_url(url)
    files = list_url(url)
    if files and url not in files and not _is_pattern(url):
        return [local_folder(url)]
    return [local_copy(file, keep=True) for file in files]


def _fetch(url: str, version: Path, files: dict[str, tuple[str, Entry]], keep: bool) -> None:
    """Download those of the files that `version` lacks. Of several processes one does it, the others wait for it."""
    missing = {name: file for name, file in files.items() if not (version / name).is_file()}
    if missing:
        version.parent.mkdir(parents=True, exist_ok=True)
        with _locked(version.parent / ".lock"):
            version.mkdir(parents=True, exist_ok=True)
            atomic_write_text(version.parent / URL_FILE, url)
            _used(version, keep)
            missing = {
                name: file for name, file in missing.items() if not (version / name).is_file()
            }
            size = sum(entry.size or 0 for _, entry in missing.values())
            _Cache.of(cache_folder()).make_room(size, redacted(url), keep)
            for name, (source, entry) in missing.items():
                (version / name).parent.mkdir(parents=True, exist_ok=True)
                with atomic_path(version / name) as temporary:
                    download(source, temporary, entry)
                    os.utime(
                        temporary, (0, 0)
                    )  # the same after another download: sizes of media are cached
    _used(version, keep)


def download(url: str, file: Path, entry: Entry | None = None) -> None:
    """Copy a file to a local path, by several requests at a time; raises `StoreError` if it changes meanwhile."""
    size = (entry or size_and_etag(url)).size
    if size is None or size <= CHUNK_BYTES:
        file.write_bytes(read_url(url, None if size is None else 0, size))
        return
    before = size_and_etag(url)
    with open(file, "wb") as out:

        def copy(start: int) -> None:
            end = min(start + CHUNK_BYTES, size)
            os.pwrite(out.fileno(), read_url(url, start, end), start)

        pool = ThreadPoolExecutor(NUM_REQUESTS)
        try:
            list(pool.map(copy, range(0, size, CHUNK_BYTES)))
        finally:
            pool.shutdown(cancel_futures=True)
    if size_and_etag(url) != before or size != before.size:
        raise StoreError(f"{redacted(url)} changed while it was read: start again")


def _home(url: str) -> Path:
    key = _hash(url)
    return cache_folder() / key[:2] / key


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    with open(file, "a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _used(version: Path, keep: bool) -> Path:
    """Note that a version was used now, and, with `keep`, that this process needs it until its end."""
    with contextlib.suppress(OSError):
        os.utime(version)
    if keep:
        _Cache.of(cache_folder()).keep(version)
    return version


class _Cache:
    """The size of the cache folder, and what this process keeps of it."""

    _of: dict[tuple[int, Path], _Cache] = {}  # noqa: RUF012 - for each process
    _lock = threading.Lock()

    def __init__(self, root: Path) -> None:
        self.root = root
        self.total = 0  # bytes, when they were last counted, and those of this process since then
        self._since: int | None = None  # bytes of this process since then
        self._kept: set[str] = set()
        self._file: Any = None

    @classmethod
    def of(cls, root: Path) -> _Cache:
        with cls._lock:
            return cls._of.setdefault((os.getpid(), root), cls(root))

    def keep(self, version: Path) -> None:
        """List a version in a file that this process, and those that it forks, hold locked."""
        with self._lock:
            if str(version) in self._kept:
                return
            while self._file is None or not os.path.exists(self._file.name):
                # Without the lock, for a moment, it may be deleted as that of a process that has ended.
                folder = self.root / "kept"
                folder.mkdir(parents=True, exist_ok=True)
                self._file = open(folder / f"{os.getpid()}-{time.time_ns()}", "a")  # noqa: SIM115
                fcntl.flock(self._file, fcntl.LOCK_EX)
                self._file.writelines(f"{one}\n" for one in self._kept)
            self._kept.add(str(version))
            self._file.write(f"{version}\n")
            self._file.flush()

    def make_room(self, size: int, what: str, keep: bool) -> None:
        """Evict what was not used for longest. The folder is counted again after each 64th of its limit."""
        limit = cache_limit()
        if (
            self._since is not None
            and self._since + size < limit // 64
            and self.total + size < limit
        ):
            self._since += size
            self.total += size
            return
        with _locked(self.root / ".lock"):
            sizes = self._count()
            kept = self._kept_by_all()
            held = sum(bytes for version, (_, bytes) in sizes.items() if version in kept)
            if held + size > limit:
                raise StoreError(
                    f"{what} needs {size / GIB:.2f} GiB of the cache {self.root}, where {held / GIB:.2f} of "
                    f"{limit / GIB:.2f} GiB are in use: set MVP_STORE_CACHE_GIB to more, MVP_STORE_CACHE to a larger "
                    "disk, or read rows as a stream (stream: true)"
                )
            self.total = sum(bytes for _, bytes in sizes.values())
            oldest = sorted((used, version) for version, (used, _) in sizes.items())
            for used, version in oldest:
                if self.total + size <= limit * 7 // 8:
                    break
                if version not in kept and used < time.time() - RECENT_SECONDS:
                    remove(Path(version))
                    self.total -= sizes[version][1]
        self._since = 0
        self.total += size

    def _count(self) -> dict[str, tuple[float, int]]:
        """Of each version: when it was last used, and its bytes."""
        sizes: dict[str, tuple[float, int]] = {}
        for version in self.root.glob("??/*/*/"):
            with contextlib.suppress(OSError):  # another process may replace a file
                bytes = sum(file.stat().st_size for file in version.rglob("*") if file.is_file())
                sizes[str(version)] = version.stat().st_mtime, bytes
        return sizes

    def _kept_by_all(self) -> set[str]:
        kept: set[str] = set()
        for file in (self.root / "kept").glob("*"):
            with contextlib.suppress(OSError), open(file, "r+") as handle:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    file.unlink()  # its process has ended
                except OSError:
                    kept |= set(handle.read().splitlines())
        return kept

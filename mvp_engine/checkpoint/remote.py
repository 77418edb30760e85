"""The copy of a run at a URL (`checkpoint.remote`): checkpoints are uploaded in the background, with a manifest last.

REMOTE/RUN_ID/run.json, config.yaml, metrics.jsonl, ...   copies of the run folder's files
REMOTE/RUN_ID/checkpoints/step_00000200.json              the manifest: where the files are, and their sizes
REMOTE/RUN_ID/checkpoints/parts/ATTEMPT/step_00000200/    the files

Each upload has a folder of its own, so files of different attempts never mix; a checkpoint is there when its manifest
is, which one request writes. A launch deletes what no manifest names. Ranks upload their own files and say so in the
job's store: there is no collective, which an outage would let time out.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from mvp_engine import stores
from mvp_engine.checkpoint.format import META, CorruptCheckpoint, verify
from mvp_engine.checkpoint.manager import steps_to_delete
from mvp_engine.config.schema import Checkpoint
from mvp_engine.distributed import World
from mvp_engine.distributed.world import raise_on_all_ranks
from mvp_engine.errors import UserError, count, reason_of
from mvp_engine.files import atomic_path, is_inside, remove
from mvp_engine.runs import STEP_PREFIX, Run, checkpoint_step

LOGGER = logging.getLogger("mvp_engine")
POLL_SECONDS = 0.2
FOLDER = "checkpoints"
PARTS = "parts"


def manifests(run_url: str) -> dict[int, str]:
    """The URLs of the manifests of a run's complete checkpoints, by step."""
    found: dict[int, str] = {}
    for url in stores.list_url(f"{run_url}/{FOLDER}/{STEP_PREFIX}*.json"):
        step = checkpoint_step(Path(stores.url_name(url)).with_suffix(""))
        if step is not None:
            found[step] = url
    return dict(sorted(found.items()))


def _read_manifest(url: str) -> tuple[str, dict[str, int]]:
    """The URL of a checkpoint's files, and their sizes."""
    manifest = json.loads(stores.read_url(url))
    files: dict[str, int] = manifest["files"]
    if not all(map(is_inside, [manifest["folder"], *files])):
        raise UserError(f"{stores.redacted(url)} names files outside of its folder")
    return stores.join_url(stores.parent_url(url), manifest["folder"]), files


class RemoteRun:
    """Uploads the checkpoints of a run, and deletes old ones there. All ranks call the same methods."""

    def __init__(self, run: Run, config: Checkpoint, world: World) -> None:
        self.run = run
        self.config = config
        self.world = world
        self.url = stores.join_url(config.remote or "", run.id)
        self.best: int | None = None
        self.last: int | None = None  # the step of the last complete upload, on rank 0
        self.uploading: int | None = None  # the step of the last upload
        self._thread: threading.Thread | None = None
        self._uploads = 0
        self._copied: dict[
            str, tuple[int, int]
        ] = {}  # files of the run folder, as they were uploaded
        with raise_on_all_ranks(world.host_group):
            if world.is_main:
                self._refuse_other_run()
                stored = manifests(self.url)
                self.last = max(stored, default=None)
                self._clean(stored)
                self.copy_files()  # an error in rights or names comes before the first step
        self._attempt = world.broadcast(secrets.token_hex(4))

    def _refuse_other_run(self) -> None:
        with contextlib.suppress(stores.MissingUrl):
            info = json.loads(stores.read_url(f"{self.url}/run.json"))
            if info["created"] != self.run.info["created"]:
                raise UserError(
                    f"checkpoint.remote: {self.url} is another run of this name: continue it with resume={self.url}, "
                    "or set another run_id"
                )

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, folder: Path) -> None:
        """Upload a local checkpoint in the background; nothing deletes it meanwhile (`uploading`)."""
        self._uploads += 1
        name = f"{PARTS}/{self._attempt}-{self._uploads}/{folder.name}"
        self._thread = threading.Thread(
            target=self._upload, args=(folder, name), name="mvp-upload", daemon=True
        )
        self.uploading = checkpoint_step(folder)
        self._thread.start()

    def wait(self) -> None:
        """Wait until no rank uploads. The collectives are short, whatever a rank waits for."""
        while self.world.any(self.busy)[0]:
            time.sleep(POLL_SECONDS)

    def finish(self, newest: Path) -> None:
        """Wait until the newest checkpoint is uploaded; one that failed or was left out is tried once more."""
        self.wait()
        step = checkpoint_step(newest)
        if self.world.broadcast(self.last) != step:
            self.start(newest)
            self.wait()
        if self.world.broadcast(self.last) != step:
            raise UserError(
                f"{newest} was not uploaded to {self.url}: the log says why. It is complete here; a launch with "
                "resume=auto uploads it"
            )

    def retire(self, after: int) -> None:
        """Delete the manifests after a step, so that no launch resumes from them."""
        self.wait()
        if self.world.is_main:
            for step, url in manifests(self.url).items():
                if step > after:
                    stores.remove_url(url)
            self.last = None

    def copy_files(self) -> None:
        """Upload the run folder's files that have changed, without checkpoints."""
        for file in sorted(self.run.dir.rglob("*")):
            name = file.relative_to(self.run.dir).as_posix()
            if name.startswith((".", FOLDER)) or not file.is_file() or file.is_symlink():
                continue
            about = file.stat()
            stamp = about.st_mtime_ns, about.st_size
            if self._copied.get(name) != stamp:
                data = file.read_bytes()  # a log may grow meanwhile
                stores.write_url(stores.join_url(self.url, name), data)
                self._copied[name] = stamp

    def _upload(self, folder: Path, name: str) -> None:
        started = time.monotonic()
        error = ""
        try:
            files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
            for file in files:
                if self._owner(file) == self.world.rank:
                    target = f"{self.url}/{FOLDER}/{name}"
                    stores.upload(file, f"{target}/{file.relative_to(folder).as_posix()}")
        except Exception as failure:  # noqa: BLE001 - training continues; the local checkpoint is complete
            error = reason_of(failure)
        try:
            if self.world.is_main:
                self._wait_for_ranks(name, error)
                self._publish(folder, name, files)
                seconds = time.monotonic() - started
                LOGGER.info("checkpoint %s is at %s (%.2f s)", folder.name, self.url, seconds)
                self._prune()
            elif self.world.store is not None:
                self.world.store.set(f"upload/{name}/{self.world.rank}", error)
        except Exception as failure:  # noqa: BLE001 - as above
            LOGGER.error(
                "%s WAS NOT UPLOADED to %s: %s. Training continues; it is complete in %s",
                folder.name,
                self.url,
                reason_of(failure),
                folder,
            )

    def _owner(self, file: Path) -> int:
        """The rank that uploads a file: the one that wrote it; rank 0 has what is not of a rank."""
        digits = file.stem.removeprefix("rank_")
        return int(digits) % self.world.size if digits.isdecimal() else 0

    def _wait_for_ranks(self, name: str, own_error: str) -> None:
        errors = [own_error]
        for rank in range(1, self.world.size):
            key = f"upload/{name}/{rank}"
            assert self.world.store is not None
            while not self.world.store.check([key]):
                if self.world.has_failed():
                    raise UserError(f"rank {rank} has failed")
                time.sleep(POLL_SECONDS)
            errors.append(self.world.store.get(key).decode())
        if failed := next(filter(None, errors), None):
            raise UserError(failed)

    def _publish(self, folder: Path, name: str, files: list[Path]) -> None:
        self.copy_files()
        sizes = {file.relative_to(folder).as_posix(): file.stat().st_size for file in files}
        manifest = {"folder": name, "files": sizes}
        url = f"{self.url}/{FOLDER}/{folder.name}.json"
        stores.write_url(url, json.dumps(manifest, indent=2).encode())
        self.last = checkpoint_step(folder)

    def _prune(self) -> None:
        stored = manifests(self.url)
        for step in steps_to_delete([*stored], self.best, self.config):
            folder, _ = _read_manifest(stored[step])
            stores.remove_url(stored[step])
            stores.remove_url(stores.parent_url(folder))

    def _clean(self, stored: dict[int, str]) -> None:
        """Delete the files of uploads that did not end."""
        named = [_read_manifest(url)[0] for url in stored.values()]
        parts = f"{self.url}/{FOLDER}/{PARTS}"
        attempts = {
            url.removeprefix(f"{parts}/").partition("/")[0] for url in stores.list_url(parts)
        }
        unknown = attempts - {
            folder.removeprefix(f"{parts}/").partition("/")[0] for folder in named
        }
        for attempt in unknown:
            stores.remove_url(f"{parts}/{attempt}")
        if unknown:
            LOGGER.warning(
                "%s: deleted %s that did not end", self.url, count(len(unknown), "upload")
            )


# ---- Resuming from a URL ------------------------------------------------------------------------


def newest_run(remote: str, name: str, run_id: str | None) -> tuple[float, str] | None:
    """When the newest run of this name at a URL was created, and its URL; only runs with a checkpoint."""
    found: list[tuple[float, str]] = []
    for url in stores.list_url(f"{remote.rstrip('/')}/{run_id or '*'}/run.json"):
        info = json.loads(stores.read_url(url))
        if info["name"] == name and info.get("workflow") == "train":
            found.append((info["created"], stores.parent_url(url)))
    return next((run for run in sorted(found, reverse=True) if manifests(run[1])), None)


def adopt_run(run_url: str, run_dir: Path) -> None:
    """Download the copies of a run folder's files, over those that are there."""
    files = stores.list_files(run_url)
    for url, entry in files.items():
        name = url.removeprefix(f"{run_url}/")
        if is_inside(name) and not name.startswith(FOLDER):
            (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
            with atomic_path(run_dir / name) as temporary:
                stores.download(url, temporary, entry)


def fetch_newest(run_url: str, folder: Path, after: int, world: World) -> Path | None:
    """Download the newest intact checkpoint after a step into the local `folder`, and the best one; each rank a part.

    None: there is none. All ranks call it.
    """
    stored: dict[int, str] = {}
    with raise_on_all_ranks(world.host_group):
        if world.is_main:
            stored = manifests(run_url)
    stored = world.broadcast(stored)
    for step in sorted((step for step in stored if step > after), reverse=True):
        try:
            found = _fetch(stored[step], folder, world)
        except CorruptCheckpoint as error:
            if world.is_main:
                LOGGER.warning("%s %s: an older one is used instead", error, stored[step])
            continue
        best = (json.loads((found / META).read_text()).get("best") or {}).get("step")
        if best in stored and not (folder / f"{STEP_PREFIX}{best:08d}" / META).is_file():
            _fetch(stored[best], folder, world)
        return found
    return None


def _fetch(manifest: str, folder: Path, world: World) -> Path:
    url = ""
    files: dict[str, int] = {}
    final = folder / stores.url_name(manifest).removesuffix(".json")
    # Not the name of a checkpoint that is being written, which a launch completes if it has its `meta.json`.
    temporary = final.with_name(f".tmp-fetch-{final.name}")
    with raise_on_all_ranks(world.host_group):
        if world.is_main:
            url, files = _read_manifest(manifest)
            remove(temporary)
            for name in files:
                (temporary / name).parent.mkdir(parents=True, exist_ok=True)
    url, files = world.broadcast((url, files))

    def work() -> None:
        for name in [*files][world.rank :: world.size]:
            stores.download(f"{url}/{name}", temporary / name)
            size = (temporary / name).stat().st_size
            if size != files[name]:
                raise CorruptCheckpoint(f"{url}/{name} has {size} bytes, not {files[name]}")

    try:
        run_in_thread(work, world)
        run_in_thread(partial(verify, temporary, world.rank, world.size), world)
        if world.is_main:
            remove(final)
            temporary.rename(final)
        world.barrier()
    except BaseException:
        if world.is_main:
            remove(temporary)
        raise
    return final


def run_in_thread(work: Callable[[], None], world: World) -> None:
    """Run long work on each rank, while short collectives keep the ranks together; raises on all ranks."""
    failed: list[Exception] = []

    def guarded() -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - raised below, on all ranks
            failed.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    while world.any(thread.is_alive())[0]:
        time.sleep(POLL_SECONDS)
    with raise_on_all_ranks(world.host_group):
        if failed:
            raise failed[0]


def cached_checkpoint(url: str, best: bool = False) -> Path:
    """A copy in the cache of REMOTE/RUN_ID/checkpoints/step_N, or of the newest (`best`: the best) of REMOTE/RUN_ID."""
    url = stores.as_url(url).rstrip("/").removesuffix(".json").removesuffix(f"/{FOLDER}")
    step = checkpoint_step(Path(stores.url_name(url)))
    run_url = url if step is None else stores.parent_url(stores.parent_url(url))
    stored = manifests(run_url)
    if not stored or (step is not None and step not in stored):
        raise UserError(
            f"{stores.redacted(url)} is neither a run with a complete checkpoint nor a checkpoint. Name "
            "REMOTE/RUN_ID or REMOTE/RUN_ID/checkpoints/step_N"
        )
    chosen = max(stored) if step is None else step
    found = _cached(stored[chosen])
    of_best: Any = (json.loads((found / META).read_text()).get("best") or {}).get("step")
    if best and step is None and of_best in stored and of_best != chosen:
        return _cached(stored[of_best])
    return found


def _cached(manifest: str) -> Path:
    url, files = _read_manifest(manifest)
    folder = stores.local_folder(url)
    verify(folder)
    for name, size in files.items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != size:
            raise CorruptCheckpoint(f"{url}/{name} is not what {manifest} names")
    return folder

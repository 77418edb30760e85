"""The checkpoints of a run: when and where they are written, which ones are kept, which one a launch starts from.

checkpoints/step_00000200/    complete
checkpoints/.tmp-step_.../    being written, or left by a crash: removed at the next start
checkpoints/latest, best      symlinks
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mvp_engine.checkpoint import format as checkpoint_format
from mvp_engine.checkpoint.format import META, Shard
from mvp_engine.config.schema import Checkpoint
from mvp_engine.distributed import World
from mvp_engine.distributed.world import raise_on_all_ranks
from mvp_engine.errors import UserError, similar_path
from mvp_engine.files import (
    as_url,
    atomic_symlink,
    is_url,
    remove,
    remove_atomically,
    temporary_path,
)
from mvp_engine.runs import (
    DIVERGED_PREFIX,
    STEP_PREFIX,
    best_checkpoint,
    checkpoint_step,
    complete_checkpoints,
)

if TYPE_CHECKING:
    from mvp_engine.checkpoint.remote import RemoteRun

LOGGER = logging.getLogger("mvp_engine")


class CheckpointManager:
    """Writes checkpoints of a run in a background thread and deletes old ones."""

    def __init__(
        self, folder: Path, config: Checkpoint, world: World, extra_folder: Path | None = None
    ) -> None:
        """`extra_folder`: is copied into each checkpoint, if it exists by then."""
        self.folder = folder
        self.config = config
        self.world = world
        self.extra_folder = extra_folder
        # Writes more into a checkpoint, given its temporary folder; `save` then waits for it.
        self.write_more: Callable[[Path], None] | None = None
        # A process group of its own: the writer thread's collectives must not mix with the main thread's.
        self.group = world.new_host_group()
        self.failed = False  # whether the last checkpoint could not be written
        self._thread: threading.Thread | None = None
        self._best: int | None = None
        # Host copies of the shards, reused for every checkpoint.
        self._host_copies: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        if world.is_main:
            folder.mkdir(parents=True, exist_ok=True)
            for leftover in folder.glob(".tmp-*"):
                remove(leftover)
            self._link_latest()  # a crash may have happened between a checkpoint and its symlink
        world.barrier()
        self.remote: RemoteRun | None = None
        if config.remote is not None:
            from mvp_engine.checkpoint.remote import RemoteRun
            from mvp_engine.runs import Run

            self.remote = RemoteRun(Run(folder.parent), config, world)
            self._upload_newest()

    def save(self, step: int, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """Copy this rank's shards to the host, then write them in the background.

        Of a training on a GPU, optimizer states that are on the host already (`optim.offload`) are not copied: they are
        most of what the host has room for. Then `save` returns when they are written.

        A failed write is logged as an error and sets `failed`; it does not stop the training.
        """
        self.wait()
        upload = self.remote is not None and not self._is_uploading(step)
        shards = list(checkpoint_format.shards_of(tensors))
        in_place = [shard for shard in shards if self._is_offloaded(shard)]
        copies = self._copy_to_host([shard for shard in shards if not self._is_offloaded(shard)])
        meta = {"step": step, **meta, "world_size": self.world.size}
        self._thread = threading.Thread(
            target=self._write,
            args=(step, [*copies, *in_place], meta, upload),
            name="mvp-checkpoint",
        )
        self._thread.start()
        if self.write_more is not None or in_place:
            self.wait()

    def _is_uploading(self, step: int) -> bool:
        """Whether an earlier checkpoint is still being uploaded on any rank: then this one is kept here alone."""
        assert self.remote is not None
        busy = self.world.any(self.remote.busy)[0]
        if busy and self.world.is_main:
            LOGGER.warning(
                "the checkpoint of step %d is not uploaded now: the upload of step %s has not ended",
                step,
                self.remote.uploading,
            )
        return busy

    def _upload_newest(self) -> None:
        """Upload the newest checkpoint, if a launch that was killed has not done it."""
        assert self.remote is not None
        found = complete_checkpoints(self.folder)[-1:] if self.world.is_main else []
        due = [path for path in found if checkpoint_step(path) != self.remote.last]
        for path in self.world.broadcast(due):
            self.remote.start(path)

    def finish(self) -> None:
        """Wait until the newest checkpoint is written and, with `checkpoint.remote`, uploaded; raise if it is not."""
        self.wait()
        if self.remote is not None:
            newest = complete_checkpoints(self.folder)[-1] if self.world.is_main else None
            self.remote.finish(self.world.broadcast(newest))

    def copy_files(self) -> None:
        """Upload the files of the run folder as they are at its end, with `checkpoint.remote`."""
        if self.remote is not None:
            try:
                self.remote.copy_files()
            except UserError as error:
                LOGGER.error("the last files of the run were not uploaded: %s", error)

    def _is_offloaded(self, shard: Shard) -> bool:
        """Whether this is an optimizer state that a training on a GPU keeps on the host; step counts are scalars."""
        on_host = self.world.device.type == "cuda" and not shard.data.is_cuda
        return on_host and shard.name.startswith("optim.") and shard.data.ndim > 0

    def _copy_to_host(self, shards: list[Shard]) -> list[Shard]:
        copies: list[Shard] = []
        for shard in shards:
            data = shard.data
            copy = self._host_copies.get((shard.name, shard.offset))
            if copy is None or copy.shape != data.shape or copy.dtype != data.dtype:
                copy = torch.empty(data.shape, dtype=data.dtype, pin_memory=data.is_cuda)
            copies.append(shard._replace(data=copy.copy_(data, non_blocking=True)))
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()  # one host sync for all copies
        self._host_copies = {(copy.name, copy.offset): copy.data for copy in copies}
        return copies

    def mark_best(self, step: int | None) -> None:
        """Point `best` to the checkpoint of `step`, now or as soon as it is written; None: there is no best one."""
        self._best = step
        if step is None and self.world.is_main:
            (self.folder / "best").unlink(missing_ok=True)
        if self._thread is None:
            self._link_best()

    def retire(self, after: int) -> list[str]:
        """Rename the checkpoints after a step, so that no launch resumes from them; returns their old names."""
        self.wait()
        found = complete_checkpoints(self.folder)
        found = [folder for folder in found if (checkpoint_step(folder) or 0) > after]
        for folder in found if self.world.is_main else []:
            target = folder.with_name(f"{DIVERGED_PREFIX}{folder.name}")
            remove(target)
            folder.rename(target)
        if self.world.is_main:
            self._link_latest()
        if self.remote is not None:
            self.remote.retire(after)
        self.world.barrier()  # a rank that exits first must not end rank 0 meanwhile
        return [folder.name for folder in found]

    def _link_latest(self) -> None:
        """Point `latest` to the newest complete checkpoint; without one there is no link."""
        latest = self.folder / "latest"
        if found := complete_checkpoints(self.folder):
            atomic_symlink(latest, found[-1].name)
        else:
            latest.unlink(missing_ok=True)

    def wait(self) -> None:
        """Wait until the current checkpoint, if any, is written or has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._link_best()

    def _write(self, step: int, shards: list[Shard], meta: dict[str, Any], upload: bool) -> None:
        folder = self.folder / _folder_name(step)
        temporary = temporary_path(folder)
        started = time.monotonic()
        self.failed = False
        try:
            checkpoint_format.write(temporary, shards, self.group)
            # What is uploaded has to be published, which the other ranks only learn by a collective.
            with raise_on_all_ranks(self.group) if upload else contextlib.nullcontext():
                if self.world.is_main:
                    self._publish(temporary, folder, meta)
                    LOGGER.info("checkpoint %s (%.2f s)", folder, time.monotonic() - started)
            if upload and self.remote is not None:
                self.remote.best = self._best
                self.remote.start(folder)
            if self.world.is_main:
                self._prune()
        except Exception as error:  # noqa: BLE001 - training continues, older checkpoints stay
            self.failed = True
            LOGGER.error(
                "CHECKPOINT AT STEP %d WAS NOT WRITTEN: %s: %s. Training continues; the older checkpoints are "
                "complete. Free disk space or fix the folder %s before the next checkpoint is due.",
                step,
                type(error).__name__,
                error,
                self.folder,
            )
            if self.world.is_main:
                remove(temporary)

    def _publish(self, temporary: Path, folder: Path, meta: dict[str, Any]) -> None:
        if self.extra_folder is not None and self.extra_folder.is_dir():
            copied = temporary / self.extra_folder.name
            shutil.copytree(self.extra_folder, copied, dirs_exist_ok=True)
        if self.write_more is not None:
            self.write_more(temporary)
        # Replaces a checkpoint of the same step; `recover` finishes a rename that a kill interrupts.
        checkpoint_format.publish(temporary, folder, meta)
        atomic_symlink(self.folder / "latest", folder.name)
        self._link_best()

    def _link_best(self) -> None:
        name = _folder_name(self._best or 0)
        if self.world.is_main and (self.folder / name / META).is_file():
            try:
                atomic_symlink(self.folder / "best", name)
            except OSError as error:  # tried again after the next checkpoint
                LOGGER.error("%s could not be linked: %s", self.folder / "best", error)

    def _prune(self) -> None:
        """Delete old checkpoints, but not one that is being uploaded."""
        found = {checkpoint_step(path) or 0: path for path in complete_checkpoints(self.folder)}
        best = checkpoint_step((self.folder / "best").resolve())
        for step in steps_to_delete([*found], best, self.config):
            if self.remote is None or not self.remote.busy or step != self.remote.uploading:
                remove_atomically(found[step])


def steps_to_delete(steps: Sequence[int], best: int | None, config: Checkpoint) -> list[int]:
    """All but the newest `keep_n`, every `keep_every`-th step and the best one."""
    if config.keep_n is None:
        return []
    every = config.keep_every
    old = sorted(steps)[: -config.keep_n]
    return [step for step in old if step != best and not (every and step % every == 0)]


def recover(folder: Path) -> None:
    """Publish the checkpoints of a run that were complete when its process was killed, just before the rename."""
    for temporary in folder.glob(f".tmp-{STEP_PREFIX}*"):
        final = folder / temporary.name.removeprefix(".tmp-")
        if checkpoint_step(final) is not None:
            checkpoint_format.publish_leftover(final)


def find_checkpoint(path: Path, best: bool = False) -> Path:
    """The complete checkpoint at `path`, or the newest one of the run folder at `path`; `best`: its best one.

    One at a URL is downloaded into the cache.
    """
    if is_url(path):
        from mvp_engine.checkpoint.remote import cached_checkpoint

        return cached_checkpoint(as_url(path), best)
    checkpoint_format.publish_leftover(path)
    if (path / META).is_file():
        return path.resolve()
    for folder in (path / "checkpoints", path):
        found = complete_checkpoints(folder)
        if found:
            return (best_checkpoint(folder) if best else None) or found[-1]
    if not path.exists():
        raise UserError(
            f"{path} does not exist.{similar_path(path)} Name a run folder, such as outputs/RUN, or a checkpoint in it"
        )
    raise UserError(f"{path} is neither a complete checkpoint nor a run folder with one")


def _folder_name(step: int) -> str:
    return f"{STEP_PREFIX}{step:08d}"

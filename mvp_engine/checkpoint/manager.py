"""The checkpoints of a run: written under a temporary name, renamed when complete, then linked and pruned.

checkpoints/step_00000200/    complete, since it has this name
checkpoints/.tmp-step_.../    being written, or left by a crash: removed at the next start
checkpoints/latest, best      links
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mvp_engine.checkpoint import format as storage
from mvp_engine.config.schema import Checkpoint
from mvp_engine.distributed import World
from mvp_engine.errors import UserError
from mvp_engine.files import atomic_symlink, remove, remove_atomically, temporary_path
from mvp_engine.runs import STEP_PREFIX, checkpoint_step, complete_checkpoints

LOGGER = logging.getLogger("mvp_engine")


class CheckpointManager:
    def __init__(
        self, folder: Path, config: Checkpoint, world: World, along: Path | None = None
    ) -> None:
        """`along`: a folder that goes into each checkpoint as it is, if there is one."""
        self.folder, self.config, self.world, self.along = folder, config, world, along
        self.group = (
            world.new_host_group()
        )  # its own: the writing thread must not cross the main thread's collectives
        self._thread: threading.Thread | None = None
        self._best: int | None = None
        self.failed = False  # the last checkpoint was not written
        self._copies: dict[
            tuple[str, tuple[int, ...]], Tensor
        ] = {}  # on the host, used again for every checkpoint
        if world.is_main:
            folder.mkdir(parents=True, exist_ok=True)
            for leftover in folder.glob(f".tmp-{STEP_PREFIX}*"):
                remove(leftover)
            if found := complete_checkpoints(folder):
                atomic_symlink(
                    folder / "latest", found[-1].name
                )  # a crash may have come between a checkpoint and its link
        world.barrier()

    def save(self, step: int, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """Copy what this rank writes now, write it in the background. A failure is a loud warning, not the end."""
        self.wait()
        staged = self._stage(tensors)
        meta = {"step": step, **meta, "world_size": self.world.size}
        self._thread = threading.Thread(
            target=self._write, args=(step, staged, meta), name="mvp-checkpoint"
        )
        self._thread.start()
        if not self.config.background:
            self.wait()

    def _stage(self, tensors: dict[str, Tensor]) -> list[storage.Piece]:
        """Copies that training cannot change any more."""
        staged = []
        for piece in storage.cut(tensors):
            data, copy = piece.data, self._copies.get((piece.name, piece.offset))
            if copy is None or copy.shape != data.shape or copy.dtype != data.dtype:
                copy = torch.empty(data.shape, dtype=data.dtype, pin_memory=data.is_cuda)
            staged.append(piece._replace(data=copy.copy_(data, non_blocking=True)))
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()  # one wait for all copies
        self._copies = {(piece.name, piece.offset): piece.data for piece in staged}
        return staged

    def mark_best(self, step: int) -> None:
        """The checkpoint of `step`, written or being written, is the best so far."""
        self._best = step
        if self._thread is None:
            self._link_best()

    def wait(self) -> None:
        """Until the checkpoint under way, if any, is written or has failed."""
        if self._thread:
            self._thread.join()
            self._thread = None
            self._link_best()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def _write(self, step: int, staged: list[storage.Piece], meta: dict[str, Any]) -> None:
        name = f"{STEP_PREFIX}{step:08d}"
        temporary = temporary_path(self.folder / name)
        started = time.monotonic()
        self.failed = False
        try:
            storage.write(temporary, staged, self.group)
            if self.world.is_main:
                if self.along and self.along.is_dir():
                    shutil.copytree(self.along, temporary / self.along.name, dirs_exist_ok=True)
                # One of the same step has less in it; `recover` finds the new one if we are killed in between.
                storage.publish(temporary, self.folder / name, meta)
                atomic_symlink(self.folder / "latest", name)
                self._link_best()
                self._prune()
                LOGGER.info(
                    "checkpoint %s (%.2f s)", self.folder / name, time.monotonic() - started
                )
        except Exception as error:  # noqa: BLE001 - training goes on, the old ones stay
            self.failed = True
            LOGGER.error(
                "CHECKPOINT AT STEP %d WAS NOT WRITTEN: %s: %s. Training goes on; the older checkpoints are whole. "
                "Free space or mend the folder %s before the next one is due.",
                step,
                type(error).__name__,
                error,
                self.folder,
            )
            if self.world.is_main:
                remove(temporary)

    def _link_best(self) -> None:
        name = f"{STEP_PREFIX}{self._best or 0:08d}"
        if self.world.is_main and (self.folder / name / "meta.json").is_file():
            atomic_symlink(self.folder / "best", name)

    def _prune(self) -> None:
        if self.config.keep_n is None:
            return
        best = (self.folder / "best").resolve().name
        for old in complete_checkpoints(self.folder)[: -self.config.keep_n]:
            step = checkpoint_step(old) or 0
            if old.name == best or (self.config.keep_every and step % self.config.keep_every == 0):
                continue
            remove_atomically(old)


def recover(folder: Path) -> None:
    """Give the checkpoints of a run that were whole when the process died, but not yet renamed, their names."""
    for temporary in folder.glob(f".tmp-{STEP_PREFIX}*"):
        final = folder / temporary.name.removeprefix(".tmp-")
        if checkpoint_step(final) is not None:
            storage.publish_leftover(final)


def find_checkpoint(path: Path) -> Path:
    """The complete checkpoint that `path` is, or the newest of the run that `path` is."""
    storage.publish_leftover(path)
    if (path / "meta.json").is_file():
        return path.resolve()
    for folder in (path / "checkpoints", path):
        if found := complete_checkpoints(folder):
            return found[-1]
    if not path.exists():
        raise UserError(f"{path}: there is no such folder")
    raise UserError(f"{path}: neither a complete checkpoint nor a run folder that has one")

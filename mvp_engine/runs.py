"""Run folders: creating one, locking it, finding it again, reading its records. This module imports no torch.

outputs/<run_id>/
  run.json         name, creation time, status, launch command, git commit, setup (device, what trains, versions)
  config.yaml      the resolved config; can be launched again
  metrics.jsonl    one record per log interval and evaluation
  slow_steps.jsonl the slowest steps, with what their time went to
  answers.jsonl    generated answers of the evaluations; answers/ has media of some
  log.txt  loss.png  report.html  tensorboard/  checkpoints/  skipped_steps.jsonl
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mvp_engine.errors import JOB_ID, UserError, did_you_mean
from mvp_engine.files import atomic_write_text

LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is ten times as fast
STEP_PREFIX = "step_"
DIVERGED_PREFIX = "diverged-"  # checkpoints after a divergence: no launch resumes from them
SLOW_STEPS = "slow_steps.jsonl"
SWEEP_FILE = "sweep.json"  # in the folder of a sweep, next to those of its runs
REASON = 0.25  # of what a slow step took more than usual: the share of a phase that is a reason
CORRUPT_PREFIX = "corrupt-"  # checkpoints with a wrong checksum: neither
# What a launch writes before its first step; other files, unless they are empty, are worth keeping.
SETUP_FILES = {"run.json", ".lock", "config.yaml", "log.txt", "tensorboard", "hf", "processor"}
LOCK_TIMEOUT = 5.0  # seconds: ranks need a moment to exit after their launcher was killed


@dataclass
class Run:
    """One run folder."""

    dir: Path
    _lock: Any = field(default=None, repr=False)

    @property
    def id(self) -> str:
        return self.dir.name

    @property
    def checkpoints(self) -> Path:
        return self.dir / "checkpoints"

    @property
    def info(self) -> dict[str, Any]:
        return json.loads((self.dir / "run.json").read_text())

    @property
    def config(self) -> dict[str, Any]:
        """The resolved config; empty for a folder without one."""
        file = self.dir / "config.yaml"
        return yaml.load(file.read_text(), LOADER) if file.is_file() else {}

    def note(self, **entries: Any) -> None:
        """Set entries of `run.json`."""
        info = {**self.info, **entries}
        atomic_write_text(self.dir / "run.json", json.dumps(info, indent=2) + "\n")

    @classmethod
    def create(cls, root: Path, name: str, run_id: str | None, workflow: str = "train") -> Run:
        """Create a new run folder; a generated name gets a number if another launch has taken it."""
        try:
            root.mkdir(parents=True, exist_ok=True)
            folder = _named_folder(root / run_id) if run_id else _generated_folder(root, name)
            info = {
                "name": name,
                "workflow": workflow,
                "created": time.time(),
                "status": "running",
                "command": sys.argv,
                "host": socket.gethostname(),
                "launcher": launcher_id(),
                "git": _git_commit(),
            }
            atomic_write_text(folder / "run.json", json.dumps(info, indent=2) + "\n")
        except OSError as error:
            raise UserError(
                f"cannot write run folders to {root.absolute()}: {error.strerror}. "
                "Set output_dir to a writable folder."
            ) from None
        return cls(folder)

    def lock(self) -> None:
        """Claim the run for this process, until the process ends."""
        # A record lock, not flock: DataLoader workers inherit a flock, and may outlive a killed trainer.
        self._lock = open(self.dir / ".lock", "a+")  # noqa: SIM115
        deadline = time.monotonic() + LOCK_TIMEOUT
        while not _try_lock(self._lock):
            if time.monotonic() > deadline:
                self._lock.seek(0)
                owner = self._lock.read().strip() or "another process"
                raise UserError(
                    f"run {self.dir} is in use by {owner}. Stop that process first, "
                    "or start another run with resume=null."
                )
            time.sleep(0.1)
        self._lock.truncate(0)
        self._lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        self._lock.flush()

    def unlock(self) -> None:
        """Leave the run to the next one that locks it, in this process too: closing any handle would unlock it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def remove_failed_start(self) -> None:
        """Remove the folder of a launch that failed before its first step, if there is nothing else in it."""
        copied = {"metrics.jsonl"} if "parent" in self.info else set()
        kept = [file for file in self.dir.iterdir() if file.name not in SETUP_FILES | copied]
        if not any(os.listdir(file) if file.is_dir() else file.stat().st_size for file in kept):
            shutil.rmtree(self.dir, ignore_errors=True)

    def is_live(self) -> bool:
        """Whether a process holds the lock now, on this machine or on one that shares its locks."""
        with contextlib.suppress(OSError), open(self.dir / ".lock", "r+") as file:
            return not _try_lock(file)
        return False

    def status(self) -> str:
        status = str(self.info.get("status", "?"))
        return "killed" if status == "running" and not self.is_live() else status

    def checkpoint_list(self) -> list[Path]:
        """The complete checkpoints, oldest first. Other files in the folder are ignored."""
        return complete_checkpoints(self.checkpoints)

    def resume_command(self, *overrides: str) -> str:
        """The command that continues this run with its config and `overrides`; without a checkpoint, a new run."""
        words = ["mvp", "train", str(self.dir / "config.yaml")]
        has_checkpoint = bool(self.checkpoint_list())
        words += [f"resume={self.dir}"] if has_checkpoint else ["resume=null", "run_id=null"]
        nproc = os.environ.get("LOCAL_WORLD_SIZE", "1")
        words += overrides
        if nproc != "1" and "TORCHELASTIC_RUN_ID" in os.environ:  # else srun starts each rank
            words += ["--nproc", nproc]
        nodes = int(os.environ.get("WORLD_SIZE", "1")) // int(nproc)
        if nodes > 1 and "SLURM_STEP_ID" not in os.environ:
            words += ["--nnodes", str(nodes), "--node-rank", "0"]
            words += ["--master-addr", os.environ["MASTER_ADDR"]]
        return shlex.join(words)

    def records(self, split: str | None = None) -> Iterator[dict[str, Any]]:
        """The records of `metrics.jsonl`, without a last line that a crash cut off."""
        file = self.dir / "metrics.jsonl"
        if not file.is_file():
            return
        with open(file, encoding="utf-8") as lines:
            for line in lines:
                with contextlib.suppress(json.JSONDecodeError):
                    record = json.loads(line)
                    if split is None or record.get("split") == split:
                        yield record

    def rewind_metrics(self, step: int) -> None:
        """Move the records after `step`, which will be repeated, to `metrics.dropped.jsonl`."""
        file = self.dir / "metrics.jsonl"
        if not file.is_file():
            return
        kept: list[str] = []
        dropped: list[str] = []
        for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
            try:
                is_later = json.loads(line)["step"] > step
            except (json.JSONDecodeError, KeyError):
                is_later = True  # the line that was being written when the run was killed
            if is_later:
                dropped.append(line.removesuffix("\n") + "\n")
            else:
                kept.append(line)
        if dropped:
            with open(self.dir / "metrics.dropped.jsonl", "a", encoding="utf-8") as out:
                out.writelines(dropped)
            atomic_write_text(file, "".join(kept))


def _named_folder(folder: Path) -> Path:
    try:
        folder.mkdir()
    except FileExistsError:
        # Without a run.json it was created by a launch that was killed at once.
        if (folder / "run.json").exists():
            raise UserError(
                f"run folder {folder} exists already. Set resume=auto to continue it, "
                "or choose another run_id."
            ) from None
    return folder


def _generated_folder(root: Path, name: str) -> Path:
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 1
    while True:
        folder = root / (stem if number == 1 else f"{stem}-{number}")
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1


def _try_lock(file: Any) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, in the order of their steps."""
    paths = [meta.parent for meta in folder.glob(f"{STEP_PREFIX}*/meta.json") if meta.is_file()]
    steps = {path: step for path in paths if (step := checkpoint_step(path)) is not None}
    return sorted(steps, key=lambda path: (steps[path], path))


def best_checkpoint(folder: Path) -> Path | None:
    """The checkpoint in a folder whose model is used: the best one (checkpoint.best_metric), else the newest."""
    checkpoints = complete_checkpoints(folder)
    best = (folder / "best").resolve().name
    newest = checkpoints[-1] if checkpoints else None
    return next((path for path in checkpoints if path.name == best), newest)


def checkpoint_step(path: Path) -> int | None:
    """The step in the name of a checkpoint folder; None for any other path."""
    digits = path.name.removeprefix(STEP_PREFIX)
    if path.name.startswith(STEP_PREFIX) and digits.isdecimal():
        return int(digits)
    return None


def list_runs(root: Path, name: str | None = None) -> list[Run]:
    """The runs below `root`, oldest first."""
    runs: dict[tuple[float, str], Run] = {}
    for file in root.glob("*/run.json"):
        with contextlib.suppress(json.JSONDecodeError, KeyError, OSError):
            info = json.loads(file.read_text())
            if name is None or info["name"] == name:
                runs[info["created"], file.parent.name] = Run(file.parent)
    return [runs[key] for key in sorted(runs)]


def open_run(text: str, root: Path) -> Run:
    """The run that `text` names: a folder, the id of a run below `root` or a unique prefix of it, or `latest`."""
    if (Path(text) / "run.json").is_file():
        return Run(Path(text))
    runs = list_runs(root)
    if text == "latest" and runs:
        return runs[-1]
    matches = [run for run in runs if run.id == text]
    if not matches:
        matches = [run for run in runs if run.id.startswith(text)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise UserError(f"{text!r} matches several runs: {', '.join(run.id for run in matches)}")
    known = ", ".join(run.id for run in runs[-8:]) or "none"
    hint = did_you_mean(text, [run.id for run in runs])
    raise UserError(f"no run {text!r} below {root.absolute()}.{hint} The newest runs: {known}")


def trained_run(name: str, root: Path = Path("outputs")) -> Run:
    """The run that `name` names; `latest` is the newest one with a checkpoint, not one that failed at its start."""
    trained = [run for run in list_runs(root) if run.checkpoint_list()] if name == "latest" else []
    return trained[-1] if trained else open_run(name, root)


def launcher_id() -> str | None:
    """The id of the torchrun process that started this one, which stays the same when torchrun restarts its workers.

    The ranks of an elastic job move between such processes, so it has an id of its own.
    """
    if JOB_ID in os.environ:
        return os.environ[JOB_ID]
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return f"{socket.gethostname()}:{os.getppid()}:{os.environ['TORCHELASTIC_RUN_ID']}"


def flat_keys(tree: object, prefix: str = "") -> dict[str, object]:
    """Nested dicts as one dict with dotted keys."""
    if not isinstance(tree, dict) or (prefix and not tree):
        return {prefix[:-1]: tree}
    flat: dict[str, object] = {}
    for name, child in tree.items():
        flat.update(flat_keys(child, f"{prefix}{name}."))
    return flat


def _git_commit() -> str | None:
    git = shutil.which("git")
    if git is None:
        return None
    done = subprocess.run([git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None

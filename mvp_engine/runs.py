"""A run's folder on disk: making it, finding it again, reading it. No torch here: `mvp runs` stays quick.

outputs/<run_id>/
  run.json         name, creation time, status, how it was launched, git commit if there is one
  config.yaml      the resolved config; can be launched again
  metrics.jsonl    one record per log interval and evaluation
  log.txt  loss.png  tensorboard/  checkpoints/  skipped_steps.jsonl
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mvp_engine.errors import UserError
from mvp_engine.files import atomic_write_text

STEP_PREFIX = "step_"
LOCK_PATIENCE = 5.0  # seconds: the ranks of a job whose launcher was killed need a moment to notice


@dataclass
class Run:
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

    def note(self, **entries: Any) -> None:
        """Add to `run.json`."""
        atomic_write_text(
            self.dir / "run.json", json.dumps({**self.info, **entries}, indent=2) + "\n"
        )

    @classmethod
    def create(cls, root: Path, name: str, run_id: str | None, workflow: str = "train") -> Run:
        """Make a new run folder, or say clearly why that cannot be."""
        stamp = time.strftime("%Y%m%d-%H%M%S")
        try:
            root.mkdir(parents=True, exist_ok=True)
            for attempt in range(1000):
                folder = root / (run_id or f"{name}-{stamp}{f'-{attempt + 1}' if attempt else ''}")
                try:
                    folder.mkdir()
                    break
                except FileExistsError:
                    if run_id and not (folder / "run.json").exists():
                        break  # made by a launch that was killed at once
                    if run_id:
                        raise UserError(
                            f"run folder {folder} exists already. Set resume=auto to go on with it, "
                            "or choose another project.run_id."
                        ) from None
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
                "Set project.dir to a folder that you can write to."
            ) from None
        return cls(folder)

    def lock(self) -> None:
        """Claim the run for this process; the claim ends with the process, however it ends."""
        # A record lock, not flock: loader processes would inherit the latter and outlive a killed trainer with it.
        self._lock = open(self.dir / ".lock", "a+")  # noqa: SIM115
        deadline = time.monotonic() + LOCK_PATIENCE
        while not _try_lock(self._lock):
            if time.monotonic() > deadline:
                self._lock.seek(0)
                owner = self._lock.read().strip() or "another process"
                raise UserError(
                    f"run {self.dir} is being trained by {owner}. Stop that one first, "
                    "or start another run with resume=null."
                )
            time.sleep(0.1)
        self._lock.truncate(0)
        self._lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        self._lock.flush()

    def is_live(self) -> bool:
        """Is a process of this machine, or of one that shares its locks, training this run now?"""
        with contextlib.suppress(OSError), open(self.dir / ".lock", "r+") as file:
            return not _try_lock(file)
        return False

    def status(self) -> str:
        status = str(self.info.get("status", "?"))
        return "killed" if status == "running" and not self.is_live() else status

    def checkpoint_list(self) -> list[Path]:
        """The complete checkpoints, oldest first. Anything else in the folder is ignored."""
        return complete_checkpoints(self.checkpoints)

    def records(self, split: str | None = None) -> Iterator[dict[str, Any]]:
        """The records of `metrics.jsonl`; a last line cut off by a crash is passed over."""
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
        """Drop the records after `step`, which will be made again; they go to `metrics.dropped.jsonl`."""
        file = self.dir / "metrics.jsonl"
        if not file.is_file():
            return
        kept: list[str] = []
        dropped: list[str] = []
        for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
            try:
                later = json.loads(line)["step"] > step
            except (json.JSONDecodeError, KeyError):
                later = True  # the line that was being written when the run was killed
            (dropped if later else kept).append(line)
        if dropped:
            with open(self.dir / "metrics.dropped.jsonl", "a", encoding="utf-8") as away:
                away.writelines(line if line.endswith("\n") else line + "\n" for line in dropped)
            atomic_write_text(file, "".join(kept))


def _try_lock(file: Any) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def complete_checkpoints(folder: Path) -> list[Path]:
    there = [p for p in folder.glob(f"{STEP_PREFIX}*") if checkpoint_step(p) is not None]
    found = [p for p in there if (p / "meta.json").is_file()]
    return sorted(found, key=lambda p: checkpoint_step(p) or 0)


def checkpoint_step(path: Path) -> int | None:
    digits = path.name.removeprefix(STEP_PREFIX)
    return int(digits) if path.name.startswith(STEP_PREFIX) and digits.isdecimal() else None


def list_runs(root: Path, name: str | None = None) -> list[Run]:
    """The runs below `root`, oldest first."""
    runs = []
    for file in root.glob("*/run.json"):
        with contextlib.suppress(json.JSONDecodeError, KeyError, OSError):
            info = json.loads(file.read_text())
            if name is None or info["name"] == name:
                runs.append((info["created"], Run(file.parent)))
    return [run for _, run in sorted(runs, key=lambda pair: (pair[0], pair[1].id))]


def open_run(text: str, root: Path) -> Run:
    """The run that `text` names: a folder, or the id (or a unique beginning of the id) of a run below `root`."""
    if (Path(text) / "run.json").is_file():
        return Run(Path(text))
    runs = list_runs(root)
    matches = [run for run in runs if run.id == text] or [
        run for run in runs if run.id.startswith(text)
    ]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise UserError(f"{text!r} could be any of: {', '.join(run.id for run in matches)}")
    known = ", ".join(run.id for run in runs[-8:]) or "none"
    raise UserError(f"no run {text!r} below {root.absolute()}; the newest there: {known}")


def launcher_id() -> str | None:
    """Names the torchrun process that started this one: the same again after torchrun restarts its workers."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return f"{socket.gethostname()}:{os.getppid()}:{os.environ['TORCHELASTIC_RUN_ID']}"


def flat_keys(tree: object, prefix: str = "") -> dict[str, object]:
    """A tree of dicts as one dict of dotted keys."""
    if not isinstance(tree, dict) or (prefix and not tree):
        return {prefix[:-1]: tree}
    return {
        key: value
        for name, child in tree.items()
        for key, value in flat_keys(child, f"{prefix}{name}.").items()
    }


def _git_commit() -> str | None:
    git = shutil.which("git")
    if git is None:
        return None
    answer = subprocess.run([git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return answer.stdout.strip() or None

"""The run folder that a launch uses, and the checkpoint that it resumes."""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mvp_engine.checkpoint.manager import find_checkpoint, recover
from mvp_engine.config.schema import Config
from mvp_engine.errors import JOB_ID, UserError
from mvp_engine.files import atomic_write_text
from mvp_engine.runs import (
    Run,
    best_checkpoint,
    checkpoint_step,
    flat_keys,
    launcher_id,
    list_runs,
)

LOGGER = logging.getLogger("mvp_engine")


@dataclass(frozen=True)
class Start:
    run: Run
    checkpoint: Path | None
    message: str
    owned: bool = True  # this launch makes or trains the run; False: it only reads it
    before: dict[str, Any] | None = None  # `run.json` of a resumed run, as this launch found it

    @property
    def is_new(self) -> bool:
        """Whether this launch has made the run folder."""
        return self.owned and self.before is None

    @property
    def step(self) -> int:
        """The step that this launch starts from."""
        return 0 if self.checkpoint is None else checkpoint_step(self.checkpoint) or 0


def choose_start(config: Config) -> Start:
    """Called on rank 0. `resume` names a run folder, to continue it, or a checkpoint, to start a new run from it."""
    root = Path(config.project.dir).expanduser()
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if config.workflow == "train" and (restarts > 0 or JOB_ID in os.environ):
        restarted = [
            run
            for run in list_runs(root, config.project.name)
            if run.info.get("launcher") == launcher_id()
        ]
        if restarted:
            return _resume(restarted[-1], config, "restarted by torchrun")
    if config.resume == "":
        raise UserError(
            "resume= is empty: write resume=auto, the folder of a run or of a checkpoint, or resume=null for a new run"
        )
    if config.resume is None:
        return Start(_new_run(config, root), None, f"a new run of {config.project.name}")
    if config.resume == "auto":
        runs = [run for run in list_runs(root, config.project.name) if _can_resume(run, config)]
        if runs:
            return _resume(runs[-1], config, "resume=auto")
        none = f"no run named {config.project.name!r} in {root.absolute()}"
        if config.workflow != "train":
            raise UserError(f"resume=auto: {none}")
        return Start(
            _new_run(config, root), None, f"resume=auto found {none}: a new run from step 0"
        )
    path = Path(config.resume).expanduser()
    if (path / "run.json").is_file():
        find_checkpoint(path)  # named on purpose, so having none is an error
        return _resume(Run(path.resolve()), config, f"resume={path}")
    checkpoint = find_checkpoint(path, best=config.workflow != "train")
    origin = Run(checkpoint.parent.parent)
    if config.workflow != "train" and (origin.dir / "run.json").is_file():
        return Start(origin, checkpoint, f"{config.workflow} with {checkpoint}", owned=False)
    run = _new_run(config, root)
    if (origin.dir / "metrics.jsonl").is_file():
        shutil.copy(origin.dir / "metrics.jsonl", run.dir / "metrics.jsonl")
        run.rewind_metrics(checkpoint_step(checkpoint) or 0)
        (run.dir / "metrics.dropped.jsonl").unlink(missing_ok=True)
    run.note(parent=str(checkpoint))
    return Start(run, checkpoint, f"a new run from checkpoint {checkpoint}")


def _can_resume(run: Run, config: Config) -> bool:
    """A run with a checkpoint; or, for training, one that was killed before its first. Not a launch that failed."""
    if config.project.run_id not in (None, run.id) or run.info.get("workflow") != "train":
        return False
    was_killed = run.status() in ("killed", "running") and config.workflow == "train"
    return bool(run.checkpoint_list()) or was_killed or config.project.run_id is not None


def _new_run(config: Config, root: Path) -> Run:
    run = Run.create(root, config.project.name, config.project.run_id, config.workflow)
    run.lock()
    return run


def _resume(run: Run, config: Config, why: str) -> Start:
    if config.workflow == "train":
        run.lock()
        recover(run.checkpoints)
    checkpoints = run.checkpoint_list()
    if config.workflow != "train":
        if not checkpoints:
            raise UserError(
                f"{why}: run {run.dir} has no complete checkpoint to {config.workflow} with"
            )
        best = best_checkpoint(run.checkpoints) or checkpoints[-1]
        which = "" if best == checkpoints[-1] else f", the best one; the last is {checkpoints[-1]}"
        return Start(run, best, f"{why}: {config.workflow} with {best}{which}", owned=False)
    if checkpoints:
        refuse_beyond_the_end(run, checkpoint_step(checkpoints[-1]) or 0, config.loop.total_steps)
    before = run.info
    checkpoint = checkpoints[-1] if checkpoints else None
    if checkpoint is not None:
        message = f"continuing {run.dir} from {checkpoint.name}"
    elif parent := before.get("parent"):
        checkpoint = find_checkpoint(Path(parent))
        message = f"{run.dir} starts again from {parent}"
    else:
        message = f"run {run.dir} has no complete checkpoint, it starts again from step 0"
    run.note(status="running", launcher=launcher_id())
    return Start(run, checkpoint, f"{why}: {message}", before=before)


def refuse_beyond_the_end(run: Run, step: int, total: int | None) -> None:
    """Raise for a run that is past the end of this config; a step beyond the end neither finishes nor exports."""
    if total is not None and step > total:
        raise UserError(
            f"run {run.dir} is at step {step}, beyond the {total} steps of this config: nothing was trained or "
            "exported. Raise loop.total_steps or loop.epochs, or continue it with the config that it was trained "
            f"with: {run.resume_command()}"
        )


def record_config(run: Run, text: str, step: int) -> None:
    """Save the resolved config with the run. If a resumed run had another one, log the changes and keep the old."""
    file = run.dir / "config.yaml"
    if file.is_file() and (before := file.read_text()) != text:
        old = flat_keys(yaml.safe_load(before))
        new = flat_keys(yaml.safe_load(text))
        keys = [key for key in {**old, **new} if key not in ("resume", "workflow")]
        changed = [
            f"{key}: {old.get(key)!r} -> {new.get(key)!r}"
            for key in keys
            if old.get(key) != new.get(key)
        ]
        if changed:
            LOGGER.warning("from step %d on the config differs: %s", step, "; ".join(changed))
            atomic_write_text(run.dir / f"config.until_step_{step}.yaml", before)
    atomic_write_text(file, text)

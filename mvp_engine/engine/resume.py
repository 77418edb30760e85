"""The run folder that a launch uses, and the checkpoint that it resumes."""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import yaml

from mvp_engine.checkpoint.manager import find_checkpoint, recover
from mvp_engine.config.schema import Config
from mvp_engine.errors import JOB_ID, UserError
from mvp_engine.files import atomic_write_text
from mvp_engine.renamed import current_keys
from mvp_engine.runs import (
    Run,
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
    if config.resume is None:
        return Start(_new_run(config, root), None, f"a new run of {config.project.name}")
    if config.resume == "auto":
        runs = [run for run in list_runs(root, config.project.name) if _can_resume(run, config)]
        if runs:
            return _resume(runs[-1], config, "resume=auto")
        if config.workflow != "train":
            raise UserError(
                f"resume=auto: no run named {config.project.name!r} in {root.absolute()}"
            )
        where = f"no run named {config.project.name!r} in {root.absolute()}"
        return Start(
            _new_run(config, root), None, f"resume=auto found {where}: a new run from step 0"
        )
    path = Path(config.resume).expanduser()
    if (path / "run.json").is_file():
        find_checkpoint(path)  # named on purpose, so having none is an error
        return _resume(Run(path.resolve()), config, f"resume={path}")
    checkpoint = find_checkpoint(path)
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
        return Start(
            run, checkpoints[-1], f"{why}: {config.workflow} with {checkpoints[-1]}", owned=False
        )
    if checkpoints:
        refuse_beyond_the_end(run, checkpoint_step(checkpoints[-1]) or 0, config.loop.total_steps)
    run.note(status="running", launcher=launcher_id())
    if checkpoints:
        return Start(
            run, checkpoints[-1], f"{why}: continuing {run.dir} from {checkpoints[-1].name}"
        )
    if parent := run.info.get("parent"):
        return Start(
            run, find_checkpoint(Path(parent)), f"{why}: {run.dir} starts again from {parent}"
        )
    return Start(
        run, None, f"{why}: run {run.dir} has no complete checkpoint, it starts again from step 0"
    )


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
        old = current_keys(flat_keys(yaml.safe_load(before)))
        new = flat_keys(yaml.safe_load(text))
        changed = [
            f"{k}: {old.get(k)!r} -> {new.get(k)!r}"
            for k in {**old, **new}
            if old.get(k) != new.get(k)
        ]
        changed = [line for line in changed if not line.startswith(("resume:", "workflow:"))]
        if changed:
            LOGGER.warning("from step %d on the config differs: %s", step, "; ".join(changed))
            atomic_write_text(run.dir / f"config.until_step_{step}.yaml", before)
    atomic_write_text(file, text)

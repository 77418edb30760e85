"""The state of a training in a checkpoint: everything that the next step depends on, saved and restored."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import platform
import shutil
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from torch import Tensor

from mvp_engine.checkpoint import CorruptCheckpoint, SavedState
from mvp_engine.checkpoint.manager import find_checkpoint, recover
from mvp_engine.checkpoint.state import read_state
from mvp_engine.config.schema import Config
from mvp_engine.data import derived_seed, rng_state, seed_everything, set_rng_state
from mvp_engine.distributed.world import raise_on_all_ranks
from mvp_engine.errors import JOB_ID, UserError, count
from mvp_engine.files import as_url, atomic_write_text, is_url, remove
from mvp_engine.hf.model.model_parts import table, trained_parts
from mvp_engine.log import backend_factory
from mvp_engine.runs import (
    CORRUPT_PREFIX,
    STEP_PREFIX,
    Run,
    best_checkpoint,
    checkpoint_step,
    flat_keys,
    launcher_id,
    list_runs,
)

if TYPE_CHECKING:
    from mvp_engine.config.schema import Parallel
    from mvp_engine.distributed import World
    from mvp_engine.engine.engine import Engine

LOGGER = logging.getLogger("mvp_engine")


@dataclass(frozen=True)
class Start:
    run: Run
    checkpoint: Path | None
    message: str
    remote: str | None = (
        None  # the URL of a run or a checkpoint to download: see `download_checkpoint`
    )
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


def agree_on_start(config: Config, world: World) -> Start:
    """Rank 0 chooses the run and the checkpoint and broadcasts them; a user error there is raised on all ranks."""
    chosen: Start | None = None
    unlocked: Start | None = None  # without the lock of the run folder, which rank 0 keeps
    with raise_on_all_ranks(world.host_group):
        if world.is_main:
            for entry in config.log.backends:
                backend_factory(entry, config.engine)  # raises for a wrong one before data is read
            chosen = choose_start(config)
            unlocked = replace(chosen, run=Run(chosen.run.dir))
    start: Start = world.broadcast(unlocked)
    folder = start.run.dir.absolute()
    if world.any(not folder.is_dir())[0]:
        if chosen and chosen.is_new:
            chosen.run.remove_failed_start()
        raise UserError(
            f"the run folder {folder}, which rank 0 created, does not exist on another node: set output_dir to a "
            "folder that all nodes share"
        )
    return download_checkpoint(chosen or start, world, config.workflow)


def choose_start(config: Config) -> Start:
    """Called on rank 0. `resume` names a run folder, to continue it, or a checkpoint, to start a new run from it."""
    root = Path(config.output_dir).expanduser()
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if config.workflow == "train" and (restarts > 0 or JOB_ID in os.environ):
        restarted = [
            run
            for run in list_runs(root, config.run_name)
            if run.info.get("launcher") == launcher_id()
        ]
        if restarted:
            # The disk is that of the run: its checkpoints are here.
            local = config.checkpoint.model_copy(update={"remote": None})
            config = config.model_copy(update={"checkpoint": local})
            return _resume(restarted[-1], config, "restarted by torchrun")
    if config.resume == "":
        raise UserError(
            "resume= is empty: write resume=auto, the folder of a run or of a checkpoint, or resume=null for a new run"
        )
    if config.resume is None:
        return Start(_new_run(config, root), None, f"a new run of {config.run_name}")
    if config.resume == "auto":
        runs = [run for run in list_runs(root, config.run_name) if _can_resume(run, config)]
        runs += _newer_remote_run(config, root, runs[-1:])
        if runs:
            return _resume(runs[-1], config, "resume=auto")
        none = f"no run named {config.run_name!r} in {root.absolute()}"
        if config.workflow != "train":
            raise UserError(f"resume=auto: {none}")
        return Start(
            _new_run(config, root), None, f"resume=auto found {none}: a new run from step 0"
        )
    if is_url(config.resume):
        return _resume_url(as_url(config.resume).rstrip("/"), config, root)
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


def _newer_remote_run(config: Config, root: Path, local: list[Run]) -> list[Run]:
    """The newest run of this name at `checkpoint.remote`, as a run folder here, unless a local one is newer."""
    if config.checkpoint.remote is None:
        return []
    from mvp_engine.checkpoint.remote import newest_run

    found = newest_run(config.checkpoint.remote, config.run_name, config.run_id)
    if not found or (local and local[0].info["created"] > found[0]):
        return []
    return [_adopt(found[1], root)]


def _remote_steps(url: str) -> list[int]:
    """The steps of the complete checkpoints of the run at a URL."""
    from mvp_engine.checkpoint.remote import manifests

    return [*manifests(url)]


def _adopt(url: str, root: Path) -> Run:
    """The run folder of a run at a URL; its files are downloaded if it is not there."""
    from mvp_engine.checkpoint.remote import adopt_run

    run = Run(root / url.rpartition("/")[2])
    if not (run.dir / "run.json").is_file():
        run.dir.mkdir(parents=True, exist_ok=True)
        adopt_run(url, run.dir)
    return run


def _resume_url(url: str, config: Config, root: Path) -> Start:
    """Continue the run at a URL, or start a new run from a checkpoint there, or read one."""
    step = checkpoint_step(Path(url))
    if config.workflow == "train" and step is None:
        if not _remote_steps(url):
            raise UserError(f"resume={url}: there is no run with a complete checkpoint")
        return _resume(_adopt(url, root), config, f"resume={url}", url)
    run = _new_run(config, root)
    run.note(parent=url)
    message = f"a new run from checkpoint {url}"
    return Start(
        run, None, message if config.workflow == "train" else f"{config.workflow} with {url}", url
    )


def download_checkpoint(start: Start, world: World, workflow: str) -> Start:
    """The start with a local checkpoint in place of one at a URL. All ranks call it."""
    if start.remote is None:
        return start
    if start.before is None:
        best = workflow != "train"
        get = partial(find_checkpoint, Path(start.remote), best)
        world.once_per_node(get, f"checkpoint/{start.run.id}")
        return replace(start, checkpoint=get())
    from mvp_engine.checkpoint.remote import fetch_newest

    local = world.broadcast(start.run.checkpoint_list()[-1:])
    after = max((checkpoint_step(path) or 0 for path in local), default=-1)
    found = fetch_newest(start.remote, start.run.checkpoints, after, world)
    if found is None and not local:
        raise UserError(f"{start.remote} has no intact checkpoint, and {start.run.dir} has none")
    return replace(start, checkpoint=found or local[0])


def _can_resume(run: Run, config: Config) -> bool:
    """A run with a checkpoint; or, for training, one that was killed before its first. Not a launch that failed."""
    if config.run_id not in (None, run.id) or run.info.get("workflow") != "train":
        return False
    was_killed = run.status() in ("killed", "running") and config.workflow == "train"
    return bool(run.checkpoint_list()) or was_killed or config.run_id is not None


def _new_run(config: Config, root: Path) -> Run:
    run = Run.create(root, config.run_name, config.run_id, config.workflow)
    run.lock()
    return run


def _resume(run: Run, config: Config, why: str, url: str | None = None) -> Start:
    """Continue a run from its newest checkpoint: here, or at its `url`, by default in `checkpoint.remote`."""
    if config.checkpoint.remote is not None and url is None:
        url = f"{config.checkpoint.remote.rstrip('/')}/{run.id}"
    if config.workflow == "train":
        run.lock()
        recover(run.checkpoints)
    checkpoints = run.checkpoint_list()
    if config.workflow != "train":
        if not checkpoints and url is not None and _remote_steps(url):
            return Start(run, None, f"{why}: {config.workflow} with {url}", url, owned=False)
        if not checkpoints:
            raise UserError(
                f"{why}: run {run.dir} has no complete checkpoint to {config.workflow} with"
            )
        best = best_checkpoint(run.checkpoints) or checkpoints[-1]
        which = "" if best == checkpoints[-1] else f", the best one; the last is {checkpoints[-1]}"
        return Start(run, best, f"{why}: {config.workflow} with {best}{which}", owned=False)
    checkpoint = checkpoints[-1] if checkpoints else None
    step = -1 if checkpoint is None else checkpoint_step(checkpoint) or 0
    newest = max(_remote_steps(url), default=-1) if url is not None else -1
    if url is not None and newest > step:
        from mvp_engine.checkpoint.remote import adopt_run

        adopt_run(url, run.dir)  # with the metrics until then
        step = newest
        checkpoint = run.checkpoints / f"{STEP_PREFIX}{step:08d}"
        why = f"{why}: {url} has a newer checkpoint"
    else:
        url = None
    refuse_beyond_the_end(run, step, config.train.max_steps)
    before = run.info
    if checkpoint is not None:
        message = f"continuing {run.dir} from {checkpoint.name}"
    elif parent := before.get("parent"):
        checkpoint = find_checkpoint(Path(parent))
        message = f"{run.dir} starts again from {parent}"
    else:
        message = f"run {run.dir} has no complete checkpoint, it starts again from step 0"
    run.note(status="running", launcher=launcher_id())
    return Start(run, checkpoint, f"{why}: {message}", url, before=before)


def refuse_beyond_the_end(run: Run, step: int, total: int | None) -> None:
    """Raise for a run that is past the end of this config; a step beyond the end neither finishes nor exports."""
    if total is not None and step > total:
        raise UserError(
            f"run {run.dir} is at step {step}, beyond the {total} steps of this config: nothing was trained or "
            "exported. Raise train.max_steps or train.epochs, or continue it with the config that it was trained "
            f"with: {run.resume_command()}"
        )


def record_config(run: Run, text: str, step: int) -> None:
    """Save the resolved config with the run. If a resumed run had another one, log the changes and keep the old."""
    file = run.dir / "config.yaml"
    if file.is_file() and (before := file.read_text()) != text:
        old = flat_keys(yaml.safe_load(before))
        new = flat_keys(yaml.safe_load(text))
        keys = [key for key in {**old, **new} if key not in ("resume", "workflow", "run_id")]
        changed = [
            f"{key}: {old.get(key)!r} -> {new.get(key)!r}"
            for key in keys
            if old.get(key) != new.get(key)
        ]
        if changed:
            LOGGER.warning("from step %d on the config differs: %s", step, "; ".join(changed))
            atomic_write_text(run.dir / f"config.until_step_{step}.yaml", before)
    atomic_write_text(file, text)


def collect_state(engine: Engine) -> dict[str, Tensor]:
    """This rank's tensors for a checkpoint of the current step."""
    shared = {
        "layout": _sizes(engine),
        "step": engine.step,
        "best": engine.best,
        "evals_since_best": engine.evals_since_best,
        "evaluated_at": engine.evaluated_at,
        "feed": engine.feed.state_dict(),
        "first_step": engine.feed.first_step,
        "guard": engine.guard.state_dict(),
        "extra": engine.extra_state(),
    }
    saved_names = engine.model.state_dict().keys()
    buffers = dict(engine.model.named_buffers())
    own: dict[str, Any] = {
        "rng": rng_state(),
        "metrics": engine.metrics.state_dict(),
        "feed": engine.feed.rank_state_dict(),
        # Running statistics differ between ranks; other buffers are computed from the config.
        "buffers": {name: buffers[name].cpu() for name in buffers if name in saved_names},
    }
    return engine.model_engine.collect(shared, own)


def restore_state(engine: Engine, checkpoint: Path) -> None:
    """Restore the state that `checkpoint` was written with."""
    rank = engine.world.rank
    saved, checkpoint = _restore_newest_intact(engine, checkpoint)
    if "step" not in saved.shared:
        raise UserError(
            f"{checkpoint} is of a model engine, not of a training: it has no position in the data. "
            "Merge it into a Hugging Face folder (mvp export) and start a new run from that (model.path)."
        )
    engine.step = saved.shared["step"]
    engine.best = saved.shared["best"]
    engine.evals_since_best = saved.shared.get("evals_since_best", 0)  # not in older checkpoints
    engine.evaluated_at = saved.shared["evaluated_at"]
    engine.saved_at = engine.step if _is_of_this_run(engine, checkpoint) else -1
    engine.guard.load_state_dict(saved.shared["guard"], engine.step)
    if not engine.feed.is_restarted:
        _load_feed(engine, saved)
    engine.epoch = engine.feed.epoch
    engine.load_extra_state(saved.shared["extra"])
    if len(saved.ranks) == engine.world.size and saved.shared["layout"] == _sizes(engine):
        own = saved.ranks[rank]
        buffers = dict(engine.model.named_buffers())
        for name, saved_buffer in own["buffers"].items():
            buffers[name].copy_(saved_buffer)
        engine.metrics.load_state_dict(own["metrics"])
        set_rng_state(own["rng"])
        return
    # On another layout one rank continues the sums of all ranks, and generators are seeded again.
    if engine.layout.is_metrics_rank:
        for other in saved.ranks:
            engine.metrics.merge(other["metrics"])
    seed_everything(
        derived_seed(engine.config.seed, "rank", engine.layout.dropout_rank, "step", engine.step)
    )


def _load_feed(engine: Engine, saved: SavedState) -> None:
    feed = saved.shared["feed"]
    engine.feed.load_state_dict(feed, len(saved.ranks), lambda rank: saved.ranks[rank]["feed"])


def restart_changed_data(engine: Engine) -> None:
    """Set the step at which the first epoch of the training data began: 0, or where a resume met changed data.

    With `resume_data=restart` that is now, if the position of the checkpoint is not valid for the data: later resumes
    of the same command continue them. All ranks call it.
    """
    may_restart = engine.config.resume_data == "restart"
    if engine.checkpoint is None or not (may_restart or "data_restarts" in engine.run.info):
        return
    feed = engine.feed
    saved = None
    with contextlib.suppress(CorruptCheckpoint, OSError, KeyError):  # reported when it is loaded
        saved = read_state(engine.checkpoint)
        feed.first_step = int(saved.shared.get("first_step", 0))
    if not may_restart:
        return
    reason = None
    if saved is not None and "step" in saved.shared:
        try:
            _load_feed(engine, saved)
        except UserError as error:
            reason = str(error).partition(": ")[0]
        feed.rewind()
    is_changed = engine.world.any(reason is not None)[0]
    if not is_changed or saved is None:
        return
    feed.is_restarted = True
    feed.first_step = step = int(saved.shared["step"])
    LOGGER.warning("resume_data=restart: the first epoch begins at step %d, since %s", step, reason)
    if engine.world.is_main:
        restarts = engine.run.info.get("data_restarts", [])
        engine.run.note(data_restarts=[*restarts, {"step": step, "why": reason}])


def _restore_newest_intact(engine: Engine, checkpoint: Path) -> tuple[SavedState, Path]:
    """Load a checkpoint, or, where one of this run is corrupt, the one before it."""
    while True:
        try:
            return engine.model_engine.restore(checkpoint), checkpoint
        except CorruptCheckpoint as error:
            if not _is_of_this_run(engine, checkpoint):
                raise
            older = engine.world.broadcast(_set_aside(engine, checkpoint))
            if older is None:
                raise UserError(
                    f"{error} {engine.run.dir} has no older one. Start again from step 0 with resume=null, or from "
                    "the checkpoint of another run with resume=FOLDER"
                ) from error
            text = (
                f"{error} Kept as {CORRUPT_PREFIX}{checkpoint.name}; {older.name} is used instead"
            )
            engine.logger.warning(text)
            engine.greeting = f"{engine.greeting}; {text}"
            checkpoint = older


def _set_aside(engine: Engine, checkpoint: Path) -> Path | None:
    """Rename a corrupt checkpoint on rank 0, so that no launch finds it; returns the newest one before it."""
    if not engine.world.is_main:
        return None
    older = [path for path in engine.run.checkpoint_list() if path.name < checkpoint.name]
    if older:
        # On a read-only disk it stays, and is found corrupt again.
        with contextlib.suppress(OSError):
            target = checkpoint.with_name(f"{CORRUPT_PREFIX}{checkpoint.name}")
            remove(target)
            checkpoint.rename(target)
    return older[-1] if older else None


def _is_of_this_run(engine: Engine, checkpoint: Path) -> bool:
    return checkpoint.resolve().parent == engine.run.checkpoints.resolve()


def _sizes(engine: Engine) -> list[int]:
    layout = engine.layout
    sizes = [layout.replicate, layout.shard, layout.ulysses, layout.tensor]
    if layout.pipeline > 1:
        return [*sizes, layout.context, layout.pipeline]
    # Checkpoints from before context parallel have four sizes.
    return [*sizes, layout.context] if layout.context > 1 else sizes


# What a training is set up with: `auto` intervals as numbers, and what is logged at its start and kept in `run.json`
# for its report.

# Of `auto`: so many in a training, and at most so many steps between two.
INTERVALS = {
    ("log", "interval"): (50, 10),
    ("eval", "steps"): (10, 400),
    ("checkpoint", "interval"): (5, 200),
}


def with_intervals(config: Config, total_steps: int | None) -> Config:
    """The config with numbers in place of `auto` intervals, which follow from the number of steps, if it is known."""
    chosen = []
    for (section, key), (times, most) in INTERVALS.items():
        values = getattr(config, section)
        if getattr(values, key) == "auto":
            steps = min(most, -(-(total_steps or times * most) // times))
            update = {section: values.model_copy(update={key: steps})}
            config = config.model_copy(update=update)
            chosen.append(f"{section}.{key}={steps}")
    if chosen:
        total = f"{total_steps:,} steps" if total_steps else "an unknown number of steps"
        LOGGER.info("auto, for %s: %s", total, ", ".join(chosen))
    return config


def record_setup(engine: Engine, accumulation: int) -> None:
    """Log the setup and note it in the run folder. `accumulation`: micro-batches of a rank in one step."""
    world = engine.model_engine.world  # of the ranks that train, which may be other processes
    layout = layout_text(engine.parallel, world.size)
    parts = trained_parts(engine.model, engine.model_engine.param_groups)
    setup = {
        "device": _device_name(world.device),
        "ranks": world.size,
        "layout": layout,
        "precision": engine.model_engine.settings.precision,
        "total_steps": engine.total_steps,
        "global_batch": count(engine.global_batch_size, engine.batch_unit),
        "parts": parts,
        "versions": _versions(),
    }
    if described := engine.describe_training():
        setup["training"] = described
    if world.is_main:
        engine.run.note(setup=setup)
    division = engine.batch_division or (
        f"on {count(engine.layout.data_size, 'data-parallel rank')}, {count(accumulation, 'micro-batch')} each"
    )
    engine.logger.info(
        f"run {engine.run.dir}: {parts[-1]['trained']:,} of {parts[-1]['parameters']:,} parameters train, "
        f"{setup['precision']} on {world.size} x {world.device.type} ({layout}); steps {engine.step} to "
        f"{engine.total_steps or '?'}; global batch of {setup['global_batch']} {division}"
    )
    if text := table(parts):
        engine.logger.info(f"what trains:\n{text}")


def layout_text(parallel: Parallel, ranks: int) -> str:
    """The ranks and the dimensions of `parallel` that are not 1: `8 ranks: replicate=2, shard=4`."""
    names = ("shard", "tensor", "context", "pipeline", "ulysses", "expert")
    sizes = {name: getattr(parallel, name) for name in names}
    replicas = ranks // math.prod(sizes[name] for name in names[:-1])
    sizes = {"replicate": replicas, **sizes}
    shown = ", ".join(f"{name}={size}" for name, size in sizes.items() if size != 1)
    return f"{count(ranks, 'rank')}: {shown}" if shown else count(ranks, "rank")


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        # Of the GPUs of worker processes: asking for the name would take memory there.
        return torch.cuda.get_device_name(device) if torch.cuda.is_initialized() else "GPU"
    return f"CPU, {count(torch.get_num_threads(), 'thread')}"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("mvp-engine", "torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["CUDA"] = torch.version.cuda
    return found

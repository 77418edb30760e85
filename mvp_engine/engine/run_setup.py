"""What a training is set up with: logged at its start, and kept in `run.json` for its report."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch

from mvp_engine.errors import count
from mvp_engine.hf.parts import table, trained_parts

if TYPE_CHECKING:
    from mvp_engine.engine.engine import Engine


def record_setup(engine: Engine, accumulation: int) -> None:
    """Log the setup and note it in the run folder. `accumulation`: micro-batches of a rank in one step."""
    world = engine.model_engine.world  # in RL not the controller's own
    groups = engine.model_engine.param_groups
    parts = trained_parts(engine.model, groups)
    everything = parts[-1]
    setup: dict[str, Any] = {
        "device": _device_name(world.device),
        "ranks": world.size,
        "precision": engine.model_engine.settings.precision,
        "first_step": engine.step,
        "total_steps": engine.total_steps,
        "global_batch": count(engine.global_batch_size, engine.batch_unit),
        "parts": parts,
        "versions": _versions(),
    }
    if engine.world.is_main:
        engine.run.note(setup=setup)
    trained = f"{everything['trained']:,}"
    if everything["trained"] != everything["parameters"]:
        trained += f" of {everything['parameters']:,}"
    engine.logger.info(
        f"run {engine.run.dir}: {trained} parameters train, {setup['precision']} on "
        f"{world.size} x {world.device.type}; "
        f"steps {engine.step} to {engine.total_steps or '?'}; global batch of {setup['global_batch']} "
        f"{engine.batch_division(accumulation)}"
    )
    if text := table(engine.model, groups):
        engine.logger.info("what trains:\n%s", text)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda" and not torch.cuda.is_initialized():
        return "GPU"  # of worker processes: asking for its name would take memory of it here
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
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

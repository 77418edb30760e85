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
    optimizer = engine.model_engine.optimizer
    parts = trained_parts(engine.model, optimizer)
    everything = parts[-1]
    setup: dict[str, Any] = {
        "device": _device_name(engine.device),
        "ranks": engine.world.size,
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
        f"{engine.world.size} x {engine.device.type}; "
        f"steps {engine.step} to {engine.total_steps or '?'}; global batch of {setup['global_batch']} on "
        f"{count(engine.layout.data_size, 'data-parallel rank')}, {count(accumulation, 'micro-batch')} each"
    )
    if text := table(engine.model, optimizer):
        engine.logger.info("what trains:\n%s", text)


def _device_name(device: torch.device) -> str:
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

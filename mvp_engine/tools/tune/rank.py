"""One rank of a trial: a short training of the config's own engine, which saves nothing and measures itself.

It writes two files into `--folder`: `facts.json` before the first step, and `measured.json` at the end.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mvp_engine.config import Composed
from mvp_engine.data.batch import PackedBatch
from mvp_engine.data.speech import num_positions
from mvp_engine.distributed import World
from mvp_engine.engine import Engine, StepContext
from mvp_engine.engine.meter import peak_memory
from mvp_engine.errors import UserError
from mvp_engine.hf.packed_model import PackedModel
from mvp_engine.hf.parts import by_part
from mvp_engine.kit.data.settings import MLLMData, data_section
from mvp_engine.kit.estimate.blocks import BlockCosts
from mvp_engine.kit.estimate.settings import GIB, EstimateSettings
from mvp_engine.launch import launch, leave
from mvp_engine.model_engine.fsdp.compile import WARM_UP_STEPS
from mvp_engine.process.pipes import ignore_broken_pipes
from mvp_engine.tools.temporary_run import temporary_run

SECONDS = 5.0  # of measured steps
FEWEST_STEPS = 2
MOST_STEPS = 20


def main(argv: list[str] | None = None) -> int:
    ignore_broken_pipes()
    parser = argparse.ArgumentParser(prog="mvp tune")
    parser.add_argument("--config", required=True)
    parser.add_argument("--folder", required=True, type=Path)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args(argv)
    overrides = [
        *args.overrides,
        f"loop.total_steps={WARM_UP_STEPS + MOST_STEPS}",
        "loop.epochs=null",
        "loop.eval_interval=null",
        "checkpoint.interval=null",
        "checkpoint.patience=null",
        "log.backends=[terminal]",
    ]
    return leave(launch(args.config, overrides, partial(_run_trial, args.folder)))


def _run_trial(folder: Path, composed: Composed, world: World) -> int:
    engine_class = measured(composed.engine_class, folder)
    with temporary_run(world, composed.config.project.name, "mvp-tune-") as run:
        with engine_class(composed.config, world, run, None, "a trial of mvp tune") as engine:
            engine.train()
        world.barrier()
    return 0


def measured(engine_class: type[Engine], folder: Path) -> type[Engine]:
    """A subclass that trains some steps to warm up, measures a few more, and saves nothing."""

    class Measured(engine_class):  # type: ignore[misc, valid-type]
        _last_step: int | None = None  # of the measured ones

        def before_train(self) -> None:
            super().before_train()
            if self.world.is_main:
                (folder / "facts.json").write_text(json.dumps(facts_of(self)))

        def train_pre_step(self, ctx: StepContext) -> None:
            # Before hooks change the micro-batches. The ranks of a model-parallel group have the same ones.
            self._tokens = sum(map(_num_tokens, ctx.micro_batches))
            self._tokens *= self.layout.is_mp_src_rank
            super().train_pre_step(ctx)

        def train_post_step(self, ctx: StepContext) -> None:
            super().train_post_step(ctx)
            if ctx.step == WARM_UP_STEPS - 1:
                self._started = self._now()
            elif ctx.step == WARM_UP_STEPS:
                now = self._now()
                # How many steps follow is the same on all ranks; between them nothing waits for the device.
                seconds = self.world.broadcast(now - self._started)
                steps = min(MOST_STEPS, max(FEWEST_STEPS, math.ceil(SECONDS / seconds)))
                self._last_step = ctx.step + steps
                self._started = now
                self._measured_tokens = 0
            elif self._last_step is not None:
                self._measured_tokens += self._tokens
                if ctx.step == self._last_step:
                    self._write(self._now() - self._started)
                    ctx.stop = True

        def _now(self) -> float:
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter()

        def _write(self, seconds: float) -> None:
            assert self._last_step is not None
            tokens = sum(self.world.all_gather(self._measured_tokens))
            peak = max(self.world.all_gather(peak_memory(self.device)))
            steps = self._last_step - WARM_UP_STEPS
            found = {
                "tokens_per_s": tokens / seconds,
                "step_s": seconds / steps,
                "steps": steps,
                "peak_gib": peak / GIB,
            }
            if self.world.is_main:
                (folder / "measured.json").write_text(json.dumps(found))

        def save(self) -> None:
            """A trial writes no checkpoint."""

        def after_train(self) -> None:
            """A trial exports nothing."""

    return Measured


def facts_of(engine: Engine) -> dict[str, Any]:
    """The numbers that the config stands for, and what may change: on this device and these ranks."""
    section, data = data_section(engine.config)
    model: Any = engine.model
    blocks = BlockCosts(model, EstimateSettings()).blocks if isinstance(model, PackedModel) else []
    parts = list(dict.fromkeys(block.part for block in blocks if block.in_backward))
    if "projector" in parts:
        parts.remove("projector")
    key = "model.activation_checkpointing"
    modes = by_part(model, engine.config.model.activation_checkpointing, key)
    setting: Any = engine.config.model.compile
    is_cuda = engine.device.type == "cuda"
    is_compiled = any(block.module._compiled_call_impl is not None for block in blocks)
    compiles: list[str | None] = [setting if is_compiled else None]
    if isinstance(setting, Mapping):
        compiles = ["as in the config"]
    elif is_compiled:
        compiles.append(None)
    elif setting is None and is_cuda:
        compiles.append("auto")
    return {
        "section": section,
        "tokens": data.pack_tokens,
        "packs": engine.global_batch_size,
        "row_tokens": data.row_tokens or data.pack_tokens,
        "least_tokens": data.row_tokens or longest_row(engine, data),
        "data_ranks": engine.layout.data_size,
        "parts": parts,
        "modes": [modes.get(part, "none") for part in parts],
        "is_in_packs": engine.config.data.global_batch_size is not None,
        "compiles": compiles,
        "device": torch.cuda.get_device_name(engine.device) if is_cuda else "CPU",
        "ranks": engine.world.size,
        "auto": engine.run.info.get("auto", {}).get("reason"),
    }


def longest_row(engine: Engine, data: MLLMData) -> int:
    """The longest row of the data, where it is known, or the most tokens that a row may have."""
    limit: int = data.pack_tokens
    costs = getattr(getattr(engine.feed.loader, "dataset", None), "costs", None)
    if not costs:
        return limit  # of a stream
    tokens = np.concatenate([cost.tokens for cost in costs])
    if data.overlong != "drop" and (tokens > limit).any():
        return limit
    return int(tokens[tokens <= limit].max())


def _num_tokens(micro_batch: Any) -> int:
    if not isinstance(micro_batch, PackedBatch):
        raise UserError(
            f"mvp tune counts the tokens of packed batches; this engine trains on {type(micro_batch).__name__}"
        )
    return num_positions(micro_batch)


if __name__ == "__main__":
    sys.exit(main())

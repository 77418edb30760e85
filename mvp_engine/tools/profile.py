"""`mvp profile`: some steps of a recipe's own training under torch.profiler, and where their time went."""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from mvp_engine.config import Composed
from mvp_engine.distributed import World
from mvp_engine.engine import Engine, StepContext
from mvp_engine.engine.meter import peak_memory
from mvp_engine.errors import UserError
from mvp_engine.launch import launch
from mvp_engine.process.pipes import ignore_broken_pipes
from mvp_engine.tools.gpu_clock import ClockSamples, sampled_clock
from mvp_engine.tools.profile_kernels import (
    DATA_WAIT,
    collectives_of,
    data_waits_of,
    kernels_of,
    summary,
)
from mvp_engine.tools.profile_page import page
from mvp_engine.tools.temporary_run import temporary_run


def main(argv: list[str] | None = None) -> int:
    """Run one rank of a profile."""
    ignore_broken_pipes()
    parser = argparse.ArgumentParser(prog="mvp profile")
    parser.add_argument("--config", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args(argv)
    # Only training steps: no evaluation, no log files, and a total that lets all profiled steps run.
    last = args.first + 2 * args.steps
    overrides = [
        *args.overrides,
        f"loop.total_steps={last}",
        "loop.epochs=null",
        "loop.eval_interval=null",
        "log.backends=[terminal]",
    ]
    return launch(args.config, overrides, partial(_profile, args.out, args.first, args.steps))


def _profile(out: Path, first: int, steps: int, composed: Composed, world: World) -> int:
    if composed.config.resume is not None:
        raise UserError("mvp profile starts a new training: leave resume out")
    engine_class = profiled(composed.engine_class, out, first, steps)
    if world.is_main:
        try:
            out.mkdir(parents=True, exist_ok=True)
            (out / "profile.md").unlink(missing_ok=True)
        except OSError as error:
            raise UserError(
                f"--out {out}: {error.strerror}. Name a folder that can be written to"
            ) from None
    with temporary_run(world, composed.config.project.name, "mvp-profile-") as run:
        with engine_class(composed.config, world, run, None, "a profile") as engine:
            engine.train()
        world.barrier()
    if not (out / "profile.md").is_file():
        last = first + 2 * steps - 1
        raise UserError(
            f"the data ended before step {last}: profile fewer steps (--steps, --first)"
        )
    if world.is_main:
        print((out / "profile.md").read_text())
        print(f"Trace, for ui.perfetto.dev: {out / 'trace.json'}")
    return 0


def profiled(engine_class: type[Engine], out: Path, first: int, steps: int) -> type[Engine]:
    """A subclass that trains up to step `first`, times `steps` steps, profiles as many more, and saves nothing.

    `out` gets `trace.json`, `profile.md` and `profile.json`. The timed steps run without the profiler, which
    slows the host down.
    """

    class Profiled(engine_class):  # type: ignore[misc, valid-type]
        profiler: profile | None = None
        _clock: ClockSamples | None = None
        _clock_facts: dict[str, float] = {}  # noqa: RUF012

        def _now(self) -> float:
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter()

        def before_train(self) -> None:
            super().before_train()
            take = self.feed.take

            def labelled_take() -> list[Any]:
                with record_function(DATA_WAIT):
                    return take()

            self.feed.take = labelled_take
            if self.device.type == "cuda" and self.world.is_main:
                gpu = f"GPU-{torch.cuda.get_device_properties(self.device).uuid}"
                self._clock = self._closing.enter_context(sampled_clock(gpu))
            self._started = self._now()

        def train_post_step(self, ctx: StepContext) -> None:
            super().train_post_step(ctx)
            # Each window is whole steps, with their wait for data.
            if ctx.step == first - 1:
                self._started = self._now()
            if ctx.step == first + steps - 1:
                now = self._now()
                self._timed_seconds = now - self._started
                if self._clock is not None:
                    self._clock_facts = self._clock.between(self._started, now)
                activities = [ProfilerActivity.CPU]
                if self.device.type == "cuda":
                    activities.append(ProfilerActivity.CUDA)
                self.profiler = profile(activities=activities)
                self.profiler.start()
                self._started = self._now()
            if self.profiler is not None and ctx.step == first + 2 * steps - 1:
                seconds = self._now() - self._started
                self.profiler.stop()
                if self.world.is_main:
                    self._write_files(seconds)
                ctx.stop = True

        def _write_files(self, seconds: float) -> None:
            assert self.profiler is not None
            kernels = kernels_of(self.profiler, self.device.type)
            collectives = collectives_of(self.profiler, kernels)
            waits = data_waits_of(self.profiler)
            facts = summary(kernels, seconds, steps, memory_by_kind(self), collectives, waits)
            facts["step_ms_alone"] = 1e3 * self._timed_seconds / steps
            facts |= self._clock_facts
            self.profiler.export_chrome_trace(str(out / "trace.json"))
            (out / "profile.json").write_text(json.dumps(facts, indent=2) + "\n")
            title = f"{self.config.project.name} on {self.world.size} x {_device_name(self.device)}"
            (out / "profile.md").write_text(page(facts, title))

        def save(self) -> None:
            """A profile writes no checkpoint."""

        def after_train(self) -> None:
            """A profile exports nothing."""

    return Profiled


def memory_by_kind(engine: Engine) -> dict[str, float]:
    """GiB on this rank: static memory, what the peak needs in addition, and the peak itself."""
    params = list(engine.model.parameters())
    optimizer = engine.model_engine.optimizer
    state: dict[Any, Any] = {} if optimizer is None else optimizer.state
    state_bytes = 0
    for entry in state.values():
        for value in entry.values():
            if isinstance(value, torch.Tensor) and value.device.type == engine.device.type:
                state_bytes += _local_bytes(value)
    sizes = {
        "parameters": sum(_local_bytes(p) for p in params),
        "gradients": sum(_local_bytes(p) for p in params if p.requires_grad),
        "optimizer state": state_bytes,
    }
    peak = peak_memory(engine.device)
    sizes["activations, copies and workspace, at the peak"] = max(0, peak - sum(sizes.values()))
    sizes["peak"] = peak
    return {kind: size / 2**30 for kind, size in sizes.items()}


def _local_bytes(tensor: Any) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.numel() * local.element_size()


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


if __name__ == "__main__":
    sys.exit(main())

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
from mvp_engine.tools.profile_kernels import DATA_WAIT, mark, read_events, summary
from mvp_engine.tools.profile_page import page
from mvp_engine.tools.temporary_run import temporary_run

FILES = ("profile.md", "profile.json", "trace.json")


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
    last = last_step(args.first, args.steps) + 1
    overrides = [
        *args.overrides,
        f"loop.total_steps={last}",
        "loop.epochs=null",
        "loop.eval_interval=null",
        "checkpoint.patience=null",
        "log.backends=[terminal]",
    ]
    return launch(args.config, overrides, partial(_profile, args.out, args.first, args.steps))


def _profile(out: Path, first: int, steps: int, composed: Composed, world: World) -> int:
    if composed.config.resume is not None:
        raise UserError("mvp profile starts a new training: leave resume out")
    workers = getattr(composed.config, "workers", None)
    if workers is not None and workers.where != "local":
        raise UserError(
            f"mvp profile measures its own process, and workers.where={workers.where} has the models in others: set "
            "workers.where=local and leave out groups.actor.ranks"
        )
    engine_class = profiled(composed.engine_class, out, first, steps)
    if world.is_main:
        try:
            out.mkdir(parents=True, exist_ok=True)
            for name in FILES:  # of an earlier profile
                (out / name).unlink(missing_ok=True)
        except OSError as error:
            raise UserError(
                f"--out {out}: {error.strerror}. Name a folder that can be written to"
            ) from None
    with temporary_run(world, composed.config.project.name, "mvp-profile-") as run:
        with engine_class(composed.config, world, run, None, "a profile") as engine:
            engine.train()
        world.barrier()
    if not (out / "profile.md").is_file():
        last = last_step(first, steps)
        raise UserError(
            f"the data ended before step {last}: profile fewer steps (--steps, --first)"
        )
    if world.is_main:
        print((out / "profile.md").read_text())
        print(f"Trace, for ui.perfetto.dev: {out / 'trace.json'}")
    return 0


def last_step(first: int, steps: int) -> int:
    """The last one of `steps` timed steps from `first` on, one more for the profiler to start, and `steps` profiled."""
    return first + 2 * steps


def profiled(engine_class: type[Engine], out: Path, first: int, steps: int) -> type[Engine]:
    """A subclass that trains up to step `first`, times `steps` steps, profiles as many more, and saves nothing.

    `out` gets `trace.json`, `profile.md` and `profile.json`. The timed steps run without the profiler, which slows the
    host down. Windows begin and end on the GPU, without a host sync: after one, the GPU would be idle until the host is
    ahead of it again. For the same reason the step in which the profiler starts does not count.
    """

    class Profiled(engine_class):  # type: ignore[misc, valid-type]
        profiler: profile | None = None
        _clock: ClockSamples | None = None

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
            self._times = [Time(self.device)]

        def train_post_step(self, ctx: StepContext) -> None:
            super().train_post_step(ctx)
            # Each window is whole steps, with their wait for data.
            if ctx.step == first - 1:
                self._times = [Time(self.device)]
            if ctx.step == first + steps - 1:
                self._times.append(Time(self.device))
                activities = [ProfilerActivity.CPU]
                if self.device.type == "cuda":
                    activities.append(ProfilerActivity.CUDA)
                self.profiler = profile(activities=activities)
                self.profiler.start()
            if ctx.step in (first + steps, last_step(first, steps)):
                mark(self.device)
            if self.profiler is not None and ctx.step == last_step(first, steps):
                if self.device.type == "cuda":
                    torch.cuda.synchronize()
                self.profiler.stop()
                if self.world.is_main:
                    self._write_files()
                ctx.stop = True

        def _write_files(self) -> None:
            assert self.profiler is not None
            events = read_events(self.profiler, self.device.type)
            facts = summary(events, steps, memory_by_kind(self))
            begin, end = self._times
            facts["step_ms_alone"] = 1e3 * begin.seconds_until(end) / steps
            if self._clock is not None:
                facts |= self._clock.between(begin.on_host, end.on_host)
            (out / "profile.json").write_text(json.dumps(facts, indent=2) + "\n")
            title = f"{self.config.project.name} on {self.world.size} x {_device_name(self.device)}"
            (out / "profile.md").write_text(page(facts, title))
            self.profiler.export_chrome_trace(str(out / "trace.json"))  # last: hundreds of MB

        def save(self) -> None:
            """A profile writes no checkpoint."""

        def after_train(self) -> None:
            """A profile exports nothing."""

    return Profiled


class Time:
    """When the device has done what it was given so far."""

    def __init__(self, device: torch.device) -> None:
        self.on_host = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def seconds_until(self, later: Time) -> float:
        if self._event is None or later._event is None:
            return later.on_host - self.on_host
        return self._event.elapsed_time(later._event) / 1e3


def memory_by_kind(engine: Engine) -> dict[str, float]:
    """GiB on this rank: static memory, what the peak needs in addition, and the peak itself."""
    params = list(engine.model.parameters())
    optimizer = getattr(engine.model_engine, "optimizer", None)  # of RL, in the workers
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

"""`mvp profile`: some steps of a recipe's own training under torch's profiler, and where their time went."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from mvp_engine.config import Composed
from mvp_engine.distributed import World
from mvp_engine.engine import Engine, StepContext
from mvp_engine.engine.meter import peak_memory
from mvp_engine.errors import UserError
from mvp_engine.launch import launch
from mvp_engine.process.pipes import ignore_broken_pipes
from mvp_engine.runs import Run
from mvp_engine.tools.profile_page import collectives_of, kernels_of, page, summary


def main(argv: list[str] | None = None) -> int:
    ignore_broken_pipes()
    parser = argparse.ArgumentParser(prog="mvp profile")
    parser.add_argument("--config", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args(argv)
    last = args.first + 2 * args.steps
    # Nothing but the steps: no evaluation, no log, and enough of them for the loop.
    words = [
        f"loop.total_steps={last}",
        "loop.epochs=null",
        "loop.eval_interval=null",
        "log.backends=[terminal]",
    ]
    return launch(
        args.config, [*args.overrides, *words], partial(_profile, args.out, args.first, args.steps)
    )


def _profile(out: Path, first: int, steps: int, composed: Composed, world: World) -> int:
    if composed.config.resume is not None:
        raise UserError("mvp profile begins a training of its own: leave resume out")
    kind = profiled(composed.engine_class, out, first, steps)
    if world.is_main:
        try:
            out.mkdir(parents=True, exist_ok=True)
            (out / "profile.md").unlink(missing_ok=True)
        except OSError as error:
            raise UserError(
                f"--out {out}: {error.strerror}. Name a folder that can be written to"
            ) from None
    with tempfile.TemporaryDirectory(prefix="mvp-profile-") as folder:
        shared = Path(world.broadcast(folder))  # every rank has one; that of rank 0 is the run's
        with kind(composed.config, world, Run(shared), None, "a few steps to look at") as engine:
            engine.train()
        world.barrier()
    if not (out / "profile.md").is_file():
        raise UserError(
            f"the data ended before step {first + 2 * steps - 1}: profile fewer steps (--steps, --first)"
        )
    if world.is_main:
        print((out / "profile.md").read_text())
        print(f"The trace, for ui.perfetto.dev: {out / 'trace.json'}")
    return 0


def profiled(engine_class: type[Engine], out: Path, first: int, steps: int) -> type[Engine]:
    """The same engine, whose training is `steps` profiled steps from step `first` on, and saves nothing.

    `out` gets `trace.json`, `profile.md` and `profile.json`. As many steps are timed without the profiler first: it
    slows the host down.
    """

    class Profiled(engine_class):  # type: ignore[misc, valid-type]
        profiler: profile | None = None

        def _now(self) -> float:
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter()

        def train_pre_step(self, ctx: StepContext) -> None:
            if ctx.step == first:
                self._started = self._now()
            if ctx.step == first + steps:
                self._seconds = self._now() - self._started
                kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (
                    self.device.type == "cuda"
                )
                self.profiler = profile(activities=kinds)
                self.profiler.start()
                self._started = self._now()
            super().train_pre_step(ctx)

        def train_post_step(self, ctx: StepContext) -> None:
            super().train_post_step(ctx)
            if self.profiler is not None and ctx.step == first + 2 * steps - 1:
                seconds = self._now() - self._started
                self.profiler.stop()
                if self.world.is_main:
                    self._tell(seconds)
                ctx.stop = True

        def _tell(self, seconds: float) -> None:
            kernels = kernels_of(self.profiler, self.device.type)
            facts = summary(
                kernels, seconds, steps, memory_of(self), collectives_of(self.profiler, kernels)
            )
            facts["step_ms_alone"] = 1e3 * self._seconds / steps
            assert self.profiler is not None
            self.profiler.export_chrome_trace(str(out / "trace.json"))
            (out / "profile.json").write_text(json.dumps(facts, indent=2) + "\n")
            title = f"{self.config.project.name} on {self.world.size} x {_device_name(self.device)}"
            (out / "profile.md").write_text(page(facts, title))

        def save(self) -> None: ...

        def after_train(self) -> None: ...

    return Profiled


def memory_of(engine: Engine) -> dict[str, float]:
    """GiB on this rank: what stays, and how much more there was at the highest point."""
    model, optimizer = engine.model, engine.model_engine.optimizer
    params = list(model.parameters())
    state: dict[Any, Any] = {} if optimizer is None else optimizer.state
    moments = [t for one in state.values() for t in one.values() if isinstance(t, torch.Tensor)]
    sizes = {
        "parameters": sum(map(_bytes, params)),
        "gradients": sum(_bytes(p) for p in params if p.requires_grad),
        "optimizer state": sum(_bytes(t) for t in moments if t.device.type == engine.device.type),
    }
    peak = peak_memory(engine.device)
    sizes["activations, copies and workspace, at most"] = max(0, peak - sum(sizes.values()))
    return {kind: size / 2**30 for kind, size in {**sizes, "all, at most": peak}.items()}


def _bytes(tensor: Any) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.numel() * local.element_size()


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


if __name__ == "__main__":
    sys.exit(main())

"""`mvp profile`: some steps of a recipe's own training, or one step of a run, under torch.profiler, and where their
time went: by phase, with the lines of Python that take it, and by kernel."""

from __future__ import annotations

import argparse
import contextlib
import json
import linecache
import sys
import sysconfig
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from mvp_engine.config import Composed
from mvp_engine.distributed import World
from mvp_engine.engine import Engine
from mvp_engine.engine.meter import Meter, StepTimes, peak_memory
from mvp_engine.errors import UserError
from mvp_engine.launch import launch
from mvp_engine.process.pipes import ignore_broken_pipes
from mvp_engine.report.facts import RunFacts
from mvp_engine.runs import Run
from mvp_engine.tools.profile_kernels import (
    DATA_WAIT,
    ClockSamples,
    mark,
    read_events,
    sampled_clock,
    summary,
)
from mvp_engine.tools.profile_page import page
from mvp_engine.tools.replay import OVERRIDES, nearest_checkpoint

FILES = ("profile.md", "profile.json", "trace.json")
WARM_UP = 2  # steps of a run that are repeated before the traced one, at least
SAMPLE_SECONDS = 0.001
MAX_LINES = 3  # of a phase
PACKAGE = str(Path(__file__).parents[1])
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib")})


def main(argv: list[str] | None = None) -> int:
    """Run one rank of a profile."""
    ignore_broken_pipes()
    parser = argparse.ArgumentParser(prog="mvp profile")
    parser.add_argument("--config", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--replayed", type=Path)  # a run, of which `--first` is the only step
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args(argv)
    window = Window(args.out, args.first, args.steps)
    if args.replayed:
        window.replayed = Run(args.replayed)
        overrides = [*OVERRIDES, *args.overrides]
        if (
            "micro_batch" in window.record
        ):  # it waited for data: rows are loaded where lines are seen
            overrides.insert(len(OVERRIDES), "data.num_workers=0")
    else:
        # Only training steps: no evaluation, no log files, and a total that lets all profiled steps run.
        overrides = [
            *args.overrides,
            f"loop.total_steps={window.last + 1}",
            "loop.epochs=null",
            "loop.eval_interval=null",
            "checkpoint.patience=null",
            "log.backends=[terminal]",
        ]
    return launch(args.config, overrides, partial(_profile, window))


@dataclass
class Window:
    """Which steps are traced: `steps` from `first` on, of a new training or of a run."""

    out: Path
    first: int
    steps: int
    replayed: Run | None = None

    @property
    def end(self) -> int:
        """The step after the traced ones."""
        return self.first + self.steps

    @property
    def last(self) -> int:
        """The last step of the profile: after the traced ones, of a new training, one in which the profiler ends, and
        as many without it, for their time."""
        return self.end - 1 if self.replayed else self.end + self.steps

    @property
    def record(self) -> dict[str, Any]:
        """What the run recorded of the step, if it was slow."""
        found = RunFacts(self.replayed).slowest if self.replayed else []
        return next((record for record in found if record["step"] == self.first), {})

    def checkpoint(self) -> Path | None:
        """Where a replay starts: some steps before, which compile and warm up."""
        return nearest_checkpoint(self.replayed, self.first - WARM_UP) if self.replayed else None


def _profile(window: Window, composed: Composed, world: World) -> int:
    out = window.out
    if composed.config.resume is not None:
        raise UserError(
            "mvp profile starts a new training: leave resume out, or name a step of a run: mvp profile RUN --step N"
        )
    repeated = window.replayed and window.replayed.dir
    composed.engine_class.check_command(composed.config, "profile", repeated, window.first)
    engine_class = profiled(composed.engine_class, window)
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
        with engine_class(composed.config, world, run, window.checkpoint(), "a profile") as engine:
            engine.train()
        world.barrier()
    if not (out / "profile.md").is_file():
        fix = "name an earlier one" if window.replayed else "profile fewer steps (--steps, --first)"
        raise UserError(f"the data, or the training, ended before step {window.last}: {fix}")
    if world.is_main:
        print((out / "profile.md").read_text())
        print(f"Trace, for ui.perfetto.dev: {out / 'trace.json'}")
    return 0


class _Done(Exception):
    """Ends a profile."""


def profiled(engine_class: type[Engine], window: Window) -> type[Engine]:
    """A subclass that trains up to the window, traces its steps, times as many more, and saves nothing.

    `window.out` gets `trace.json`, `profile.md` and `profile.json`. Steps are traced from their wait for data to what
    follows them. Those that are timed run without the profiler, which slows the host down. Windows begin and end on the
    GPU, without a host sync: after one, the GPU would be idle until the host is ahead of it again. For the same reason
    the profiler starts to prepare one step before, and the step in which it ends does not count.
    """
    out = window.out

    class Profiled(engine_class):  # type: ignore[misc, valid-type]
        profiler: profile | None = None
        _clock: ClockSamples | None = None

        def before_train(self) -> None:
            super().before_train()
            take = self.feed.take
            begin = self.meter.begin

            def labelled_take() -> list[Any]:
                with record_function(DATA_WAIT):
                    return take()

            def begin_step(step: int, *phase: str) -> None:
                ended = self.meter.now
                begin(step, *phase)
                if self.meter.now is not ended:  # else it begins again, in the next epoch
                    self._between(ended, step)

            self.feed.take = labelled_take
            self.meter.begin = begin_step
            self._is_traced = self.world.rank == window.record.get("rank", 0) % self.world.size
            if self.device.type == "cuda" and self._is_traced:
                gpu = f"GPU-{torch.cuda.get_device_properties(self.device).uuid}"
                self._clock = self._closing.enter_context(sampled_clock(gpu))
            self._steps: list[StepTimes] = []
            self._lines = LineSampler(self.meter)
            self._closing.enter_context(self._lines)
            self.facts: dict[str, Any] = {}

        def do_train(self) -> None:
            with contextlib.suppress(_Done):
                super().do_train()
                self.meter.begin(self.step + 1)  # the training ends with the window

        def _between(self, ended: StepTimes, step: int) -> None:
            """What is done between the step that has ended and the next one."""
            if window.first - 1 <= step <= window.first and self.profiler is None:
                activities = [ProfilerActivity.CPU]
                if self.device.type == "cuda":
                    activities.append(ProfilerActivity.CUDA)
                with_stack = window.replayed is not None
                self.profiler = profile(activities=activities, with_stack=with_stack)
                self.profiler.prepare_trace()
            if window.first < step <= window.end:
                self._steps.append(ended)
            if step == window.first:
                assert self.profiler is not None
                self.profiler.start_trace()
                mark(self.device)
                self.meter.mark(
                    self.meter.now.marks.pop()[0]
                )  # the start is none of the step's time
                self._lines.start()
            if step == window.end:
                assert self.profiler is not None
                self._lines.stop()
                mark(self.device)
                if self.device.type == "cuda":
                    torch.cuda.synchronize()
                self.profiler.stop_trace()
                if self._is_traced:
                    self._summarize()
            if step == window.end + 1:
                self._begin = Time(self.device)
            if step == window.last + 1:
                if not window.replayed:
                    self._add_time(self._begin, Time(self.device))
                if self._is_traced:
                    self._write_files()
                raise _Done

        def _summarize(self) -> None:
            events = read_events(self.profiler, self.device.type)
            self.facts = summary(events, window.steps, memory_by_kind(self))
            self.facts |= {"first_step": window.first, "in_run": window.record}
            for one in self._steps:
                if one.marks:
                    one.read()
            self.facts["phases"] = phases(self._steps, self._lines)
            waits = [one.longest_wait for one in self._steps if "row" in one.longest_wait]
            self.facts["slow_row"] = max(waits, key=lambda wait: wait["row_seconds"], default=None)

        def _add_time(self, begin: Time, end: Time) -> None:
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            self.facts["step_ms_alone"] = 1e3 * begin.seconds_until(end) / window.steps
            if self._clock is not None:
                self.facts |= self._clock.between(begin.on_host, end.on_host)

        def _write_files(self) -> None:
            assert self.profiler is not None
            (out / "profile.json").write_text(json.dumps(self.facts, indent=2) + "\n")
            title = f"{self.config.project.name} on {self.world.size} x {_device_name(self.device)}"
            (out / "profile.md").write_text(page(self.facts, title))
            self.profiler.export_chrome_trace(str(out / "trace.json"))  # last: hundreds of MB

        def save(self) -> None:
            """A profile writes no checkpoint."""

        def after_train(self) -> None:
            """A profile exports nothing."""

    return Profiled


class Line(NamedTuple):
    """A line of Python that runs."""

    file: str
    number: int
    function: str


class LineSampler:
    """A thread that looks every millisecond where the training is: the lines that take the time of each phase.

    Of a stack, the innermost line of the recipe counts; without one, that of this package.
    """

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.counts: Counter[tuple[str, Line | None]] = Counter()  # samples by phase and line
        self._runs = threading.Event()
        self._ended = threading.Event()
        self._main = threading.get_ident()

    def __enter__(self) -> None:
        threading.Thread(target=self._watch, name="mvp-lines", daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._runs.set()

    def start(self) -> None:
        self._runs.set()

    def stop(self) -> None:
        self._runs.clear()

    def _watch(self) -> None:
        while self._runs.wait() and not self._ended.wait(SAMPLE_SECONDS):
            frames = sys._current_frames()
            marks = self.meter.now.marks
            phase = marks[-1][0] if marks else ""
            threads = [self._main]
            if phase == "data":  # without workers, a thread loads rows and pins them
                threads += [one.ident or 0 for one in threading.enumerate() if "pin" in one.name]
            lines = [_line(frames.get(thread)) for thread in reversed(threads)]
            self.counts[phase, next(filter(None, lines), None)] += 1

    def lines(self, phase: str) -> list[tuple[str, float]]:
        """The lines of a phase with their share of it, longest first."""
        found = {line: n for (name, line), n in self.counts.items() if name == phase}
        longest = sorted(found, key=lambda line: -found[line])[:MAX_LINES]
        return [(_text(line), found[line] / sum(found.values())) for line in longest if line]


def _line(frame: FrameType | None) -> Line | None:
    """The line of a stack within a step; None if it is of libraries only."""
    own: Line | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        is_own = file.startswith(PACKAGE)
        if is_own or not file.startswith((*LIBRARIES, "<")):
            line = Line(file, frame.f_lineno, frame.f_code.co_name)
            if not is_own:
                return line
            own = own or line
            if (
                line.function == "do_train"
            ):  # the loop, which was called by what started the training
                return own
        frame = frame.f_back
    return own


def _text(line: Line) -> str:
    path = Path(line.file)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    code = linecache.getline(line.file, line.number).strip()
    return f"{shown}:{line.number} {line.function}: {code}"


def phases(steps: list[StepTimes], sampler: LineSampler) -> list[dict[str, Any]]:
    """The time of each phase per step, longest first, with the lines that take it."""
    totals: Counter[str] = Counter()
    for one in steps:
        totals.update(one.split)
    found = []
    for phase, seconds in totals.most_common():
        ms = 1e3 * seconds / len(steps)
        lines = [{"line": line, "ms": share * ms} for line, share in sampler.lines(phase)]
        found.append({"name": phase, "ms": ms, "lines": lines})
    return found


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
    optimizer = getattr(engine.model_engine, "optimizer", None)
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


# A run folder for a command that trains for a while and leaves nothing behind.


@contextlib.contextmanager
def temporary_run(world: World, name: str, prefix: str) -> Iterator[Run]:
    """A run in a temporary folder of rank 0, which is removed at the end; those of the other ranks stay empty."""
    with tempfile.TemporaryDirectory(prefix=prefix) as folder:
        place: Path | None = None
        if world.is_main:
            place = Run.create(Path(folder), name, None).dir
        yield Run(world.broadcast(place))

"""`mvp profile`: some steps of a recipe's own training, or one step of a run, under torch.profiler, and where their
time went: by phase, with the lines of Python that take it, and by kernel."""

from __future__ import annotations

import argparse
import contextlib
import json
import linecache
import re
import sys
import sysconfig
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from mvp_engine.config import Composed
from mvp_engine.distributed import World
from mvp_engine.engine import Engine
from mvp_engine.engine.monitor import Meter, StepTimes, peak_memory
from mvp_engine.errors import UserError, count
from mvp_engine.launch import launch
from mvp_engine.process.watchdog import ignore_broken_pipes
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
    replayed = Run(args.replayed) if args.replayed else None
    window = Window(args.out, args.first, args.steps, replayed)
    if replayed:
        # A step that waited for data loads its rows where lines are seen.
        loads_here = ["data.num_workers=0"] if "micro_batch" in window.record else []
        overrides = [*OVERRIDES, *loads_here, *args.overrides]
    else:
        # Only training steps: no evaluation, no log files, and a total that lets all profiled steps run.
        overrides = [
            *args.overrides,
            f"train.max_steps={window.last + 1}",
            "train.epochs=null",
            "eval.steps=null",
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

    @cached_property
    def record(self) -> dict[str, Any]:
        """What the run recorded of the step, if it was slow."""
        slowest = RunFacts(self.replayed).slowest if self.replayed else []
        return next((record for record in slowest if record["step"] == self.first), {})

    def checkpoint(self) -> Path | None:
        """Where a replay starts: some steps before, which compile and warm up."""
        return nearest_checkpoint(self.replayed, self.first - WARM_UP) if self.replayed else None


def _profile(window: Window, composed: Composed, world: World) -> int:
    out = window.out
    if composed.config.resume is not None:
        raise UserError(
            "mvp profile starts a new training: leave resume out, or name a step of a run: mvp profile RUN --step N"
        )
    repeated = window.replayed.dir if window.replayed else None
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
    with temporary_run(world, composed.config.run_name, "mvp-profile-") as run:
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
                # The start is none of the step's time.
                self.meter.mark(self.meter.now.marks.pop()[0])
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
            for step in self._steps:
                if step.marks:
                    step.read()
            self.facts["phases"] = phases(self._steps, self._lines)
            waits = [step.longest_wait for step in self._steps if "row" in step.longest_wait]
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
            title = f"{self.config.run_name} on {self.world.size} x {_device_name(self.device)}"
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
                threads += [t.ident or 0 for t in threading.enumerate() if "pin" in t.name]
            lines = [_line(frames.get(thread)) for thread in reversed(threads)]
            self.counts[phase, next(filter(None, lines), None)] += 1

    def lines(self, phase: str) -> list[tuple[str, float]]:
        """The lines of a phase with their share of it, longest first."""
        counts = Counter({line: n for (name, line), n in self.counts.items() if name == phase})
        total = counts.total()
        longest = counts.most_common(MAX_LINES)
        return [(_text(line), n / total) for line, n in longest if line]


def _line(frame: FrameType | None) -> Line | None:
    """The line of a stack within a step; None if it is of libraries only."""
    innermost: Line | None = None  # of this package
    while frame is not None:
        line = Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        if line.file.startswith(PACKAGE):
            innermost = innermost or line
            if line.function == "do_train":  # called by what started the training
                return innermost
        elif not line.file.startswith((*LIBRARIES, "<")):
            return line
        frame = frame.f_back
    return innermost


def _text(line: Line) -> str:
    path = Path(line.file)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    code = linecache.getline(line.file, line.number).strip()
    return f"{shown}:{line.number} {line.function}: {code}"


def phases(steps: list[StepTimes], sampler: LineSampler) -> list[dict[str, Any]]:
    """The time of each phase per step, longest first, with the lines that take it."""
    totals: Counter[str] = Counter()
    for step in steps:
        totals.update(step.split)
    rows = []
    for phase, seconds in totals.most_common():
        ms = 1e3 * seconds / len(steps)
        lines = [{"line": line, "ms": share * ms} for line, share in sampler.lines(phase)]
        rows.append({"name": phase, "ms": ms, "lines": lines})
    return rows


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
    states = [] if optimizer is None else optimizer.state.values()
    values = [value for entry in states for value in entry.values() if torch.is_tensor(value)]
    state = [value for value in values if value.device.type == engine.device.type]
    sizes = {
        "parameters": sum(map(_local_bytes, params)),
        "gradients": sum(_local_bytes(p) for p in params if p.requires_grad),
        "optimizer state": sum(map(_local_bytes, state)),
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


@contextlib.contextmanager
def temporary_run(world: World, name: str, prefix: str) -> Iterator[Run]:
    """A run in a temporary folder of rank 0, which is removed at the end; those of the other ranks stay empty."""
    with tempfile.TemporaryDirectory(prefix=prefix) as folder:
        place: Path | None = None
        if world.is_main:
            place = Run.create(Path(folder), name, None).dir
        yield Run(world.broadcast(place))


# ---- The page --------------------------------------------------------------------------------------------

LONG_WAIT = 0.1  # of a step
MUCH_IDLE = 0.3  # of the time, without an explanation
ONE_ROW = 0.5  # of the time of its micro-batch, above which a row is the reason
# Phases in which the model does not run.
BETWEEN = {
    "train_pre_step": "The hook train_pre_step",
    "train_post_step": "The hook train_post_step",
    "logging": "Logging",
    "other ranks": "Waiting for other ranks after the step",
}
OFTEN = 0.5  # of the time
MAX_NAME = 90  # characters of a kernel's name
MAX_KERNELS = 20  # profile.json has more


def page(facts: dict[str, Any], title: str) -> str:
    """The facts as one Markdown page: idle time, kinds of work, longest kernels, memory."""
    step = facts["step_ms"]
    text = f"{count(facts['steps'], 'step')} of {step:.1f} ms from step {facts['first_step']} on"
    if "step_ms_alone" in facts:
        text += f", {facts['step_ms_alone']:.1f} ms without the profiler"
    text += "."
    if record := facts["in_run"]:
        took, usual = 1e3 * record["seconds"], 1e3 * record["usual_seconds"]
        text += f" In the run it took {took:.1f} ms, where {usual:.1f} are usual."
    for sentences in (_idle, _clock, _hooks, _data_wait, _communication):
        text += sentences(facts)
    lines = [f"# {title}", f"\n{text}"]
    lines += _table("phase", facts["phases"], step)
    lines += _table("kind", facts["kinds"], step)
    lines += _table("kernel", facts["kernels"][:MAX_KERNELS], step)
    lines += _table("idle before", facts["gaps"], step)
    lines.append("\n| memory | GiB |\n| --- | ---: |")
    lines += [f"| {kind} | {size:.2f} |" for kind, size in facts["memory_gib"].items()]
    return "\n".join(lines) + "\n"


def _idle(facts: dict[str, Any]) -> str:
    if facts["idle"] is None:
        return (
            " The profiler recorded no kernels, so idle time is unknown: it needs CUPTI, and the right to read the "
            "GPU's performance counters."
        )
    text = (
        f" The device was idle for {facts['idle']:.1%} of the time, with {facts['launches']:,.0f} kernels and copies "
        "per step."
    )
    waits = [facts["data_wait_ms"], *(phase["ms"] for phase in _long_hooks(facts))]
    if facts["idle"] > MUCH_IDLE + sum(waits) / facts["step_ms"]:
        text += " The host launches them too slowly: larger packs (data.pack_tokens: auto), model.compile."
    return text


def _long_hooks(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Phases between the model's work that take much of the time."""
    long = LONG_WAIT * facts["step_ms"]
    return [phase for phase in facts["phases"] if phase["name"] in BETWEEN and phase["ms"] > long]


def _hooks(facts: dict[str, Any]) -> str:
    text = ""
    for phase in _long_hooks(facts):
        share = phase["ms"] / facts["step_ms"]
        text += f" {BETWEEN[phase['name']]} takes {phase['ms']:.1f} ms ({share:.1%}) of a step{_lines(phase)}."
    return text


def _lines(phase: dict[str, Any]) -> str:
    lines = [line for line in phase["lines"] if line["ms"] > LONG_WAIT * phase["ms"]]
    return "".join(f"; {line['ms']:.1f} ms in `{line['line']}`" for line in lines)


def _clock(facts: dict[str, Any]) -> str:
    if "power_w" not in facts:  # no GPU, or no nvidia-smi
        return ""
    text = f" The GPU drew {facts['power_w']:.0f} W at {facts['sm_clock_mhz']:,.0f} MHz"
    if facts["at_power_limit"] < OFTEN:
        return f"{text}."
    return (
        f"{text}: at its power limit, where the clock falls, and with it the FLOP/s that it can reach. Only work that "
        "takes less energy, such as model.fp8, makes it faster."
    )


def _data_wait(facts: dict[str, Any]) -> str:
    wait = facts["data_wait_ms"]
    share = wait / facts["step_ms"]
    text = f" The step waited {wait:.1f} ms ({share:.1%}) for data."
    if share <= LONG_WAIT:
        return text
    row = facts["slow_row"]
    is_one_row = row is not None and row["row_seconds"] > ONE_ROW * row["batch_seconds"]
    if row is not None:
        place = "" if row["worker"] is None else f", in worker {row['worker']}"
        text += f" The slowest row, {row['row']}, took {1e3 * row['row_seconds']:.1f} of the "
        text += f"{1e3 * row['batch_seconds']:.1f} ms of its micro-batch{place}."
    for phase in facts["phases"]:
        if phase["name"] == "data" and (lines := _lines(phase)):
            text = f"{text[:-1]}{lines}."
    if not is_one_row:
        text += " More data.num_workers, smaller media or faster storage would help."
    return text


def _communication(facts: dict[str, Any]) -> str:
    total = facts["comm_ms"]
    exposed = facts["exposed_comm_ms"]
    if not total:
        return ""
    return (
        f" Communication takes {total:.1f} ms per step; {exposed:.1f} ms of it ({exposed / total:.0%}) is "
        "exposed: no kernel computes meanwhile."
    )


def _table(name: str, rows: list[dict[str, Any]], step_ms: float) -> list[str]:
    last = "most in" if name == "phase" else "calls"
    lines = [f"\n| {name} | ms per step | share | {last} |", "| --- | ---: | ---: | ---: |"]
    for row in rows:
        share = row["ms"] / step_ms
        most = [_short(line["line"]) for line in row.get("lines", [])[:1]] or [""]
        calls = f"{row['calls']:.0f}" if "calls" in row else most[0]
        lines.append(f"| {_short(row['name'])} | {row['ms']:.2f} | {share:.1%} | {calls} |")
    return lines


def _short(name: str) -> str:
    return re.sub(r"\s+", " ", name).replace("|", "/")[:MAX_NAME]


if __name__ == "__main__":
    sys.exit(main())

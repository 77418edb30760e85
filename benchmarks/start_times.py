"""Where the time between a command and its first steps goes: seconds of wall and CPU time at each stage of one start.

    PYTHONPATH=. python benchmarks/start_times.py text_0.6b [--rows 5000] [--steps 4] [--out FILE] [key=value ...]
    PYTHONPATH=. python benchmarks/start_times.py text_0.6b --tiny      # a small model on a CPU

The work is one of `benchmarks/recipes.py`: its config, a folder of random weights and a file of rows. It is started
twice with the same caches: `first` has no measured rows and no compiled graphs, `second` finds both. Below the stages
is a timeline: for each half second, where the main thread was for most of it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import resource
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.watch import watch
from mvp_engine.files import atomic_write_text

ROOT = Path(__file__).parents[1]
SAMPLED_SECONDS = 0.02  # between two looks at the stack of the main thread
LINE_SECONDS = 0.5  # of the timeline
# What is timed: (module, class or "", function).
STAGES = [
    ("mvp_engine.launch", "", "compose"),
    ("mvp_engine.distributed.world", "World", "join"),
    ("mvp_engine.kit.mllm", "", "with_choice"),
    ("mvp_engine.kit.plan.choice", "", "meta_model"),
    ("mvp_engine.kit.plan.choice", "", "choose"),
    ("mvp_engine.kit.mllm", "MLLMEngine", "make_processor"),
    ("mvp_engine.kit.data.measured_sources", "MeasuredSources", "measure_ahead"),
    ("mvp_engine.kit.data.measured_sources", "MeasuredSources", "sample"),
    ("mvp_engine.kit.data.measured_sources", "MeasuredSources", "measured"),
    ("mvp_engine.kit.mllm", "MLLMEngine", "prepare_model"),
    ("mvp_engine.model_engine.fsdp.base_engine", "", "parallelize_model"),
    ("mvp_engine.model_engine.fsdp.base_engine", "FSDPBaseEngine", "_materialize"),
    ("mvp_engine.hf.model.adapter", "HFAdapter", "preflight"),
    ("mvp_engine.kit.model", "", "start_compile_workers"),
    ("mvp_engine.kit.model", "", "compile_blocks"),
    ("mvp_engine.kit.mllm", "MLLMEngine", "prepare_dataloader"),
    ("mvp_engine.kit.mllm", "MLLMEngine", "prepare_optimizer"),
    ("mvp_engine.engine.engine", "", "record_setup"),
    ("mvp_engine.engine.feed", "Feed", "take"),
    ("mvp_engine.model_engine.base", "ModelEngine", "train_batch"),
    ("mvp_engine.model_engine.fsdp.engine", "FSDPEngine", "optimizer_step"),
]


class Stages:
    """Times of stages, written after each of them: a start that is ended leaves what it had."""

    def __init__(self, file: Path, started: float) -> None:
        self.file = file
        self.started = started
        self.found: list[dict[str, Any]] = []
        self.depth = 0

    def note(self, name: str, begin: float, cpu: float, depth: int) -> None:
        now = time.time()
        row = {"stage": name, "depth": depth, "begin_s": begin - self.started, "wall_s": now - begin}
        self.found.append({**row, "cpu_s": time.process_time() - cpu})
        write_whole(self.file, self.found)

    def watch(self, module: str, owner: str, name: str) -> None:
        found = importlib.import_module(module)
        place = getattr(found, owner) if owner else found
        inner = place.__dict__[name]
        call = inner.__func__ if isinstance(inner, classmethod) else inner

        def timed(*args: Any, **options: Any) -> Any:
            begin, cpu, depth = time.time(), time.process_time(), self.depth
            self.depth += 1
            try:
                return call(*args, **options)
            finally:
                self.depth -= 1
                self.note(name, begin, cpu, depth)

        setattr(place, name, classmethod(timed) if isinstance(inner, classmethod) else timed)


def write_whole(file: Path, found: list[Any]) -> None:
    """The process is killed after its last step, maybe while it writes. Not flushed to disk, which takes time."""
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(found))
    temporary.replace(file)


class Timeline:
    """Where the main thread was: the innermost frame of the package, and the innermost of all."""

    def __init__(self, file: Path, started: float) -> None:
        self.file = file
        self.started = started
        self.main = threading.get_ident()
        self.lines: dict[int, Counter[str]] = {}
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        last = time.time()
        written = last
        while True:
            time.sleep(SAMPLED_SECONDS)
            now = time.time()
            place = _place(sys._current_frames().get(self.main))
            # A native call that holds the GIL keeps this thread waiting: all of its seconds are of one place.
            while last < now:
                line = int((last - self.started) / LINE_SECONDS)
                end = min(now, self.started + (line + 1) * LINE_SECONDS + 1e-6)
                self.lines.setdefault(line, Counter())[place] += end - last
                last = end
            if now - written > LINE_SECONDS:
                written = now
                rows = [[line * LINE_SECONDS, *found.most_common(1)[0]] for line, found in self.lines.items()]
                write_whole(self.file, rows)


def _place(frame: FrameType | None) -> str:
    inner = ours = ""
    while frame is not None and not ours:
        code = frame.f_code
        where = "/".join(Path(code.co_filename).parts[-2:]) + f":{code.co_name}"
        inner = inner or where
        ours = where if "mvp_engine" in code.co_filename else ""
        frame = frame.f_back
    return inner if ours in ("", inner) else f"{ours} > {inner}"


def inside(file: str, started: str, words: list[str]) -> None:
    """The start itself, in its own process, as `mvp train` makes it."""
    stages = Stages(Path(file), float(started))
    Timeline(Path(file).with_name("timeline.json"), float(started))
    stages.note("python", stages.started, 0.0, 0)
    begin = time.time()
    config = importlib.import_module("mvp_engine.config").compose(words[1], words[2:]).config
    stages.note("config", begin, 0.0, 0)
    begin = time.time()
    with ExitStack() as stack:
        stack.enter_context(importlib.import_module("mvp_engine.process.signals").without_collections())
        context = importlib.import_module("mvp_engine.tools.launcher")
        stack.enter_context(context.created_meanwhile(config.device))
        launch = importlib.import_module("mvp_engine.launch")
        stages.note("imports", begin, 0.0, 1)
    stages.note("imports and CUDA context", begin, 0.0, 0)
    importlib.import_module("mvp_engine.kit.mllm")
    # Where they are in a folder that cannot be written to, each start compiles them: then set PYTHONPYCACHEPREFIX.
    files = [getattr(module, "__cached__", None) for module in list(sys.modules.values())]
    missing = [file for file in files if isinstance(file, str) and not Path(file).is_file()]
    stages.note(f"imported {len(files)} modules, {len(missing)} without bytecode on disk", time.time() - 0.01, 0.0, 0)
    for stage in STAGES:
        stages.watch(*stage)
    sys.exit(launch.main(words))


def start(words: list[str], env: dict[str, str], folder: Path, limit: float, steps: int) -> dict[str, Any]:
    """The stages of a start, which ends after so many steps, and its timeline; also of one that failed."""
    files = [folder / "stages.json", folder / "timeline.json"]
    command = [sys.executable, __file__, "--inside", str(files[0]), str(time.time()), *words]
    seen = watch(command, folder, limit, env=env, last_step=steps)
    stages, timeline = (json.loads(one.read_text()) if one.is_file() else [] for one in files)
    found = {"stages": sorted(stages, key=itemgetter("begin_s")), "timeline": timeline}
    if seen.code not in (0, None):
        found |= {"why": f"ended with {seen.code}", "output": seen.output}
    return found


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| stage | begins | wall s | CPU s |", "| --- | ---: | ---: | ---: |"]
    for row in rows:
        if row["wall_s"] > 0.005:
            name = "&nbsp;" * 2 * row["depth"] + row["stage"]
            lines.append(f"| {name} | {row['begin_s']:.2f} | {row['wall_s']:.2f} | {row['cpu_s']:.2f} |")
    return "\n".join(lines)


def main() -> int:
    if sys.argv[1:2] == ["--inside"]:
        inside(sys.argv[2], sys.argv[3], sys.argv[4:])
    from benchmarks.bytecode import compile_bytecode
    from benchmarks.recipes import WORKS, about, caches, config_words, prepare

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("keys", nargs="*", metavar="key=value")
    parser.add_argument("--rows", type=int, help="in the file; by default 5000 chats, fewer of images and documents")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--limit", type=float, default=240, help="seconds of one start")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "mvp-recipes")
    parser.add_argument("--out", type=Path)
    args = parser.parse_intermixed_args()
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    compile_bytecode(args.folder)
    work, model, data = prepare(args.work, args, args.rows or (5000 if WORKS[args.work].rows == "chats" else None))
    result: dict[str, Any] = {**about(), "work": args.work, "rows": data.parent.name}
    with tempfile.TemporaryDirectory(prefix="mvp-start-") as name:
        scratch = Path(name)
        config, *words = [*config_words(work, model, data, args), f"data.cache={scratch / 'costs'}"]
        words += [f"train.max_steps={args.steps}", "log.backends=[jsonl]", "log.interval=1"]
        for which in ("first", "second"):
            (scratch / which).mkdir()
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            command = ["--config", config, *words, f"output_dir={scratch / which / 'runs'}"]
            found = start(command, caches(scratch), scratch / which, args.limit, args.steps)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            result[which] = {"cpu_s": cpu, **found}
            print(f"\n{which} start, {cpu:.1f} s of CPU time with all processes\n\n{table(found['stages'])}\n")
            for place, lines in groupby(found["timeline"], key=itemgetter(1)):
                print(f"{next(lines)[0]:5.1f} s  {place}")
            if "why" in found:
                print(f"\n{found['output']}\nThe {which} start {found['why']}.")
            sys.stdout.flush()
            if args.out:
                atomic_write_text(args.out, json.dumps(result, indent=2) + "\n")
            if "why" in found:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The stages of a check: config, data, model, a few real steps, one micro-batch of the evaluation.

The recipe's own engine runs, in a temporary folder: no run, no checkpoint, no export is left, and nothing is resumed.
What `facts` gives is described in docs/check.md, and its keys do not change. `show.py` prints it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import logging
import os
import sys
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

from mvp_engine.config import Composed, Config
from mvp_engine.distributed import World
from mvp_engine.engine import Engine, StepContext
from mvp_engine.engine.meter import peak_memory
from mvp_engine.errors import EXIT_USER_ERROR, UserError
from mvp_engine.files import atomic_write_text
from mvp_engine.hf.parts import trained_parts
from mvp_engine.kit import EvalGeneration, MLLMData, MLLMDataKit
from mvp_engine.kit.data.read.bad_rows import BadRows, TooManyBad
from mvp_engine.launch import launch, leave
from mvp_engine.log.backends import Backend
from mvp_engine.log.hub import backend_class
from mvp_engine.model_engine import precision_on
from mvp_engine.process.pipes import outlive_readers
from mvp_engine.process.signals import StopSignals
from mvp_engine.runs import Run
from mvp_engine.tools.check.show import Printer
from mvp_engine.tools.inspect import count_bad, inspect_kit, kit_of

STEPS = 4  # the first is not timed: it allocates, compiles, and starts the loaders
NEW_TOKENS = 4  # of an answer, where evaluations ask questions: that it works shows at once
LONG = 3600.0  # seconds of training that nobody would like to lose
LOGGER = logging.getLogger("mvp_engine")


def main(argv: list[str] | None = None) -> int:
    """One rank of a check. `folder` is for whoever started the ranks: to remove, and to read `facts` from."""
    outlive_readers()
    parser = argparse.ArgumentParser(prog="mvp_engine.tools.check", description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--folder", required=True, type=Path)
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args(argv)
    # A recipe may print; what is to be read by a program must stand alone.
    with contextlib.redirect_stdout(sys.stderr) if args.quiet else contextlib.nullcontext():
        check = Check(args.config, args.folder, args.quiet)
        return leave(launch(args.config, args.overrides, check.run, check.failed))


def facts(folder: Path) -> dict[str, Any]:
    """What the ranks left."""
    found = json.loads((folder / "facts.json").read_text())
    if (folder / "error.txt").exists():
        found["problems"].append((folder / "error.txt").read_text())
    return {"ok": not found["problems"], **found}


class Checked(Engine):
    """Goes before a recipe's engine: trains a few steps, saves nothing, and looks at each loss."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.wrong: list[str] = []  # losses that are not finite, and whose they are
        self._passes: list[Tensor] = []

    @property
    def done(self) -> bool:
        return super().done or self.step >= STEPS

    def save(self) -> None:
        """Nothing."""

    def forward_step(self, ctx: StepContext, micro_batch: Any) -> tuple[Tensor, Tensor | float]:
        given = super().forward_step(ctx, micro_batch)
        if ctx.split == "train" and ctx.counts:
            self._passes.append(given[0].detach())
        return given

    def train_post_step(self, ctx: StepContext) -> None:
        super().train_post_step(ctx)
        first = self.feed.used - len(self._passes)
        for number, loss in enumerate(self._passes):
            if not bool(torch.isfinite(loss)):
                ids = self.feed.sample_ids({"micro_batches": [first + number, first + number + 1]})
                where = f"step {ctx.step}, rank {self.world.rank}, micro-batch {number + 1} of {len(self._passes)}"
                self.wrong.append(f"{where}: the loss is {float(loss)}{_listed(ids)}")
        self._passes = []


class Recorder(Backend):
    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def metrics(self, record: dict[str, Any]) -> None:
        self.records.append(record)


class Warnings(logging.Handler):
    def __init__(self, told: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.told = told

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())


class Check:
    def __init__(self, config_file: str, folder: Path, quiet: bool) -> None:
        self.folder, self.is_mp_src_rank = folder, os.environ.get("RANK", "0") == "0"
        self.printer = Printer(quiet or not self.is_mp_src_rank)
        self.facts: dict[str, Any] = {
            "config": config_file,
            "engine": None,
            "device": None,
            "processes": 1,
        }
        self.facts |= {"stages": [], "problems": [], "warnings": [], "bad_rows": []}
        self.facts |= dict.fromkeys(
            ("data", "eval_data", "parts", "step", "memory", "training", "evaluation")
        )
        self._begin("config")

    # ---- Stages ---------------------------------------------------------------------------------------------------

    def run(self, composed: Composed, world: World) -> int:
        config, device, name = composed.config, world.device, composed.engine_class.__name__
        self.facts |= {"engine": name, "device": device.type, "processes": world.size}
        self._look_ahead(config)
        run = Run(
            world.broadcast(
                Run.create(self.folder, config.project.name, None).dir if world.is_main else None
            )
        )
        engine: Checked = type(name, (Checked, composed.engine_class), {})(
            _small(config), world, run, None, "a check"
        )
        precision = precision_on(device, config.loop.precision)
        self._passed(f"{config.project.name}: {name}, {precision} on {world.size} x {device.type}")
        engine.signals = StopSignals()  # asked, never entered: Ctrl-C ends a check at once
        watch = Warnings(self.facts["warnings"])
        LOGGER.addHandler(watch)
        try:
            with engine:
                self._run(engine, config)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"out of memory on {device}, of {_gib(_room(device))}: {str(error).splitlines()[0]}. Lower "
                "data.micro_batch_size (or mllm.micro_batch_tokens), set model.activation_checkpointing, or share (parallel.shard)"
            ) from None
        except TooManyBad as error:
            raise UserError(error.told) from None  # its file goes with the check's folder
        finally:
            LOGGER.removeHandler(watch)
            self._list_bad(run.dir / "bad_rows.jsonl")
        self.printer.end(self.facts)
        return EXIT_USER_ERROR if world.broadcast(bool(self.facts["problems"])) else 0

    def _run(self, engine: Checked, config: Config) -> None:
        kit = self._data(engine)
        self._begin("model")
        engine.before_train()
        recorder = Recorder()
        if engine.world.is_main:
            engine.hub.backends.append(recorder)
        self.facts["parts"] = trained_parts(engine.model, engine.model_engine.optimizer)
        whole = self.facts["parts"][-1]
        self._passed(f"{whole['trained']:,} of {whole['parameters']:,} parameters train")
        self.printer.parts(self.facts["parts"])
        with engine.model_engine.train_mode():
            self._begin("step")
            engine.do_train()
            engine._settle()
            self._step(engine, config, recorder.records)
            if config.loop.eval_interval or (kit is not None and _has_eval(kit)):
                self._begin("evaluation")
                self._evaluation(engine, config, kit)
        peak = max(engine.world.all_gather(peak_memory(engine.device)))
        of = "device" if engine.device.type == "cuda" else "process"
        self.facts["memory"] = {
            "of": of,
            "peak_gib": _gib(peak),
            "total_gib": _gib(_room(engine.device)),
        }

    def _data(self, engine: Checked) -> MLLMDataKit | None:
        config, kind = engine.config, type(engine)
        section = any(isinstance(value, MLLMData) for _, value in config)
        if not hasattr(kind, "data_kit") and not (section and config.model.path):
            return None
        self._begin("data")
        kit = kit_of(kind, config)
        packs = engine.global_batch_size
        for split, key in (("train", "data"), ("eval", "eval_data")):
            if split == "eval" and not _has_eval(kit):
                continue
            stream = kit.is_stream(split)
            row = None if split == "eval" or stream else _first_good(kit, split)
            found = inspect_kit(kit, split, packs, limit=1 if split == "train" else 0, row=row)
            self.facts[key] = found
            self._keep()
            self.printer.data(found)
            if not stream:
                bad = BadRows(kit.settings, sum(source["rows"] for source in found["sources"]))
                bad.add(kit.bad_rows(split))  # too many are an error
            if found["bad"]["total"]:
                self.facts["warnings"].append(
                    f"{split}: {found['bad']['total']} bad row(s) will be left out"
                )
        plan = self.facts["data"]["plan"]
        self._passed(
            f"{plan['rows']:,} rows, packs {plan['fill']:.1%} full" if plan else "streams: no plan"
        )
        return kit

    def _step(self, engine: Checked, config: Config, records: list[dict[str, Any]]) -> None:
        wrong = [text for part in engine.world.all_gather(engine.wrong) for text in part]
        self.facts["problems"] += wrong or _skipped(engine.run.dir)
        if engine.guard.overflows == engine.step:
            self.facts["warnings"].append(
                f"all {engine.step} steps overflowed in fp16: is bf16 possible?"
            )
        if not engine.world.is_main:
            return
        timed, plan = (
            [one["perf"] for one in records[1:] or records],
            (self.facts["data"] or {}).get("plan"),
        )
        tokens = [one["totals"]["tokens"] for one in records if "tokens" in one["totals"]]
        seconds, samples = median(one["step_s"] for one in timed), engine.global_batch_size
        self.facts["step"] = {
            "seconds": seconds,
            "first_seconds": records[0]["perf"]["step_s"],
            "tokens": round(mean(tokens)) if tokens else None,
            "samples": round(plan["rows"] / plan["steps"], 1)
            if plan
            else None
            if self.facts["data"]
            else samples,
            "tokens_per_s": mean(tokens) / seconds if tokens else None,
            "data_wait": mean(one["data_wait"] for one in timed),
            "mfu": median(one["mfu"] for one in timed) if "mfu" in timed[0] else None,
            "losses": [one.get("loss") for one in records],
            "grad_norms": [one.get("grad_norm") for one in records],
        }
        total = engine.total_steps
        self.facts["training"] = {
            "steps": total,
            "steps_per_epoch": engine.feed.steps_per_epoch,
            "eta_s": total * seconds if total else None,
            "tokens": round(total * mean(tokens)) if total and tokens else None,
        }
        if total and total * seconds > LONG and config.checkpoint.interval is None:
            self.facts["warnings"].append(
                "checkpoint.interval is null: nothing is saved before the end"
            )
        self._passed(f"{len(records)} steps: {seconds:.3g} s each")

    def _evaluation(self, engine: Checked, config: Config, kit: MLLMDataKit | None) -> None:
        means = engine.evaluate()
        self.facts["evaluation"] = means
        if "loss" in means and means["loss"] is None:
            self.facts["problems"].append(
                "evaluation: the loss of the first micro-batch is not finite"
            )
        name, sources = (
            config.checkpoint.best_metric,
            kit.names("eval") if kit is not None and _has_eval(kit) else [],
        )
        if (
            config.loop.eval_interval
            and name is not None
            and not _given(name, list(means), sources)
        ):
            told = (
                f"checkpoint.best_metric={name} is not among the eval metrics: {', '.join(means)}"
            )
            self.facts["problems"].append(told)
        self._passed("one micro-batch")

    def _list_bad(self, file: Path) -> None:
        """Rows of which only those who read them knew that they are bad: of streams, and with broken media."""
        known = [
            row
            for key in ("data", "eval_data")
            if self.facts[key]
            for row in self.facts[key]["bad"]["rows"]
        ]
        listed = (
            [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
        )
        self.facts["bad_rows"] = [row for row in listed if row not in known]
        self._keep()
        self.printer.bad(count_bad(self.facts["bad_rows"]))

    def _look_ahead(self, config: Config) -> None:
        """What a training would only find out later, or not where a check is made."""
        root = Path(config.project.dir).expanduser().absolute()
        there = next(folder for folder in (root, *root.parents) if folder.exists())
        if not os.access(there, os.W_OK) or not there.is_dir():
            self.facts["problems"].append(f"project.dir={root}: {there} cannot be written to")
        if (
            config.project.run_id
            and config.resume is None
            and (root / config.project.run_id / "run.json").is_file()
        ):
            self.facts["problems"].append(
                f"run folder {root / config.project.run_id} exists: choose another run_id"
            )
        for name in config.log.backends:
            backend_class(name)
            if name in ("wandb", "trackio") and importlib.util.find_spec(name) is None:
                self.facts["problems"].append(
                    f"log.backends names {name!r}: pip install {name}, or leave it out"
                )
        if config.resume is not None:
            self.facts["warnings"].append(
                f"resume={config.resume} is not looked at: a check begins at step 0"
            )

    # ---- Keeping --------------------------------------------------------------------------------------------------

    def failed(self, error: BaseException) -> None:
        """The first rank to fail says why; the others fail because of it."""
        text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(FileExistsError), open(self.folder / "error.txt", "x") as out:
            out.write(text)
        self.printer.failed(self.facts["stages"][-1]["name"])

    def _begin(self, stage: str) -> None:
        self._began = time.perf_counter()
        self.facts["stages"].append({"name": stage, "ok": False, "seconds": None, "says": None})
        self._keep()

    def _passed(self, says: str) -> None:
        seconds = round(time.perf_counter() - self._began, 2)
        self.facts["stages"][-1] |= {"ok": True, "seconds": seconds, "says": says}
        self._keep()
        self.printer.stage(self.facts["stages"][-1])

    def _keep(self) -> None:
        if self.is_mp_src_rank:
            atomic_write_text(self.folder / "facts.json", json.dumps(self.facts))


def _small(config: Config) -> Config:
    """The config, without what takes long, leaves something, or is heard of elsewhere."""
    changes: dict[str, Any] = {"workflow": "train", "resume": None}
    changes["loop"] = config.loop.model_copy(update={"eval_interval": None, "eval_batches": 1})
    changes["guard"] = config.guard.model_copy(
        update={"max_consecutive_skips": STEPS + 1, "max_total_skips": None}
    )
    changes["log"] = config.log.model_copy(update={"interval": 1, "backends": []})
    changes["checkpoint"] = config.checkpoint.model_copy(update={"interval": None})
    generation = getattr(config, "eval_generation", None)
    if isinstance(generation, EvalGeneration):
        tokens = min(NEW_TOKENS, generation.max_new_tokens)
        changes["eval_generation"] = generation.model_copy(update={"max_new_tokens": tokens})
    return config.model_copy(update=changes)


def _given(name: str, metrics: list[str], sources: list[str]) -> bool:
    """Is it among them, or the figure of a source that this micro-batch has no row of?"""
    ends = [(metric, one) for metric in metrics for one in sources if metric.endswith(f"_{one}")]
    return name in metrics or name in {
        metric.removesuffix(one) + other for metric, one in ends for other in sources
    }


def _has_eval(kit: MLLMDataKit) -> bool:
    return any(source.split == "eval" for source in kit.settings.sources)


def _first_good(kit: MLLMDataKit, split: str) -> str | None:
    """The number of the first row that can be trained on."""
    rows = (tokens > 0 for cost in kit._open(split)[1] for tokens in cost.tokens.tolist())
    return next((str(number) for number, good in enumerate(rows) if good), None)


def _listed(ids: list[Any] | None) -> str:
    if not ids:
        return ""
    return f"; its samples: {', '.join(map(str, ids[:5]))}" + (
        f" and {len(ids) - 5} more" if len(ids) > 5 else ""
    )


def _skipped(folder: Path) -> list[str]:
    """Steps whose losses are finite, and which were skipped all the same."""
    file = folder / "skipped_steps.jsonl"
    entries = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return [
        f"step {one['step']} changed nothing: {one['reason']}{_listed(one['sample_ids'])}"
        for one in entries
    ]


def _room(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _gib(amount: int) -> float:
    return round(amount / 2**30, 3)


if __name__ == "__main__":
    sys.exit(main())

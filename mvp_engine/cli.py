"""`mvp`: each command is one call into the package. Heavy imports wait inside the commands, so help is instant."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mvp_engine import __version__
from mvp_engine.errors import EXIT_BUG, EXIT_CODE_FILE, EXIT_USER_ERROR, UserError
from mvp_engine.process.pipes import outlive_readers
from mvp_engine.process.signals import StopSignals


def main(argv: list[str] | None = None) -> int:
    outlive_readers()
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    # argparse takes no key=value after an option that follows the first ones; they may stand anywhere.
    if not hasattr(args, "overrides") or any(word.startswith("-") for word in rest):
        parser.parse_args(argv)  # for its error message
    else:
        args.overrides += rest
    try:
        return int(args.run(args) or 0)
    except UserError as error:
        print(f"mvp: error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mvp", description="Train multimodal models with MVP Engine."
    )
    parser.add_argument("--version", action="version", version=f"mvp_engine {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    for name, text in (
        ("train", "train a recipe: mvp train CONFIG [--nproc N] [key=value ...]"),
        (
            "evaluate",
            "evaluate a checkpoint, by default the newest run's: mvp evaluate CONFIG [resume=PATH]",
        ),
    ):
        _on_config(commands, name, text, nproc=True).set_defaults(run=_launch, workflow=name)

    text = (
        "try a config out: data, model, a few steps, one evaluation batch; nothing is left behind"
    )
    check = _on_config(commands, "check", text, nproc=True)
    check.add_argument("--json", action="store_true", help="for programs")
    check.set_defaults(run=_check)

    text = "where the time and memory of a training's steps go: a trace and a page"
    profile = _on_config(commands, "profile", text, nproc=True)
    profile.add_argument("--out", default="profile", metavar="DIR", help="where to write (profile)")
    profile.add_argument("--steps", type=int, default=3, metavar="N", help="steps to profile (3)")
    profile.add_argument(
        "--first", type=int, default=6, metavar="N", help="the step to begin with: 5 warm up (6)"
    )
    profile.set_defaults(run=_profile)

    text = "what a config will need of a GPU, which need not be there: memory, time of a step and of all"
    estimate = _on_config(commands, "estimate", text)
    estimate.add_argument(
        "--gpu", default="H200", metavar="NAME", help="such as H100 or RTX 4090 (H200)"
    )
    estimate.add_argument("--gpus", type=int, default=1, metavar="N", help="how many of them (1)")
    estimate.add_argument("--json", action="store_true", help="for programs")
    estimate.set_defaults(run=_estimate)

    recipe = commands.add_parser(
        "recipe", help="list recipes, make one of your own"
    ).add_subparsers(required=True, metavar="COMMAND")
    text = "the recipes that there are"
    listing = recipe.add_parser("list", help=text, description=text)
    listing.add_argument("--json", action="store_true", help="for programs")
    listing.set_defaults(run=_recipe_list)
    text = "a recipe of your own, that begins as a copy of another and runs at once"
    new = recipe.add_parser("new", help=text, description=text)
    new.add_argument("name", metavar="NAME", help="of letters, digits and _")
    new.add_argument(
        "--from", dest="origin", required=True, metavar="RECIPE", help="its name, or its folder"
    )
    new.add_argument(
        "--dir",
        metavar="DIR",
        help="where to put it (recipes, if there is such a folder; else here)",
    )
    new.set_defaults(run=_recipe_new)

    config = commands.add_parser("config", help="show or describe a config").add_subparsers(
        required=True
    )
    for name, text in (
        ("show", "print the resolved config"),
        ("schema", "print the JSON Schema of its keys"),
    ):
        _on_config(config, name, text).set_defaults(run=_config, what=name)

    text = "rows as the model sees them, with what is learnt, lengths, packing and bad rows"
    data = commands.add_parser("data", help="look at training data").add_subparsers(
        required=True, metavar="COMMAND"
    )
    look = data.add_parser("inspect", help=text, description=text)
    look.add_argument(
        "what", metavar="FILE|CONFIG", help="rows in any format, or a recipe's YAML file"
    )
    look.add_argument("overrides", nargs="*", metavar="key=value", help="for a config")
    look.add_argument(
        "--model", metavar="FOLDER", help="a model's folder, for its processor or tokenizer"
    )
    look.add_argument("--split", default="train", help="of a config's sources (train)")
    look.add_argument(
        "--row", metavar="N", help="show this row, all of it: its number from 0, or its file:line"
    )
    look.add_argument("--limit", type=int, default=3, metavar="N", help="rows to show (3)")
    look.add_argument(
        "--tokens", type=int, default=8192, metavar="N", help="of a pack, for a file (8192)"
    )
    look.add_argument(
        "--decode", action="store_true", help="decode all media, which finds broken ones"
    )
    look.add_argument("--json", action="store_true", help="for programs")
    look.set_defaults(run=_data_inspect)

    text = "a checkpoint as a Hugging Face folder; needs no GPU, and memory for one file"
    merge = commands.add_parser("merge", help=text, description=text)
    merge.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a checkpoint, or a run folder: its newest"
    )
    merge.add_argument("out", metavar="OUT", help="the folder to write")
    merge.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="default: that of the pretrained folder",
    )
    merge.add_argument(
        "--max-file-gb", type=float, default=5.0, metavar="GB", help="size of a weight file (5)"
    )
    merge.add_argument(
        "--engine",
        metavar="FILE",
        help="what registers a model type of your own, if it has moved since the training",
    )
    merge.add_argument(
        "--adapter", action="store_true", help="of a LoRA training: the adapter alone, for peft"
    )
    merge.add_argument(
        "--base",
        metavar="FOLDER",
        help="of a LoRA training: the folder it began with, if it has moved",
    )
    merge.add_argument(
        "--ema",
        action="store_true",
        help="the averaged weights (optim.ema) instead of the last ones",
    )
    merge.set_defaults(run=_merge)

    runs = commands.add_parser("runs", help="list, show, plot and compare runs").add_subparsers(
        required=True
    )
    listing = runs.add_parser("list", help="all runs, oldest first")
    show = runs.add_parser("show", help="one run: status, last figures, checkpoints")
    show.add_argument("runs", nargs="?", metavar="RUN", help="folder or id; the newest if left out")
    plot = runs.add_parser("plot", help="draw a metric of one or more runs")
    plot.add_argument("runs", nargs="+", metavar="RUN")
    plot.add_argument("--metric", default="loss")
    plot.add_argument(
        "--out", default=None, metavar="PNG", help="default: <metric>.png in the first run's folder"
    )
    diff = runs.add_parser("diff", help="what differs between two runs: config and last figures")
    diff.add_argument("runs", nargs=2, metavar="RUN")
    for command, function in (
        (listing, _runs_list),
        (show, _runs_show),
        (plot, _runs_plot),
        (diff, _runs_diff),
    ):
        command.add_argument("--dir", default="outputs", help="where the runs are (project.dir)")
        command.add_argument("--json", action="store_true", help="for programs")
        command.set_defaults(run=function)
    return parser


def _on_config(commands: Any, name: str, text: str, nproc: bool = False) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    command.add_argument("config", metavar="CONFIG", help="the recipe's YAML file")
    command.add_argument("overrides", nargs="*", metavar="key=value")
    if nproc:
        command.add_argument(
            "--nproc", type=int, default=1, metavar="N", help="processes on this machine"
        )
    return command


def _launch(args: argparse.Namespace) -> int:
    overrides = list(args.overrides)
    if args.workflow == "evaluate":
        overrides = ["workflow=evaluate", "resume=auto", *overrides]
    return _start("mvp_engine.launch", args.nproc, ["--config", args.config, *overrides])


def _check(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="mvp-check-") as folder:
        words = [
            "--config",
            args.config,
            "--folder",
            folder,
            *(["--quiet"] if args.json else []),
            *args.overrides,
        ]
        code = _start("mvp_engine.tools.check", args.nproc, words)
        if args.json:
            from mvp_engine.tools.check import facts

            print(json.dumps(facts(Path(folder)), indent=2))
    return code


def _profile(args: argparse.Namespace) -> int:
    if args.steps < 1 or args.first < 1:
        raise UserError("--steps and --first: at least 1")
    words = [
        "--config",
        args.config,
        "--out",
        args.out,
        "--steps",
        str(args.steps),
        "--first",
        str(args.first),
    ]
    return _start("mvp_engine.tools.profile", args.nproc, [*words, *args.overrides])


def _estimate(args: argparse.Namespace) -> None:
    from mvp_engine.tools.estimate import facts, page

    told = facts(args.config, args.overrides, args.gpu, args.gpus)
    print(json.dumps(told, indent=2) if args.json else page(told))


def _start(module: str, nproc: int, words: list[str]) -> int:
    if nproc < 1:
        raise UserError(f"--nproc {nproc}: at least one process is needed")
    return (
        int(importlib.import_module(module).main(words))
        if nproc == 1
        else _torchrun(module, nproc, words)
    )


def _torchrun(module: str, nproc: int, arguments: list[str]) -> int:
    """torchrun in this process, with the exit code of the rank that failed first."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    words = ["--standalone", f"--nproc_per_node={nproc}", "-m", module, *arguments]
    with tempfile.TemporaryDirectory(prefix="mvp-") as folder, StopSignals(leave=_kill_children):
        told = Path(folder) / "exit_code"
        os.environ[EXIT_CODE_FILE] = str(told)
        os.environ.setdefault(
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600"
        )  # a long step and a large checkpoint need time
        try:
            run(parse_args(words))
        except ChildFailedError as error:
            return error.get_first_failure()[1].exitcode or EXIT_BUG
        except SignalException:
            return int(told.read_text()) if told.is_file() else EXIT_BUG
    return 0


def _kill_children() -> None:
    me = os.getpid()
    for word in Path(f"/proc/{me}/task/{me}/children").read_text().split():
        os.kill(int(word), signal.SIGKILL)


def _recipe_list(args: argparse.Namespace) -> None:
    from mvp_engine.tools.recipe import find_recipes, first_words

    found = {
        name: {"dir": str(folder), "about": first_words(folder)}
        for name, folder in find_recipes().items()
    }
    if args.json:
        print(json.dumps(found, indent=2))
    for name, one in () if args.json else found.items():
        print(f"{name:<20} {one['about']}\n{'':<20} {one['dir']}")


def _recipe_new(args: argparse.Namespace) -> None:
    from mvp_engine.tools.recipe import new_recipe

    folder, configs = new_recipe(args.name, args.origin, Path(args.dir) if args.dir else None)
    print(
        f"{folder} is a recipe now. To see it run: mvp check {configs[0]}, then mvp train {configs[0]}"
    )


def _config(args: argparse.Namespace) -> None:
    from mvp_engine.config import compose

    composed = compose(args.config, args.overrides)
    if args.what == "show":
        print(composed.config.to_yaml(), end="")
    else:
        print(json.dumps(composed.json_schema(), indent=2))


def _data_inspect(args: argparse.Namespace) -> None:
    from rich.console import Console

    from mvp_engine.kit import MLLMDataKit
    from mvp_engine.tools.inspect import inspect_file, inspect_kit, kit_of, kit_of_file
    from mvp_engine.tools.inspect_page import show

    kit: MLLMDataKit | None = None
    packs = 1
    if Path(args.what).suffix in (".yaml", ".yml"):
        from mvp_engine.config import compose

        composed = compose(args.what, args.overrides)
        sizes, kit = (
            composed.config.data,
            kit_of(composed.engine_class, composed.config, args.model),
        )
        packs = kit.settings.global_batch_packs(sizes.global_batch_size) or sizes.micro_batch_size
    elif args.overrides:
        raise UserError(f"{args.overrides[0]!r}: only a config has keys")
    elif args.model:
        kit = kit_of_file(args.what, args.model, args.tokens)
    if kit is None:
        facts = inspect_file(args.what, limit=args.limit, row=args.row)
    else:
        facts = inspect_kit(
            kit, args.split, packs, limit=args.limit, row=args.row, decode=args.decode
        )
    facts = {"data": args.what, "model": args.model, **facts}
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        show(facts, Console(highlight=False), whole=args.row is not None)


def _merge(args: argparse.Namespace) -> None:
    import torch

    from mvp_engine.checkpoint.manager import find_checkpoint
    from mvp_engine.tools.merge import merge

    checkpoint = find_checkpoint(Path(args.checkpoint))
    if not 0 < args.max_file_gb < float("inf"):
        raise UserError(f"--max-file-gb {args.max_file_gb}: a file must have some size")
    dtype, limit = args.dtype and getattr(torch, args.dtype), int(args.max_file_gb * 1e9)
    out = Path(args.out).expanduser().resolve()
    options = {"base": args.base, "adapter": args.adapter, "ema": args.ema}
    merge(checkpoint, out, args.engine, dtype=dtype, limit=limit, **options)
    print(f"{checkpoint} is now the {'peft' if args.adapter else 'Hugging Face'} folder {args.out}")


def _runs_list(args: argparse.Namespace) -> None:
    from mvp_engine.runs import list_runs

    rows = [_run_facts(run) for run in list_runs(Path(args.dir))]
    if args.json:
        print(json.dumps(rows, indent=2))
    elif not rows:
        print(f"no runs in {Path(args.dir).absolute()}")
    else:
        from rich.console import Console
        from rich.table import Table

        table = Table(
            "run", "status", "step", "loss", "started", "checkpoints", box=None, pad_edge=False
        )
        for row in rows:
            loss = row["train"].get("loss")
            cells = (
                row["id"],
                row["status"],
                row["step"],
                "-" if loss is None else f"{loss:.4g}",
                row["started"],
            )
            table.add_row(*map(str, cells), str(len(row["checkpoints"])))
        Console(highlight=False, width=None if sys.stdout.isatty() else 160).print(table)


def _runs_show(args: argparse.Namespace) -> None:
    from mvp_engine.log.format import shown
    from mvp_engine.runs import list_runs, open_run

    newest = list_runs(Path(args.dir))[-1:]
    if not args.runs and not newest:
        raise UserError(f"no runs in {Path(args.dir).absolute()}")
    run = open_run(args.runs, Path(args.dir)) if args.runs else newest[0]
    facts = _run_facts(run)
    if args.json:
        print(json.dumps(facts, indent=2))
        return
    print(f"{run.id}: {facts['status']} at step {facts['step']}, started {facts['started']}")
    for split in ("train", "eval"):
        if facts[split]:
            figures = "  ".join(
                f"{name} {text}" for name, text in shown(facts[split]) if name != "eta"
            )
            print(f"  {split:<12}{figures}")
    best = facts["best"]
    if best:
        print(f"  best        {best['metric']} {best['value']:.4g} at step {best['step']}")
    print(f"  checkpoints {' '.join(facts['checkpoints']) or 'none'}")
    curve = run.dir / "loss.png"
    print(f"  files       {run.dir}/" + (f", curve in {curve}" if curve.is_file() else ""))


def _runs_plot(args: argparse.Namespace) -> None:
    from mvp_engine.log.plot import plot_runs
    from mvp_engine.runs import open_run

    runs = [open_run(text, Path(args.dir)) for text in args.runs]
    out = Path(args.out) if args.out else runs[0].dir / f"{args.metric.replace('/', '_')}.png"
    if not any(r.get(args.metric) is not None for run in runs for r in run.records()):
        known = sorted(
            {k for run in runs for r in run.records() for k, v in r.items() if isinstance(v, float)}
        )
        raise UserError(
            f"no values of {args.metric!r} in these runs; they have: {', '.join(known) or 'no metrics'}"
        )
    points = plot_runs(runs, args.metric, out)
    print(
        json.dumps({"file": str(out), "points": points})
        if args.json
        else f"{out} ({points} points)"
    )


def _runs_diff(args: argparse.Namespace) -> None:
    import yaml

    from mvp_engine.runs import flat_keys, open_run

    first, second = (open_run(text, Path(args.dir)) for text in args.runs)
    sides = []
    for run in (first, second):
        file = run.dir / "config.yaml"
        config = flat_keys(yaml.safe_load(file.read_text())) if file.is_file() else {}
        facts = _run_facts(run)
        figures = {
            f"{s}.{k}": v
            for s in ("train", "eval")
            for k, v in facts[s].items()
            if isinstance(v, int | float)
        }
        sides.append({"config": config, "figures": {"status": facts["status"], **figures}})
    answer: dict[str, Any] = {"runs": [first.id, second.id]}
    for part in ("config", "figures"):
        a, b = sides[0][part], sides[1][part]
        answer[part] = {k: [a.get(k), b.get(k)] for k in {**a, **b} if a.get(k) != b.get(k)}
    if args.json:
        print(json.dumps(answer, indent=2))
        return
    print(f"{first.id}  ->  {second.id}")
    for part in ("config", "figures"):
        print(f"{part}:" + ("" if answer[part] else " the same"))
        for key, (a, b) in answer[part].items():
            print(f"  {key}: {a} -> {b}")


def _run_facts(run: Any) -> dict[str, Any]:
    last: dict[str, dict[str, Any]] = {"train": {}, "eval": {}}
    for record in run.records():
        last[record["split"]] = record
    checkpoints = run.checkpoint_list()
    best = run.checkpoints / "best" / "meta.json"
    return {
        "id": run.id,
        "dir": str(run.dir),
        "status": run.status(),
        "step": max([r.get("step", 0) for r in last.values()] + [run.info.get("step", 0)]),
        "started": time.strftime("%Y-%m-%d %H:%M", time.localtime(run.info["created"])),
        "checkpoints": [p.name for p in checkpoints],
        "best": json.loads(best.read_text())["best"] if best.is_file() else None,
        **last,
    }


if __name__ == "__main__":
    sys.exit(main())

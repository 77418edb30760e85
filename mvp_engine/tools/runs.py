"""`mvp runs`: list, show, plot and compare run folders. It imports no torch."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mvp_engine.errors import UserError
from mvp_engine.log.format import shown
from mvp_engine.report.facts import RunFacts
from mvp_engine.runs import Run, flat_keys, list_runs, open_run

SPLITS = ("train", "eval")


def runs_command(
    names: list[str], plot: str | None, out: str | None, port: int, root: str, *, as_json: bool
) -> None:
    """List all runs, show one, compare two, plot a metric of some, or serve a page of them."""
    folder = Path(root)
    if names[:1] == ["serve"]:
        serve(folder, names[1:], port)
    elif plot is not None:
        plot_metric(folder, names or ["latest"], plot, out, as_json=as_json)
    elif not names:
        print_runs(folder, as_json=as_json)
    elif len(names) == 1:
        print_run(folder, names[0], as_json=as_json)
    elif len(names) == 2:
        print_diff(folder, *names, as_json=as_json)
    else:
        raise UserError(f"{len(names)} runs: give two to compare, or --plot METRIC")


def serve(root: Path, names: list[str], port: int) -> None:
    """The live page of some runs, or of the newest one, until Ctrl-C. A sweep's name stands for its runs."""
    from mvp_engine.report.live import LiveServer

    known = list_runs(root)
    runs = []
    for name in names:
        runs += [run for run in known if run.id.startswith(f"{name}-")] or [open_run(name, root)]
    with LiveServer(root, runs, port) as server:
        print(
            f"{server.url}  (this machine only; from another one: ssh -L {server.port}:127.0.0.1:{server.port} HOST)"
        )
        print("Ctrl-C ends it; trainings are not affected", flush=True)
        server.serve_forever()


def print_runs(root: Path, *, as_json: bool) -> None:
    rows = [_summary(run) for run in list_runs(root)]
    if as_json:
        print(json.dumps(rows, indent=2))
    elif not rows:
        print(f"no runs in {root.absolute()}")
    else:
        _print_table(rows)


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    columns = ("run", "status", "step", "loss", "started", "checkpoints")
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        loss = row["train"].get("loss")
        table.add_row(
            row["id"],
            row["status"],
            str(row["step"]),
            "-" if loss is None else f"{loss:.4g}",
            row["started"],
            str(len(row["checkpoints"])),
        )
    Console(highlight=False, width=None if sys.stdout.isatty() else 160).print(table)


def print_run(root: Path, name: str, *, as_json: bool) -> None:
    run = open_run(name, root)
    summary = _summary(run)
    if as_json:
        print(json.dumps(summary, indent=2))
        return
    print(f"{run.id}: {summary['status']} at step {summary['step']}, started {summary['started']}")
    if summary["error"]:
        print(f"  error       {summary['error'].rstrip()}")
    for split in SPLITS:
        if summary[split]:
            values = [f"{key} {text}" for key, text in shown(summary[split]) if key != "eta"]
            print(f"  {split:<12}{'  '.join(values)}")
    best = summary["best"]
    if best:
        print(f"  best        {best['metric']} {best['value']:.4g} at step {best['step']}")
    for name, text in RunFacts(run).slow_step_lines():
        print(f"  {name:<12}{text}")
    if summary["slow_steps"]:
        print(
            f"  {'':<12}the line: mvp profile {run.dir} --step {summary['slow_steps'][0]['step']}"
        )
    if summary["hub"]:
        print(f"  hub         {' '.join(dict.fromkeys(summary['hub'].values()))}")
    print(f"  checkpoints {' '.join(summary['checkpoints']) or 'none'}")
    names = [name for name in ("report.html", "loss.png") if (run.dir / name).is_file()]
    print(f"  folder      {run.dir}/" + (f" ({', '.join(names)})" if names else ""))


def plot_metric(
    root: Path, names: list[str], metric: str, out: str | None, *, as_json: bool
) -> None:
    """Plot one metric of several runs into a PNG file."""
    from mvp_engine.report.page import COLOURS, Curve, draw_curves, new_figure, save_png

    runs = [open_run(name, root) for name in names]
    file = Path(out) if out else runs[0].dir / f"{metric.replace('/', '_')}.png"
    curves = []
    for i, run in enumerate(runs):
        records = list(run.records())
        colours = [COLOURS[i % len(COLOURS)]] * 2 if len(runs) > 1 else COLOURS
        for split, colour in zip(SPLITS, colours, strict=False):
            label = split if len(runs) == 1 else f"{run.id}, {split}"
            curves.append(Curve.read(records, split, metric, label, colour))
    points = sum(len(curve.values) for curve in curves)
    if not points:
        metrics = _metric_names(record for run in runs for record in run.records())
        known = ", ".join(sorted(metrics)) or "no metrics"
        raise UserError(f"no values of {metric!r} in these runs; they have: {known}")
    figure = new_figure(8, 4.5 + 0.2 * (len(runs) > 1) * len(curves))
    title = f"{runs[0].id}: {metric}" if len(runs) == 1 else metric
    draw_curves(figure.subplots(), curves, title, metric)
    save_png(figure, file)
    if as_json:
        print(json.dumps({"file": str(file), "points": points}))
    else:
        print(f"{file} ({points} points)")


def _metric_names(records: Iterable[dict[str, Any]]) -> set[str]:
    names = set[str]()
    for record in records:
        values = {**record, **record.get("perf", {})}
        names |= {name for name, value in values.items() if isinstance(value, float)}
    return names


def print_diff(root: Path, first_name: str, second_name: str, *, as_json: bool) -> None:
    """Print the config keys and the last metrics that differ between two runs."""
    first = open_run(first_name, root)
    second = open_run(second_name, root)
    difference: dict[str, Any] = {
        "runs": [first.id, second.id],
        "config": _different(flat_keys(first.config), flat_keys(second.config)),
        "figures": _different(_last_metrics(first), _last_metrics(second)),
    }
    if as_json:
        print(json.dumps(difference, indent=2))
        return
    print(f"{first.id}  ->  {second.id}")
    for title, part in (("config", "config"), ("last metrics", "figures")):
        print(f"{title}:" + ("" if difference[part] else " no difference"))
        for key, (old, new) in difference[part].items():
            print(f"  {key}: {old} -> {new}")


def _different(first: dict[str, Any], second: dict[str, Any]) -> dict[str, list[Any]]:
    keys = {**first, **second}
    pairs = {key: [first.get(key), second.get(key)] for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _last_metrics(run: Run) -> dict[str, Any]:
    summary = _summary(run)
    metrics: dict[str, Any] = {"status": summary["status"]}
    for split in SPLITS:
        for key, value in summary[split].items():
            if isinstance(value, int | float):
                metrics[f"{split}.{key}"] = value
    return metrics


def _last_record(lines: list[bytes], split: str) -> dict[str, Any]:
    """The last record of a split. Parsing all 200,000 records of a long run would take more than a second."""
    for line in reversed(lines):
        if f'"{split}"'.encode() in line:
            with contextlib.suppress(json.JSONDecodeError):  # a crash cut the last line off
                record: dict[str, Any] = json.loads(line)
                if record.get("split") == split:
                    return record
    return {}


def _summary(run: Run) -> dict[str, Any]:
    """Status, last step, checkpoints and the last record of each split."""
    file = run.dir / "metrics.jsonl"
    lines = file.read_bytes().splitlines() if file.is_file() else []
    last = {split: _last_record(lines, split) for split in SPLITS}
    steps = [record.get("step", 0) for record in last.values()]
    best = run.checkpoints / "best" / "meta.json"
    return {
        "id": run.id,
        "dir": str(run.dir),
        "status": run.status(),
        "error": run.info.get("error") if run.status() == "failed" else None,
        "step": max(*steps, run.info.get("step", 0)),
        "started": time.strftime("%Y-%m-%d %H:%M", time.localtime(run.info["created"])),
        "hub": run.info.get("hub", {}),  # commits by what the config named
        "checkpoints": [path.name for path in run.checkpoint_list()],
        "slow_steps": RunFacts(run).slow_steps,
        "best": json.loads(best.read_text())["best"] if best.is_file() else None,
        **last,
    }

"""The end of a training: a summary on the terminal, and the report page where the recipe wrote none."""

from __future__ import annotations

import json
import traceback
from typing import Any

from mvp_engine.log.format import duration, number
from mvp_engine.report.facts import RunFacts, metric_text
from mvp_engine.report.page import Example, write_report
from mvp_engine.runs import Run

NAME_WIDTH = 12


def end_of_run(run: Run, seconds: float, *, page: bool, summary: bool) -> None:
    """Write `report.html`, unless this launch has, and print the summary. An error here is not one of the run."""
    try:
        if page and not _is_new(run, seconds):
            write_page(run)
        if summary:
            text = summary_text(RunFacts(run), seconds)
            print(text, flush=True)
            log = run.dir / "log.txt"
            if log.is_file():
                with log.open("a", encoding="utf-8") as file:
                    file.write(text + "\n")
    except Exception:  # noqa: BLE001 - the training has ended well
        print(f"the report of {run.dir} failed:\n{traceback.format_exc()}", flush=True)


def _is_new(run: Run, seconds: float) -> bool:
    file = run.dir / "report.html"
    created = run.info.get("ended", 0.0) - seconds
    return file.is_file() and file.stat().st_mtime >= created


def write_page(run: Run) -> None:
    """The page from what the run folder holds: with generated answers, without their media."""
    facts = RunFacts(run)
    write_report(
        run.dir / "report.html",
        run,
        title=str(facts.info.get("name", run.id)),
        subtitle=f"{run.id}, {_progress(facts)}",
        examples=_answers(run),
    )


def _answers(run: Run) -> list[Example]:
    file = run.dir / "answers.jsonl"
    if not file.is_file():
        return []
    records: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()]
    last = max((record["step"] for record in records), default=0)
    return [
        Example(list, row["prompt"], row["expected"], row["written"], row["right"])
        for row in records
        if row["step"] == last
    ]


def _progress(facts: RunFacts) -> str:
    total = facts.setup.get("total_steps")
    return f"step {facts.step:,}" + (f" of {total:,}" if total else "")


def summary_text(facts: RunFacts, seconds: float) -> str:
    """What a run did, in a few lines, and the commands that may follow."""
    run = facts.run
    lines = [
        f"\n{run.id}: {facts.info.get('status')} at {_progress(facts)}, in {duration(seconds)}"
    ]
    train = facts.last("train")
    held_out = facts.last("eval")
    name = facts.headline
    if train.get(name) is not None:
        lines.append(_line("train", f"{name} {number(train[name])}"))
    if held_out:
        values = _metrics(held_out)
        lines.append(_line("eval", f"step {held_out['step']:,}  {values}"))
    if best := facts.best:
        value = metric_text(best["metric"], best["value"])
        lines.append(_line("best", f"{best['metric']} {value} at step {best['step']:,}"))
    speed = [f"{name} {text}" for name, text in facts.speed().items() if name != "seconds per step"]
    if speed:
        lines.append(_line("speed", ", ".join(speed)))
    if skipped := train.get("skipped"):
        lines.append(_line("skipped", f"{skipped} steps: see {run.dir / 'skipped_steps.jsonl'}"))
    if facts.left_out:
        reasons = ", ".join(f"{s}: {n:,} {r}" for (s, r), n in facts.left_out.most_common())
        lines.append(_line("left out", f"{facts.left_out.total():,} rows ({reasons})"))
    lines += [_line(name, text) for name, text in facts.slow_step_lines()]
    lines.append(_line("files", _files(run)))
    lines.append("next:")
    steps = facts.next_steps()
    width = max(map(len, steps))
    lines += [f"  {what:<{width}}  {command}" for what, command in steps.items()]
    return "\n".join(lines)


def _line(name: str, text: str) -> str:
    return f"  {name:<{NAME_WIDTH}}{text}"


def _metrics(record: dict[str, Any]) -> str:
    hidden = ("loss", "step", "epoch", "split")
    others = [name for name in record if name not in hidden and not name.startswith("loss_")]
    names = ["loss", *others] if "loss" in record else others
    return "  ".join(f"{name} {metric_text(name, record[name])}" for name in names)


def _files(run: Run) -> str:
    names = [name for name in ("report.html", "loss.png") if (run.dir / name).is_file()]
    checkpoints = run.checkpoint_list()
    if checkpoints:
        names.append(f"checkpoints/{checkpoints[-1].name}")
    return f"{run.dir}/ ({', '.join(names)})" if names else f"{run.dir}/"

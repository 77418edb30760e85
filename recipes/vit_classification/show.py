"""The report: curves, held-out images with their classes and the model's guesses, and a confusion matrix."""

import io
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mvp_engine.report import Example, write_report
from mvp_engine.report.facts import RunFacts, metric_texts

from .data import IGNORE

MAX_CLASSES = 20  # of the confusion matrix: of more, those that are confused most often
Figures = Mapping[str, float | None]


def show(engine: Any, figures: Figures | None = None, export: Path | None = None) -> None:
    """Write `report.html` with the guesses of the last evaluation, if there was one. All ranks call it.

    `figures` are its metrics; by default those of the log.
    """
    in_training = export is None
    if not hasattr(engine, "guesses") or (in_training and "plot" not in engine.config.log.backends):
        return
    of_ranks = engine.world.all_gather([row for part in engine.guesses for row in part.tolist()])
    guesses = sorted(row for rows in of_ranks for row in rows if row[1] != IGNORE)
    if engine.world.is_main:
        shown = RunFacts(engine.run).figures() if figures is None else metric_texts(figures)
        _write(engine, guesses, shown, export)


def _write(engine: Any, guesses: list[list[int]], shown: dict[str, str], export: Path | None) -> None:
    """`guesses` are rows of (index, label, guess)."""
    dataset = engine.held_out
    run = engine.run
    classes = dataset.classes
    examples = []
    for index, label, guess in guesses:
        image = partial(_png, dataset, index)
        examples.append(Example(image, "What is this?", classes[label], classes[guess], label == guess))
    shown["held-out images"] = f"{len(guesses):,}"
    config_file = run.dir / "config.yaml"
    pairs = [(label, guess) for _, label, guess in guesses]
    write_report(
        run.dir / "report.html",
        run,
        title=f"A vision transformer and {len(classes):,} classes of images",
        subtitle=f"{run.id}, step {engine.step}. None of these images was seen in training.",
        figures=shown,
        panels={"loss": {"held-out": "loss"}, "right guesses on held-out images": {"accuracy": "accuracy"}},
        examples=examples,
        tables={"What was taken for what": confusion_matrix(classes, pairs)},
        config=engine.config.to_yaml(),
        next_steps=_next_steps(config_file, run.dir, export),
    )
    engine.logger.info("report: %s", run.dir / "report.html")


def _next_steps(config_file: Path, folder: Path, export: Path | None) -> dict[str, str]:
    steps = {}
    if export is None:
        steps["Export it"] = f"mvp train {config_file} workflow=report resume={folder}"
    else:
        steps["Use the model"] = f"transformers.pipeline('image-classification', '{export}')"
    steps["Train longer"] = f"mvp train {config_file} resume={folder} train.epochs=N"
    steps["Compare runs"] = "mvp runs"
    return steps


def confusion_matrix(classes: list[str], pairs: list[tuple[int, int]]) -> list[list[str]]:
    """A table of (label, guess) pairs: a row per class with the count of each guess, and the share of right ones."""
    confusions = [0] * len(classes)
    for label, guess in pairs:
        if label != guess:
            confusions[label] += 1
            confusions[guess] += 1
    by_confusions = sorted(range(len(classes)), key=lambda i: -confusions[i])
    chosen = sorted(by_confusions[:MAX_CLASSES])
    rows = [["", *(classes[i] for i in chosen), "right"]]
    for i in chosen:
        guesses = [guess for label, guess in pairs if label == i]
        counts = [str(guesses.count(j)) if j in guesses else "" for j in chosen]
        accuracy = f"{guesses.count(i) / len(guesses):.1%}" if guesses else "none"
        rows.append([classes[i], *counts, accuracy])
    return rows


def _png(dataset: Any, index: int) -> list[bytes]:
    file = io.BytesIO()
    image = dataset.open_image(dataset.items[index]).convert("RGB")
    image.thumbnail((480, 480))
    image.save(file, "png")
    return [file.getvalue()]

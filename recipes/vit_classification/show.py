"""The report: curves, held-out images with their classes and the model's guesses, and a confusion matrix."""

import io
from functools import partial
from pathlib import Path
from typing import Any

from mvp_engine.report import Example, write_report

MAX_CLASSES = 20  # of the confusion matrix: of more, those that are confused most often


def show(engine: Any, figures: dict[str, float | None], guesses: list[list[int]], export: Path) -> None:
    """Write `report.html`; `guesses` are rows of (index, label, guess)."""
    dataset = engine.held_out
    run = engine.run
    classes = dataset.classes
    examples = []
    for index, label, guess in guesses:
        image = partial(_png, dataset, index)
        examples.append(Example(image, "What is this?", classes[label], classes[guess], label == guess))
    shown = {name: "none" if value is None else f"{value:.4g}" for name, value in figures.items()}
    shown["held-out images"] = f"{len(guesses):,}"
    shown["parameters"] = f"{sum(p.numel() for p in engine.model.parameters()):,}"
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
        next_steps={
            "Use the model": f"transformers.pipeline('image-classification', '{export}')",
            "Train on": f"mvp train {run.dir / 'config.yaml'} resume={run.dir} loop.epochs=N",
            "Compare runs": "mvp runs list",
        },
    )
    engine.logger.info("Hugging Face folder: %s; report: %s", export, run.dir / "report.html")


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
    image.thumbnail((160, 160))
    image.save(file, "png")
    return [file.getvalue()]

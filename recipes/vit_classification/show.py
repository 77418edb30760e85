"""The report: curves, held-out pictures with what they are and what they were taken for, and a table of all of it."""

import io
from functools import partial
from pathlib import Path
from typing import Any

from mvp_engine.kit.report import Example, write_report

MOST = 20  # classes in the table: of more, only those that were taken for another most often


def show(engine: Any, figures: dict[str, float | None], guesses: list[list[int]], export: Path) -> None:
    pictures, run = engine.held_out, engine.run
    classes, answers = pictures.classes, [(label, guess) for _, label, guess in guesses]
    examples = [
        Example(partial(_png, pictures, i), "What is this?", classes[label], classes[guess], label == guess)
        for i, label, guess in guesses
    ]
    config = run.dir / "config.yaml"
    shown = {name: "none" if value is None else f"{value:.4g}" for name, value in figures.items()}
    shown |= {"held-out pictures": f"{len(guesses):,}"}
    shown |= {"parameters": f"{sum(p.numel() for p in engine.model.parameters()):,}"}
    write_report(
        run.dir / "report.html",
        run,
        title=f"A vision transformer and {len(classes):,} classes of pictures",
        subtitle=f"{run.id}, step {engine.step}. None of these pictures was seen in training.",
        figures=shown,
        panels={"loss": {"held-out": "loss"}, "right guesses on held-out pictures": {"accuracy": "accuracy"}},
        examples=examples,
        tables={"What was taken for what": confusion(classes, answers)},
        config=engine.config.to_yaml(),
        next_steps={
            "Use the model": f"transformers.pipeline('image-classification', '{export}')",
            "Train on": f"mvp train {config} resume={run.dir} loop.epochs=N",
            "Compare runs": "mvp runs list",
        },
    )
    engine.logger.info("Hugging Face folder: %s; report: %s", export, run.dir / "report.html")


def confusion(classes: list[str], answers: list[tuple[int, int]]) -> list[list[str]]:
    """A row for each class, with how often it was taken for which, and how often that was right."""
    wrong = [sum(label != guess for label, guess in answers if i in (label, guess)) for i in range(len(classes))]
    chosen = sorted(sorted(range(len(classes)), key=lambda i: -wrong[i])[:MOST])
    rows = [["", *(classes[i] for i in chosen), "right"]]
    for i in chosen:
        of = [guess for label, guess in answers if label == i]
        counts = [str(of.count(j)) if j in of else "" for j in chosen]
        rows.append([classes[i], *counts, f"{of.count(i) / len(of):.1%}" if of else "none"])
    return rows


def _png(pictures: Any, index: int) -> list[bytes]:
    file = io.BytesIO()
    picture = pictures.picture(pictures.items[index]).convert("RGB")
    picture.thumbnail((160, 160))
    picture.save(file, "png")
    return [file.getvalue()]

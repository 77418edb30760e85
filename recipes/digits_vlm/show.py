"""The report of a trained model: some answers of its export on the terminal, and all answers on a page."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mvp_engine.kit import Answer
from mvp_engine.report import Example, write_report

from .ask import ask
from .data import conclusion

NUM_EXPORT_QUESTIONS = 6  # that the export answers again: half with one image, half with two
RECIPE = "recipes/digits_vlm/configs/train.yaml"
Question = tuple[list[str], str]  # image files, text


def show(engine: Any, answers: list[Answer], figures: Mapping[str, float | None], export: Path | None) -> None:
    folder = Path(engine.config.digits.folder)
    rows = []
    for kind in ("one", "two"):
        rows += [json.loads(line) for line in (folder / f"eval_{kind}.jsonl").open()]
    questions = [_question(folder, rows[answer.sample]) for answer in answers]
    shown = _figures(figures, answers)
    if export is not None:
        shown["the export says the same"] = _ask_export(export, answers, questions)
    _write_page(engine, answers, questions, shown)


def _ask_export(export: Path, answers: list[Answer], questions: list[Question]) -> str:
    """Print answers of the export by transformers alone; returns how many are those of the checkpoint."""
    chosen = range(0, len(answers), max(1, len(answers) // NUM_EXPORT_QUESTIONS))[:NUM_EXPORT_QUESTIONS]
    texts = ask(str(export), [questions[i] for i in chosen])
    print(f"\nAsked once more, from {export} with nothing but transformers:")
    same = 0
    for i, text in zip(chosen, texts, strict=True):
        files, question = questions[i]
        names = " ".join(Path(file).name for file in files)
        right = conclusion(text) == conclusion(answers[i].expected)
        verdict = "right" if right else f"WRONG, it is {answers[i].expected}"
        print(f"  {names:<36}{question:<24}{text:<24}{verdict}")
        same += answers[i].written == text
    print(f"The same words as from the checkpoint: {same} of {len(texts)}")
    return f"{same} of {len(texts)}"


def _figures(figures: Mapping[str, float | None], answers: list[Answer]) -> dict[str, str]:
    return {
        "right, one image": f"{figures['accuracy_one']:.1%}",
        "right, two images": f"{figures['accuracy_two']:.1%}",
        "both digits right too": f"{figures['exact_two']:.1%}",
        "held-out loss": f"{figures['loss']:.4g}",
        "held-out questions": f"{len(answers):,}",
    }


def _write_page(engine: Any, answers: list[Answer], questions: list[Question], shown: dict[str, str]) -> None:
    run = engine.run
    examples = []
    for answer, (files, question) in zip(answers, questions, strict=True):
        right = conclusion(answer.written) == conclusion(answer.expected)
        examples.append(Example(partial(_read_files, files), question, answer.expected, answer.written, right))
    first_image = questions[0][0][0]
    write_report(
        run.dir / "report.html",
        run,
        title="A tiny Qwen3-VL reads digits",
        subtitle=f"{run.id}, step {engine.step}. None of these images was seen in training.",
        figures=shown,
        panels={
            "loss": {"held-out": "loss"},
            "right answers to held-out questions": {"one image": "accuracy_one", "two images": "accuracy_two"},
        },
        examples=examples,
        config=engine.config.to_yaml(),
        next_steps={
            "Ask it yourself": f"mvp chat {run.dir} --image {first_image} -p 'Which digit is this?'",
            "Look at the data": f"mvp data inspect {RECIPE}",
            "Train longer": f"mvp train {RECIPE} train.max_steps=1500",
            "On two processes": f"mvp train {RECIPE} --nproc 2",
            "Compare runs": "mvp runs",
        },
    )
    engine.logger.info("report: %s", run.dir / "report.html")


def _read_files(paths: list[str]) -> list[bytes]:
    return [Path(path).read_bytes() for path in paths]


def _question(folder: Path, row: dict[str, Any]) -> Question:
    content = row["messages"][0]["content"]
    return [str(folder / part["image"]) for part in content[:-1]], content[-1]["text"]

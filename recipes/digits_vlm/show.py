"""What a trained model says: a few answers of its export on the terminal, and all of it on a page."""

import json
from functools import partial
from pathlib import Path
from typing import Any

from mvp_engine.kit import Answer
from mvp_engine.kit.report import Example, write_report

from .ask import ask
from .data import conclusion

ASKED_AGAIN = 6  # of the export: half with one picture, half with two


def show(engine: Any, answers: list[Answer], figures: dict[str, float | None], export: Path) -> None:
    folder, run = Path(engine.config.digits.folder), engine.run
    rows = [json.loads(line) for kind in ("one", "two") for line in (folder / f"eval_{kind}.jsonl").open()]
    looked = [_look(folder, rows[one.sample]) for one in answers]
    chosen = range(0, len(answers), max(1, len(answers) // ASKED_AGAIN))[:ASKED_AGAIN]
    again = ask(str(export), [looked[i] for i in chosen])
    same = sum(answers[i].written == text for i, text in zip(chosen, again, strict=True))
    print(f"\nAsked once more, from {export} with nothing but transformers:")
    for i, text in zip(chosen, again, strict=True):
        pictures = " ".join(Path(picture).name for picture in looked[i][0])
        right = conclusion(text) == conclusion(answers[i].expected)
        verdict = "right" if right else f"WRONG, it is {answers[i].expected}"
        print(f"  {pictures:<36}{looked[i][1]:<24}{text:<24}{verdict}")
    print(f"The same words as from the checkpoint: {same} of {len(again)}")

    config, parameters = engine.config, sum(p.numel() for p in engine.model.parameters())
    words = {"one": "right, one picture", "two": "right, two pictures"}
    shown = {text: f"{figures[f'accuracy_{kind}']:.1%}" for kind, text in words.items()}
    shown |= {"both digits right too": f"{figures['exact_two']:.1%}"}
    shown |= {"held-out questions": f"{len(answers):,}", "parameters": f"{parameters:,}"}
    shown |= {"the export says the same": f"{same} of {len(again)}"}
    examples = []
    for one, (pictures, question) in zip(answers, looked, strict=True):
        right = conclusion(one.written) == conclusion(one.expected)
        seen = partial(_files, pictures)
        examples.append(Example(seen, question, one.expected, one.written, right))
    picture = folder / rows[0]["messages"][0]["content"][0]["image"]
    recipe = "recipes/digits_vlm/configs/train.yaml"
    write_report(
        run.dir / "report.html",
        run,
        title="A tiny Qwen3-VL reads digits",
        subtitle=f"{run.id}, step {engine.step}. None of these pictures was seen in training.",
        figures=shown,
        panels={
            "loss": {"held-out": "loss"},
            "right answers to held-out questions": {"one picture": "accuracy_one", "two pictures": "accuracy_two"},
        },
        examples=examples,
        config=config.to_yaml(),
        next_steps={
            "Ask it yourself": f".venv/bin/python recipes/digits_vlm/ask.py {export} 'Which digit is this?' {picture}",
            "Look at the data": f".venv/bin/mvp data inspect {recipe}",
            "Train longer": f".venv/bin/mvp train {recipe} loop.total_steps=1500",
            "On two processes": f".venv/bin/mvp train {recipe} --nproc 2 data.global_batch_size=4",
            "Compare runs": ".venv/bin/mvp runs list",
        },
    )
    print(f"\nThe report, with the curves and the pictures: {run.dir / 'report.html'}")


def _files(paths: list[str]) -> list[bytes]:
    return [Path(path).read_bytes() for path in paths]


def _look(folder: Path, row: dict[str, Any]) -> tuple[list[str], str]:
    content = row["messages"][0]["content"]
    return [str(folder / part["image"]) for part in content[:-1]], content[-1]["text"]

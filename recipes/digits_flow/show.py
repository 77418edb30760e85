"""The report: curves, and generated digits with what the judge takes them for."""

import io
from collections.abc import Mapping
from functools import partial
from typing import Any

from PIL import Image
from torch import Tensor

from mvp_engine.report import Example, write_report
from mvp_engine.report.facts import RunFacts, metric_texts

from .model import SIDE

ZOOM = 8  # pixels on the page for each pixel of a digit


def show(engine: Any, figures: Mapping[str, float | None] | None = None) -> None:
    """Write `report.html` with the digits of the last evaluation, if there was one."""
    in_training = figures is None
    if engine.images is None or not engine.world.is_main or (in_training and "plot" not in engine.config.log.backends):
        return
    run = engine.run
    guesses = engine.judge.classes(engine.images).tolist()
    examples = []
    for image, wanted, guess in zip(engine.images, engine.wanted.tolist(), guesses, strict=True):
        examples.append(Example(partial(_png, image), f"Draw a {wanted}", str(wanted), str(guess), wanted == guess))
    shown = RunFacts(run).figures() if figures is None else metric_texts(figures)
    shown["the judge on real held-out digits"] = f"{engine.judge.held_out_accuracy():.1%}"
    write_report(
        run.dir / "report.html",
        run,
        title="A diffusion transformer draws digits",
        subtitle=f"{run.id}, step {engine.step}. An SVM trained on real digits says which digit each one is.",
        figures=shown,
        panels={"velocity loss": {"held-out": "loss"}, "right digits, by the judge": {"right": "right"}},
        examples=examples,
        config=engine.config.to_yaml(),
        next_steps={
            "Draw again, with stronger guidance": f"mvp train {run.dir}/config.yaml workflow=report resume={run.dir} "
            "flow.guidance=4",
            "Compare runs": "mvp runs",
        },
        shown=60,
    )
    engine.logger.info("report: %s", run.dir / "report.html")


def _png(image_P: Tensor) -> list[bytes]:
    file = io.BytesIO()
    ink = ((1 - image_P.clamp(-1, 1)) * 127.5).round().byte().view(SIDE, SIDE)
    Image.fromarray(ink.numpy()).resize((SIDE * ZOOM, SIDE * ZOOM), Image.Resampling.NEAREST).save(file, "png")
    return [file.getvalue()]

"""Examples for the report: answers of a model with the prompts and the media of the rows they belong to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from PIL import Image
from torch import nn

from mvp_engine.hf.model.model_parts import trained_parts
from mvp_engine.kit.data import MLLMDataKit
from mvp_engine.kit.data.read.row_types import MEDIA, BadRow, Message
from mvp_engine.kit.data.read.rows import read_row
from mvp_engine.kit.generation import Answer, read_answers
from mvp_engine.kit.model import export_link
from mvp_engine.kit.row_checks import log_end_report
from mvp_engine.report import Example, write_report
from mvp_engine.report.facts import RunFacts, is_of_task, metric_texts
from mvp_engine.report.page import image_file, wav_file, write_media

MAX_VIDEO_FRAMES = 4
MAX_AUDIO_SECONDS = 30


def examples_of(kit: MLLMDataKit, split: str, answers: Sequence[Answer]) -> list[Example]:
    """One example for each answer. Their media are read only when a page shows them.

    Rows of a stream cannot be read again, so their examples have the decoded prompt and no media.
    """
    found = []
    for answer in answers:
        messages: Sequence[Message] = ()
        source = None
        if not kit.is_stream(split):
            messages, source = _prompt_messages(kit, split, answer)
        media = partial(media_files, kit, source, messages)
        # A row that is a caption has no messages before its answer: the prompt is its media alone.
        question = conversation_text(messages) if messages else answer.prompt
        example = Example(media, question, answer.expected, answer.written, answer.verdict)
        found.append(replace(example, spoken=answer.media_files))
    return found


def keep_media(engine: Any, answers: Sequence[Answer]) -> None:
    """Write the media of the answers that `mvp runs serve` and a report of the run folder show."""
    if "plot" in engine.config.log.backends:
        examples = examples_of(engine.data, "eval", answers)
        write_media(engine.run, [answer.sample for answer in answers], examples)


def end_training(engine: Any, answers: Sequence[Answer]) -> None:
    """Report rows that were left out, export if `export_link` is set, and write the page; its errors are warnings.

    `answers`: those of all ranks in the last evaluation.
    """
    log_end_report(engine)
    note_seen(engine)
    export = None
    if engine.config.export_link is not None:
        engine.load_best()
        export = engine.export()
    if not engine.world.is_main or "plot" not in engine.config.log.backends:
        return
    try:
        engine.write_page(engine.eval_metrics, answers, export)
    except Exception:
        engine.logger.warning("report.html could not be written:", exc_info=True)


def note_seen(engine: Any) -> None:
    """Log what was trained on of each source, and keep it in `run.json`. Loaders of the data kit know it."""
    loader = engine.feed.loader
    if not hasattr(loader, "seen"):
        return
    seen = loader.seen()
    if getattr(loader, "seen_of_rank", False):  # each data-parallel rank has seen its own rows
        of_ranks = dict(engine.world.all_gather((engine.layout.data_rank, seen)))
        for rank in of_ranks.keys() - {engine.layout.data_rank}:
            for name, one in of_ranks[rank].items():
                for key in ("rows", "tokens"):
                    seen[name][key] += one[key]
    if not engine.world.is_main:
        return
    engine.run.note(seen=seen)
    for name, one in seen.items():
        engine.logger.info(
            "trained on %s: %s rows, %s tokens, %.3g epochs",
            name,
            f"{one['rows']:,}",
            f"{one['tokens']:,}",
            one["epochs"],
        )


def write_report_of(engine: Any, answers: Callable[[], Sequence[Answer]]) -> None:
    """Evaluate a checkpoint, export it, and write the page."""
    export_link(engine.config.export_link)
    figures, export = engine.evaluate(), engine.export()
    of_all_ranks = answers()
    if engine.world.is_main:
        engine.write_page(figures, of_all_ranks, export)


def rewrite_page(engine: Any) -> None:
    """Write the page of a run again, after an evaluation that the page has a table of; the answers on it stay."""
    folder = engine.run.dir
    if not engine.world.is_main or not (folder / "report.html").is_file():
        return
    facts = RunFacts(engine.run)
    answers = read_answers(folder / "answers.jsonl", engine.data.source_names("eval"))
    engine.write_page(facts.metrics("eval"), answers, None)


def write_examples_page(
    engine: Any,
    figures: Mapping[str, float | None] | None,
    examples: Sequence[Example],
    subtitle: str,
) -> None:
    """The `report.html` of an MLLMEngine: its curves, the metrics of an evaluation, and examples of it."""
    file = engine.run.dir / "report.html"
    write_report(
        file,
        engine.run,
        title=engine.title,
        subtitle=f"{engine.run.id}, step {engine.step}{subtitle}",
        figures=None if figures is None else engine.page_figures(figures),
        examples=examples,
        config=engine.config.to_yaml(),
    )
    engine.logger.info("report: %s", file)


def page_figures(model: nn.Module, figures: Mapping[str, float | None]) -> dict[str, str]:
    """Metrics as text, and the size of the model."""
    size = trained_parts(model)[-1]["parameters"]
    figures = {name: value for name, value in figures.items() if not is_of_task(name)}
    return {**metric_texts(figures), "parameters": f"{size:,}"}


def conversation_text(messages: Sequence[Message]) -> str:
    """The text of a single message; the turns of a longer conversation with their roles."""
    if len(messages) == 1:
        return messages[0].text
    return "\n".join(f"{message.role}: {message.text}" for message in messages)


def _prompt_messages(kit: MLLMDataKit, split: str, answer: Answer) -> tuple[Sequence[Message], Any]:
    """The messages of the row before its last answer, and the source of the row."""
    source, row, format = kit.row(split, answer.sample)
    messages = read_row(row, format).messages
    last = 0
    for i, message in enumerate(messages):
        if message.role == "assistant":
            last = i
    return messages[:last], source


def media_files(kit: MLLMDataKit, source: Any, messages: Sequence[Message]) -> list[bytes]:
    """Images and some frames of each video as PNG or JPEG files, audio as WAV files; empty for what cannot be read."""
    handler = kit.row_encoder.media
    files = []
    for part in chain.from_iterable(message.parts for message in messages):
        if part.kind not in MEDIA:
            continue
        try:
            _, item = handler.probe_and_decode(part, source.root)
        except BadRow:
            files.append(b"")
            continue
        if part.kind == "audio":
            rate = handler.sampling_rate
            files.append(wav_file(item[: MAX_AUDIO_SECONDS * rate], rate))
            continue
        frames = [item]
        if part.kind == "video":
            frames = item[:: max(1, -(-len(item) // MAX_VIDEO_FRAMES))]
        for frame in frames:
            image = frame if isinstance(frame, Image.Image) else Image.fromarray(frame)
            files.append(image_file(image))
    return files

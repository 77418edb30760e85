"""`mvp data codes`: the codes of all sounds that a config's model learns to speak, made before the training."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from mvp_engine.config import compose
from mvp_engine.errors import UserError
from mvp_engine.kit.speech.make_codes import MadeCodes, make_codes
from mvp_engine.tools.inspect import config_data_kit

LOGGER = logging.getLogger("mvp_engine")


def print_codes(file: str, overrides: list[str], *, as_json: bool) -> None:
    """Make the codes of every split, with progress on stderr, and print what was made by source."""
    with _progress_shown():
        _print_codes(file, overrides, as_json)


def _print_codes(file: str, overrides: list[str], as_json: bool) -> None:
    composed = compose(file, overrides)
    kit = config_data_kit(composed.engine_class, composed.config)
    speech = kit.row_encoder.speech
    if speech is None or speech.store is None:
        key = "mllm.speech" if speech is None else "mllm.speech.codec"
        raise UserError(f"{file}: {key} is not set, so no sound of its rows becomes codes")
    found: dict[str, MadeCodes] = {}
    for split in kit.splits:
        if kit.is_stream(split):
            print(f"{split}: the rows of a stream are encoded while it is read", file=sys.stderr)
            continue
        for name, settings in zip(kit.source_names(split), kit.sources(split), strict=True):
            row_format = settings.row_format(kit.settings)
            made = make_codes(name, kit.open_rows(settings), row_format, speech, again=True)
            if made is not None:
                found[f"{split}/{name}"] = made
    if as_json:
        sources = {name: {**asdict(made), "speed": made.speed} for name, made in found.items()}
        print(json.dumps({"folder": str(speech.store.folder), "sources": sources}, indent=2))
        return
    for name, made in found.items():
        print(f"{name}: {made}")
    print(f"codes: {speech.store.folder}")


@contextmanager
def _progress_shown() -> Iterator[None]:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)

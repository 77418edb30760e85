"""Demonstrations of the table as a LeRobot folder, and a small tokenizer for its instructions. Both are built once."""

from pathlib import Path
from typing import Any

import numpy as np

from mvp_engine.kit import build_once, load_processor
from mvp_engine.kit.actions.write import LeRobotWriter
from mvp_engine.kit.tiny_processors import train_tokenizer

from .world import ACTION_NAMES, CAMERA, NAMES, PHRASES, SIZE, STATE, STATE_NAMES, Table

FPS = 10
MAX_STEPS = 40
BATCH = 250  # tables at a time
VOCABULARY = 300


def prepare(folder: str, demonstrations: int, version: str, codec: str | None) -> Any:
    """Build the folder if it is missing, and load its tokenizer."""

    def build(target: Path) -> None:
        write_demonstrations(target / "lerobot", demonstrations, version, codec)
        texts = [phrase.format(name) + "\n" for phrase in PHRASES for name in NAMES]
        train_tokenizer(texts, VOCABULARY, ("<image>",)).save_pretrained(target / "tokenizer")

    parameters = {"demonstrations": demonstrations, "format": version, "codec": codec, "version": 1}
    return load_processor(build_once(folder, parameters, build, "table.folder") / "tokenizer")


def write_demonstrations(root: Path, count: int, version: str, codec: str | None) -> None:
    """Episodes of the expert on tables with the seeds 0 to `count`."""
    writer = LeRobotWriter(
        root,
        fps=FPS,
        sizes={STATE: len(STATE_NAMES), "action": len(ACTION_NAMES)},
        names={STATE: STATE_NAMES, "action": ACTION_NAMES},
        cameras={CAMERA: (SIZE, SIZE)},
        version=version,
        codec=codec,
        robot_type="table",
    )
    with writer:
        for first in range(0, count, BATCH):
            _write_batch(writer, range(first, min(first + BATCH, count)))


def _write_batch(writer: LeRobotWriter, seeds: range) -> None:
    table = Table(len(seeds))
    seen, _ = table.reset(seed=list(seeds))
    steps: list[tuple[np.ndarray, ...]] = []
    lengths = np.zeros(len(seeds), int)
    while not table.done.all() and len(steps) < MAX_STEPS:
        actions = table.expert()
        steps.append((seen[CAMERA], seen[STATE], actions))
        lengths += ~table.done
        seen, *_ = table.step(actions)
    images, states, actions_TNA = (np.stack(values) for values in zip(*steps, strict=True))
    for number, length in enumerate(lengths):
        columns = {STATE: states[:length, number], "action": actions_TNA[:length, number]}
        writer.add(columns, {CAMERA: images[:length, number]}, table.tasks[number])

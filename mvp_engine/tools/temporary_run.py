"""A run folder for a command that trains for a while and leaves nothing behind."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mvp_engine.distributed import World
from mvp_engine.runs import Run


@contextlib.contextmanager
def temporary_run(world: World, name: str, prefix: str) -> Iterator[Run]:
    """A run in a temporary folder of rank 0, which is removed at the end; those of the other ranks stay empty."""
    with tempfile.TemporaryDirectory(prefix=prefix) as folder:
        place: Path | None = None
        if world.is_main:
            place = Run.create(Path(folder), name, None).dir
        yield Run(world.broadcast(place))

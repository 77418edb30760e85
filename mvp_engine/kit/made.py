"""Data that a recipe makes up: into a folder, once, complete or not there."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mvp_engine.errors import UserError
from mvp_engine.files import atomic_path


def made_once(
    folder: str | Path, about: Mapping[str, Any], make: Callable[[Path], None], key: str
) -> Path:
    """The folder that `make` fills; of several processes one makes it, the others wait.

    `about` is what it depends on (numbers and words, and a version that goes up when `make` changes): a folder that was
    made with another is refused, not used. `key` is the setting that names the folder, for messages.
    """
    folder, wanted = (
        Path(folder).expanduser(),
        json.loads(json.dumps(dict(about))),
    )  # as it will be read again
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f".{folder.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made.json").is_file():
            _make(folder, wanted, make, key)
    made = json.loads((folder / "made.json").read_text())
    if made != wanted:
        raise UserError(
            f"{folder} was made with {made}, not {wanted}: remove it, or set {key} to another"
        )
    return folder


def _make(folder: Path, about: dict[str, Any], make: Callable[[Path], None], key: str) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is there, but was not made by this recipe: set {key} to another")
    print(f"Making data in {folder}, once", flush=True)
    with atomic_path(folder) as temporary:
        temporary.mkdir()
        make(temporary)
        (temporary / "made.json").write_text(json.dumps(about) + "\n")

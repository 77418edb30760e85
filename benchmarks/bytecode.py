"""Byte-compile packages before starts are measured."""

from __future__ import annotations

import compileall
import os
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]


def compile_bytecode(folder: Path) -> None:
    """Byte-compile packages that were copied instead of installed; `make setup` does it. A start takes half as long.

    It is done once, and a file in `folder` says so: only looking at all files of torch takes ten seconds.
    """
    done = folder / "bytecode_is_compiled"
    if done.is_file():
        return
    copied = [Path(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    folders = [ROOT / "mvp_engine", *(one for one in copied if one.resolve() != ROOT)]
    if torch.__spec__ and torch.__spec__.cached and not Path(torch.__spec__.cached).is_file():
        folders += map(Path, torch.__path__)
    for one in folders:
        compileall.compile_dir(one, quiet=2, workers=0)
    folder.mkdir(parents=True, exist_ok=True)
    done.touch()

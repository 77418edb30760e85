"""Folders of synthetic data: built once, by one process, complete or missing."""

from __future__ import annotations

import fcntl
import inspect
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mvp_engine.errors import UserError
from mvp_engine.files import atomic_path
from mvp_engine.imports import load_spec

PARAMETERS_FILE = "made.json"


def make_data(made: Any) -> None:
    """Build the data of the config section `made`, unless they exist: its function gets the folder and other values.

    A number VERSION in the function's module is raised when the function changes.
    """
    if not isinstance(made, dict):  # null, or a section of the recipe's own, which its engine reads
        return
    if not {"by", "folder"} <= made.keys():
        raise UserError(
            "made: give `by`, which is file.py:function or module:function, and `folder`"
        )
    values = {key: value for key, value in made.items() if key not in ("by", "folder")}
    module, name = load_spec(made["by"], Path.cwd(), "made.by")
    build = getattr(module, name or "", None)
    if not callable(build):
        raise UserError(f"made.by={made['by']}: there is no function {name!r} in {module.__file__}")
    try:
        inspect.signature(build).bind(Path(made["folder"]), **values)
    except TypeError as error:
        raise UserError(
            f"made: {error}. {made['by']} is called with the folder and {values}"
        ) from None
    parameters = {**values, "version": getattr(module, "VERSION", 1)}
    build_once(made["folder"], parameters, partial(build, **values), "made.folder")


def build_once(
    folder: str | Path, parameters: Mapping[str, Any], build: Callable[[Path], None], key: str
) -> Path:
    """The folder that `build` fills. Of several processes one builds it, the others wait.

    `parameters` is everything that the data depends on (numbers, strings, and a version that is raised when `build`
    changes). A folder that was built with other parameters is a user error. `key` is the config key of the folder,
    for messages.
    """
    folder = Path(folder).expanduser()
    wanted = json.loads(json.dumps(dict(parameters)))  # as it will be read from the file
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f".{folder.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / PARAMETERS_FILE).is_file():
            _build(folder, wanted, build, key)
    found = json.loads((folder / PARAMETERS_FILE).read_text())
    if found != wanted:
        raise UserError(
            f"{folder} was made with {found}, not {wanted}: remove it, or set {key} to another"
        )
    return folder


def _build(
    folder: Path, parameters: dict[str, Any], build: Callable[[Path], None], key: str
) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} exists, but was not made by this recipe: set {key} to another")
    print(f"Making data in {folder}, once", flush=True)
    with atomic_path(folder) as temporary:
        temporary.mkdir()
        build(temporary)
        (temporary / PARAMETERS_FILE).write_text(json.dumps(parameters) + "\n")

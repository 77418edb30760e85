"""Importing what a config names: `module:Name`, or `path/to/file.py:Name` anywhere on disk."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

from mvp_engine.errors import UserError


def load_spec(spec: str, folder: Path, what: str) -> tuple[ModuleType, str | None]:
    """The module of `file.py:Name` or `module:Name`, and the name if there is one."""
    location, _, name = spec.rpartition(":") if ":" in spec else (spec, "", "")
    if location.endswith(".py"):
        file = (folder / Path(location).expanduser()).resolve()
        if not file.is_file():
            raise UserError(f"{what} {spec!r}: there is no file {file}")
        return import_file(file), name or None
    try:
        return importlib.import_module(location), name or None
    except ModuleNotFoundError as error:
        if not location.startswith(error.name or "\0"):
            raise  # the module exists, something that it imports does not
        raise UserError(f"{what} {spec!r}: no module {location!r}. For a file, write path/to/file.py:Class") from None


def import_file(file: Path) -> ModuleType:
    """Import `file` as `<its folder>.<its name>`, so that a recipe's files import each other with `from .model import`.

    The folder's parent goes on `sys.path`, which also lets loader processes find the recipe's classes.
    """
    file = file.resolve()
    name = f"{file.parent.name}.{file.stem}"
    if (loaded := sys.modules.get(file.parent.name)) is not None and str(file.parent) not in loaded.__path__:
        raise UserError(
            f"recipe folder {file.parent} has the name of a package that is already imported "
            f"({loaded.__file__ or list(loaded.__path__)}); rename the folder"
        )
    if str(file.parents[1]) not in sys.path:
        sys.path.append(str(file.parents[1]))
    importlib.invalidate_caches()
    module = importlib.import_module(name)
    if Path(module.__file__ or "").resolve() != file:
        raise UserError(f"recipe folder name {file.parent.name!r} is taken by {module.__file__}; rename {file.parent}")
    return module

"""Find the Engine subclass of a config: from a file path, a module name, or the recipe's `engine.py`.

A recipe is a folder with an `engine.py`, and configs in it or below it.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from mvp_engine.errors import UserError
from mvp_engine.imports import import_file, load_spec

if TYPE_CHECKING:
    from mvp_engine.engine import Engine

FOLDERS_ABOVE = 2  # a config may lie in recipes/<name>/configs/<group>/


def find_engine(spec: str | None, config_file: Path) -> tuple[type[Engine], str]:
    """Import the engine class that `spec` names; returns it with an absolute spec.

    `spec` is `file.py:Class` (relative to the config file, or else to the working directory), `module:Class`, either
    without `:Class` if the file defines one engine only, or None for the nearest `engine.py`. The absolute spec is
    saved with the run, so that a resume from another folder finds the same class.
    """
    class_name = None
    if spec is None:
        module = import_file(nearest_engine(config_file))
    else:
        module, class_name = load_spec(spec, config_file.parent, "engine")
    class_name = class_name or _only_engine(module)
    engine_class = _engines_in(module).get(class_name)
    if engine_class is None:
        known = ", ".join(sorted(_engines_in(module))) or "none"
        raise UserError(f"{_name(module)} has no engine class {class_name!r}; it has: {known}")
    is_file = spec is None or spec.partition(":")[0].endswith(".py")
    return engine_class, f"{module.__file__ if is_file else module.__name__}:{class_name}"


def nearest_engine(config_file: Path) -> Path:
    for folder in config_file.absolute().parents[: 1 + FOLDERS_ABOVE]:
        if (folder / "engine.py").is_file():
            return folder / "engine.py"
    raise UserError(
        f"{config_file}: no engine.py next to the config or in the two folders above it. "
        "Set `engine: path/to/engine.py:YourEngine` in the config."
    )


def _engines_in(module: ModuleType) -> dict[str, type[Engine]]:
    """The engine classes of a module by name, those that it imports included."""
    from mvp_engine.engine import Engine  # here: it imports torch, which `mvp --help` must not

    found: dict[str, type[Engine]] = {}
    for name in {**vars(module), **dict.fromkeys(getattr(module, "__all__", ()))}:
        value = getattr(module, name, None)
        if isinstance(value, type) and issubclass(value, Engine) and value is not Engine:
            found[name] = value
    return found


def _only_engine(module: ModuleType) -> str:
    """The name of the one engine class that the module defines itself."""
    engines = _engines_in(module)
    own = [name for name in engines if engines[name].__module__ == module.__name__]
    if not own:
        raise UserError(f"{_name(module)} defines no subclass of mvp_engine.engine.Engine")
    if len(own) > 1:
        choices = ", ".join(sorted(own))
        raise UserError(
            f"{_name(module)} defines several engines ({choices}). Set `engine: file.py:Class`."
        )
    return own[0]


def _name(module: ModuleType) -> str:
    return module.__file__ or module.__name__

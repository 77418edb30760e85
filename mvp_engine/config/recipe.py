"""The engine class of a config, found in this repository or anywhere else on disk."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from mvp_engine.errors import UserError
from mvp_engine.imports import import_file, load_spec

if TYPE_CHECKING:
    from mvp_engine.engine import Engine


def find_engine(spec: str | None, config_file: Path) -> tuple[type[Engine], str]:
    """The engine class that `spec` names, and a spec that finds it again from any folder.

    `spec` is `file.py:Class` (relative to the config file), `module:Class`, or None for the recipe's own engine:
    `engine.py` next to the config file or in one of the two folders above it.
    """
    module, wanted = _load(spec, config_file)
    engine_class = pick_class(module, wanted)
    if Path(module.__file__ or "").is_file() and (spec is None or ".py" in spec):
        return engine_class, f"{module.__file__}:{engine_class.__name__}"
    return engine_class, f"{module.__name__}:{engine_class.__name__}"


def _load(spec: str | None, config_file: Path) -> tuple[ModuleType, str | None]:
    if spec is None:
        folders = [config_file.parent, *config_file.parents[1:3]]
        for folder in folders:
            if (folder / "engine.py").is_file():
                return import_file(folder / "engine.py"), None
        raise UserError(
            f"{config_file}: no engine.py next to the config or in the two folders above it. "
            "Set `engine: path/to/engine.py:YourEngine` in the config."
        )
    return load_spec(spec, config_file.parent, "engine")


def pick_class(module: ModuleType, wanted: str | None) -> type[Engine]:
    """The engine class called `wanted`, or the only one that the module defines itself."""
    from mvp_engine.engine import Engine

    classes = dict[str, type[Engine]]()
    for name, value in vars(module).items():
        if isinstance(value, type) and issubclass(value, Engine) and value is not Engine:
            classes[name] = value
    own = {name: value for name, value in classes.items() if value.__module__ == module.__name__}
    file = module.__file__
    choices = ", ".join(sorted(own or classes))
    if wanted is not None:
        if wanted in classes:
            return classes[wanted]
        raise UserError(f"{file} has no engine class {wanted!r}; it has: {choices or 'none'}")
    if not own:
        raise UserError(f"{file} defines no subclass of mvp_engine.engine.Engine")
    if len(own) > 1:
        raise UserError(f"{file} defines several engines ({choices}). Set `engine: file.py:Class`.")
    return next(iter(own.values()))

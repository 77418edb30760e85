"""Find the Engine subclass of a config: from a file path, a module name, a recipe, or the `engine.py` near the config.

A recipe is a folder with an `engine.py`, and configs in it or below it. The import of an engine takes seconds, most of
them for torch. So the config class of `engine.py` may lie in `settings.py` next to it, and that of `NAME.py` in
`NAME_settings.py`: where such a file defines one config class, composing a config imports nothing else of a recipe.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from mvp_engine.config.schema import Config
from mvp_engine.errors import UserError
from mvp_engine.imports import import_file, load_spec, shipped_folder, spec_file

if TYPE_CHECKING:
    from mvp_engine.engine import Engine

PACKAGE = Path(__file__).parents[1]
FOLDERS_ABOVE = 2  # a config may lie in recipes/<name>/configs/<group>/


SHIPPED = shipped_folder("recipes")


def shipped_config(name: Path) -> Path | None:
    """The file of `recipe/config`, if the package has it."""
    file = SHIPPED / name.parent / "configs" / f"{name.name}.yaml"
    return file if len(name.parts) == 2 and file.is_file() else None


def shipped_configs(recipe: str = "*") -> list[str]:
    """The names of a recipe's configs, or of all; empty if there is no such recipe."""
    files = SHIPPED.glob(f"{recipe}/configs/*.yaml")
    return sorted(f"{file.parts[-3]}/{file.stem}" for file in files)


def find_engine(spec: str | None, config_file: Path) -> tuple[type[Engine], str]:
    """Import the engine class that `spec` names; returns it with an absolute spec.

    `spec` is `file.py:Class` (relative to the config file, or else to the working directory), `module:Class`, either
    without `:Class` if the file defines one engine only, the name of a shipped recipe, or None for the nearest
    `engine.py`. The absolute spec is saved with the run, so that a resume from another folder finds the same class.
    """
    spec = _recipe_file(spec)
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


def _recipe_file(spec: str | None) -> str | None:
    """The spec, with the file of the engine in place of the name of a shipped recipe."""
    file = SHIPPED / (spec or "") / "engine.py"
    return str(file) if spec and spec.isidentifier() and file.is_file() else spec


def spec_of(engine: type[Engine]) -> str:
    """What names a class in a config: its module, or its file where no import finds that module again."""
    module = sys.modules.get(engine.__module__)
    file = getattr(module, "__file__", None)
    if file and (
        engine.__module__ == "__main__"
        or not importlib.util.find_spec(engine.__module__.partition(".")[0])
    ):
        return f"{file}:{engine.__qualname__}"
    return f"{engine.__module__}:{engine.__qualname__}"


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


def find_config_class(spec: str | None, config_file: Path) -> tuple[type[Config], str]:
    """The config class of an engine, and the absolute spec of the engine."""
    spec = _recipe_file(spec)
    location, _, name = spec.rpartition(":") if spec and ":" in spec else (spec or "", "", "")
    if not location or location.endswith(".py"):
        folder = config_file.parent
        file = spec_file(location, folder) if location else nearest_engine(config_file).resolve()
        if config_class := _settings_class(file):
            return config_class, f"{file}:{name}" if name else str(file)
    engine_class, spec = find_engine(spec, config_file)
    return engine_class.config_class, spec


def _settings_class(engine_file: Path) -> type[Config] | None:
    """The one config class that the settings file of an engine defines, if there is one."""
    stem = engine_file.stem
    file = engine_file.with_name("settings.py" if stem == "engine" else f"{stem}_settings.py")
    if not (engine_file.is_file() and file.is_file()):
        return None
    module = import_file(file)
    classes = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Config)
        and value.__module__ == module.__name__
    ]
    return classes[0] if len(classes) == 1 else None


def workflows(engine_class: type[Engine]) -> list[str]:
    """The public methods without arguments that are no hooks."""
    from mvp_engine.engine import Engine  # here: it imports torch, which `mvp --help` must not

    hooks = set(dir(Engine)) - {"train", "evaluate"}
    names = []
    for name, method in inspect.getmembers(engine_class, inspect.isfunction):
        needed = [
            p
            for p in list(inspect.signature(method).parameters.values())[1:]
            if p.default is p.empty
        ]
        if not name.startswith("_") and name not in hooks and not needed:
            names.append(name)
    return names


def check_workflow(engine_class: type[Engine], name: str) -> None:
    known = workflows(engine_class)
    if name not in known:
        raise UserError(
            f"workflow={name}: {engine_class.__name__} has no such workflow; it has: {', '.join(known)}"
        )

"""Find the Engine subclass of a config: from a file path, a module name, a recipe, or the `engine.py` near the config.

A recipe is a folder with an `engine.py`, and configs in it or below it. The import of an engine takes seconds, most of
them for torch. So its config class is looked for in its source first: if this imports the class from a module, such
as `from .settings import MyConfig`, only that module is imported.
"""

from __future__ import annotations

import ast
import importlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from mvp_engine.config.schema import Config
from mvp_engine.errors import UserError
from mvp_engine.imports import import_file, load_spec, spec_file

if TYPE_CHECKING:
    from mvp_engine.engine import Engine

PACKAGE = Path(__file__).parents[1]
FOLDERS_ABOVE = 2  # a config may lie in recipes/<name>/configs/<group>/


def shipped_folder(name: str) -> Path:
    """A folder of the checkout, which an editable install finds too; else `_NAME` in the wheel (setup.py)."""
    in_wheel = PACKAGE / f"_{name}"
    return in_wheel if in_wheel.is_dir() else PACKAGE.parent / name


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


# ---- The config class, from the source --------------------------------------------------------------


def find_config_class(spec: str | None, config_file: Path) -> tuple[type[Config], str]:
    """The config class of an engine, and the absolute spec of the engine."""
    spec = _recipe_file(spec)
    location, _, name = spec.rpartition(":") if spec and ":" in spec else (spec or "", "", "")
    try:
        if location and not location.endswith(".py"):
            source = _package_source(location)
        else:
            folder = config_file.parent
            file = spec_file(location, folder) if location else nearest_engine(config_file)
            location = str(file.resolve())
            source = EngineSource(Path(location))
        name = name or source.only_engine
        if config_class := source.config_class(name):
            return config_class, f"{location}:{name}"
    except (LookupError, OSError, SyntaxError):
        pass  # the import finds the class, or says what is wrong
    engine_class, spec = find_engine(spec, config_file)
    return engine_class.config_class, spec


@dataclass(frozen=True)
class EngineSource:
    """A file that defines or imports engines. Methods raise `LookupError` for what only its import shows."""

    file: Path

    @cached_property
    def tree(self) -> ast.Module:
        text = self.file.read_text(encoding="utf-8")
        if ".config_class =" in text:  # set outside of a class
            raise LookupError(self.file)
        return ast.parse(text)

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        return {node.name: node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)}

    @cached_property
    def imports(self) -> dict[str, tuple[ast.ImportFrom, str]]:
        """The imported names, each with its statement and its name there."""
        statements = [node for node in ast.walk(self.tree) if isinstance(node, ast.ImportFrom)]
        return {
            alias.asname or alias.name: (node, alias.name)
            for node in statements
            for alias in node.names
        }

    @property
    def only_engine(self) -> str:
        """The one class with a base that is called ...Engine, or with such a class as its base."""
        engines: list[str] = []
        for node in self.classes.values():
            bases = [ast.unparse(base) for base in node.bases]
            if any(base.endswith("Engine") or base in engines for base in bases):
                engines.append(node.name)
        if len(engines) != 1:
            raise LookupError(self.file)
        return engines[0]

    def config_class(self, name: str) -> type[Config] | None:
        """The config class of an engine, or None for a class without one."""
        if name in self.imports:
            node, original = self.imports[name]
            source = _package_source(node.module or "") if not node.level else self._sibling(node)
            return source.config_class(original)
        for statement in self.classes[name].body:
            targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
            if [getattr(target, "id", None) for target in targets] == ["config_class"]:
                return self._imported(ast.unparse(getattr(statement, "value", None) or statement))
        for base in self.classes[name].bases:
            if config_class := self.config_class(ast.unparse(base)):
                return config_class
        return None

    def _imported(self, name: str) -> type[Config]:
        node, original = self.imports[name]
        sibling = self._sibling(node).file if node.level else None
        module = import_file(sibling) if sibling else importlib.import_module(str(node.module))
        config_class = getattr(module, original, None)
        if not (isinstance(config_class, type) and issubclass(config_class, Config)):
            raise LookupError(name)
        return config_class

    def _sibling(self, node: ast.ImportFrom) -> EngineSource:
        if node.level > 1 or not node.module:
            raise LookupError(node.module)
        return EngineSource(self.file.parent / f"{node.module.replace('.', '/')}.py")


def _package_source(module: str) -> EngineSource:
    """The source of a module of the package: `importlib.util.find_spec` would import the packages around it."""
    package, *names = module.split(".")
    if package != "mvp_engine":
        raise LookupError(module)
    path = PACKAGE.joinpath(*names)
    return EngineSource(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))

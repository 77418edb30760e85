"""Importing what a config names: `module:Name`, or `path/to/file.py:Name` anywhere on disk."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from mvp_engine.errors import UserError, similar_path


def load_spec(spec: str, folder: Path, what: str) -> tuple[ModuleType, str | None]:
    """The module of `file.py:Name` or `module:Name`, and the name if there is one.

    A file is relative to `folder`, or else to the working directory.
    """
    location, _, name = spec.rpartition(":") if ":" in spec else (spec, "", "")
    if location.endswith(".py"):
        file = spec_file(location, folder)
        if not file.is_file():
            also = "" if folder.resolve() == Path.cwd() else f", nor one in {folder}"
            raise UserError(f"{what} {spec!r}: there is no file {file}{also}.{similar_path(file)}")
        return import_file(file), name or None
    try:
        return importlib.import_module(location), name or None
    except ModuleNotFoundError as error:
        if not location.startswith(error.name or "\0"):
            raise  # the module exists, something that it imports does not
        raise UserError(
            f"{what} {spec!r}: no module {location!r}. For a file, write path/to/file.py:Class"
        ) from None


def spec_file(location: str, folder: Path) -> Path:
    """The file of a spec, in `folder` or else in the working directory; the latter one need not exist."""
    path = Path(location).expanduser()
    file = (folder / path).resolve()
    return file if file.is_file() else path.resolve()


def import_file(file: Path) -> ModuleType:
    """Import `file` as a module of a package that stands for its folder.

    So a recipe's files import each other with `from .model import ...`. The folder may have any name and lie anywhere.
    """
    file = file.resolve()
    folder = str(file.parent)
    name = re.sub(r"\W", "_", file.parent.name)
    stands_for = list(getattr(sys.modules.get(name), "__path__", []))
    if stands_for != [folder] and (
        name in sys.modules or importlib.util.find_spec(name) is not None
    ):
        name = f"{name}_{hashlib.blake2b(folder.encode(), digest_size=4).hexdigest()}"  # the name is somebody else's
    add_packages({name: folder})
    return importlib.import_module(f"{name}.{file.stem}")


def shipped_folder(name: str) -> Path:
    """A folder of the checkout, which an editable install finds too; else `_NAME` in the wheel (setup.py)."""
    package = Path(__file__).parent
    in_wheel = package / f"_{name}"
    return in_wheel if in_wheel.is_dir() else package.parent / name


_packages: dict[str, str] = {}  # of `add_packages`


def add_packages(folders: dict[str, str]) -> None:
    """Make packages that stand for folders, by their names."""
    for name, folder in folders.items():
        if name not in sys.modules:
            package = ModuleType(name)
            package.__path__ = [folder]
            sys.modules[name] = package
            _packages[name] = folder


def added_packages() -> dict[str, str]:
    """The packages of `import_file`, which another process must add before it can load a pickle of their classes."""
    return dict(_packages)


def lazy_exports(package: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package that imports on first use what it names below `if TYPE_CHECKING:`."""

    def get(name: str) -> Any:
        module = sys.modules[package]
        for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
                value = getattr(importlib.import_module(str(node.module)), name)
                setattr(module, name, value)
                return value
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get

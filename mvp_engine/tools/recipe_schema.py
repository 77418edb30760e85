"""The schema of a recipe's config without the import of its engine, which imports torch and takes seconds.

The engine's source is parsed: its class, or one that it inherits from, says `config_class = Name`. Of the module that
defines this name, only the statements that the class depends on are executed. A recipe that is written in another way
is imported.
"""

from __future__ import annotations
import __future__

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from mvp_engine.config.compose import Draft
from mvp_engine.config.engine_class import find_engine, nearest_engine
from mvp_engine.config.schema import Config
from mvp_engine.imports import spec_file

PACKAGE = "mvp_engine"
PACKAGE_FOLDER = Path(__file__).parents[1]


def find_schema(draft: Draft) -> tuple[type[Config], str]:
    """The schema of a config, and the absolute spec of its engine, as `find_engine` returns it."""
    spec = draft.values.get("engine")
    try:
        return _parsed_schema(spec, draft.file)
    except Exception:  # noqa: BLE001 - code of the recipe ran: its import reports the error in full
        engine_class, spec = find_engine(spec, draft.file)
        return engine_class.config_class, spec


class _NotFoundError(Exception):
    """The source does not say it in a form that this module reads."""


@dataclass
class _Source:
    """A parsed module."""

    name: str  # the dotted name of a module of the package; empty for a file of a recipe
    file: Path

    @cached_property
    def statements(self) -> list[ast.stmt]:
        """The top-level statements, an import of several names as one import each."""
        found: list[ast.stmt] = []
        for node in ast.parse(self.file.read_text(encoding="utf-8")).body:
            group = [node]
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                group = node.body
            for one in group:
                found += _single_imports(one) if isinstance(one, ast.ImportFrom) else [one]
        return found

    def binding(self, name: str) -> ast.stmt:
        """The last statement that defines a name."""
        for node in reversed(self.statements):
            if name in _bound_names(node):
                return node
        raise _NotFoundError(name)

    def origin(self, node: ast.ImportFrom) -> _Source:
        """The module that an import names."""
        if node.level == 1 and node.module and not self.name:
            return _Source("", self.file.parent / f"{node.module.replace('.', '/')}.py")
        if node.level == 0 and node.module and node.module.split(".")[0] == PACKAGE:
            return _package_source(node.module)
        raise _NotFoundError(node.module)


def _single_imports(node: ast.ImportFrom) -> list[ast.stmt]:
    found: list[ast.stmt] = []
    for alias in node.names:
        one = ast.ImportFrom(node.module, [alias], node.level)
        found.append(ast.copy_location(one, node))
    return found


def _package_source(name: str) -> _Source:
    """A module of the package. `importlib.util.find_spec` would import the packages around it."""
    path = PACKAGE_FOLDER.joinpath(*name.split(".")[1:])
    return _Source(name, path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))


# ---- Which class -------------------------------------------------------------------------------------------


def _parsed_schema(spec: str | None, config_file: Path) -> tuple[type[Config], str]:
    location, _, name = spec.rpartition(":") if spec and ":" in spec else (spec or "", "", "")
    if not location:
        source = _Source("", nearest_engine(config_file))
    elif location.endswith(".py"):
        source = _Source("", spec_file(location, config_file.parent))
    elif location.split(".")[0] == PACKAGE:
        source = _package_source(location)
    else:
        raise _NotFoundError(location)
    if re.search(r"\.config_class\b", source.file.read_text(encoding="utf-8")):
        raise _NotFoundError(location)  # set outside of a class
    name = name or _only_engine(source)
    schema = _execute(*_config_class(source, name))
    if not (isinstance(schema, type) and issubclass(schema, Config)):
        raise _NotFoundError(name)
    return schema, f"{source.name or source.file}:{name}"


def _only_engine(source: _Source) -> str:
    names = []
    for node in source.statements:
        if isinstance(node, ast.ClassDef) and _is_engine(source, node.name):
            names.append(node.name)
    if len(names) != 1:
        raise _NotFoundError(source.file)
    return names[0]


def _is_engine(source: _Source, name: str) -> bool:
    try:
        _config_class(source, name)
    except _NotFoundError:
        return False
    return True


def _config_class(source: _Source, name: str) -> tuple[_Source, str]:
    """The module and the name of the config class of an engine class."""
    node = source.binding(name)
    if isinstance(node, ast.ImportFrom):
        return _config_class(source.origin(node), node.names[0].name)
    if not isinstance(node, ast.ClassDef):
        raise _NotFoundError(name)
    for statement in node.body:
        if "config_class" in _bound_names(statement):
            value = getattr(statement, "value", None)
            if isinstance(value, ast.Name):
                return source, value.id
            raise _NotFoundError(name)
    for base in node.bases:
        if isinstance(base, ast.Name) and _is_engine(source, base.id):
            return _config_class(source, base.id)
    raise _NotFoundError(name)


# ---- Its statements ----------------------------------------------------------------------------------------


def _execute(source: _Source, name: str) -> Any:
    """The value of a name of a module, of which only the statements are executed that it depends on."""
    if source.name:
        node = source.binding(name)
        if isinstance(node, ast.ImportFrom):
            return _execute(source.origin(node), node.names[0].name)
        return getattr(importlib.import_module(source.name), name)
    folder = re.sub(r"\W", "_", source.file.parent.name)
    module = ModuleType(f"{folder}.{source.file.stem}")  # as `import_file` calls it
    module.__file__ = str(source.file)
    imported = sys.modules.get(module.__name__)
    sys.modules[module.__name__] = module  # pydantic finds annotations and docstrings there
    try:
        _execute_statements(source, name, module)
    finally:
        del sys.modules[module.__name__]
        if imported is not None:
            sys.modules[module.__name__] = imported
    return vars(module)[name]


def _execute_statements(source: _Source, name: str, module: ModuleType) -> None:
    flags = 0
    for node in _needed(source, name):
        if isinstance(node, ast.ImportFrom) and node.level:
            alias = node.names[0]
            vars(module)[alias.asname or alias.name] = _execute(source.origin(node), alias.name)
            continue
        code = compile(ast.Module([node], []), str(source.file), "exec", flags, True)
        flags |= code.co_flags & __future__.annotations.compiler_flag
        exec(code, vars(module))


def _needed(source: _Source, name: str) -> Iterator[ast.stmt]:
    """The statements that a name depends on, in the order of the source."""
    names = {name, "annotations"}  # `from __future__ import annotations`
    size = 0
    while size < len(names):
        size = len(names)
        for node in source.statements:
            if names & _bound_names(node):
                names |= _named(node)
    return (node for node in source.statements if names & _bound_names(node))


def _bound_names(node: ast.stmt) -> set[str]:
    """The names that a statement defines. A call, an `if` and the like may change whatever they mention."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.split(".")[0] for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    if isinstance(node, ast.Assign | ast.AnnAssign) and all(
        isinstance(t, ast.Name) for t in targets
    ):
        return {target.id for target in targets if isinstance(target, ast.Name)}
    names = _named(node)
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.stmt):
            names |= _bound_names(inner)
    return names


def _named(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}

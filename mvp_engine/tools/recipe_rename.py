"""Renaming inside a copied recipe: engine class, run names, output folders and the commands in its texts."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import yaml

from mvp_engine.tools.recipe_configs import load_yaml, section_value

TEXT_FILES = {".py", ".yaml", ".md", ".sh", ".txt"}


def rename_recipe(folder: Path, old: str, new: str, final: Path) -> None:
    """Rename the recipe in all text files of `folder`; `final` is where the folder will be moved to."""
    files = [file for file in folder.rglob("*") if file.suffix in TEXT_FILES and file.is_file()]
    configs = [file for file in files if file.suffix == ".yaml"]
    engine = _engine_class(folder / "engine.py")
    camel_case = "".join(word.title() for word in new.split("_") if word)
    run_names = {section_value(load_yaml(file), "project", "name") for file in configs} - {None}
    for file in files:
        text = file.read_text(encoding="utf-8")
        text = re.sub(rf"\brecipes/{re.escape(old)}/", lambda _: f"{final}/", text)
        if engine is not None:
            text = re.sub(rf"\b{engine}\b", f"{camel_case}Engine", text)
        if file.suffix == ".yaml":
            output = rf"\$\{{project\.dir\}}/({re.escape(old)}/)?"
            text = re.sub(output, f"${{project.dir}}/{new}/", text)
            text = _rename_project(text, old, new, single=len(run_names) == 1)
        file.write_text(text, encoding="utf-8")


def _rename_project(text: str, old: str, new: str, single: bool) -> str:
    """Replace the value of `project.name` in place, so that comments and order stay."""
    node = yaml.compose(text)
    for key in ("project", "name"):
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        node = next((value for name, value in pairs if name.value == key), None)
    if not isinstance(node, yaml.ScalarNode):
        return text
    name = _project_name(node.value, old, new, single)
    return text[: node.start_mark.index] + name + text[node.end_mark.index :]


def _project_name(name: str, old: str, new: str, single: bool) -> str:
    """The new run name; training stages with different names keep their endings."""
    if name.startswith(old):
        return new + name.removeprefix(old)
    return new if single else f"{new}_{name}"


def _engine_class(file: Path) -> str | None:
    """The name of the engine class, if the file exists and defines exactly one."""
    if not file.is_file():
        return None
    engines = list[str]()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ClassDef):
            continue
        bases = [ast.unparse(base) for base in node.bases]
        if any(base.endswith("Engine") or base in engines for base in bases):
            engines.append(node.name)
    return engines[0] if len(engines) == 1 else None

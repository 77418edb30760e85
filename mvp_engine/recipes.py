"""`mvp recipe`: the recipes that there are, and a copy of one as the beginning of one's own.

A copy shares nothing with its origin but the engine: runs have its name, and what it makes (data, exports) goes into
a folder of that name below `project.dir`.
"""

from __future__ import annotations

import ast
import difflib
import keyword
import os
import re
import shutil
import textwrap
from pathlib import Path
from typing import Any

import yaml

from mvp_engine.errors import UserError

HERE = Path(__file__).parents[1] / "recipes"  # of a checkout, and of an editable install of it
TEXTS = {".py", ".yaml", ".md", ".sh", ".txt"}
LEFT = shutil.ignore_patterns("__pycache__", "*.pyc", "outputs", ".*", "README.md")


def find_recipes() -> dict[str, Path]:
    """Those of the checkout that this package is in, and those below the current folder, by name."""
    folders = [folder for root in (HERE, Path("recipes")) if root.is_dir() for folder in sorted(root.iterdir())]
    return {folder.name: folder.resolve() for folder in folders if _is_recipe(folder)}


def first_words(folder: Path) -> str:
    """The first sentence of a recipe's README."""
    file = folder / "README.md"
    text = re.sub(r"^#[^\n]*\n", "", file.read_text(encoding="utf-8")) if file.is_file() else ""
    first = " ".join(text.strip().partition("\n\n")[0].split())
    return textwrap.shorten(re.split(r"(?<=\.)\s", first)[0], 150, placeholder=" ...") if first else "(no README)"


def new_recipe(name: str, origin: str, parent: Path | None = None) -> tuple[Path, list[Path]]:
    """Copy a recipe; gives the new folder and its configs, the one to begin with first."""
    if not name.isidentifier() or keyword.iskeyword(name) or not name.isascii():
        raise UserError(f"{name!r} is no name for a recipe: use letters, digits and _, and begin with a letter")
    source = _find(origin)
    if parent is None:
        parent = Path("recipes") if Path("recipes").is_dir() else Path()
    folder = parent.expanduser() / name
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{folder} is there already: choose another name, or another place with --dir")
    if folder.resolve().is_relative_to(source):
        raise UserError(f"{folder} would lie inside of {source}, which it is to be a copy of: choose another --dir")
    beside = folder.with_name(f".{name}.{os.getpid()}.tmp")
    try:
        shutil.copytree(source, beside, ignore=LEFT)
        _rename(beside, source.name, name, folder)
        configs = [folder / file.relative_to(beside) for file in _configs(beside)]
        (beside / "README.md").write_text(_readme(source, name, configs), encoding="utf-8")
        beside.rename(folder)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror}. Give another place with --dir") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return folder, configs


def _find(origin: str) -> Path:
    known = find_recipes()
    if origin in known:
        return known[origin]
    path = Path(origin).expanduser()
    if _is_recipe(path):
        return path.resolve()
    if path.is_dir():
        raise UserError(f"{path} is no recipe: it needs an engine.py, and a YAML file beside it or in configs/")
    if not known:
        raise UserError(
            f"no recipe {origin!r}: recipes are in the repository, not in the installed package, and there is no "
            f"{HERE}. Clone the repository and give --from PATH/recipes/NAME, or install the clone (pip install -e)"
        )
    near = difflib.get_close_matches(origin, known, n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    raise UserError(f"no recipe {origin!r}. {hint}There are: {', '.join(known)}; or give the folder of one")


def _is_recipe(folder: Path) -> bool:
    return (folder / "engine.py").is_file() and bool(_configs(folder))


def _configs(folder: Path) -> list[Path]:
    """The configs, those for a CPU first; those that others only inherit from are not for running."""
    files = sorted(file for place in (folder, folder / "configs") for file in place.glob("*.yaml"))
    inherited = {entry for file in files for entry in _tree(file).get("defaults") or [] if isinstance(entry, str)}
    runnable = [file for file in files if file.stem not in inherited] or files
    return sorted(runnable, key=lambda file: (not file.stem.startswith("cpu"), file.stem != "train", file.stem))


def _tree(file: Path) -> dict[str, Any]:
    tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    return tree if isinstance(tree, dict) else {}


def _rename(folder: Path, old: str, name: str, final: Path) -> None:
    """The engine's class, the names of runs, the folders of what is made, and the commands in the texts."""
    files = [file for file in folder.rglob("*") if file.suffix in TEXTS and file.is_file()]
    engine, camel = _engine_class(folder / "engine.py"), "".join(word.title() for word in name.split("_") if word)
    names = {str((_tree(file).get("project") or {}).get("name", "")) for file in files if file.suffix == ".yaml"} - {""}
    for file in files:
        text = file.read_text(encoding="utf-8")
        text = re.sub(rf"\brecipes/{re.escape(old)}/", lambda _: f"{final}/", text)
        if engine is not None:
            text = re.sub(rf"\b{engine}\b", f"{camel}Engine", text)
        if file.suffix == ".yaml":
            text = re.sub(rf"\$\{{project\.dir\}}/({re.escape(old)}/)?", f"${{project.dir}}/{name}/", text)
            text = _name_project(text, lambda given: _project(given, old, name, alone=len(names) == 1))
        file.write_text(text, encoding="utf-8")


def _project(given: str, old: str, name: str, alone: bool) -> str:
    """Stages have names of their own, and keep what tells them apart."""
    if given.startswith(old):
        return name + given.removeprefix(old)
    return name if alone else f"{name}_{given}"


def _name_project(text: str, change: Any) -> str:
    """The value of `project.name` replaced where it stands, so that comments and order stay."""
    node = yaml.compose(text)
    for key in ("project", "name"):
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        node = next((value for name, value in pairs if name.value == key), None)
    if not isinstance(node, yaml.ScalarNode):
        return text
    return text[: node.start_mark.index] + change(node.value) + text[node.end_mark.index :]


def _engine_class(file: Path) -> str | None:
    """Of the one engine that the file has."""
    engines = list[str]()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        bases = [ast.unparse(base) for base in node.bases] if isinstance(node, ast.ClassDef) else []
        if isinstance(node, ast.ClassDef) and any(base.endswith("Engine") or base in engines for base in bases):
            engines.append(node.name)
    return engines[0] if len(engines) == 1 else None


def _readme(source: Path, name: str, configs: list[Path]) -> str:
    about = f"recipes/{source.name}" if source.parent == HERE else str(source)
    others = "".join(f"- `{file}`\n" for file in configs[1:])
    return f"""# {name}

Began as a copy of {about}, whose README says what it trains on, what to expect, and what its keys mean.
Say here what this one is for.

```bash
mvp check {configs[0]}
mvp train {configs[0]}
mvp evaluate {configs[0]}
```
{f"{chr(10)}Other configs:{chr(10)}{chr(10)}{others}" if others else ""}
What to change first: the data (what `data.py` makes, or the rows under `mllm.sources`), sizes and learning rate in the
config, `engine.py` for what is measured. What it makes (data, exports) goes into `{name}/` below `project.dir`.
"""

"""`mvp recipe`: the recipes that there are, and a copy of one as the beginning of one's own.

A copy shares nothing with its origin but the engine: runs have its name, and what it makes (data, exports) goes into
a folder of that name below `project.dir`.
"""

from __future__ import annotations

import ast
import difflib
import keyword
import re
import shutil
import textwrap
from pathlib import Path
from typing import Any

import yaml

from mvp_engine.errors import UserError
from mvp_engine.files import atomic_path

HERE = Path(__file__).parents[1] / "recipes"  # of a checkout, and of an editable install of it
TEXTS = {".py", ".yaml", ".md", ".sh", ".txt"}
LEFT = shutil.ignore_patterns("__pycache__", "*.pyc", "outputs", ".*", "README.md")


def find_recipes() -> dict[str, Path]:
    """Those of the checkout that this package is in, and those below the current folder, by name."""
    folders = [
        folder
        for root in (HERE, Path("recipes"))
        if root.is_dir()
        for folder in sorted(root.iterdir())
    ]
    return {folder.name: folder.resolve() for folder in folders if _is_recipe(folder)}


def first_words(folder: Path) -> str:
    """The first sentence of a recipe's README."""
    file = folder / "README.md"
    text = re.sub(r"^#[^\n]*\n", "", file.read_text(encoding="utf-8")) if file.is_file() else ""
    first = " ".join(text.strip().partition("\n\n")[0].split())
    return (
        textwrap.shorten(re.split(r"(?<=[^.]\.)\s", first)[0], 150, placeholder=" ...")
        if first
        else "(no README)"
    )


def new_recipe(name: str, origin: str, parent: Path | None = None) -> tuple[Path, list[Path]]:
    """Copy a recipe; gives the new folder and its configs, the one to begin with first."""
    if not name.isidentifier() or keyword.iskeyword(name) or not name.isascii():
        raise UserError(
            f"{name!r} is no name for a recipe: use letters, digits and _, and begin with a letter"
        )
    source = _find(origin)
    if parent is None:
        parent = Path("recipes") if Path("recipes").is_dir() else Path()
    folder = parent.expanduser() / name
    if folder.exists() or folder.is_symlink():
        raise UserError(
            f"{folder} is there already: choose another name, or another place with --dir"
        )
    if folder.resolve().is_relative_to(source):
        raise UserError(
            f"{folder} would lie inside of {source}, which it is to be a copy of: choose another --dir"
        )
    try:
        with atomic_path(folder) as copy:
            shutil.copytree(source, copy, ignore=LEFT)
            _rename(copy, source.name, name, folder)
            configs = [folder / file.relative_to(copy) for file in _configs(copy)]
            (copy / "README.md").write_text(_readme(source, name, configs), encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot write {folder}: {error.strerror}. Give another place with --dir"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{source} has a file that cannot be read: {error}") from None
    return folder, configs


def _find(origin: str) -> Path:
    known = find_recipes()
    if origin in known:
        return known[origin]
    path = Path(origin).expanduser()
    if _is_recipe(path):
        return path.resolve()
    if path.is_dir():
        raise UserError(
            f"{path} is no recipe: it needs an engine.py, and a YAML file beside it or in configs/"
        )
    if not known:
        raise UserError(
            f"no recipe {origin!r}: recipes are in the repository, not in the installed package, and there is no "
            f"{HERE}. Clone the repository and give --from PATH/recipes/NAME, or install the clone (pip install -e)"
        )
    near = difflib.get_close_matches(origin, known, n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    raise UserError(
        f"no recipe {origin!r}. {hint}There are: {', '.join(known)}; or give the folder of one"
    )


def _is_recipe(folder: Path) -> bool:
    return (folder / "engine.py").is_file() and bool(_yaml_files(folder))


def _yaml_files(folder: Path) -> list[Path]:
    return sorted(file for place in (folder, folder / "configs") for file in place.glob("*.yaml"))


def _configs(folder: Path) -> list[Path]:
    """The configs that are for running, the one to begin with first: no GPU, and no export of another that it needs."""
    files = _yaml_files(folder)
    trees = {file.stem: _tree(file) for file in files}
    parents = {
        stem: [name for name in tree.get("defaults") or [] if name in trees]
        for stem, tree in trees.items()
    }
    exports = {tree.get("export") for tree in trees.values()} - {None}

    def given(stem: str, section: str, key: str, below: tuple[str, ...] = ()) -> Any:
        """By the file, or by what it inherits."""
        above = (
            given(one, section, key, (*below, stem)) for one in parents[stem] if one not in below
        )
        own = _value(trees[stem], section, key)
        return next((value for value in above if value is not None), None) if own is None else own

    def whole(stem: str) -> bool:
        """Not one that only others make something of: it has a name, and some of those go by it."""
        heirs = [name for name, above in parents.items() if stem in above]
        names = [_value(trees[name], "project", "name") for name in (stem, *heirs)]
        known = names[0] is not None or (
            given(stem, "project", "name") is not None and None in names[1:]
        )
        return not heirs or (bool(parents[stem]) and known)

    def order(stem: str) -> tuple[bool, bool, bool, bool, str]:
        return (
            "gpu" in stem,
            given(stem, "model", "path") in exports,
            "cpu" not in stem,
            stem != "train",
            stem,
        )

    found = {file.stem: file for file in files if whole(file.stem)} or {
        file.stem: file for file in files
    }
    return [found[stem] for stem in sorted(found, key=order)]


def _tree(file: Path) -> dict[str, Any]:
    tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    return tree if isinstance(tree, dict) else {}


def _value(tree: dict[str, Any], section: str, key: str) -> Any:
    inner = tree.get(section)
    return inner.get(key) if isinstance(inner, dict) else None


def _rename(folder: Path, old: str, name: str, final: Path) -> None:
    """The engine's class, the names of runs, the folders of what is made, and the commands in the texts."""
    files = [file for file in folder.rglob("*") if file.suffix in TEXTS and file.is_file()]
    engine, camel = (
        _engine_class(folder / "engine.py"),
        "".join(word.title() for word in name.split("_") if word),
    )
    names = {_value(_tree(file), "project", "name") for file in files if file.suffix == ".yaml"} - {
        None
    }
    for file in files:
        text = file.read_text(encoding="utf-8")
        text = re.sub(rf"\brecipes/{re.escape(old)}/", lambda _: f"{final}/", text)
        if engine is not None:
            text = re.sub(rf"\b{engine}\b", f"{camel}Engine", text)
        if file.suffix == ".yaml":
            text = re.sub(
                rf"\$\{{project\.dir\}}/({re.escape(old)}/)?", f"${{project.dir}}/{name}/", text
            )
            text = _name_project(
                text, lambda given: _project(given, old, name, alone=len(names) == 1)
            )
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
        if isinstance(node, ast.ClassDef) and any(
            base.endswith("Engine") or base in engines for base in bases
        ):
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

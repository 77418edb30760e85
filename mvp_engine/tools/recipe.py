"""`mvp recipe`: list the recipes, and create one as a copy of another.

A copy shares nothing with its origin but the engine: its runs carry its own name, and the data and exports
that it writes go to a folder of that name below `project.dir`.
"""

from __future__ import annotations

import json
import keyword
import os
import re
import shutil
import textwrap
from pathlib import Path

import yaml

from mvp_engine.config.compose import MissingKeys, read_draft
from mvp_engine.config.shipped import SHIPPED
from mvp_engine.errors import UserError, did_you_mean
from mvp_engine.files import atomic_path
from mvp_engine.tools.recipe_configs import is_recipe, runnable_configs
from mvp_engine.tools.recipe_rename import rename_recipe

NOT_COPIED = shutil.ignore_patterns("__pycache__", "*.pyc", "outputs", ".*", "README.md")
MAX_SUMMARY = 150  # characters of a recipe's summary in the list


def print_recipes(*, as_json: bool) -> None:
    found = {
        name: {"dir": str(folder), "about": first_sentence(folder)}
        for name, folder in find_recipes().items()
    }
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for name, recipe in found.items():
        print(f"{name:<20} {recipe['about']}\n{'':<20} {recipe['dir']}")


def create_recipe(name: str, origin: str, parent: str | None) -> None:
    folder, configs = new_recipe(name, origin, Path(parent) if parent else None)
    words = [str(configs[0]), *(f"{key}=..." for key in _keys_to_set(configs[0]))]
    command = " ".join(words)
    print(f"created {folder}. Next: mvp check {command}, then mvp train {command}")


def _keys_to_set(config: Path) -> list[str]:
    """The keys of a config that have no value yet (???)."""
    try:
        read_draft(str(config), [])
    except MissingKeys as error:
        return error.keys
    return []


def find_recipes() -> dict[str, Path]:
    """The recipes that come with this package and those in ./recipes, by name."""
    found = {}
    for root in (SHIPPED, Path("recipes")):
        for folder in sorted(root.iterdir()) if root.is_dir() else []:
            if is_recipe(folder):
                found[folder.name] = folder.resolve()
    return found


def first_sentence(folder: Path) -> str:
    """The first sentence of a recipe's README."""
    file = folder / "README.md"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    text = re.sub(r"^#[^\n]*\n", "", text)  # without the title
    paragraph = " ".join(text.strip().partition("\n\n")[0].split())
    if not paragraph:
        return "(no README)"
    sentence = re.split(r"(?<=[^.]\.)\s", paragraph)[0]
    return textwrap.shorten(sentence, MAX_SUMMARY, placeholder=" ...")


def new_recipe(name: str, origin: str, parent: Path | None = None) -> tuple[Path, list[Path]]:
    """Copy a recipe; returns the new folder and its runnable configs, the one to start with first."""
    if not name.isidentifier() or keyword.iskeyword(name) or not name.isascii():
        raise UserError(
            f"{name!r} is not a valid recipe name: use letters, digits and _, and begin with a letter"
        )
    source = _find(origin)
    _refuse_links_out(source)
    folder = _new_folder(name, source, parent)
    try:
        with atomic_path(folder) as copy:
            shutil.copytree(source, copy, ignore=NOT_COPIED)
            rename_recipe(copy, source.name, name, folder)
            configs = [folder / file.relative_to(copy) for file in runnable_configs(copy)]
            (copy / "README.md").write_text(_readme(source, name, configs), encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot write {folder}: {error.strerror}. Choose another folder with --dir"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{source} has a file that cannot be read: {error}") from None
    return folder, configs


def _refuse_links_out(source: Path) -> None:
    """A recipe of somebody else must not bring files of this machine into the copy, which may be published."""
    for parent, folders, files in os.walk(source):
        ignored = NOT_COPIED(parent, [*folders, *files])
        folders[:] = [name for name in folders if name not in ignored]
        for path in (Path(parent) / name for name in (*folders, *files) if name not in ignored):
            if not path.resolve().is_relative_to(source.resolve()):
                raise UserError(
                    f"{path} is a link that leads out of the recipe, to {path.resolve()}: replace it by the file itself"
                )


def _new_folder(name: str, source: Path, parent: Path | None) -> Path:
    if parent is None:
        parent = Path("recipes") if Path("recipes").is_dir() else Path()
    folder = parent.expanduser() / name
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{folder} exists already: choose another name, or another folder (--dir)")
    if folder.resolve().is_relative_to(source):
        raise UserError(
            f"{folder} would lie inside {source}, the recipe to copy: choose another --dir"
        )
    return folder


def _find(origin: str) -> Path:
    """The folder of the recipe that `origin` names."""
    known = find_recipes()
    if origin in known:
        return known[origin]
    path = Path(origin).expanduser()
    if is_recipe(path):
        return path.resolve()
    if path.is_dir():
        raise UserError(
            f"{path} is not a recipe: it needs an engine.py, and a YAML file next to it or in configs/"
        )
    raise UserError(
        f"no recipe {origin!r}.{did_you_mean(origin, known)} Known recipes: {', '.join(known)}; "
        "or give a recipe's folder"
    )


def _readme(source: Path, name: str, configs: list[Path]) -> str:
    origin = f"recipes/{source.name}" if source.parent == SHIPPED else str(source)
    start = configs[0]
    others = "".join(f"- `{file}`\n" for file in configs[1:])
    other_configs = f"\nOther configs:\n\n{others}" if others else ""
    return f"""# {name}

Started as a copy of {origin}; the README there describes the data, the expected results and the keys.
Describe here what this recipe is for.

```bash
mvp check {start}
mvp train {start}
mvp evaluate {start}
```
{other_configs}
What to change first: the data (what `data.py` writes, or the rows under `mllm.sources`), sizes and learning
rate in the config, the metrics in `engine.py`. Data and exports go to `{name}/` below `project.dir`.
"""

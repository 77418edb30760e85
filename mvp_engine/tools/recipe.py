"""`mvp recipe`: list the recipes, and create one as a copy of another.

A copy shares nothing with its origin but the engine: its runs carry its own name, and the data and exports
that it writes go to a folder of that name below `output_dir`.

`mvp recipe --skills`: copy the skills to where coding agents look for them.

`.agents/skills` holds the copies, `.claude/skills` has links to them. Paths in the texts are those of a checkout; in a
copy they point into the installed package.
"""

from __future__ import annotations

import filecmp
import json
import keyword
import os
import re
import shutil
import tempfile
import textwrap
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from mvp_engine.config.compose import read_draft
from mvp_engine.config.engine_class import PACKAGE, SHIPPED
from mvp_engine.errors import UserError, count, did_you_mean
from mvp_engine.files import atomic_path, atomic_symlink, remove
from mvp_engine.imports import shipped_folder

NOT_COPIED = shutil.ignore_patterns("__pycache__", "*.pyc", "outputs", ".*")


def recipe_command(
    name: str | None,
    origin: str | None,
    folder: str | None,
    *,
    skills: bool,
    force: bool,
    as_json: bool,
) -> None:
    """List the recipes, create one, or install the skills."""
    if skills:
        install_skills(folder or ".", force)
    elif name is None:
        print_recipes(as_json=as_json)
    elif origin is None:
        raise UserError(f"mvp recipe {name}: which recipe to copy? Add --from RECIPE")
    else:
        create_recipe(name, origin, folder)


def print_recipes(*, as_json: bool) -> None:
    found = {
        name: {"dir": str(folder), "about": first_sentence(folder)}
        for name, folder in find_recipes().items()
    }
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for name, recipe in found.items():
        indent = " " * 21
        print(
            textwrap.fill(
                recipe["about"], 110, initial_indent=f"{name:<20} ", subsequent_indent=indent
            )
        )
        print(f"{indent}{recipe['dir']}")


def create_recipe(name: str, origin: str, parent: str | None) -> None:
    folder, configs = new_recipe(name, origin, Path(parent) if parent else None)
    command = _with_missing_keys(configs[0], configs[0])
    print(f"created {folder}. Next: mvp check {command}, then mvp train {command}")


def _with_missing_keys(config: Path, file: Path) -> str:
    """A config, and the keys that have no value in its `file`, as words of a command."""
    return " ".join([str(config), *(f"{key}=..." for key in read_draft(file).missing)])


def find_recipes() -> dict[str, Path]:
    """The recipes that come with this package and those in ./recipes, by name."""
    found = {}
    for root in (SHIPPED, Path("recipes")):
        for folder in sorted(root.iterdir()) if root.is_dir() else []:
            if is_recipe(folder):
                found[folder.name] = folder.resolve()
    return found


def first_sentence(folder: Path) -> str:
    """The first sentence of a recipe's README, without the targets of its links."""
    file = folder / "README.md"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    text = re.sub(r"^#[^\n]*\n", "", text)  # without the title
    paragraph = " ".join(text.strip().partition("\n\n")[0].split())
    if not paragraph:
        return "(no README)"
    paragraph = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", paragraph)
    return _sentence(paragraph)


def _sentence(text: str) -> str:
    return re.split(r"(?<=[^.]\.)\s", text)[0]


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
            rename_recipe(copy, source, name, folder)
            files = runnable_configs(copy)
            configs = [folder / file.relative_to(copy) for file in files]
            start = _with_missing_keys(configs[0], files[0])
            _write_readme(copy, source, folder, configs, start)
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


def _write_readme(copy: Path, source: Path, folder: Path, configs: list[Path], start: str) -> None:
    """Put the commands of the copy above the README of the original, whose commands and links are renamed already.

    `folder`: where the copy will be. `start`: the first config, with the keys that it needs on the command line.
    """
    name = folder.name
    origin = f"recipes/{source.name}" if source.parent == SHIPPED else str(source)
    file = copy / "README.md"
    original = file.read_text(encoding="utf-8") if file.is_file() else ""
    original = re.sub(r"\A#[^\n]*\n", "", original).strip()  # without the title
    lines = "".join(f"- `{one}`{_purpose(copy / one.relative_to(folder))}\n" for one in configs)
    text = f"""# {name}

Started as a copy of {origin}. Describe here what this recipe is for.

```bash
mvp check {start}
mvp train {start}
mvp evaluate {start}
```

The configs, the one to start with first:

{lines}
What to change first: the data (what `data.py` writes, or the rows under `data.sources`), sizes and learning
rate in the config, the metrics in `engine.py`; then the loss, the model, the optimizer. docs/changes.md has diffs for
copies of `sft`, and docs/recipes.md every hook. Data and exports go to `{name}/` below `output_dir`.
"""
    if original:
        text += f"""
## From the README of {origin}

The commands below run the copy. The results are those of the original.

{original}
"""
    file.write_text(text, encoding="utf-8")


def _purpose(config: Path) -> str:
    """The first sentence of the comment that a config begins with, which says when to use it."""
    lines = takewhile(lambda line: line.startswith("#"), config.read_text("utf-8").splitlines())
    comment = " ".join(line.lstrip("# ") for line in lines)
    return f": {_sentence(comment)}" if comment else ""


# Renaming inside a copied recipe: engine class, run names, output folders and the commands in its texts.

TEXT_FILES = {".py", ".yaml", ".md", ".sh", ".txt"}


def rename_recipe(folder: Path, origin: Path, new: str, final: Path) -> None:
    """Rename the recipe in all text files of `folder`, a copy of `origin` that will be moved to `final`."""
    old = origin.name
    files = [file for file in folder.rglob("*") if file.suffix in TEXT_FILES and file.is_file()]
    configs = [file for file in files if file.suffix == ".yaml"]
    engine_file = folder / "engine.py"
    source = engine_file.read_text(encoding="utf-8") if engine_file.is_file() else ""
    classes = re.findall(r"^class (\w+)\((\w+)", source, re.MULTILINE)
    engines = [name for name, base in classes if "Engine" in name + base]
    engine = engines[0] if len(engines) == 1 else None
    camel_case = "".join(word.title() for word in new.split("_") if word)
    run_names = {load_yaml(file).get("run_name") for file in configs} - {None}
    outputs = {name for file in configs for name in _output_names(file, old)}
    stems = [file.stem for file in configs]
    for file in files:
        text = file.read_text(encoding="utf-8")
        text = re.sub(rf"\brecipes/{re.escape(old)}/", lambda _: f"{final}/", text)
        if engine is not None:
            text = re.sub(rf"\b{engine}\b", f"{camel_case}Engine", text)
        if file.suffix == ".yaml":
            output = rf"\$\{{output_dir\}}/({re.escape(old)}/)?"
            text = re.sub(output, f"${{output_dir}}/{new}/", text)
            text = _rename_run(text, old, new, single=len(run_names) == 1)
        if file.suffix == ".md":
            text = _rename_outputs(text, old, new, outputs)
            text = _rename_short_names(text, old, final, stems)
            text = _relink(text, origin, final, file.relative_to(folder).parent)
        file.write_text(text, encoding="utf-8")


def _output_names(config: Path, old: str) -> list[str]:
    """What a config writes or reads below `output_dir`: the first name of each path."""
    pattern = rf"\$\{{output_dir\}}/(?:{re.escape(old)}/)?([\w-]+)"
    return re.findall(pattern, config.read_text(encoding="utf-8"))


def _rename_outputs(text: str, old: str, new: str, names: set[str]) -> str:
    """Data and exports that a text names are those of the copy, as in its configs."""
    if not names:
        return text
    pattern = rf"\boutputs/(?:{re.escape(old)}/)?(?=(?:{'|'.join(map(re.escape, names))})\b)"
    return re.sub(pattern, f"outputs/{new}/", text)


def _rename_short_names(text: str, old: str, final: Path, stems: list[str]) -> str:
    """`sft/lora` is a config of the shipped recipe: the copy has no short names, so its file takes the place."""
    pattern = rf"(?<![\w/.]){re.escape(old)}/({'|'.join(map(re.escape, stems))})(?![\w/.-])"
    return re.sub(pattern, lambda found: f"{final}/configs/{found[1]}.yaml", text)


def _relink(text: str, origin: Path, final: Path, inside: Path) -> str:
    """Links that lead out of the recipe, seen from the copy. `inside`: the folder of the text in the recipe."""

    def moved(found: re.Match[str]) -> str:
        path, mark, anchor = found[1].partition("#")
        target = (origin / inside / path).resolve()
        if target.is_relative_to(origin) or not target.exists():
            return found[0]
        return f"]({os.path.relpath(target, (final / inside).resolve())}{mark}{anchor})"

    return re.sub(r"\]\(([^)\s:#]+(?:#[^)\s]*)?)\)", moved, text)


def _rename_run(text: str, old: str, new: str, single: bool) -> str:
    """Replace the value of `run_name` in place, so that comments and order stay."""
    node = yaml.compose(text)
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    node = next((value for name, value in pairs if name.value == "run_name"), None)
    if not isinstance(node, yaml.ScalarNode):
        return text
    name = _renamed_run(node.value, old, new, single)
    return text[: node.start_mark.index] + name + text[node.end_mark.index :]


def _renamed_run(name: str, old: str, new: str, single: bool) -> str:
    """The new run name; training stages with different names keep their endings."""
    if name.startswith(old):
        return new + name.removeprefix(old)
    return new if single else f"{new}_{name}"


# The configs of a recipe: which of its YAML files can be run, and which one to start with.


def is_recipe(folder: Path) -> bool:
    """Whether the folder has configs, and an engine of its own or a config that names one."""
    files = _yaml_files(folder)
    has_engine = (folder / "engine.py").is_file()
    return bool(files) and (has_engine or any("engine" in load_yaml(file) for file in files))


def runnable_configs(folder: Path) -> list[Path]:
    """The configs that are meant to be run, the one to start with first.

    The first one needs no GPU and no export of another config. Files that others only inherit from are left out.
    """
    files = {file.stem: file for file in _yaml_files(folder)}
    configs = _Configs({stem: load_yaml(file) for stem, file in files.items()})
    stems = [stem for stem in files if configs.is_runnable(stem)] or list(files)
    return [files[stem] for stem in sorted(stems, key=configs.order)]


def load_yaml(file: Path) -> dict[str, Any]:
    tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    return tree if isinstance(tree, dict) else {}


def section_value(tree: dict[str, Any], section: str, key: str) -> Any:
    inner = tree.get(section)
    return inner.get(key) if isinstance(inner, dict) else None


class _Configs:
    """The YAML files of one recipe, by name, with what each inherits through `defaults:`."""

    def __init__(self, trees: dict[str, dict[str, Any]]) -> None:
        self.trees = trees
        self.parents: dict[str, list[str]] = {}
        for stem, tree in trees.items():
            self.parents[stem] = [name for name in tree.get("defaults") or [] if name in trees]
        self.exports = {tree.get("export_link") for tree in trees.values()} - {None}

    def value(self, stem: str, section: str, key: str, seen: tuple[str, ...] = ()) -> Any:
        """A key's value in the file or in what it inherits."""
        own = section_value(self.trees[stem], section, key)
        if own is not None:
            return own
        for parent in self.parents[stem]:
            if parent in seen:
                continue
            inherited = self.value(parent, section, key, (*seen, stem))
            if inherited is not None:
                return inherited
        return None

    def is_runnable(self, stem: str) -> bool:
        """Whether the config is more than a base of others.

        A config that others inherit is runnable if it is called train, or if it inherits too and its runs have a name:
        its own, or an inherited one that some of its heirs share.
        """
        heirs = [name for name, parents in self.parents.items() if stem in parents]
        if not heirs:
            return True
        if not self.parents[stem]:
            return stem == "train"
        if self._own_name(stem) is not None:
            return True
        heir_shares_name = any(self._own_name(heir) is None for heir in heirs)
        return self._run_name(stem) is not None and heir_shares_name

    def _own_name(self, stem: str) -> Any:
        return self.trees[stem].get("run_name")

    def _run_name(self, stem: str) -> Any:
        """The name of the runs of a config, or of what it inherits."""
        names = [self._own_name(stem), *map(self._run_name, self.parents[stem])]
        return next((name for name in names if name is not None), None)

    def order(self, stem: str) -> tuple[bool, bool, bool, bool, str]:
        needs_export = self.value(stem, "model", "path") in self.exports
        return ("gpu" in stem, needs_export, "cpu" not in stem, stem != "train", stem)


def _yaml_files(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.yaml"), *(folder / "configs").glob("*.yaml")])


FOLDER = Path(".agents/skills")
LINKS = Path(".claude/skills")


def install_skills(project: str, force: bool) -> None:
    root = Path(project).expanduser().absolute()
    if not root.is_dir():
        raise UserError(f"--dir {project}: no such folder")
    source = shipped_folder("skills")
    if (root / FOLDER).resolve() == source.resolve():
        print(f"{root / FOLDER} is a link to {source}: nothing to install")
        return
    try:
        changed = _install(source, root, force)
    except OSError as error:
        raise UserError(
            f"cannot write {error.filename or root}: {error.strerror}. Choose another folder with --dir"
        ) from None
    print(f"{root / FOLDER}: {count(len(changed), 'skill')} written; links in {root / LINKS}")
    for name in changed:
        print(f"  {name}")


def _install(source: Path, root: Path, force: bool) -> list[str]:
    """Write copies that are missing or, with `force`, that differ; returns their names."""
    names = sorted(file.parent.name for file in source.glob("*/SKILL.md"))
    with tempfile.TemporaryDirectory() as folder:
        copies = Path(folder)
        for name in names:
            _copy_skill(source / name, copies / name, root)
        changed = [name for name in names if _differs(copies / name, root / FOLDER / name)]
        taken = [name for name in changed if (root / FOLDER / name).exists()]
        taken += [name for name in names if not _may_link(root, name)]
        if taken and not force:
            raise UserError(
                f"{root} has other skills of these names, or older versions: {', '.join(taken)}. "
                "--force replaces them"
            )
        for name in changed:
            (root / FOLDER).mkdir(parents=True, exist_ok=True)
            with atomic_path(root / FOLDER / name, replace_folder=True) as copy:
                shutil.copytree(copies / name, copy)
    for name in names:
        _link(root, name)
    return changed


def _copy_skill(source: Path, copy: Path, root: Path) -> None:
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    file = copy / "SKILL.md"
    text = file.read_text(encoding="utf-8")
    text = text.replace(".venv/bin/python", "python").replace(".venv/bin/mvp", "mvp")
    text = re.sub(r"(?<![\w/.])skills/", f"{FOLDER}/", text)
    text = re.sub(r"(?<![\w/.])docs/(?=\w)", f"{shipped_folder('docs')}/", text)
    text = re.sub(r"(?<![\w/.])mvp_engine/(?=\w)", f"{PACKAGE}/", text)
    file.write_text(text, encoding="utf-8")


def _differs(one: Path, two: Path) -> bool:
    """Whether two skill folders, which have no folders inside, differ."""
    if not two.is_dir():
        return True
    compared = filecmp.dircmp(one, two, ignore=["__pycache__"])
    _, unequal, unreadable = filecmp.cmpfiles(one, two, compared.common_files, shallow=False)
    return bool(compared.left_only or compared.right_only or unequal or unreadable)


def _may_link(root: Path, name: str) -> bool:
    """Whether the link is missing or ours already."""
    link = root / LINKS / name
    exists = link.exists() or link.is_symlink()
    return not exists or link.resolve() == (root / FOLDER / name).resolve()


def _link(root: Path, name: str) -> None:
    link = root / LINKS / name
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.resolve() == (root / FOLDER / name).resolve():
        return
    remove(link)
    atomic_symlink(link, Path("../..") / FOLDER / name)

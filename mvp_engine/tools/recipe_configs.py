"""The configs of a recipe: which of its YAML files can be run, and which one to start with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


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
        self.exports = {tree.get("export") for tree in trees.values()} - {None}

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
        return self.value(stem, "project", "name") is not None and heir_shares_name

    def _own_name(self, stem: str) -> Any:
        return section_value(self.trees[stem], "project", "name")

    def order(self, stem: str) -> tuple[bool, bool, bool, bool, str]:
        needs_export = self.value(stem, "model", "path") in self.exports
        return ("gpu" in stem, needs_export, "cpu" not in stem, stem != "train", stem)


def _yaml_files(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.yaml"), *(folder / "configs").glob("*.yaml")])

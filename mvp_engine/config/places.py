"""Where a config key was set: on the command line, or in which line of which file. Error messages name it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import yaml


class ConfigFile(NamedTuple):
    """A YAML file, and the dotted prefix of its keys: `model.` for a file of the config group `model`."""

    path: Path
    prefix: str


def place_of(key: str, files: list[ConfigFile], overrides: list[str]) -> str:
    """Where `key` was set last: the command line, else `file:line`."""
    for word in overrides:
        named = override_key(word)
        if named == key or key.startswith(f"{named}.") or named.startswith(f"{key}."):
            return f"command line ({word})"
    for file in reversed(files):
        if key.startswith(file.prefix):
            parts = key.removeprefix(file.prefix).split(".")
            line = _line_of(parts, yaml.compose(file.path.read_text(encoding="utf-8")))
            if line is not None:
                return f"{short_path(file.path)}:{line}"
    return short_path(files[-1].path)


def override_key(word: str) -> str:
    """The key of a command-line override: `key=value`, `+key=value`, `++key=value` or `~key`."""
    return word.lstrip("+~").partition("=")[0]


def short_path(file: Path) -> str:
    """The path relative to the current folder, if it is inside."""
    here = Path.cwd()
    return str(file.relative_to(here)) if file.is_relative_to(here) else str(file)


def _line_of(parts: list[str], node: Any) -> int | None:
    """The line of the key with these parts in a YAML tree; the index of a list item is a part too."""
    if not parts:
        return int(node.start_mark.line) + 1
    name, *rest = parts
    if name.isdecimal() and isinstance(node, yaml.SequenceNode | yaml.MappingNode):
        return _line_in_items(node, int(name), rest)
    if not isinstance(node, yaml.MappingNode):
        return None
    for key, value in node.value:
        if key.value == name:
            return _line_of(rest, value) if rest else int(key.start_mark.line) + 1
    return None


def _line_in_items(
    node: yaml.SequenceNode | yaml.MappingNode, index: int, rest: list[str]
) -> int | None:
    """The line in one item of a list. A mapping by name may stand for a list: then any item may hold the key."""
    items = node.value[index : index + 1]
    if isinstance(node, yaml.MappingNode):
        items = [value for _, value in node.value]
    for item in items:
        line = _line_of(rest, item)
        if line is not None:
            return line
    return None

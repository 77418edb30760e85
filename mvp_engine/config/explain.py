"""Error messages for configs: each names the problem, where it was set (command line or file:line), and the fix."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel, ValidationError

from mvp_engine.config.schema import Config

OTHER_TRAINERS = Path(__file__).parent / "other_trainers.yaml"  # their names of keys, and ours


def explain_invalid(
    error: ValidationError,
    schema: type[Config],
    files: list[ConfigFile],
    overrides: list[str],
    only_unknown: bool = False,
) -> list[str]:
    """The messages for values that the schema refuses, one line per problem; `only_unknown`: for unknown keys."""
    lines = []
    for problem in error.errors(include_url=False):
        if only_unknown and problem["type"] != "extra_forbidden":
            continue
        key = _key_of(problem["loc"], schema)
        place = place_of(key, files, overrides)
        if problem["type"] == "extra_forbidden":
            lines.append(f"{place}: unknown key '{key}'. {suggest_key(key, schema)}")
        elif problem["type"] == "missing":
            file = short_path(files[-1].path)
            lines.append(
                f"{file}: key '{key}' is missing; add it, or give {key}=... on the command line"
            )
        else:
            text = problem["msg"].removeprefix("Value error, ")
            if problem["type"] == "model_type":
                inner = [one for one in all_keys(schema) if one.startswith(f"{key}.")]
                text = f"It is a section, so set one of its keys: {', '.join(inner)}"
            # A check over several keys names them itself.
            if not isinstance(problem["input"], dict):
                text = f"{place}: '{key}' is {problem['input']!r}. {text[0].upper()}{text[1:]}"
            lines.append(text)
    return lines


def _key_of(loc: tuple[int | str, ...], schema: type[BaseModel]) -> str:
    """The dotted key of a problem. pydantic appends the union members that it tried to `loc`; they are no keys."""
    parts: list[str] = []
    fields: dict[str, Any] | None = dict(schema.model_fields)
    for part in loc:
        parts.append(str(part))
        if isinstance(part, int):
            continue  # an item of a list of sections
        if fields is None or str(part) not in fields:
            break
        section = _section(fields[str(part)].annotation)
        if section is None:
            break
        fields = dict(section.model_fields)
    return ".".join(parts)


def _section(annotation: Any) -> type[BaseModel] | None:
    for kind in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def all_keys(schema: type[BaseModel], prefix: str = "") -> list[str]:
    """All dotted keys of a schema, with those of its sections."""
    keys = []
    for name, field in schema.model_fields.items():
        keys.append(prefix + name)
        section = _section(field.annotation)
        if section is not None:
            keys += all_keys(section, f"{prefix}{name}.")
    return keys


def suggest_key(key: str, schema: type[Config]) -> str:
    """The key that was probably meant: a similar one, else one with the same or a similar last part."""
    leaf = _leaf(key)
    known = all_keys(schema)
    if leaf in other_trainers()["hints"]:
        return f"Here it is {other_trainers()['hints'][leaf]}"
    if leaf in other_trainers()["same"]:
        return f"Here it is {same_key(leaf, known) or _keys_of(leaf)[0]}"
    key = re.sub(r"\.\d+(?=\.)", "", key)  # all items of a list have the same keys
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    near = near or [one for one in known if _leaf(one) == leaf]
    near = near or [
        one for one in known if difflib.get_close_matches(leaf, [_leaf(one)], cutoff=0.7)
    ]
    if near:
        return f"Did you mean '{near[0]}'?"
    parent = key.rpartition(".")[0]
    siblings = [one for one in known if one.rpartition(".")[0] == parent]
    return f"Known keys{f' under {parent}' if parent else ''}: {', '.join(siblings)}"


@cache
def other_trainers() -> dict[str, dict[str, Any]]:
    """Names of keys in other trainers: `same` by our key, `hints` by what to do instead."""
    names: dict[str, dict[str, Any]] = yaml.safe_load(OTHER_TRAINERS.read_text(encoding="utf-8"))
    return names


def same_key(name: str, known: Collection[str]) -> str | None:
    """Our key with the meaning of another trainer's `name`, one of those that the config knows."""
    return next((key for key in _keys_of(name) if key in known), None)


def _keys_of(name: str) -> list[str]:
    keys = other_trainers()["same"].get(name, [])
    return [keys] if isinstance(keys, str) else keys


def _leaf(key: str) -> str:
    return key.rpartition(".")[2]


# Where a key was set.


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

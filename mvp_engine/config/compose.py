"""From a YAML file and `key=value` overrides to a validated config.

`default.yaml` comes first, then the recipe's YAML with the files that its `defaults:` list inherits, then the
command line. OmegaConf resolves interpolations, pydantic validates; Hydra's grammar reads the command line.
"""

from __future__ import annotations

import copy
import difflib
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from mvp_engine.config.engine_class import (
    find_config_class,
    find_engine,
    shipped_config,
    shipped_configs,
    spec_of,
)
from mvp_engine.config.schema import Config
from mvp_engine.errors import UserError, did_you_mean, similar_path
from mvp_engine.imports import spec_file
from mvp_engine.runs import flat_keys

if TYPE_CHECKING:
    from mvp_engine.engine import Engine

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
            for name in _keys_below(key, problem["input"]):
                place = place_of(name, files, overrides)
                lines.append(f"{place}: unknown key '{name}'. {suggest_key(name, schema)}")
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


def _keys_below(key: str, value: Any) -> Iterator[str]:
    """The dotted keys that an unknown section sets, or the key itself."""
    if not (isinstance(value, dict) and value):
        yield key
        return
    for name, inner in value.items():
        yield from _keys_below(f"{key}.{name}", inner)


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
    hints, gone = other_trainers()["hints"], other_trainers()["gone"]
    if key in gone or leaf in gone:
        return f"This key is gone: {gone.get(key) or gone[leaf]}"
    if key in hints or leaf in hints:
        return f"Here it is {hints.get(key) or hints[leaf]}"
    if leaf in other_trainers()["same"]:
        return f"Here it is {same_key(leaf, known) or _keys_of(leaf)[0]}"
    key = re.sub(r"\.\d+(?=\.)", "", key)  # all items of a list have the same keys
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    same_leaf = [name for name in known if _leaf(name) == leaf]
    near = near or difflib.get_close_matches(key, same_leaf, n=1, cutoff=0)
    near = near or [
        one for one in known if difflib.get_close_matches(leaf, [_leaf(one)], cutoff=0.7)
    ]
    if near:
        return f"Did you mean '{near[0]}'?"
    parent = key.rpartition(".")[0]
    if parent not in known:
        parent = ""
    siblings = [one for one in known if one.rpartition(".")[0] == parent]
    return f"Known keys{f' under {parent}' if parent else ''}: {', '.join(siblings)}"


@cache
def other_trainers() -> dict[str, dict[str, Any]]:
    """Names of keys in other trainers: `same` by our key, `hints` by what to do instead; `gone`: our own of before."""
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


DEFAULTS = Path(__file__).parent / "default.yaml"
NO_VALUE = "__no_value__"  # stands for a value that is missing (???)


@dataclass(frozen=True)
class Composed:
    """A validated config, and the files that it was composed from (later ones win)."""

    config: Config
    files: list[Path]

    @cached_property
    def engine_class(self) -> type[Engine]:
        """Imports the engine, and with it torch."""
        engine_class, spec = find_engine(self.config.engine, self.files[-1])
        if engine_class.config_class is not type(self.config):
            raise UserError(
                f"{spec}: its config_class is {engine_class.config_class.__name__}, but the settings file next to it "
                f"defines {type(self.config).__name__}: set config_class = {type(self.config).__name__}"
            )
        return engine_class


@dataclass(frozen=True)
class Draft:
    """The values of all files and overrides, before a schema validates them."""

    files: list[ConfigFile]
    overrides: list[str]
    values: dict[str, Any]
    missing: list[str]  # keys that have no value (???): it is NO_VALUE

    @property
    def file(self) -> Path:
        return self.files[-1].path

    @property
    def schema(self) -> type[Config]:
        return self._engine[0]

    @cached_property
    def _engine(self) -> tuple[type[Config], str]:
        """The config class of the engine, and the engine's absolute spec."""
        spec = self.values.get("engine")
        if spec == NO_VALUE:
            raise MissingKeys(self.file, self.missing)
        if not isinstance(spec, str | None):
            place = place_of("engine", self.files, self.overrides)
            raise UserError(f"{place}: 'engine' is {spec!r}. Write file.py:Class")
        return find_config_class(spec, self.file)

    @property
    def _made(self) -> dict[str, Any]:
        """The section `made` with the absolute file of its function: a resume from another folder finds the same."""
        made = self.values.get("made")
        if not isinstance(made, dict) or not isinstance(made.get("by"), str):
            return {}
        location, _, name = made["by"].rpartition(":")
        if location.endswith(".py"):
            made = {**made, "by": f"{spec_file(location, self.file.parent)}:{name}"}
        return {"made": made}

    def composed(self, may_miss: bool = False) -> Composed:
        """`may_miss`: a key without a value is an error only where its value cannot be a text."""
        schema, engine = self._engine
        problems: list[str] = []
        try:
            config = schema.model_validate({**self.values, "engine": engine, **self._made})
            if not self.missing or may_miss:
                return Composed(config, [source.path for source in self.files])
        except ValidationError as error:
            # Next to missing values, unknown keys only: a misspelt one is often the one without a value.
            lines = explain_invalid(error, schema, self.files, self.overrides, bool(self.missing))
            problems = list(dict.fromkeys(lines))
        if self.missing:
            raise MissingKeys(self.file, self.missing, problems)
        raise UserError("\n".join(problems))


class MissingKeys(UserError):
    """Keys that have no value (???) in the files and none on the command line."""

    def __init__(self, file: Path, keys: list[str], unknown: Sequence[str] = ()) -> None:
        """`unknown`: what is said about unknown keys, one line each."""
        words = " ".join(f"{key}=..." for key in keys)
        text = (
            f"{short_path(file)} has keys without a value (???); give on the command line: {words}"
        )
        super().__init__("\n".join([*unknown, text]))
        self.keys = keys


def compose(
    path: str | Path, overrides: Sequence[str] = (), engine: type[Engine] | None = None
) -> Composed:
    """Compose and validate the config at `path`; raises `UserError` with what is wrong, where, and the fix.

    `engine` is used in place of the class that the config names.
    """
    draft = read_draft(path, overrides)
    if engine is None:
        return draft.composed()
    draft.__dict__["_engine"] = (engine.config_class, spec_of(engine))
    composed = draft.composed()
    composed.__dict__["engine_class"] = engine
    return composed


def read_draft(path: str | Path, overrides: Sequence[str] = ()) -> Draft:
    """The values of the files, of those that they inherit, and of the overrides, with interpolations resolved."""
    file = _find_file(Path(path).expanduser())
    words = [_parse_override(word) for word in overrides]
    inheritance = Inheritance(file, {word.key_or_group: word.value() for word in words})
    inheritance.read(file)
    overrides = _with_our_names(inheritance.trees, list(overrides), words, file)
    words = [_parse_override(word) for word in overrides]
    values = copy.deepcopy(_default_values())
    for source, tree in inheritance.trees.items():
        for name in reversed(source.prefix.split(".")[:-1]):
            tree = {name: tree}
        _merge(values, tree)
    try:
        config = OmegaConf.create(values)
        for word in words:
            if word.key_or_group not in inheritance.selected:
                _override(config, word)
        missing = sorted(
            re.sub(r"\[(\d+)\]", r".\1", key) for key in OmegaConf.missing_keys(config)
        )
        for key in missing:
            OmegaConf.update(config, key, NO_VALUE)
        values = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    except (OmegaConfBaseException, TypeError) as error:  # TypeError: a name as the index of a list
        raise UserError(f"{short_path(file)} does not compose: {_in_one_line(error)}") from None
    for key, value in flat_keys(values).items():
        if "://" in str(value):
            from mvp_engine.stores import refuse_credentials

            refuse_credentials(str(value), f"{key}=")
    files = [ConfigFile(DEFAULTS, ""), *inheritance.trees]
    return Draft(files, list(overrides), {str(key): values[key] for key in values}, missing)


def _with_our_names(
    trees: dict[ConfigFile, dict[str, Any]], overrides: list[str], words: list[Override], file: Path
) -> list[str]:
    """Rename keys of other trainers with the same meaning as ours, in `trees`; returns the overrides, renamed too."""
    foreign = other_trainers()["same"].keys()
    tops = {name for source, tree in trees.items() if not source.prefix for name in tree}
    if not foreign & (tops | {word.key_or_group for word in words}):
        return overrides
    specs = [tree["engine"] for tree in trees.values() if "engine" in tree]
    specs += [word.value() for word in words if word.key_or_group == "engine"]
    schema = find_config_class(specs[-1] if specs else None, file)[0]
    known = all_keys(schema)
    names = {name: same_key(name, known) for name in foreign if name not in schema.model_fields}
    ours = {name: key for name, key in names.items() if key is not None}
    for source, tree in trees.items():
        for name in [name for name in tree if name in ours and not source.prefix]:
            place = short_path(source.path)
            _set_once(tree, ours[name], _converted(name, tree.pop(name)), name, place)
    given = {word.key_or_group for word in words}
    return [
        _renamed_word(text, word, ours, given) for text, word in zip(overrides, words, strict=True)
    ]


def _set_once(tree: dict[Any, Any], key: str, value: Any, name: str, place: str) -> None:
    """Set a dotted key in the tree of a file, which has it as `name`."""
    *sections, leaf = key.split(".")
    for section in sections:
        if not isinstance(tree.get(section), dict):
            tree[section] = {}
        tree = tree[section]
    if leaf in tree:
        raise UserError(f"{place}: {name} and {key} are the same key: remove one")
    tree[leaf] = value
    _note(f"{place}: {name} sets {key}")


def _renamed_word(text: str, word: Override, ours: dict[str, str], given: set[str]) -> str:
    """A word of the command line with our name; `given`: the keys of all words."""
    name = word.key_or_group
    if name not in ours or word.is_delete():
        return text
    key = ours[name]
    if key in given:
        raise UserError(f"command line: {name} and {key} are the same key: remove one")
    _note(f"command line: {name} sets {key}")
    value = _converted(name, word.value())
    return text.replace(name, key, 1) if value is word.value() else f"{key}={value}"


def _converted(name: str, value: Any) -> Any:
    """A value as our key has it: a ratio is no whole number, a number of epochs is one."""
    if name.endswith("_ratio") and type(value) is int:
        return float(value)
    if name.endswith("_epochs") and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


@cache
def _note(text: str) -> None:
    """Print a line once, on one rank."""
    if os.environ.get("RANK", "0") == "0":
        print(f"mvp: {text}", file=sys.stderr)


@cache
def _default_values() -> dict[str, Any]:
    return dict(load_yaml(DEFAULTS))


def _merge(values: dict[Any, Any], tree: dict[Any, Any]) -> None:
    """Put the values of a later file into those of the files before."""
    for key, value in tree.items():
        before = values.get(key)
        if isinstance(before, dict) and isinstance(value, dict):
            _merge(before, value)
        else:
            values[key] = value


# ---- Files ------------------------------------------------------------------------------------------


def _find_file(file: Path) -> Path:
    """The absolute path of an existing YAML file, or of a shipped recipe's config such as `sft/lora`."""
    if file.is_file():
        if file.suffix != ".yaml":
            raise UserError(f"config {file} must be called *.yaml, as all files of configs")
        return file.resolve()
    shipped = shipped_config(file)
    if shipped is not None:
        return shipped
    if file.is_dir():
        raise UserError(f"config {file} is a folder; name a YAML file. {_yaml_files(file)}")
    raise UserError(f"config file not found: {file}.{similar_path(file) or _other_files(file)}")


def _other_files(file: Path) -> str:
    shipped = [] if file.is_absolute() else shipped_configs(file.parts[0])
    if shipped:
        return f" The recipe has: {', '.join(shipped)}"
    return did_you_mean(str(file), shipped_configs()) or f" {_yaml_files(file.parent)}"


def _yaml_files(folder: Path) -> str:
    """The YAML files of a folder, or of a recipe's folder, in words."""
    files = sorted(folder.glob("[!.]*.yaml")) or sorted(folder.glob("configs/*.yaml"))
    if not files:
        return f"{folder} has no YAML file (paths are relative to {Path.cwd()})"
    return f"{folder} has: {', '.join(str(file.relative_to(folder)) for file in files)}"


class Inheritance:
    """The `defaults:` lists of a file and of all files that it inherits.

    An entry is the name of a file, `group: name` for a file in the folder `group`, whose keys go below that name, or
    `_self_`, the place of the file's own keys (without it they come last).
    """

    def __init__(self, file: Path, choices: dict[str, Any]) -> None:
        """`choices`: values of the command line. That of a group, such as `model=tiny`, is the name of its file."""
        outer = [folder for folder in file.parents[1:] if folder.name == "configs"]
        self.roots = [file.parent, *outer[:1]]
        self.choices = choices
        self.selected: set[str] = set()  # groups of which the command line has chosen the file
        self.trees: dict[ConfigFile, dict[str, Any]] = {}  # values by file, later ones win

    def read(self, file: Path, group: str = "", heirs: tuple[Path, ...] = ()) -> None:
        if file in heirs:
            others = " and ".join(short_path(heir) for heir in heirs[1:]) or "itself"
            raise UserError(f"{short_path(file)} inherits from itself, through {others}")
        tree = load_yaml(file)
        if not isinstance(tree, dict):
            raise UserError(f"{short_path(file)} must be a mapping of keys to values")
        entries = tree.pop("defaults", None) or []
        for entry in entries if "_self_" in entries else [*entries, "_self_"]:
            if entry == "_self_":
                prefix = f"{group.replace('/', '.')}." if group else ""
                self.trees.setdefault(ConfigFile(file, prefix), tree)
                continue
            name = self._name(entry, file)
            path = name[1:] if name[0] == "/" else f"{group}/{name}".lstrip("/")
            self.read(self._find(path, file), path.rpartition("/")[0], (*heirs, file))

    def _name(self, entry: object, file: Path) -> str:
        """The path of an entry of a `defaults:` list; the command line may choose the file of a group."""
        name = str(entry)
        if isinstance(entry, dict):
            [(group, choice), *_] = entry.items()
            if isinstance(self.choices.get(group), str):
                self.selected.add(group)
                choice = self.choices[group]
            name = f"{group}/{choice}"
        if not re.fullmatch(r"/?[\w.+-]+(/[\w.+-]+)*", name):
            raise UserError(
                f"{short_path(file)}: {entry!r} in `defaults:` is no name of a file, `group: name` or _self_"
            )
        return name

    def _find(self, name: str, heir: Path) -> Path:
        for root in self.roots:
            if (file := root / f"{name}.yaml").is_file():
                return file
        folders = " or ".join(map(short_path, self.roots))
        raise UserError(f"{short_path(heir)} inherits {name!r}: {folders} has no {name}.yaml")


def load_yaml(file: Path) -> Any:
    try:
        return OmegaConf.to_container(OmegaConf.load(file))
    except (yaml.YAMLError, OSError) as error:  # OSError: a file with one number or text
        raise UserError(f"{short_path(file)} is not valid YAML: {error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{short_path(file)} is not UTF-8 text: {error}") from None
    except OmegaConfBaseException as error:
        raise UserError(f"{short_path(file)} does not compose: {_in_one_line(error)}") from None


def _in_one_line(error: Exception) -> str:
    return " ".join(line for line in str(error).splitlines() if line.strip())


# ---- The command line -------------------------------------------------------------------------------


NOT_TEXT = ("null", "true", "false", "nan", "inf")  # without quotes


def word(key: str, value: Any) -> str:
    """The override that sets `key` to `value`, in the grammar of `read_draft`."""
    return f"{key}={_literal(value)}"


def _literal(value: Any) -> str:
    """A value in the grammar of overrides."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float) and type(value).__module__ == "builtins":
        return repr(value)
    if isinstance(value, str | Path):
        if (
            re.fullmatch(r"(\.{0,2}/|[A-Za-z])[\w./:-]*", str(value))
            and str(value).lower() not in NOT_TEXT
        ):
            return str(value)
        # Only backslashes before a quote are special.
        return "'" + re.sub(r"(\\*)('|$)", _quoted, str(value)) + "'"
    if isinstance(value, Mapping):
        # Keys have no quotes.
        keys = [re.sub(r"[\\()\[\]{}:=, \t]", r"\\\g<0>", str(key)) for key in value]
        pairs = zip(keys, map(_literal, value.values()), strict=True)
        return "{" + ",".join(f"{key}:{text}" for key, text in pairs) + "}"
    if isinstance(value, Sequence):
        return "[" + ",".join(map(_literal, value)) + "]"
    if hasattr(value, "tolist"):  # numpy and torch
        return _literal(value.tolist())
    raise UserError(f"a config has no {type(value).__name__}: give numbers, texts, lists or dicts")


def _quoted(match: re.Match[str]) -> str:
    return match[1] * 2 + ("\\'" if match[2] else "")


def _parse_override(word: str) -> Override:
    if "=" not in word and not word.startswith("~"):
        raise UserError(f"{word!r} on the command line is not of the form key=value")
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{word!r} on the command line cannot be read: {reason}") from None
    if override.is_sweep_override():
        key, _, value = word.partition("=")
        raise UserError(
            f"{word!r} on the command line has several values, and a training takes one: start one for each. A list is "
            f"{key}=[{value}], a text with a comma \"{key}='{value}'\""
        )
    if override.package is not None:
        raise UserError(f"{word!r} on the command line cannot be read: @ is no part of a key")
    return override


def _key_of_items(config: DictConfig, key: str) -> str:
    """A key with the index of an item of a list for its name: `data.sources.NAME.path` of a run's config.yaml."""
    parts: list[str] = []
    for part in key.split("."):
        at = ".".join(parts)
        found = OmegaConf.select(config, at, throw_on_missing=False) if parts else config
        if isinstance(found, ListConfig) and not part.isdigit():
            part = str(_item_of(found, part, at))
        parts.append(part)
    return ".".join(parts)


def _item_of(items: ListConfig, name: str, at: str) -> int:
    """The index of the item with this name."""
    names = [item.get("name") if isinstance(item, DictConfig) else None for item in items]
    places = [index for index, other in enumerate(names) if other == name]
    if len(places) == 1:
        return places[0]
    if places:
        keys = " or ".join(f"{at}.{index}" for index in places)
        raise UserError(f"{at} has {len(places)} items with the name {name}: write {keys}")
    known = ", ".join(str(other) for other in names if other) or "none"
    raise UserError(f"{at} is a list without an item of the name {name!r}. Its names: {known}")


def _override(config: DictConfig, override: Override) -> None:
    """Set or, with `~key`, remove a key. A dict is merged into the one that is there; `+key=value` adds a key."""
    word = override.input_line
    key, value = _key_of_items(config, override.key_or_group), override.value()
    before = OmegaConf.select(config, key, throw_on_missing=False)
    if override.is_delete():
        if before is None or value not in (None, before):
            reason = f"there is no key {key}" if before is None else f"its value is {before!r}"
            raise UserError(f"{word!r} on the command line removes nothing: {reason}")
        section, _, name = key.rpartition(".")
        del (OmegaConf.select(config, section) if section else config)[name]
    elif override.is_add() and before is not None and not isinstance(value, dict | list):
        raise UserError(
            f"{word!r} on the command line adds a key that has a value: write {key}=..."
        )
    else:
        OmegaConf.update(config, key, value, merge=True, force_add=True)

"""From a YAML file and `key=value` words to a checked config: Hydra composes, pydantic checks, errors name the place.

`default.yaml` comes first, then the recipe's YAML with whatever its `defaults:` list inherits, then the command line.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from mvp_engine.config.recipe import find_engine
from mvp_engine.config.schema import Config
from mvp_engine.errors import UserError
from mvp_engine.renamed import REMOVED_KEYS, renamed_key
from mvp_engine.runs import flat_keys

if TYPE_CHECKING:
    from mvp_engine.engine import Engine

DEFAULTS = Path(__file__).parent / "default.yaml"

Source = tuple[
    Path, str
]  # a file, and the dotted prefix of its keys: "model." for a file of the group `model`


@dataclass(frozen=True)
class Composed:
    """A checked config, the engine class that it is for, and the files that it came from (later ones win)."""

    config: Config
    engine_class: type[Engine]
    files: list[Path]

    def json_schema(self) -> dict[str, Any]:
        """The JSON Schema of this recipe's configs, with the resolved values as defaults."""
        schema = type(self.config).model_json_schema()
        definitions = schema.get("$defs", {})

        def fill(node: dict[str, Any], value: dict[str, Any]) -> None:
            node.pop("required", None)
            for key, child in node.get("properties", {}).items():
                if key not in value:
                    continue
                section = definitions.get(child.get("$ref", "").removeprefix("#/$defs/"))
                if section is not None and isinstance(value[key], dict):
                    fill(section, value[key])
                else:
                    child["default"] = value[key]

        fill(schema, self.config.model_dump())
        return schema


def compose(path: str | Path, overrides: list[str] | None = None) -> Composed:
    """Compose and check the config at `path`, or raise `UserError` with what is wrong, where, and the fix."""
    overrides = overrides or []
    file = _existing(Path(path).expanduser())
    roots = _search_roots(file)
    files: list[Source] = [(DEFAULTS, ""), *_inherited(file, roots)]
    values = _hydra(file, roots, overrides)
    if not isinstance(values.get("engine"), str | None):
        raise UserError(
            f"{_place('engine', files, overrides)}: 'engine' is {values['engine']!r}. Write file.py:Class"
        )
    engine_class, values["engine"] = find_engine(values.get("engine"), file)
    try:
        config = engine_class.config_class.model_validate(values)
    except ValidationError as error:
        raise UserError(_explain(error, engine_class.config_class, files, overrides)) from None
    return Composed(config, engine_class, [source for source, _ in files])


def _existing(file: Path) -> Path:
    if file.is_file() and file.suffix != ".yaml":
        raise UserError(f"config {file} must be called *.yaml: Hydra reads no other")
    if file.is_file():
        return file.resolve()
    if file.is_dir():
        raise UserError(f"config {file} is a folder; name a YAML file in it")
    if file.suffix not in (".yaml", ".yml") and file.with_name(file.name + ".yaml").is_file():
        raise UserError(f"config file not found: {file}. Did you mean {file}.yaml?")
    there = sorted(p.name for p in file.parent.glob("*.yaml")) if file.parent.is_dir() else []
    if there:
        near = difflib.get_close_matches(file.name, there, n=1)
        hint = (
            f"Did you mean {file.with_name(near[0])}?"
            if near
            else f"{file.parent} has: {', '.join(there)}"
        )
    else:
        hint = f"there is no YAML file in {file.parent} (paths are relative to {Path.cwd()})"
    raise UserError(f"config file not found: {file}. {hint}")


def _search_roots(file: Path) -> list[Path]:
    """Where `defaults:` entries are looked for: beside the file, then in the `configs` folder that it lies in."""
    outer = [p for p in file.parents[1:] if p.name == "configs"][:1]
    return [file.parent, *outer]


def _inherited(
    file: Path, roots: list[Path], above: tuple[Path, ...] = (), package: str = ""
) -> list[Source]:
    """The recipe's own files, in the order in which they are applied. Only used to tell where a key was set."""
    if file in above:
        raise UserError(
            f"{_short(file)} inherits from itself, by way of {' and '.join(map(_short, above[1:])) or 'itself'}"
        )
    tree = _load(file)
    found: list[Source] = []
    for entry in (tree.get("defaults") or []) if isinstance(tree, dict) else []:
        for group, name in entry.items() if isinstance(entry, dict) else [("", entry)]:
            inner = f"{group}/{name}" if group else str(name)
            candidates = [root / f"{inner.split('@')[0].lstrip('/')}.yaml" for root in roots]
            parent = next((c for c in candidates if c.is_file()), None)
            if parent is not None:
                below = f"{package}{group.replace('/', '.')}." if group else package
                found += _inherited(parent, roots, (*above, file), below)
    return [*dict.fromkeys(found), (file, package)]


def _load(file: Path) -> Any:
    try:
        return yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise UserError(f"{_short(file)} is not valid YAML: {error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{_short(file)} is not UTF-8 text: {error}") from None


def _hydra(file: Path, roots: list[Path], overrides: list[str]) -> dict[str, Any]:
    if not isinstance(_load(file), dict):
        raise UserError(f"{_short(file)} must be a mapping of keys to values")
    store = ConfigStore.instance()
    store.store(name="_mvp_defaults", node=OmegaConf.load(DEFAULTS))
    store.store(name="_mvp_root", node={"defaults": ["_mvp_defaults", "_self_", file.stem]})
    GlobalHydra.instance().clear()
    try:
        words = [_forced(word, roots) for word in overrides]
        if len(roots) > 1:
            words.append(f"hydra.searchpath=['file://{roots[1]}']")
        with initialize_config_dir(config_dir=str(file.parent), version_base="1.3"):
            composed = hydra_compose("_mvp_root", overrides=words)
        if missing := sorted(
            OmegaConf.missing_keys(composed)
            | _left_open(_inherited(file, roots), composed, overrides)
        ):
            given = " ".join(f"{key}=..." for key in missing)
            raise UserError(
                f"{_short(file)} leaves open what only you know; give on the command line: {given}"
            )
        values = OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise UserError(f"{_short(file)} does not compose: {' '.join(lines)}") from None
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _left_open(files: list[Source], composed: Any, overrides: list[str]) -> set[str]:
    """Keys that are ??? in the files, over a default: there Hydra keeps the default, such as null, without a word."""
    last = {
        f"{package}{key}": value
        for file, package in files
        for key, value in flat_keys(_load(file)).items()
    }
    open_ones = {key for key, value in last.items() if value == "???"}
    given = [word.partition("=")[0].lstrip("+~") for word in overrides]
    open_ones -= {key for key in open_ones for one in given if f"{key}.".startswith(f"{one}.")}
    return {
        key
        for key in open_ones
        if OmegaConf.select(composed, key.rpartition(".")[0] or key) is not None
    }


def _forced(word: str, roots: list[Path]) -> str:
    """`key=value` may name a key that only the schema knows, so it is sent to Hydra as `++key=value`.

    A word that picks a file of a config group (`model=tiny` beside a folder `model/`) stays as it is.
    """
    if "=" not in word and not word.startswith("~"):
        raise UserError(f"{word!r} on the command line is not of the form key=value")
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException as error:
        raise UserError(
            f"{word!r} on the command line cannot be read: {str(error).splitlines()[0]}"
        ) from None
    if override.key_or_group.startswith("hydra"):
        raise UserError(f"{word!r} on the command line: Hydra's own settings have no effect here")
    is_group = any((root / override.key_or_group).is_dir() for root in roots)
    return word if word[0] in "+~" or is_group else f"++{word}"


def _explain(
    error: ValidationError, schema: type[Config], files: list[Source], overrides: list[str]
) -> str:
    lines = []
    for problem in error.errors(include_url=False):
        key = _key(problem["loc"], schema)
        place = _place(key, files, overrides)
        if problem["type"] == "extra_forbidden" and (new := renamed_key(key)):
            lines.append(f"{place}: '{key}' was renamed to '{new}'")
        elif problem["type"] == "extra_forbidden" and key in REMOVED_KEYS:
            lines.append(f"{place}: '{key}' was removed. {REMOVED_KEYS[key]}")
        elif problem["type"] == "extra_forbidden":
            lines.append(f"{place}: unknown key '{key}'. {_suggest(key, schema)}")
        elif problem["type"] == "missing":
            lines.append(
                f"{_short(files[-1][0])}: key '{key}' is missing; add it, or give {key}=... on the command line"
            )
        else:
            text = problem["msg"].removeprefix("Value error, ")
            if not key:  # a check over several sections: the text names its keys
                lines.append(f"{place}: {text}")
                continue
            lines.append(f"{place}: '{key}' is {problem['input']!r}. {text[0].upper()}{text[1:]}")
    return "\n".join(dict.fromkeys(lines))


def _key(loc: tuple[int | str, ...], schema: type[BaseModel]) -> str:
    """The dotted key of an error. pydantic adds the tried members of a union to `loc`; they are no keys."""
    parts: list[str] = []
    fields: dict[str, Any] | None = dict(schema.model_fields)
    for part in loc:
        parts.append(str(part))
        if isinstance(part, int):
            continue  # an item of a list of sections
        if fields is None or str(part) not in fields:
            break
        section = _section(fields[str(part)].annotation)
        fields = dict(section.model_fields) if section else None
        if fields is None:
            break
    return ".".join(parts)


def _section(annotation: Any) -> type[BaseModel] | None:
    for kind in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _all_keys(schema: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in schema.model_fields.items():
        keys.append(prefix + name)
        if section := _section(field.annotation):
            keys += _all_keys(section, f"{prefix}{name}.")
    return keys


def _suggest(key: str, schema: type[Config]) -> str:
    known = _all_keys(schema)
    key = re.sub(r"\.\d+(?=\.)", "", key)  # all items of a list have the same keys
    leaf = key.rsplit(".", 1)[-1]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    near = near or [k for k in known if k.rsplit(".", 1)[-1] == leaf]
    near = near or [
        k for k in known if difflib.get_close_matches(leaf, [k.rsplit(".", 1)[-1]], cutoff=0.7)
    ]
    if near:
        return f"Did you mean '{near[0]}'?"
    parent = key.rpartition(".")[0]
    siblings = [k for k in known if k.rpartition(".")[0] == parent]
    return f"Known keys{f' under {parent}' if parent else ''}: {', '.join(siblings)}"


def _place(key: str, files: list[Source], overrides: list[str]) -> str:
    """Where `key` was set last: the command line, else `file:line`."""
    for word in overrides:
        named = word.lstrip("+~").split("=", 1)[0]
        if named == key or key.startswith(f"{named}.") or named.startswith(f"{key}."):
            return f"command line ({word})"
    for file, package in reversed(files):
        if key.startswith(package):
            inner = key.removeprefix(package).split(".")
            if line := _line_of(inner, yaml.compose(file.read_text(encoding="utf-8"))):
                return f"{_short(file)}:{line}"
    return _short(files[-1][0])


def _line_of(parts: list[str], node: Any) -> int | None:
    if not parts:
        return int(node.start_mark.line) + 1
    if parts[0].isdecimal() and isinstance(
        node, yaml.SequenceNode | yaml.MappingNode
    ):  # of a list, or of one by name
        named = isinstance(node, yaml.MappingNode)
        items = [value for _, value in node.value] if named else node.value[int(parts[0]) :][:1]
        return next((line for item in items if (line := _line_of(parts[1:], item))), None)
    if not isinstance(node, yaml.MappingNode):
        return None
    for name, value in node.value:
        if name.value == parts[0]:
            return int(name.start_mark.line) + 1 if len(parts) == 1 else _line_of(parts[1:], value)
    return None


def _short(file: Path) -> str:
    return str(file.relative_to(Path.cwd())) if file.is_relative_to(Path.cwd()) else str(file)

"""`mvp config`: the resolved config of a recipe, its JSON Schema, and what each key means."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from mvp_engine import plugins
from mvp_engine.config.compose import (
    DEFAULTS,
    NO_VALUE,
    compose,
    load_yaml,
    read_draft,
    suggest_key,
    word,
)
from mvp_engine.config.engine_class import SHIPPED, find_config_class, shipped_configs
from mvp_engine.config.schema import Config
from mvp_engine.errors import UserError
from mvp_engine.runs import flat_keys, trained_run


def config_command(
    config: str | None, overrides: list[str], explain: str | None, schema: bool, reference: bool
) -> None:
    """Print a config, its schema, what a key means, or all keys."""
    if (explain is not None) + schema + reference > 1:
        raise UserError("give one of --explain, --schema and --reference")
    if explain is not None:
        print(explain_key(explain, *schemas_of(config, overrides)))
    elif reference:
        print(reference_page(*schemas_of(config, overrides)), end="")
    elif config is None:
        raise UserError("name a CONFIG, or a key with --explain KEY")
    elif schema:
        print(json.dumps(json_schema(compose(config, overrides).config), indent=2))
    else:
        print_config(config, overrides)


def print_config(config_file: str, overrides: list[str]) -> None:
    """Print the config as YAML; keys that have no value yet are printed as ???, as in the file."""
    draft = read_draft(config_file, overrides)
    text = draft.composed(may_miss=True).config.to_yaml()
    if draft.missing:
        print(f"mvp: to be set before training: {', '.join(draft.missing)}", file=sys.stderr)
    print(text.replace(NO_VALUE, "???"), end="")


def config_or_run(name: str, overrides: list[str], root: Path) -> tuple[str, list[str]]:
    """A config file and overrides: `name` itself, or, if it names a run, that run's config with a resume of the run."""
    if not names_run(name):
        return name, overrides
    run = trained_run(name, root)
    return str(run.dir / "config.yaml"), [f"resume={run.dir}", *overrides]


def evaluation_words(options: dict[str, Any]) -> list[str]:
    """The overrides of `mvp evaluate`: held-out rows, or tasks of evaluation harnesses. Its options are taken out."""
    tasks = options.pop("tasks")
    settings = {name: options.pop(name) for name in ("limit", "fewshot", "system")}
    settings["chat_template"] = False if options.pop("no_chat_template") else None
    given = {name: value for name, value in settings.items() if value is not None}
    if tasks is not None:
        entries = [{"task": name, **given} for name in tasks.split(",")]
        return ["workflow=evaluate_tasks", word("eval_harness.tasks", entries)]
    if given:
        raise UserError("--limit, --fewshot, --system and --no-chat-template need --tasks")
    return ["workflow=evaluate"]


def names_run(name: str) -> bool:
    """Whether a word names a run, by its folder or id: then it is neither a file nor a recipe."""
    path = Path(name).expanduser()
    is_file = path.suffix in (".yaml", ".yml") or path.exists()
    is_word = len(path.parts) == 1 and not is_file
    return (path / "run.json").is_file() or (is_word and not shipped_configs(name))


def schemas_of(config_file: str | None = None, overrides: Sequence[str] = ()) -> list[type[Config]]:
    """The schema of a recipe's config; without one, those of the kits' engines, the most used one first."""
    if config_file is not None:
        return [read_draft(config_file, overrides).schema]
    from mvp_engine.kit.settings import MLLMConfig

    return [MLLMConfig, *plugins.load_all("config").values()]


def recipe_schemas() -> dict[str, type[Config]]:
    """The config classes of the shipped recipes, which add keys to those of the kits."""
    engines = sorted(SHIPPED.glob("*/engine.py"))
    return {file.parent.name: find_config_class(str(file), file)[0] for file in engines}


def json_schema(config: Config) -> dict[str, Any]:
    """The JSON Schema of a recipe's configs, with the values of `config` as defaults, and descriptions."""
    schema = type(config).model_json_schema()
    _complete(schema, config.model_dump(), schema.get("$defs", {}), "", engine_comments())
    return schema


def _complete(
    node: dict[str, Any],
    values: dict[str, Any],
    sections: dict[str, Any],
    prefix: str,
    comments: dict[str, str],
) -> None:
    node.pop("required", None)
    for key, child in node.get("properties", {}).items():
        if prefix + key in comments:
            child["description"] = comments[prefix + key]
        if key not in values:
            continue
        name = child.get("$ref", "").removeprefix("#/$defs/")
        section = sections.get(name)
        if section is not None and isinstance(values[key], dict):
            _complete(section, values[key], sections, f"{prefix}{key}.", comments)
        else:
            child["default"] = values[key]


# Every config key with its type, default and description: `mvp config --explain` and the reference page.
#
# Descriptions of the engine's keys are the comments of `default.yaml`; those of a kit's or a recipe's keys are the
# docstrings below the fields of its sections.

# A comment of default.yaml: after a key, or alone in a line that continues the comment above.
_COMMENT = re.compile(r"^(?P<indent> *)(?:(?P<key>\w+):.*?)? +# (?P<text>.*)$")


@dataclass(frozen=True)
class ConfigKey:
    """One key of a config, or one of its sections."""

    name: str
    type: str
    default: str  # as YAML; empty for a section, and for a key without a default
    description: str
    is_section: bool


def config_keys(*schemas: type[Config]) -> list[ConfigKey]:
    """All keys of the schemas, each section before its own; a key of several is that of the first."""
    defaults = dict(flat_keys(load_yaml(DEFAULTS)))
    comments = engine_comments()
    keys: dict[str, ConfigKey] = {}
    for schema in schemas:
        tree = schema.model_json_schema()
        for key in _walk(tree, tree.get("$defs", {}), "", defaults, comments):
            keys.setdefault(key.name, key)
    return list(keys.values())


def _walk(
    node: dict[str, Any],
    sections: dict[str, Any],
    prefix: str,
    defaults: dict[str, Any],
    comments: dict[str, str],
) -> Iterator[ConfigKey]:
    fields = node.get("properties", {})
    inner = [_section_of(field, sections)[0] for field in fields.values()]
    for index, (name, field) in enumerate(fields.items()):
        key = f"{prefix}{name}"
        section, suffix = _section_of(field, sections)
        default = defaults.get(key, field.get("default", ...))
        if default is ... and name not in node.get("required", []):  # made by a default_factory
            default = {} if field.get("type") == "object" else []
        shown = "" if default is ... or section else _as_yaml(default)
        text = (
            comments.get(key) or field.get("description") or (section or {}).get("description", "")
        )
        text = " ".join(text.split())
        yield ConfigKey(key, type_in_words(field, sections), shown, text, section is not None)
        if section is None or any(section is other for other in inner[index + 1 :]):
            continue
        if any(section is other for other in inner[:index]):  # several of one type: once for all
            key = f"{prefix}NAME"
        yield from _walk(section, sections, f"{key}{suffix}.", defaults, comments)


def _section_of(
    field: dict[str, Any], sections: dict[str, Any]
) -> tuple[dict[str, Any] | None, str]:
    """The section that a field holds, and what stands between its key and those of the section."""
    for choice in field.get("anyOf", [field]):
        if choice.get("type") == "array" and "$ref" in choice.get("items", {}):
            return _resolve(choice["items"], sections), ".NAME"
        if "$ref" in choice:
            return _resolve(choice, sections), ""
    return None, ""


def _resolve(node: dict[str, Any], sections: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = sections[node["$ref"].removeprefix("#/$defs/")]
    return found


def type_in_words(node: dict[str, Any], sections: dict[str, Any]) -> str:
    """The type of a JSON Schema node for a reader, such as "integer >= 1, or null"."""
    if "anyOf" in node:
        return ", or ".join(type_in_words(choice, sections) for choice in node["anyOf"])
    if "$ref" in node:
        return "section"
    if "enum" in node:
        return " | ".join(map(str, node["enum"]))
    if "const" in node:
        return str(node["const"])
    kind = node.get("type", "any value")
    if kind == "array":
        return f"list of {type_in_words(node.get('items', {}), sections)}"
    if kind == "object":
        inner = node.get("additionalProperties")
        return f"mapping to {type_in_words(inner if isinstance(inner, dict) else {}, sections)}"
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = [f"{sign} {_as_yaml(node[name])}" for name, sign in signs.items() if name in node]
    return " ".join([kind, " and ".join(limits)]).strip()


def engine_comments() -> dict[str, str]:
    """The comments of default.yaml by key."""
    found: dict[str, str] = {}
    parents: list[tuple[int, str]] = []  # (indentation, name) of the sections around a line
    key = ""
    for line in DEFAULTS.read_text(encoding="utf-8").splitlines():
        if opened := re.match(r"^( *)(\w+):", line):
            indent = len(opened[1])
            parents = [one for one in parents if one[0] < indent] + [(indent, opened[2])]
            key = ".".join(name for _, name in parents)
        comment = _COMMENT.match(line)
        if comment and key:
            found[key] = f"{found.get(key, '')} {comment['text']}".strip()
    return found


def _as_yaml(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, width=1000)
    return text.removesuffix("...\n").strip()


# ---- What is printed --------------------------------------------------------------------------------


def explain_key(name: str, *schemas: type[Config]) -> str:
    """A key's type, default and description; of a section, all its keys."""
    keys = config_keys(*schemas)
    # A name in a mapping of sections (data.sources.mine.path) is anything.
    wanted = [key for key in keys if re.fullmatch(key.name.replace(".NAME", r"(\.\w+)?"), name)]
    if not wanted:
        for recipe, schema in recipe_schemas().items():
            if schema not in schemas and any(key.name == name for key in config_keys(schema)):
                return f"A key of the recipe {recipe}.\n{explain_key(name, schema)}"
        raise UserError(f"no config key {name!r}. {suggest_key(name, schemas[0])}")
    lines = []
    for key in wanted:
        lines.append(f"{key.name}: {key.type}")
        if key.description:
            lines.append(f"  {key.description}")
        if not key.is_section:
            lines.append(f"  default: {key.default or 'none, it must be set'}")
    if wanted[0].is_section:
        prefix = f"{wanted[0].name}."
        if not any(key.name.startswith(prefix) for key in keys):  # listed once for all of its type
            prefix = f"{_parent(wanted[0].name)}.NAME."
        inner = [key for key in keys if key.name.startswith(prefix)]
        width = max(len(key.name) for key in inner)
        lines += ["", *(f"  {key.name:{width}}  {key.description}" for key in inner)]
    return "\n".join(lines)


def reference_page(*schemas: type[Config]) -> str:
    """All keys as a Markdown page, one table per section."""
    keys = _without_repeated_sections(config_keys(*schemas))
    lines = [
        "# Config keys",
        "",
        "Every key of a recipe that uses the kits, with its type and default. This page is generated by",
        "`mvp config --reference`; `mvp config --explain KEY` prints one key, `mvp config CONFIG` the",
        "values of a recipe. How configs are composed, and how a recipe adds keys: [recipes.md](recipes.md).",
    ]
    top = [key for key in keys if "." not in key.name and not key.is_section]
    lines += ["", "## Top level", "", *_table(top)]
    for section in keys:
        if section.is_section:
            lines += ["", f"## `{section.name}`", ""]
            if section.description:
                lines += [_cell(section.description), ""]
            own = [key for key in keys if _parent(key.name) == section.name]
            lines += _table([key for key in own if not key.is_section])
    if len(schemas) > 1:  # not the page of one config
        lines += _recipes_table(keys)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def _recipes_table(known: list[ConfigKey]) -> list[str]:
    """The keys that each recipe adds to the known ones."""
    names = {key.name for key in known}
    lines = ["", "## Recipes", ""]
    lines += [
        "A recipe adds keys of its own. `mvp config --explain SECTION` prints what they mean.",
        "",
    ]
    lines += ["| recipe | its keys |", "| --- | --- |"]
    for recipe, schema in recipe_schemas().items():
        keys = _without_repeated_sections(config_keys(schema))
        added = [key.name for key in keys if key.name not in names and not key.is_section]
        if added:
            shown = ", ".join(f"`{name}`" for name in added)
            lines.append(f"| [{recipe}](../recipes/{recipe}/README.md) | {shown} |")
    return lines


def _without_repeated_sections(keys: list[ConfigKey]) -> list[ConfigKey]:
    """The keys with one row for a section that has the keys of a section of the top level with the same name."""
    shown: list[ConfigKey] = []
    repeated: set[str] = set()
    for key in keys:
        top = key.name.rpartition(".")[2]
        inner = {
            one.name.removeprefix(f"{key.name}.") for one in keys if _parent(one.name) == key.name
        }
        known = {one.name.removeprefix(f"{top}.") for one in keys}
        if key.is_section and top != key.name and inner and inner <= known:
            repeated.add(key.name)
            text = f"{key.description} The keys are those of `{top}`."
            shown.append(replace(key, default="{}", description=text, is_section=False))
        elif _parent(key.name) not in repeated:
            shown.append(key)
    return shown


def _parent(name: str) -> str:
    return name.rpartition(".")[0].removesuffix(".NAME")


def _table(keys: list[ConfigKey]) -> list[str]:
    lines = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"] if keys else []
    for key in keys:
        default = f"`{key.default}`" if key.default else "required"
        lines.append(
            f"| `{key.name}` | {_cell(key.type)} | {_cell(default)} | {_cell(key.description)} |"
        )
    return lines


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("<", r"\<")

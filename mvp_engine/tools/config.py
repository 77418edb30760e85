"""`mvp config`: the resolved config of a recipe, and the JSON Schema of its keys."""

from __future__ import annotations

import json
from typing import Any

from mvp_engine.config import Config, compose


def print_config(config_file: str, overrides: list[str]) -> None:
    config = compose(config_file, overrides).config
    print(config.to_yaml(), end="")


def print_schema(config_file: str, overrides: list[str]) -> None:
    config = compose(config_file, overrides).config
    print(json.dumps(json_schema(config), indent=2))


def json_schema(config: Config) -> dict[str, Any]:
    """The JSON Schema of a recipe's configs, with the values of `config` as defaults."""
    schema = type(config).model_json_schema()
    _set_defaults(schema, config.model_dump(), schema.get("$defs", {}))
    return schema


def _set_defaults(node: dict[str, Any], values: dict[str, Any], sections: dict[str, Any]) -> None:
    node.pop("required", None)
    for key, child in node.get("properties", {}).items():
        if key not in values:
            continue
        name = child.get("$ref", "").removeprefix("#/$defs/")
        section = sections.get(name)
        if section is not None and isinstance(values[key], dict):
            _set_defaults(section, values[key], sections)
        else:
            child["default"] = values[key]

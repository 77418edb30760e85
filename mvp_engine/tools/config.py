"""`mvp config`: the resolved config of a recipe, and the JSON Schema of its keys."""

from __future__ import annotations

import json

from mvp_engine.config import compose


def print_config(config_file: str, overrides: list[str]) -> None:
    print(compose(config_file, overrides).config.to_yaml(), end="")


def print_schema(config_file: str, overrides: list[str]) -> None:
    print(json.dumps(compose(config_file, overrides).json_schema(), indent=2))

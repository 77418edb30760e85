"""`mvp config`: the resolved config of a recipe, its JSON Schema, and what each key means."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mvp_engine.config.compose import Draft, MissingKeys, read_draft
from mvp_engine.config.schema import Config
from mvp_engine.config.shipped import shipped_configs
from mvp_engine.errors import UserError
from mvp_engine.runs import trained_run
from mvp_engine.tools.config_keys import engine_comments, explain_key, reference_page
from mvp_engine.tools.recipe_schema import find_schema

_NO_VALUE = "__no_value__"


def print_config(config_file: str, overrides: list[str]) -> None:
    """Print the config as YAML; keys that have no value yet are printed as ???, as in the file."""
    draft, missing = _read_incomplete(config_file, overrides)
    try:
        text = draft.validated(*find_schema(draft)).to_yaml()
    except UserError as error:  # of a key that is a number, a placeholder is no value
        if _NO_VALUE in str(error):
            read_config(config_file, overrides)  # raises MissingKeys
        raise
    if missing:
        print(f"mvp: to be set before training: {', '.join(missing)}", file=sys.stderr)
    print(text.replace(_NO_VALUE, "???"), end="")


def _read_incomplete(config_file: str, overrides: list[str]) -> tuple[Draft, list[str]]:
    """A draft with placeholders for keys that have no value (???), and these keys."""
    try:
        return read_draft(config_file, overrides), []
    except MissingKeys as error:
        placeholders = [f"{key}={_NO_VALUE}" for key in error.keys]
        try:
            return read_draft(config_file, [*overrides, *placeholders]), error.keys
        except UserError:  # an item of a list cannot be set
            raise error from None


def print_schema(config_file: str, overrides: list[str]) -> None:
    print(json.dumps(json_schema(read_config(config_file, overrides)), indent=2))


def read_config(config_file: str, overrides: list[str]) -> Config:
    """The config that `compose` returns, without an import of torch: its user errors are raised before that."""
    draft = read_draft(config_file, overrides, incomplete=True)
    return draft.validated(*find_schema(draft))


def config_or_run(name: str, overrides: list[str], root: Path) -> tuple[str, list[str]]:
    """A config file and overrides: `name` itself, or, if it names a run, that run's config with a resume of the run."""
    path = Path(name).expanduser()
    is_file = path.suffix in (".yaml", ".yml") or path.exists()
    is_word = len(path.parts) == 1 and not is_file
    if not (path / "run.json").is_file() and (not is_word or shipped_configs(name)):
        return name, overrides
    run = trained_run(name, root)
    return str(run.dir / "config.yaml"), [f"resume={run.dir}", *overrides]


def print_explanation(key: str, config_file: str | None) -> None:
    print(explain_key(key, *schemas_of(config_file)))


def print_reference(config_file: str | None) -> None:
    print(reference_page(*schemas_of(config_file)), end="")


def schemas_of(config_file: str | None = None) -> list[type[Config]]:
    """The schema of a recipe's config; without one, those of the kits' engines, the most used one first."""
    if config_file is not None:
        return [find_schema(_read_incomplete(config_file, [])[0])[0]]
    from mvp_engine.kit.actions.settings import ActionConfig
    from mvp_engine.kit.contrastive_settings import ContrastiveConfig
    from mvp_engine.kit.distil_settings import DistilConfig
    from mvp_engine.kit.preference_settings import PreferenceConfig
    from mvp_engine.kit.reward_settings import RewardConfig
    from mvp_engine.kit.settings import MLLMConfig
    from mvp_engine.rl.rl_settings import RLConfig

    kits: list[type[Config]] = [MLLMConfig, PreferenceConfig, RewardConfig, ContrastiveConfig]
    return [*kits, DistilConfig, ActionConfig, RLConfig]


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

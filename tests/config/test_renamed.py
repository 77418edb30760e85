"""Renamed config keys: the old name is an error (exit code 2) that gives the place and the new name."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import MAGIC, TINY

from mvp_engine.cli import main
from mvp_engine.config import compose
from mvp_engine.config.schema import Config
from mvp_engine.errors import EXIT_USER_ERROR, UserError
from mvp_engine.kit import MLLMConfig
from mvp_engine.renamed import CONFIG_KEYS, REMOVED_DEFAULTS, REMOVED_KEYS, renamed_key

BASE = """\
engine: mvp_engine.kit:MLLMEngine
mllm:
  micro_batch_tokens: 8
  sources: [{path: a.jsonl}]
"""
KEYS = sorted(CONFIG_KEYS)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "train.yaml"
    file.write_text(BASE)
    return file


def error(config: Path, *words: str) -> str:
    with pytest.raises(UserError) as caught:
        compose(config, list(words))
    return str(caught.value)


def as_yaml(key: str) -> str:
    """One key as a YAML document; its own line is the last one."""
    *sections, leaf = key.split(".")
    lines = [f"{'  ' * depth}{name}:" for depth, name in enumerate(sections)]
    return "\n".join([*lines, f"{'  ' * len(sections)}{leaf}: 1"]) + "\n"


def expected(key: str) -> str:
    return f"'{key}' was renamed to '{CONFIG_KEYS[key]}'"


@pytest.mark.parametrize("key", KEYS)
def test_renamed_key_in_the_config_file_names_line_and_new_name(config: Path, key: str) -> None:
    text = as_yaml(key)
    if key.startswith("mllm."):
        line = len(BASE.splitlines()) + 1
        config.write_text(BASE + text.removeprefix("mllm:\n"))
    else:
        line = len((BASE + text).splitlines())
        config.write_text(BASE + text)
    assert f"{config}:{line}: {expected(key)}" in error(config)
    assert main(["config", "show", str(config)]) == EXIT_USER_ERROR


@pytest.mark.parametrize("key", KEYS)
def test_renamed_key_in_an_inherited_file_names_that_file(config: Path, key: str) -> None:
    text = as_yaml(key)
    config.with_name("base.yaml").write_text(text)
    config.write_text("defaults: [base, _self_]\n" + BASE)
    line = len(text.splitlines())
    assert f"{config.with_name('base.yaml')}:{line}: {expected(key)}" in error(config)


@pytest.mark.parametrize("prefix", ["", "+", "++"])
@pytest.mark.parametrize("key", KEYS)
def test_renamed_key_on_the_command_line_names_the_override(config: Path, key: str, prefix: str) -> None:
    word = f"{prefix}{key}=1"
    assert f"command line ({word}): {expected(key)}" in error(config, word)
    assert main(["train", str(config), word]) == EXIT_USER_ERROR


@pytest.mark.parametrize("key", KEYS)
def test_renamed_key_in_a_deletion_names_the_override(config: Path, key: str) -> None:
    assert error(config, f"~{key}") == f"command line (~{key}): {expected(key)}"


def test_renamed_key_in_an_interpolation_names_the_key_that_uses_it(config: Path) -> None:
    config.write_text(BASE + "seed: ${parallel.sequence}\n")
    assert error(config) == f"{config}:5: 'parallel.sequence' was renamed to 'parallel.ulysses'"


def test_renamed_section_reports_its_renamed_keys_too(config: Path) -> None:
    config.write_text(BASE + "ask:\n  max_new_tokens: 4\n  every: 2\n")
    assert error(config).splitlines() == [f"{config}:5: {expected('ask')}", f"{config}:7: {expected('ask.every')}"]


def test_key_in_a_renamed_section_keeps_its_name() -> None:
    assert renamed_key("ask.max_new_tokens") == "eval_generation.max_new_tokens"
    assert renamed_key("model.recompute.llm") == "model.activation_checkpointing.llm"
    assert renamed_key("model.path") is None


@pytest.mark.parametrize(
    ("typo", "new"),
    [
        ("model.recompte", "model.activation_checkpointing"),
        ("optim.moment", "optim.state_dtype"),
        ("optim.rate", "optim.lr_by_part"),
        ("parallel.sequences", "parallel.ulysses"),
        ("mllm.pack_per_step", "data.global_batch_size"),
    ],
)
def test_typo_near_a_renamed_key_suggests_the_new_name(config: Path, typo: str, new: str) -> None:
    assert f"unknown key '{typo}'. Did you mean '{new}', the new name of" in error(config, f"{typo}=1")


@pytest.mark.parametrize(
    ("typo", "new"), [("model.activation_checkpoint", "activation_checkpointing"), ("optim.lr_by_parts", "lr_by_part")]
)
def test_typo_near_a_current_key_suggests_that_key(config: Path, typo: str, new: str) -> None:
    assert f"Did you mean '{typo.partition('.')[0]}.{new}'?" in error(config, f"{typo}=1")


def test_renamed_key_of_a_kit_in_a_config_without_the_kit_says_so() -> None:
    text = error(TINY, "optim.moments=int8")
    assert text.endswith("renamed to 'optim.state_dtype', which this recipe's config does not have.")
    assert error(MAGIC, "ask=1").endswith("does not have. Did you mean 'task'?")


def test_renamed_keys_are_in_no_schema_and_new_names_are() -> None:
    from mvp_engine.config.explain import all_keys

    known = {*all_keys(Config), *all_keys(MLLMConfig)}
    assert not known & CONFIG_KEYS.keys()
    assert set(CONFIG_KEYS.values()) <= known


@pytest.mark.parametrize("key", sorted(REMOVED_KEYS))
def test_removed_key_names_line_and_reason(config: Path, key: str) -> None:
    config.write_text(BASE + as_yaml(key))
    line = len((BASE + as_yaml(key)).splitlines())
    assert f"{config}:{line}: '{key}' was removed. {REMOVED_KEYS[key]}" in error(config)
    assert f"command line ({key}=true): '{key}' was removed." in error(config.with_name("train.yaml"), f"{key}=true")


@pytest.mark.parametrize("key", sorted(REMOVED_KEYS))
def test_removed_key_with_its_default_is_dropped_from_the_config_of_a_run(config: Path, key: str) -> None:
    config.write_text(BASE + as_yaml(key).replace(": 1", f": {str(REMOVED_DEFAULTS.get(key, False)).lower()}"))
    assert f"'{key}' was removed." in error(config)
    config.with_name("run.json").write_text("{}")
    compose(config)
    other = str(not REMOVED_DEFAULTS.get(key, False)).lower()
    assert f"'{key}' was removed." in error(config, f"{key}={other}")

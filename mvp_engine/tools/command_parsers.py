"""Parsers of single commands: what the commands of `mvp` have in common."""

from __future__ import annotations

import argparse
from typing import Any

CONFIG = "a YAML file, or the config of a shipped recipe, such as sft/lora"


def add_group(commands: Any, name: str, text: str) -> Any:
    group = commands.add_parser(name, help=text, description=text)
    return group.add_subparsers(required=True, metavar="COMMAND")


def add_command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    command.set_defaults(parser=command)  # it reports unknown options
    return command


def add_config_command(
    commands: Any, name: str, text: str, config: str = CONFIG
) -> argparse.ArgumentParser:
    """A command on a config file and its overrides."""
    command = add_command(commands, name, text)
    command.add_argument("config", metavar="CONFIG", help=config)
    add_overrides(command)
    return command


def add_overrides(command: argparse.ArgumentParser) -> None:
    """The `key=value` words of a command on a config."""
    command.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="overrides of config keys"
    )


def add_json_option(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print JSON, for programs")

"""Plug-ins: what kits and other packages add to the core, by extension point and name.

The core names no kit. It asks for a name when a config, a row or a command has it, and only then is it imported:

    plugins.load("model_engine", "omni_model.fsdp")  # the class, or None if nothing adds it

A folder of the package adds names in its `plugin.py`, as a table `PLUGINS` of `module:attribute`. Another package adds
them by an entry point for each extension point:

    [project.entry-points."mvp_engine.model_engine"]
    "my_model.fsdp" = "my_package.engine:MyModelEngine"

docs/plugins.md lists the extension points, and what is expected at each.
"""

from __future__ import annotations

import importlib
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from mvp_engine.errors import UserError

POINTS = ("model_engine", "config")


@cache
def names(point: str) -> dict[str, str]:
    """`module:attribute` by name, of all that is installed; those of the package first."""
    assert point in POINTS, f"docs/plugins.md has no extension point {point!r}"
    package = Path(__file__).parent
    targets: dict[str, str] = {}
    for file in sorted(package.glob("*/*/plugin.py")):
        module = ".".join([package.name, *file.parent.relative_to(package).parts, "plugin"])
        targets |= importlib.import_module(module).PLUGINS.get(point, {})
    for entry in entry_points(group=f"mvp_engine.{point}"):
        if targets.setdefault(entry.name, entry.value) != entry.value:
            both = " and ".join(sorted([targets[entry.name], entry.value]))
            raise UserError(
                f"two plug-ins add {entry.name!r} to mvp_engine.{point}: {both}. Uninstall one of their packages"
            )
    return targets


def load(point: str, name: str) -> Any:
    """What a plug-in adds under this name; None if none does."""
    target = names(point).get(name)
    if target is None:
        return None
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def load_all(point: str) -> dict[str, Any]:
    """All that plug-ins add at an extension point, by name."""
    return {name: load(point, name) for name in names(point)}

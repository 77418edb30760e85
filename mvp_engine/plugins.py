"""Plug-ins: what kits and other packages add to the core, by extension point and name.

The core names no kit. It asks for a name when a config, a row or a command has it, and only then is it imported:

    plugins.load("model_engine", "my_model.fsdp")  # the class, or None if nothing adds it

A folder of the package adds names in its `plugin.py`, as a table `PLUGINS` of `module:attribute`. Another package adds
them by an entry point for each extension point:

    [project.entry-points."mvp_engine.model_engine"]
    "my_model.fsdp" = "my_package.engine:MyModelEngine"

docs/plugins.md lists the extension points, and what is expected at each.
"""

from __future__ import annotations

import importlib
import runpy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from mvp_engine.errors import UserError

POINTS: tuple[str, ...] = ("model_engine", "config", "model_folder", "model_part", "data_folder")
POINTS += ("inspect", "target", "data_command", "chat_option", "auto")


class ModelFolder:
    """What a kit says of model folders: the base class of `model_folder` plug-ins. It imports no torch."""

    settings: tuple[
        str, ...
    ] = ()  # keys of model.config that the classes of transformers do not declare
    side_files: tuple[str, ...] = ()  # file names that exports copy from the folder of the model
    sequence_fields: tuple[str, ...] = ()  # per-sequence fields of a batch that the forward reads
    # By model type, of a config or of transformers: what its models do, if they write no text.
    without_text: Mapping[str, str] = {}

    @classmethod
    def is_of(cls, config: Any) -> bool:
        """Whether the config of transformers is that of a folder for this model type."""
        return False

    @classmethod
    def read_config(cls, file: Path, settings: Mapping[str, Any]) -> Any:
        """The config of transformers for a config.json of another library; None if it is none of this kit."""
        return None

    @classmethod
    def complete_config(cls, config: Any) -> None:
        """Set what models of this config read and its class of transformers does not declare."""

    @classmethod
    def weight_name(cls, config: Any, name: str) -> str:
        """The name of a weight in the folder as transformers' table of conversions knows it."""
        return name


class DataFolder:
    """Folders that one kind of data kit reads: the base class of `data_folder` plug-ins. It imports no torch."""

    marker = ""  # a file that these folders have, and others have not
    reader = ""  # what such a folder is and what trains on it; an error puts its path in front

    @classmethod
    def open(cls, source: Any) -> tuple[Any, dict[str, Any]]:
        """A `Source` of the rows of a `DataSource`, and facts for `mvp data inspect`."""
        raise NotImplementedError(f"{cls.__name__} must define open")

    @classmethod
    def data_kit(cls, settings: Any, processor: Any, model: str, workers: int) -> Any:
        """The data kit that reads such a folder for a model's folder, for `mvp data inspect --model`."""
        raise NotImplementedError(f"{cls.__name__} must define data_kit")


@dataclass(frozen=True)
class InspectFact:
    """A fact of `mvp data inspect` that a kit adds: what `inspect` plug-ins name."""

    # (value, in full) -> name, text, style.
    lines: Callable[[Any, bool], Iterable[tuple[str, str, str]]]
    default: Any = None  # of sequences that have no such fact; None: their facts have no such key


@cache
def _tables() -> list[dict[str, dict[str, str]]]:
    """`PLUGINS` of every plugin.py of the package, without an import of its parents, which may import torch."""
    files = sorted(Path(__file__).parent.glob("*/*/plugin.py"))
    return [runpy.run_path(str(file))["PLUGINS"] for file in files]


@cache
def names(point: str) -> dict[str, str]:
    """`module:attribute` by name, of all that is installed; those of the package first."""
    assert point in POINTS, f"docs/plugins.md has no extension point {point!r}"
    targets: dict[str, str] = {}
    for table in _tables():
        targets |= table.get(point, {})
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


def model_folders() -> list[type[ModelFolder]]:
    return list(load_all("model_folder").values())


def folder_type(config: Any) -> str | None:
    """The model type of a kit that trains folders with this config of transformers; None if none does."""
    folders: dict[str, type[ModelFolder]] = load_all("model_folder")
    return next((name for name, folder in folders.items() if folder.is_of(config)), None)


@cache
def model_settings() -> frozenset[str]:
    """Settings of model folders of all kits."""
    return frozenset(name for folder in model_folders() for name in folder.settings)


@cache
def sequence_fields() -> frozenset[str]:
    """Per-sequence fields of batches that models of kits read."""
    return frozenset(name for folder in model_folders() for name in folder.sequence_fields)


def data_folder(path: Any) -> type[DataFolder] | None:
    """What reads the folder of data at a path; None for paths that every data kit reads."""
    if not isinstance(path, str | Path):
        return None
    folders: list[type[DataFolder]] = list(load_all("data_folder").values())
    return next((f for f in folders if (Path(path).expanduser() / f.marker).is_file()), None)


def without_text() -> dict[str, str]:
    """By model type: what models of kits do that write no text."""
    return {name: text for folder in model_folders() for name, text in folder.without_text.items()}

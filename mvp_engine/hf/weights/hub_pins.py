"""The revisions of the Hub that a run uses: pinned to commits when it starts, recorded in `run.json`, kept on resume.

A branch such as `main` moves. The config of a run therefore names commits: `org/name@<commit>`.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from mvp_engine.config.schema import Config
from mvp_engine.distributed import World
from mvp_engine.distributed.collective_errors import raise_on_all_ranks
from mvp_engine.errors import UserError
from mvp_engine.hf.weights.hub import SCHEME, HubRepo, hub_model, local_folder, pin
from mvp_engine.hf.weights.hub_datasets import HubDataset, dataset_files, hub_dataset, pin_dataset
from mvp_engine.runs import Run

LOGGER = logging.getLogger("mvp_engine")
MODEL_KEYS = ("model.path", "processor")
AnyConfig = TypeVar("AnyConfig", bound=Config)


@dataclasses.dataclass(frozen=True)
class Reference:
    """A repository of the Hub in a config."""

    key: str
    text: str
    split: str  # of the source, for datasets

    def pinned(self) -> str:
        try:
            if self.key in MODEL_KEYS:
                return str(pin(_repo(self.text)))
            return str(pin_dataset(_dataset(self.text), self.split))
        except UserError as error:
            raise UserError(f"{self.key}={error}") from None


def pin_config(config: AnyConfig, world: World, run: Run) -> AnyConfig:
    """The config with commits in place of branches and tags. One rank of each node downloads the files."""
    found: list[Reference] = []

    def collect(reference: Reference) -> str:
        found.append(reference)
        return reference.text

    _map_references(config, "", config, collect)
    if not found:
        return config
    pins = _agree_on_pins(found, world, run)
    world.once_per_node(lambda: _download(found, pins), f"hub/{run.id}")
    return _map_references(config, "", config, lambda reference: pins[reference.text])


def _agree_on_pins(found: list[Reference], world: World, run: Run) -> dict[str, str]:
    """Rank 0 takes the recorded commits, looks the others up, and records them. The key is what the config has."""
    pins: dict[str, str] = {}
    with raise_on_all_ranks(world.host_group):
        if world.is_main:
            recorded = recorded_pins(run)
            pins = {one.text: recorded.get(one.text) or one.pinned() for one in found}
            new = {text: pin for text, pin in pins.items() if pin != text}
            if new:
                LOGGER.info("revisions of the Hub: %s", ", ".join(dict.fromkeys(new.values())))
            if not new.items() <= run.info.get("hub", {}).items():
                run.note(hub={**recorded, **new})
    agreed: dict[str, str] = world.broadcast(pins)
    return agreed


def recorded_pins(run: Run) -> dict[str, str]:
    """The commits of a run, by what its config named; those of the run that it was started from are kept."""
    pins: dict[str, str] = run.info.get("hub", {})
    parent = run.info.get("parent")
    origin = Path(parent).parent.parent / "run.json" if parent else None
    if origin is not None and origin.is_file():
        pins = {**json.loads(origin.read_text()).get("hub", {}), **pins}
    return pins


def _download(found: list[Reference], pins: dict[str, str]) -> None:
    for one in found:
        if one.key in MODEL_KEYS:
            local_folder(pins[one.text], weights=one.key == "model.path")
        else:
            dataset_files(pins[one.text], one.split)


def _map_references(value: Any, key: str, owner: Any, replace: Callable[[Reference], str]) -> Any:
    """A copy of a config in which `replace` gives the text of each reference to the Hub."""
    if isinstance(value, BaseModel):
        prefix = f"{key}." if key else ""
        parts = {name: _map_references(v, prefix + name, value, replace) for name, v in value}
        return value.model_copy(update=parts)
    if isinstance(value, list):
        return [_map_references(one, key, owner, replace) for one in value]
    is_model = key in MODEL_KEYS and isinstance(value, str) and hub_model(value) is not None
    if is_model or (isinstance(value, str) and value.startswith(SCHEME)):
        return replace(Reference(key, value, getattr(owner, "split", "train")))
    return value


def _repo(text: str) -> HubRepo:
    repo = hub_model(text)
    if repo is None:
        raise UserError(f"{text}: write org/name or hf://org/name, or a local folder without hf://")
    return repo


def _dataset(text: str) -> HubDataset:
    dataset = hub_dataset(text)
    assert dataset is not None
    return dataset

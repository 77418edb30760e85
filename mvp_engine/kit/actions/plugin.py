"""What models that act add to the core, by extension point (docs/plugins.md). It imports neither torch nor pydantic."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mvp_engine.errors import UserError
from mvp_engine.plugins import DataFolder, InspectFact, ModelFolder

if TYPE_CHECKING:
    from mvp_engine.kit.data import DataSource, MLLMData, MLLMDataKit
    from mvp_engine.kit.data.read.sources import Source

KIT = "mvp_engine.kit.actions"

PLUGINS = {
    "model_engine": {"action_model.fsdp": f"{KIT}.action_model:ActionModelEngine"},
    "config": {"actions": f"{KIT}.settings:ActionConfig"},
    "model_folder": {"action_model": f"{KIT}.plugin:ActionModelFolder"},
    "model_part": {"action": f"{KIT}.action_model:ActionModel"},
    "data_folder": {"lerobot": f"{KIT}.plugin:LeRobotData"},
    "inspect": {
        "robot": f"{KIT}.plugin:ROBOT",
        "state": f"{KIT}.plugin:STATE_SHOWN",
        "actions": f"{KIT}.plugin:ACTIONS_SHOWN",
    },
}

# Per-sequence fields of a batch.
STATE = "action_state"  # (S, Q): normalized, zeros behind the real dimensions
CHUNK = "action_chunk"  # (S, C, A): the actions to learn, normalized
MASK = "action_mask"  # (S, C, A) bool: entries that carry loss
NOISE = "action_noise"  # (S, N, C, A)
TIMES = "action_times"  # (S, N)

ACTION_SIZES = ("chunk_size", "max_action_dim", "max_state_dim")  # of an action head, in the config
# What a policy of lerobot must be, to be transformers' pi0.
_LEROBOT_PI0 = {
    "type": "pi0",
    "paligemma_variant": "gemma_2b",
    "action_expert_variant": "gemma_300m",
    "image_resolution": [224, 224],
}
# lerobot saves pi0 as a part of its policy; the folder that it starts from, and transformers' table, have no prefix.
_LEROBOT_PREFIX = re.compile(r"^model\.(?=paligemma_with_expert\.|action_|state_proj\.)")
_ACTS = "predicts actions: act.py of an export (docs/actions.md)"
MAX_ACTIONS = 3  # of a chunk that `mvp data inspect` prints


class ActionModelFolder(ModelFolder):
    """Folders of pi0, by transformers or by lerobot, and of vision-language models with an action head."""

    settings = ACTION_SIZES
    side_files = ("normalization.json", "act.py")
    sequence_fields = (STATE, CHUNK, MASK, NOISE, TIMES)
    without_text: Mapping[str, str] = {"pi0": _ACTS, "action_model": _ACTS}

    @classmethod
    def is_of(cls, config: Any) -> bool:
        return hasattr(config, "max_action_dim")

    @classmethod
    def read_config(cls, file: Path, settings: Mapping[str, Any]) -> Any:
        """The config of a pi0 that lerobot saved: it names variants of Gemma in place of their sizes."""
        if "type" not in settings or "model_type" in settings:
            return None
        from transformers import PI0Config

        for key, value in _LEROBOT_PI0.items():
            if settings.get(key, value) != value:
                raise UserError(
                    f"{file} is the config of a lerobot policy with {key}={settings[key]}, which transformers does not "
                    f"have: only {key}={value} is supported"
                )
        known = {field.name for field in dataclasses.fields(PI0Config)}
        return PI0Config(**{name: settings[name] for name in settings.keys() & known})

    @classmethod
    def weight_name(cls, config: Any, name: str) -> str:
        is_pi0 = getattr(config, "model_type", None) == "pi0"
        return _LEROBOT_PREFIX.sub("", name) if is_pi0 else name


class LeRobotData(DataFolder):
    """LeRobot datasets."""

    marker = "meta/info.json"
    reader = "is a LeRobot dataset of robot actions: only an engine that acts trains on it (docs/actions.md)"

    @classmethod
    def open(cls, source: DataSource) -> tuple[Source, dict[str, Any]]:
        from mvp_engine.kit.actions.rows import FrameRows, robot_facts
        from mvp_engine.kit.actions.settings import ActionData
        from mvp_engine.kit.data.read.sources import Source

        rows = FrameRows(str(source.path), source.label, ActionData(), chunk=1)
        return Source([rows], rows.folder.root), {"robot": robot_facts(rows)}

    @classmethod
    def data_kit(cls, settings: MLLMData, processor: Any, model: str, workers: int) -> MLLMDataKit:
        from mvp_engine.hf.model.config_source import read_config
        from mvp_engine.kit.actions.kit import ActionDataKit
        from mvp_engine.kit.actions.settings import ActionData

        config = read_config(model, {})
        return ActionDataKit(
            settings, ActionData(), processor, model_config=config, num_workers=workers
        )


def lines_of_robot(facts: dict[str, str], in_full: bool) -> Iterator[tuple[str, str, str]]:
    for name, words in facts.items():
        yield name, words, ""


def lines_of_state(state: list[float], in_full: bool) -> Iterator[tuple[str, str, str]]:
    yield "state", _numbers(state), ""


def lines_of_actions(actions: list[list[float]], in_full: bool) -> Iterator[tuple[str, str, str]]:
    """The actions to predict; only the first ones, unless all are wanted."""
    shown = actions if in_full else actions[:MAX_ACTIONS]
    for number, values in enumerate(shown):
        yield f"action {number}", _numbers(values), "loss"
    if len(actions) > len(shown):
        yield "", f"... {len(actions) - len(shown)} more in the chunk", "dim"


def _numbers(values: list[float]) -> str:
    return "  ".join(f"{value:.4g}" for value in values)


ROBOT = InspectFact(lines_of_robot)
STATE_SHOWN = InspectFact(lines_of_state)
ACTIONS_SHOWN = InspectFact(lines_of_actions)

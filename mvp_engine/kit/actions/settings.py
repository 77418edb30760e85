"""The config of an engine that acts: which features of LeRobot folders are read, and how they are normalized.

It imports no torch.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from mvp_engine.config.schema import Count, NonNegative, Section
from mvp_engine.errors import UserError
from mvp_engine.kit.flow import Times
from mvp_engine.kit.settings import MLLMConfig


class ActionData(Section):
    """The config section of the action kit (`actions:`). The folders themselves are sources of `data.sources`."""

    features: dict[Literal["state", "action", "cameras"], str | list[str]] = Field(
        default_factory=dict
    )
    """Names of features: {state: observation.state, action: action, cameras: [observation.images.top]}. These are the
    defaults of state and action; cameras: all, in the order of meta/info.json, or these in the order of the prompt."""
    normalize: Literal["mean_std", "min_max", "quantiles", "none"] = "mean_std"
    """How states and actions are normalized: by mean and standard deviation, or their range (or that from the 1 % to
    the 99 % quantile) mapped to -1..1."""
    relative: bool | list[int] = False
    """Dimensions of the action that are trained relative to the state at the first frame of the chunk; true: all."""
    statistics: str | None = None
    """A normalization.json, or a LeRobot stats.json, with the statistics; null: computed from the training frames."""
    draws: Count = 1
    """Draws of noise and time for each observation, which share its prefix."""
    times: Times | None = None
    """The distribution of flow-matching times: beta, uniform, logit_normal, or a mapping such as
    {kind: beta, alpha: 1.5, beta: 1.0, scale: 0.999, offset: 0.001}; null: that of the model's config."""
    text_weight: NonNegative = 0.0
    """Weight of the token loss of other rows (images and text), which are trained with the same packs."""

    @field_validator("features")
    @classmethod
    def _cameras_are_a_list(cls, value: dict[str, str | list[str]]) -> dict[str, str | list[str]]:
        for name, feature in value.items():
            if isinstance(feature, list) != (name == "cameras"):
                wanted = "a list of names" if name == "cameras" else "one name"
                raise ValueError(f"{name} is {wanted}, not {feature!r}")
        return value

    @property
    def state(self) -> str:
        """The feature with the robot's state."""
        return str(self.features.get("state", "observation.state"))

    @property
    def action(self) -> str:
        """The feature with the actions."""
        return str(self.features.get("action", "action"))

    @property
    def cameras(self) -> list[str]:
        """The image features, in the order of the prompt; empty: all."""
        return list(self.features.get("cameras", []))


class Simulation(Section):
    """Closed-loop rollouts in every evaluation: the section `simulation` of recipes that have an environment."""

    episodes: Count = 50
    """How many episodes are rolled out."""
    execute: Count | None = None
    """Actions of a chunk that are executed before the next observation; null: the whole chunk."""
    max_steps: Count = 200
    """The most steps of an episode."""
    seed: int = Field(default=1_000_003, ge=0)
    """Seed of the environments and of the noise."""


class ActionConfig(MLLMConfig):
    """The config of an MLLMEngine whose model acts."""

    actions: ActionData = ActionData()
    """Features of LeRobot folders, normalization, draws of noise."""

    @model_validator(mode="after")
    def _generates_no_text(self) -> ActionConfig:
        if self.eval.generation is not None:
            raise ValueError(
                "eval.generation: an action model answers no prompts. Roll it out (docs/actions.md)"
            )
        return self

    def check_engine(self) -> None:
        if self.model.type != "action_model":
            raise UserError(
                f"model.type={self.model.type}: LeRobot folders train an action model. Set "
                "model.type=action_model"
            )

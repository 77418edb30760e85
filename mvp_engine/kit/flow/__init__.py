"""Flow matching: its config sections, without an import of torch, and what `matching.py` computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, WithJsonSchema

from mvp_engine.config.schema import Count, Fraction, NonNegative, Positive, Section
from mvp_engine.imports import lazy_exports

if TYPE_CHECKING:
    from mvp_engine.kit.flow.matching import Draw, FlowDataset, draw, start_noise, times_of_config
    from mvp_engine.ops.flow_matching import (
        Velocity,
        euler_sample,
        euler_times,
        guided_velocity,
        noisy_sample,
        target_velocity,
        velocity_losses,
    )
else:
    __getattr__ = lazy_exports(__name__)

__all__ = [
    "Draw",
    "Flow",
    "FlowDataset",
    "FlowTimes",
    "Velocity",
    "draw",
    "euler_sample",
    "euler_times",
    "guided_velocity",
    "noisy_sample",
    "start_noise",
    "target_velocity",
    "times_of_config",
    "velocity_losses",
]


class FlowTimes(Section):
    """The distribution of the times at which a velocity is learnt, as `scale * t + offset`; time 1 is noise."""

    kind: Literal["beta", "uniform", "logit_normal"] = "beta"
    """Beta is what pi0 uses, with more of the noisy times; logit_normal has more of the middle."""
    alpha: Positive = 1.5
    """First parameter of the beta distribution."""
    beta: Positive = 1.0
    """Second parameter of the beta distribution."""
    scale: Positive = 0.999
    """Largest time, less the offset."""
    offset: NonNegative = 0.001
    """Smallest time."""


def _read_times(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


# A key of a config: the name of a distribution, or a mapping.
Times = Annotated[
    FlowTimes,
    BeforeValidator(_read_times),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]}),
]


class Flow(Section):
    """The config section of flow matching."""

    times: Times = FlowTimes()
    """The distribution of times: beta, uniform, logit_normal, or a mapping such as {kind: beta, alpha: 1.5, beta: 1.0,
    scale: 0.999, offset: 0.001}."""
    draws: Count = 1
    """Draws of noise and time for each sample and epoch."""
    drop_condition: Fraction = 0.1
    """Share of draws without the condition, which guidance needs."""
    steps: Count = 20
    """Euler steps of generation."""
    guidance: NonNegative = 1.0
    """Classifier-free guidance of generation; 1 is none."""

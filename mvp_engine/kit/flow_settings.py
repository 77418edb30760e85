"""The config sections of flow matching. It imports no torch."""

from __future__ import annotations

from typing import Literal

from mvp_engine.config.schema import Count, Fraction, NonNegative, Positive, Section


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


class Flow(Section):
    """The config section of flow matching."""

    times: FlowTimes = FlowTimes()
    """At which times velocities are learnt."""
    draws: Count = 1
    """Draws of noise and time for each sample and epoch."""
    drop_condition: Fraction = 0.1
    """Share of draws without the condition, which guidance needs."""
    steps: Count = 20
    """Euler steps of generation."""
    guidance: NonNegative = 1.0
    """Classifier-free guidance of generation; 1 is none."""

"""The search of `mvp tune`: from the config's own setup to neighbours of the fastest one so far."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mvp_engine.tools.tune.setups import Setup, Space

NEARLY_EQUAL = (
    0.99  # of the highest throughput: of these, the setup with the least memory is the best
)
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class Outcome:
    """What a trial measured, or why it measured nothing."""

    setup: Setup
    tokens_per_s: float = 0.0  # 0: see `problem`
    step_s: float = 0.0
    peak_gib: float = 0.0
    problem: str | None = None

    @property
    def is_out_of_memory(self) -> bool:
        return self.problem == OUT_OF_MEMORY


def search(
    space: Space, first: Outcome, run: Callable[[Setup], Outcome], has_time: Callable[[], bool]
) -> Iterator[Outcome]:
    """Yield the outcomes of trials until time is over, or all neighbours of the fastest setup are known."""
    outcomes = [first]
    while True:
        setup = _next_setup(space, outcomes)
        if setup is None or not has_time():
            return
        outcomes.append(run(setup))
        yield outcomes[-1]


def _next_setup(space: Space, outcomes: list[Outcome]) -> Setup | None:
    """The first neighbour that was not tried and that no smaller setup ran out of memory before."""
    tried = {outcome.setup for outcome in outcomes}
    too_large = [outcome.setup for outcome in outcomes if outcome.is_out_of_memory]
    fast = fastest(outcomes)
    # As long as nothing fits, from the last one, which needs least.
    centre = outcomes[-1] if fast is None else fast
    for setup in space.neighbours(centre.setup, fits=fast is not None):
        if setup not in tried and not any(setup.needs_at_least(other) for other in too_large):
            return setup
    return None


def fastest(outcomes: list[Outcome]) -> Outcome | None:
    measured = [outcome for outcome in outcomes if outcome.tokens_per_s]
    return max(measured, key=lambda outcome: outcome.tokens_per_s, default=None)


def best(outcomes: list[Outcome]) -> Outcome | None:
    """Of those within one percent of the fastest, the one with the least memory."""
    top = fastest(outcomes)
    if top is None:
        return None
    nearly = [one for one in outcomes if one.tokens_per_s >= NEARLY_EQUAL * top.tokens_per_s]
    return min(nearly, key=lambda one: one.peak_gib)

"""StepPlan: what every data-parallel rank holds in one optimizer step, known without communication.

A loader that derives the global order of an epoch from its seed knows this for all ranks. The FSDP backend then
schedules dummy forwards without a host all-gather in every step.
"""

from __future__ import annotations

from dataclasses import dataclass

MediaKinds = frozenset[str]  # keys of PackedBatch.media, such as "pixel_values"


@dataclass(frozen=True)
class StepPlan:
    """For each data-parallel rank, the media kinds of its micro-batches.

    A rank may turn out to hold fewer kinds than planned (a row that failed to decode is left out), never more. Without
    `media_known` the plan says only how many micro-batches there are; their kinds are then empty.
    """

    ranks: tuple[tuple[MediaKinds, ...], ...]
    media_known: bool = True
    num_samples: int | None = None  # of all ranks

    @property
    def num_micro_batches(self) -> int:
        """The micro-batches of the rank that has most; 0 at the end of an epoch."""
        return max(map(len, self.ranks), default=0)

"""Do ranks call the same collectives in the same order? A difference is a hang, or mixes up data.

Two ranks are compared by the calls over groups that both are members of. Sends are compared with the receives of the
other rank, apart from the collectives: a pipeline orders them differently on its two sides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, zip_longest

from mvp_engine.tools.plan.record import Collective

Calls = Sequence[Collective]
POINT_TO_POINT = ("send", "receive")


@dataclass(frozen=True)
class Difference:
    """The first call in which a rank differs from another one."""

    rank: int
    other: int
    number: int  # of the call, counted from 1, among those that both ranks make together
    call: Collective | None  # None: the rank has no such call
    expected: Collective | None

    def __str__(self) -> str:
        mine = _described(self.call)
        theirs = _described(self.expected)
        return (
            f"rank {self.rank} would hang: call {self.number} that it shares with rank {self.other} is {mine}; "
            f"on rank {self.other} it is {theirs}"
        )


def _described(call: Collective | None) -> str:
    return "missing" if call is None else f"{call} ({call.where})"


def find_differences(calls_of: Mapping[int, Calls]) -> list[Difference]:
    """One difference for each rank that is not like the others, the rank with most differences first.

    Of two ranks that differ only from each other, the higher one is named.
    """
    found = list[Difference]()
    for one, other in combinations(sorted(calls_of), 2):
        difference = _compare(one, calls_of[one], other, calls_of[other])
        if difference is not None:
            found.append(difference)
    named = list[Difference]()
    while found:
        votes = Counter[int]()
        for difference in found:
            votes.update([difference.rank, difference.other])
        odd = max(votes, key=lambda rank: (votes[rank], rank))
        of_odd = [one for one in found if odd in (one.rank, one.other)]
        first = min(of_odd, key=lambda one: one.number)
        named.append(first if first.rank == odd else _swapped(first))
        found = [one for one in found if one not in of_odd]
    return named


def _swapped(one: Difference) -> Difference:
    return Difference(one.other, one.rank, one.number, one.expected, one.call)


def _compare(rank: int, calls: Calls, other: int, other_calls: Calls) -> Difference | None:
    together = [c for c in calls if other in c.ranks and c.kind not in POINT_TO_POINT]
    theirs = [c for c in other_calls if rank in c.ranks and c.kind not in POINT_TO_POINT]
    # Ranks that send each other the sizes of later calls agree on them, whatever a simulation assumes.
    agreed = {call.ranks for call in together if call.kind == "all-to-all" and not call.sent}
    for number, (mine, its) in enumerate(zip_longest(together, theirs), 1):
        if not _match(rank, mine, other, its, agreed):
            return Difference(other, rank, number, its, mine)
    for sender, sending, receiver, receiving in (
        (rank, calls, other, other_calls),
        (other, other_calls, rank, calls),
    ):
        sent = [c for c in sending if c.kind == "send" and c.peer == receiver]
        received = [c for c in receiving if c.kind == "receive" and c.peer == sender]
        for number, (mine, its) in enumerate(zip_longest(sent, received), 1):
            if mine is None or its is None or (mine.bytes, mine.dtype) != (its.bytes, its.dtype):
                return Difference(receiver, sender, number, its, mine)
    return None


def _match(
    rank: int,
    one: Collective | None,
    other: int,
    two: Collective | None,
    agreed: set[tuple[int, ...]],
) -> bool:
    if one is None or two is None:
        return False
    if (one.kind, one.ranks, one.dtype, one.peer) != (two.kind, two.ranks, two.dtype, two.peer):
        return False
    if not one.sent or not two.sent:
        return one.bytes == two.bytes
    if one.ranks in agreed:
        return True
    mine = one.ranks.index(rank)
    its = one.ranks.index(other)
    return one.sent[its] == two.received[mine] and one.received[its] == two.sent[mine]

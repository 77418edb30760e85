"""The lanes of streams: which rows each of them reads, and how they move to another number of ranks.

A lane reads the rows n with n % stride == offset. The state of a lane says all about it, so any rank can continue it: a
training that resumes on other ranks deals the lanes of all old ranks out to the new ones, for the rest of the epoch.
Each lane then finishes its window as it would have; where lanes do not divide evenly, each is split in several from the
next window on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

# The position of a lane: the number of the first row of its window, the rows that the window before left over, the
# number of the window, how many of its packs were yielded, and the number of the first row after it. To resume, the
# lane reads that window again. `rules` say which rows are of the lane: (from row, stride, offset), each of them valid
# from its row on.
Cursor = dict[str, Any]
START: Cursor = {"first": 0, "left": [], "window": 0, "packs": 0, "next": 0}

MAX_SPLIT = 4  # lanes after a split, as a multiple of those that a new epoch has


def start_lanes(lanes: int, rank: int, world_size: int) -> list[Cursor]:
    """The lanes of a rank at the start of an epoch: row n of the streams is of lane n modulo all lanes of all ranks."""
    stride = lanes * world_size
    return [{**START, "rules": [[0, stride, lane * world_size + rank]]} for lane in range(lanes)]


def is_of_lane(cursor: Cursor, row: int) -> bool:
    rules = cursor["rules"]
    return all(row < first or row % stride == offset for first, stride, offset in rules)


def move_lanes(states: Sequence[dict[str, Any]], lanes: int, world_size: int) -> list[list[Cursor]]:
    """The lanes of all ranks that saved, dealt out to `world_size` ranks in the order of their next turns.

    `states` has one entry for each data-parallel rank that saved; `lanes` is the number of lanes of a rank in a new
    epoch.
    """
    in_turn: list[tuple[int, int, Cursor]] = []
    for rank, state in enumerate(states):
        for lane, cursor in enumerate(state["lanes"]):
            turn = (lane - state["turn"]) % len(state["lanes"])
            in_turn.append((turn, rank, cursor))
    in_turn.sort(key=lambda entry: entry[:2])
    cursors = [cursor for _, _, cursor in in_turn]
    ways = _ways(len(cursors), lanes, world_size)
    if any(cursor["next"] is None for cursor in cursors):
        ways = 1  # saved by an earlier version, and not read since
    parts: list[Cursor] = []
    for index in range(ways):
        parts += [_split(cursor, ways, index) for cursor in cursors]
    return [parts[rank::world_size] for rank in range(world_size)]


def _ways(found: int, lanes: int, world_size: int) -> int:
    """In how many lanes to split each, so that all ranks have as many, or at least one."""
    even = math.lcm(found, world_size)
    if even <= MAX_SPLIT * lanes * world_size:
        return even // found
    return math.ceil(world_size / found)


def _split(cursor: Cursor, ways: int, index: int) -> Cursor:
    """One of the lanes that a lane is split in from its next window on; the first of them finishes the window."""
    if ways == 1:
        return cursor
    first = cursor["next"]
    _, stride, offset = cursor["rules"][-1]
    rules = [*cursor["rules"], [first, stride * ways, offset + index * stride]]
    if index == 0:
        return {**cursor, "rules": rules}
    return {**START, "first": first, "next": first, "rules": rules}

"""`mvp plan`: a config on any number of ranks, simulated in one process: memory, collectives, hangs."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, zip_longest
from typing import Any

from mvp_engine.errors import EXIT_USER_ERROR, UserError, count
from mvp_engine.kit.estimate.settings import GIB
from mvp_engine.tools.estimate import make_estimator
from mvp_engine.tools.estimate_config import Question
from mvp_engine.tools.plan.network import Network
from mvp_engine.tools.plan.record import Collective, ranks_text
from mvp_engine.tools.plan.simulate import RankPlan, Simulation
from mvp_engine.tools.plan.step import (
    estimate_stages,
    micro_batches,
    simulated_batches,
    step_calls,
    without_stages,
)

EXACT = ("weights", "gradients", "optimizer states")  # memory that the simulation counts


@dataclass(frozen=True)
class PlanOptions:
    gpus_per_node: int = 8
    network: float | None = None  # GB/s per GPU between nodes; None: the default
    ranks: str | None = None  # more ranks to simulate, or "all"


def print_plan(question: Question, options: PlanOptions, *, as_json: bool) -> int:
    """Print the plan; the exit code is 2 if ranks would hang or the training does not fit."""
    with warnings.catch_warnings():
        # torch's own FSDP calls them.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
        facts = plan(question, options)
    print(json.dumps(facts, indent=2) if as_json else page(facts))
    return 0 if facts["fits"] and not facts["hangs"] else EXIT_USER_ERROR


def plan(question: Question, options: PlanOptions) -> dict[str, Any]:
    estimator = make_estimator(question)
    if estimator.is_rl:
        raise UserError(
            "mvp plan is for trainings; of an RL config, plan the training of its actor: the same model and parallel "
            "sizes in a config of sft"
        )
    config = estimator.config
    batches = micro_batches(estimator, config)
    estimated = estimate_stages(estimator, config, len(batches))
    simulation = Simulation(config, estimator.gpus, options.gpus_per_node)
    plans = [
        simulation.run(rank, simulated_batches(batches)) for rank in simulation.ranks(options.ranks)
    ]
    network = Network.of(estimator.gpu, options.gpus_per_node, options.network)
    differences = find_differences({one.rank: one.calls for one in plans})
    kinds = [
        _kind_facts(ranks, step_calls(simulation, ranks[0], batches), network, estimated)
        for ranks in _kinds(plans)
    ]
    step_s = estimated["step_s"] + max(kind["communication"]["exposed_s"] for kind in kinds)
    return {
        "config": question.what,
        "gpus": estimator.gpus,
        "gpu": estimated["gpu"],
        "packs": estimated["packs"],
        "stages": config.parallel.pipeline,
        "micro_batches": len(batches),  # of a rank, in a step
        "simulated_ranks": [one.rank for one in plans],
        "parameters": sum(
            param.numel() for param in estimator.model(without_stages(config)).parameters()
        ),
        "room_gib": estimated["room_gib"],
        "fits": all(kind["fits"] for kind in kinds),
        "kinds": kinds,
        "compute_s": estimated["step_s"],
        "step_s": step_s,
        "host_collectives": max(one.host_calls for one in plans),
        "hangs": [str(difference) for difference in differences],
    }


def _kinds(plans: Sequence[RankPlan]) -> list[list[RankPlan]]:
    """Ranks of one stage with equal collectives, whatever the members of their groups; most memory first."""
    found = dict[str, list[RankPlan]]()
    for one in plans:
        calls = [(call.kind, len(call.ranks), call.bytes, call.dtype) for call in one.calls]
        found.setdefault(f"{one.stage} {calls}", []).append(one)
    return [
        sorted(kind, key=lambda one: sum(one.held.values()), reverse=True)
        for kind in found.values()
    ]


def _kind_facts(
    plans: list[RankPlan],
    calls: Counter[Collective],
    network: Network,
    estimated: dict[str, Any],
) -> dict[str, Any]:
    first = plans[0]
    memory = {kind: size / GIB for kind, size in first.held.items()}
    memory |= {kind: gib for kind, gib in estimated["memory_gib"].items() if kind not in EXACT}
    memory["activations"] = estimated["activations_of_stage"][first.stage]
    if first.stage < len(estimated["activations_of_stage"]) - 1:
        memory["loss"] = 0.0
    peak = sum(memory.values())
    sizes = first.bytes_of_ranks.values()
    return {
        "ranks": sorted(one.rank for one in plans),
        "stage": first.stage,
        "parameters": first.parameters,
        "memory_gib": memory,
        "peak_gib": peak,
        "fits": peak < estimated["room_gib"] * estimated["usable"],
        "held_bytes": first.held,
        # Over the ranks that share these parameters, simulated or not.
        "held_gib_smallest": min(sizes) / GIB,
        "held_gib_largest": max(sizes) / GIB,
        "collectives": _table(calls, first.groups, network),
        "communication": network.communication(calls, estimated["step_s"]),
    }


def _table(
    calls: Counter[Collective], groups: dict[tuple[int, ...], str], network: Network
) -> list[dict[str, Any]]:
    """Calls, bytes and time by process group and kind, in the order of their first call."""
    rows = dict[tuple[Any, ...], dict[str, Any]]()
    for call, number in calls.items():
        key = (call.ranks, call.kind, call.dtype, call.overlaps)
        row = rows.setdefault(
            key,
            {
                "group": groups.get(call.ranks, "other"),
                "ranks": ranks_text(call.ranks),
                "size": len(call.ranks),
                "kind": call.kind,
                "dtype": call.dtype,
                "overlaps": call.overlaps,
                "calls": 0,
                "bytes": 0,
                "seconds": 0.0,
            },
        )
        row["calls"] += number
        row["bytes"] += number * call.total_bytes
        row["seconds"] += number * network.seconds(call)
    return list(rows.values())


def page(facts: dict[str, Any]) -> str:
    """The plan as text."""
    lines = [f"{facts['config']} on {facts['gpus']:,} x {facts['gpu']}, simulated"]
    simulated = facts["simulated_ranks"]
    batches = count(facts["micro_batches"], "micro-batch")
    lines += [f"  {facts['packs']}", f"  {batches} per rank and step"]
    lines += [f"  {facts['parameters']:,} parameters", f"  simulated: {_text(simulated)}", ""]
    for kind in facts["kinds"]:
        lines += _kind_lines(kind, facts)
    lines += [f"  {'compute':<22}{1e3 * facts['compute_s']:10.1f} ms, estimated"]
    lines += [f"  {'step':<22}{1e3 * facts['step_s']:10.1f} ms with exposed communication"]
    lines += [f"  {'host collectives':<22}{facts['host_collectives']:10,} in a step", ""]
    lines += [f"HANG: {text}" for text in facts["hangs"]]
    if not facts["hangs"]:
        lines.append("All simulated ranks call the same collectives in the same order.")
    return "\n".join(lines)


def _kind_lines(kind: dict[str, Any], facts: dict[str, Any]) -> list[str]:
    stage = f" of stage {kind['stage']}" if facts["stages"] > 1 else ""
    lines = [f"{_text(kind['ranks'])}{stage}: {kind['parameters']:,} parameters"]
    for name, size in kind["memory_gib"].items():
        lines.append(f"  {name:<22}{size:10.2f} GiB")
    verdict = "fits" if kind["fits"] else "does NOT fit"
    peak = f"{kind['peak_gib']:10.2f} GiB of {facts['room_gib']:.0f} GiB: {verdict}"
    lines.append(f"  {'peak memory per GPU':<22}{peak}")
    smallest = kind["held_gib_smallest"]
    largest = kind["held_gib_largest"]
    spread = f"{smallest:10.2f} to {largest:.2f} GiB of weights, gradients and states"
    lines += [f"  {'over the ranks':<22}{spread}", ""]
    title = f"  {'collective':<16}{'group':<24}{'dtype':<10}{'calls':>7}{'GB':>10}{'ms':>10}"
    lines.append(title)
    for row in kind["collectives"]:
        group = f"{row['group']} ({row['size']})"
        text = f"  {row['kind']:<16}{group:<24}{row['dtype']:<10}{row['calls']:>7,}"
        overlap = "  overlaps" if row["overlaps"] else ""
        lines.append(f"{text}{row['bytes'] / 1e9:>10.3f}{1e3 * row['seconds']:>10.2f}{overlap}")
    found = kind["communication"]
    exposed = f"{1e3 * found['exposed_s']:10.1f} ms of {1e3 * found['total_s']:.1f} ms"
    return [*lines, f"  {'exposed communication':<22}{exposed}", ""]


def _text(ranks: list[int]) -> str:
    return ranks_text(tuple(ranks))


# Do ranks call the same collectives in the same order? A difference is a hang, or mixes up data.
#
# Two ranks are compared by the calls over groups that both are members of. Sends are compared with the receives of the
# other rank, apart from the collectives: a pipeline orders them differently on its two sides.

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

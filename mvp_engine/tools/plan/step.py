"""The step that `mvp plan` simulates and `mvp estimate` predicts: micro-batches, pipeline stages, communication."""

from __future__ import annotations

from collections import Counter
from typing import Any

from mvp_engine.errors import UserError
from mvp_engine.kit.estimate.training import changed
from mvp_engine.tools.estimate_config import Estimator
from mvp_engine.tools.plan.network import Network
from mvp_engine.tools.plan.record import Collective
from mvp_engine.tools.plan.simulate import RankPlan, Simulation

MOST_MICRO_BATCHES = 2  # of a step that are simulated; those after the first repeat it


def micro_batches(estimator: Estimator, config: Any) -> list[Any]:
    """One rank's micro-batches of a step; without data they are assumed, and equal."""
    if config.model.type in ("action_model", "omni_model"):
        raise UserError(
            f"mvp plan does not simulate the loss of model.type={config.model.type}. mvp estimate CONFIG, without "
            "--communication, predicts its memory and time"
        )
    packs_per_step = estimator.packs_per_step(config, estimator.gpus)
    parallel = config.parallel
    same_data = parallel.pipeline * parallel.context * parallel.ulysses * parallel.tensor
    per_rank = max(1, packs_per_step // (estimator.gpus // same_data))
    sampled = estimator.packs(without_stages(config), packs_per_step).sampled
    return [sampled[index % len(sampled)] for index in range(per_rank)]


def estimate_stages(estimator: Estimator, config: Any, micro_batches: int) -> dict[str, Any]:
    """The estimate of a step, with the activations of each pipeline stage.

    A pipeline of S stages is estimated as S times as many shards: a rank then has the weights of a stage, and runs all
    blocks. Of n micro-batches, a stage runs 1 / S of the blocks, keeps the activations of at most as many micro-batches
    as stages follow it, itself included, and waits for S - 1 micro-batches of the others.
    """
    stages = config.parallel.pipeline
    if stages == 1:
        estimated = estimator.estimate(config, estimator.gpus)
        return {**estimated, "activations_of_stage": [estimated["memory_gib"]["activations"]]}
    packs = estimator.packs_per_step(config, estimator.gpus)
    flat = without_stages(config)
    ranks = estimator.gpus // estimator.settings(flat).text_ranks
    estimated = estimator.estimate(flat, estimator.gpus)
    of_flat = max(1, -(-packs // ranks))  # micro-batches of a rank
    activations = estimated["memory_gib"]["activations"]
    kept = [min(stages - stage, micro_batches) for stage in range(stages)]
    seconds = estimated["step_s"] / of_flat / stages
    return {
        **estimated,
        "step_s": seconds * (micro_batches + stages - 1),
        "activations_of_stage": [activations * number / stages for number in kept],
    }


def without_stages(config: Any) -> Any:
    """The config with the ranks of other pipeline stages as shards."""
    parallel = config.parallel
    shards = parallel.pipeline * parallel.shard
    return changed(config, {"parallel.pipeline": 1, "parallel.shard": shards})


def simulated_batches(batches: list[Any]) -> list[Any]:
    return batches[:MOST_MICRO_BATCHES]


def step_calls(simulation: Simulation, one: RankPlan, batches: list[Any]) -> Counter[Collective]:
    """The collectives of a rank in a whole step: each micro-batch that was not simulated adds what the last one did."""
    simulated = simulated_batches(batches)
    calls = Counter(one.calls)
    left_out = len(batches) - len(simulated)
    if left_out:
        added = calls - Counter(simulation.run(one.rank, simulated[:-1]).calls)
        calls.update({call: number * left_out for call, number in added.items()})
    return calls


def communication(
    estimator: Estimator, compute_s: float, gpus_per_node: int, network: float | None
) -> dict[str, float]:
    """Seconds of communication of rank 0 in a step (`Network.communication`)."""
    batches = micro_batches(estimator, estimator.config)
    simulation = Simulation(estimator.config, estimator.gpus, gpus_per_node)
    one = simulation.run(0, simulated_batches(batches))
    calls = step_calls(simulation, one, batches)
    return Network.of(estimator.gpu, gpus_per_node, network).communication(calls, compute_s)

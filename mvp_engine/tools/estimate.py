"""`mvp estimate`: predicted memory and time of a training run on GPUs that need not be present, and advice."""

from __future__ import annotations

import json
from typing import Any

from mvp_engine.errors import EXIT_USER_ERROR, UserError
from mvp_engine.kit.estimate.memory import IN_BACKWARD
from mvp_engine.kit.estimate.training import changed
from mvp_engine.log.format import duration, rate
from mvp_engine.rl.rl_settings import RLConfig
from mvp_engine.tools.estimate_advice import advise
from mvp_engine.tools.estimate_config import Estimator, Question, compose_question

OFFLOAD_KEYS = {
    "optimizer states": "optim.offload",
    "inputs of blocks": "model.activation_checkpointing=offload",
}


def print_estimate(
    question: Question,
    *,
    communication: bool = False,
    gpus_per_node: int = 8,
    network: float | None = None,
    as_json: bool,
) -> int:
    """Print the estimate with advice; the exit code is 2 if the training does not fit.

    `communication`: also simulate a rank, for the communication that a step waits for.
    """
    estimator = make_estimator(question)
    _refuse_unsupported(estimator)
    facts = estimator.estimate(estimator.config, estimator.gpus)
    if communication and estimator.is_rl:
        raise UserError("--communication is for trainings: leave it out for an RL config")
    if communication and facts["fits"] and facts["gpus"] > 1:
        facts = _with_communication(estimator, facts, gpus_per_node, network)
    advice = {} if facts["fits"] else advise(estimator, facts)
    print(json.dumps({**facts, **advice}, indent=2) if as_json else page({**facts, **advice}))
    return 0 if facts["fits"] else EXIT_USER_ERROR


def _refuse_unsupported(estimator: Estimator) -> None:
    """Raise the error with which a training of this config would end at its start.

    Building a rank takes up to two seconds, so a layout that supports every model is not tried: FSDP and replicas.
    """
    from mvp_engine.tools.plan.simulate import Simulation

    config = estimator.config
    parallel = estimator.parallel(config)
    model = config.model
    is_plain = parallel.context == parallel.ulysses == parallel.tensor == parallel.expert == 1
    if is_plain and model.backend == "fsdp" and not (model.fp8 or model.quantize):
        return
    if hasattr(config.optim, "offload"):
        # It would check the host memory of this machine, on which the training need not run.
        config = changed(config, {"optim.offload": False})
    Simulation(config, estimator.gpus, parallel=parallel).check()


def _with_communication(
    estimator: Estimator, facts: dict[str, Any], gpus_per_node: int, network: float | None
) -> dict[str, Any]:
    """The facts with the communication that a step waits for, by the simulation of `mvp plan`."""
    from mvp_engine.tools.plan.step import communication

    found = communication(estimator, facts["step_s"], gpus_per_node, network)
    step_s = facts["step_s"] + found["exposed_s"]
    slower = step_s / facts["step_s"]
    return {
        **facts,
        "compute_s": facts["step_s"],
        "communication": found,
        "seconds": {**facts["seconds"], "exposed communication": found["exposed_s"]},
        "step_s": step_s,
        "tokens_per_s": facts["tokens_per_s"] / slower,
        "mfu": facts["mfu"] / slower,
        "eta_s": facts["eta_s"] and facts["eta_s"] * slower,
    }


def make_estimator(question: Question) -> Estimator:
    """An estimator of the kind that the config needs."""
    composed = compose_question(question)
    if not isinstance(composed[0].config, RLConfig):
        return Estimator(question, composed)
    from mvp_engine.tools.estimate_rl import RLEstimator

    return RLEstimator(question, composed)


def page(facts: dict[str, Any]) -> str:
    """The estimate as text."""
    lines = [f"{facts['config']} on {facts['gpus']} x {facts['gpu']}, estimated"]
    lines.append(f"  {facts['packs']}")
    if facts["auto"]:
        lines.append(f"  auto: {facts['auto']['reason']}")
    lines.append("")
    for name, size in facts["memory_gib"].items():
        if size or name != IN_BACKWARD:
            lines.append(f"  {name:<22}{size:8.2f} GiB")
    verdict = "fits" if facts["fits"] else "does NOT fit"
    peak = f"{facts['peak_gib']:8.2f} GiB of {facts['room_gib']:.0f} GiB: {verdict}"
    lines += [f"  {'peak memory per GPU':<22}{peak}", *_host_lines(facts), ""]
    if facts["fits"]:
        lines += _time_lines(facts)
    else:
        lines += _advice_lines(facts)
    return "\n".join(lines)


def _host_lines(facts: dict[str, Any]) -> list[str]:
    """Host memory that optimizer states and inputs of blocks need."""
    lines = []
    for what, size in facts.get("host_memory_gib", {}).items():
        if size:
            text = f"{size:8.2f} GiB per GPU, pinned: {what} ({OFFLOAD_KEYS[what]})"
            lines.append(f"  {'host memory':<22}{text}")
    return lines


def _time_lines(facts: dict[str, Any]) -> list[str]:
    lines = []
    for name, seconds in facts["seconds"].items():
        lines.append(f"  {name:<22}{1e3 * seconds:8.1f} ms")
    throughput = f"{rate(facts['tokens_per_s'])} tokens/s, MFU {facts['mfu']:.1%}"
    step = f"{1e3 * facts['step_s']:8.1f} ms, {facts['tokens_per_step']:,} tokens: {throughput}"
    lines.append(f"  {'step':<22}{step}")
    if facts["idle_ranks"]:
        text = (
            f"{facts['idle_ranks']} data parallel ranks have no pack: raise data.global_batch_size"
        )
        lines.append(f"  {'idle':<22}{text}")
    if facts["steps"] is not None:
        training = f"{facts['steps']:8,} steps, about {duration(facts['eta_s'])}"
        lines.append(f"  {'training':<22}{training}")
    left_out = "Waiting for data or host is not included."
    if facts["gpus"] > 1 and "communication" not in facts:
        left_out = "Communication (--communication) and waiting for data or host are not included."
    return [*lines, "", f"{left_out} Accuracy: docs/performance.md"]


def _advice_lines(facts: dict[str, Any]) -> list[str]:
    lines = []
    for option in facts["advice"]:
        where = ""
        if option["gpus"] != facts["gpus"]:
            where = f" on {option['gpus']} GPUs"
            if "groups.actor.ranks" not in option["words"]:
                where += " (--gpus here, --nproc of mvp train)"
        lines.append(f"It fits{where} with these words on the command line:")
        lines += ["", f"  {option['words']}", ""]
        step = f"{option['peak_gib']:.1f} GiB per GPU, {1e3 * option['step_s']:,.0f} ms per step"
        lines += [f"  {step}", *(f"  {note}" for note in option["notes"]), ""]
    if any(option["gpus"] > 1 for option in facts["advice"]):
        text = "Times are without communication, which --communication adds to the estimate of a config that fits."
        lines += [text, ""]
    if not facts["advice"]:
        lines += ["No setting makes it fit, not even LoRA or 64 of these GPUs.", ""]
    if facts["fits_on"]:
        lines.append(f"Without a change it fits on: {', '.join(facts['fits_on'])}")
    return lines

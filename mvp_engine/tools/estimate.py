"""`mvp estimate`: predicted memory and time of a training run on GPUs that need not be present, and advice."""

from __future__ import annotations

import json
from typing import Any

from mvp_engine.errors import EXIT_USER_ERROR
from mvp_engine.log.format import duration, rate
from mvp_engine.rl.rl_settings import RLConfig
from mvp_engine.tools.estimate_advice import advise
from mvp_engine.tools.estimate_config import Estimator, Question, compose_question


def print_estimate(question: Question, *, as_json: bool) -> int:
    """Print the estimate with advice; the exit code is 2 if the training does not fit."""
    estimator = make_estimator(question)
    facts = estimator.estimate(estimator.config, estimator.gpus)
    advice = {} if facts["fits"] else advise(estimator, facts)
    print(json.dumps({**facts, **advice}, indent=2) if as_json else page({**facts, **advice}))
    return 0 if facts["fits"] else EXIT_USER_ERROR


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
    lines += [f"  {facts['packs']}", ""]
    for name, size in facts["memory_gib"].items():
        lines.append(f"  {name:<22}{size:8.2f} GiB")
    verdict = "fits" if facts["fits"] else "does NOT fit"
    peak = f"{facts['peak_gib']:8.2f} GiB of {facts['room_gib']:.0f} GiB: {verdict}"
    lines += [f"  {'peak memory per GPU':<22}{peak}", ""]
    if facts["fits"]:
        lines += _time_lines(facts)
    else:
        lines += _advice_lines(facts)
    return "\n".join(lines)


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
    note = "Communication between GPUs and waiting for data or host are not included. Accuracy: docs/performance.md"
    return [*lines, "", note]


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
    if not facts["advice"]:
        lines += ["No setting makes it fit, not even LoRA or 64 of these GPUs.", ""]
    if facts["fits_on"]:
        lines.append(f"Without a change it fits on: {', '.join(facts['fits_on'])}")
    return lines

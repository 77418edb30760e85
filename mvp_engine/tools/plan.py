"""`mvp plan`: memory, time, collectives and hangs of a training on GPUs that need not be present, and advice."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from mvp_engine import plugins
from mvp_engine.config import compose
from mvp_engine.config.compose import Composed, MissingKeys, override_key
from mvp_engine.config.engine_class import shipped_configs
from mvp_engine.errors import EXIT_USER_ERROR, UserError, count
from mvp_engine.hf.model.config_source import read_config
from mvp_engine.hf.weights.hub import hub_model
from mvp_engine.imports import load_spec
from mvp_engine.kit.auto import changed
from mvp_engine.kit.data.settings import data_section
from mvp_engine.kit.plan.planner import Planner, Question, advise
from mvp_engine.kit.plan.record import ranks_text
from mvp_engine.kit.plan.step import IN_BACKWARD
from mvp_engine.log.format import duration, rate
from mvp_engine.model_engine.base import model_types
from mvp_engine.tools.inspect import config_data_kit

MODEL_CONFIG = Path(__file__).parent / "plan_model.yaml"
OFFLOAD_KEYS = {
    "optimizer states": "optim.offload",
    "inputs of blocks": "model.activation_checkpointing=offload",
}


def print_plan(question: Question, *, as_json: bool) -> int:
    """Print the plan; the exit code is 2 if ranks would hang or the training does not fit."""
    facts = plan(question)
    print(json.dumps(facts, indent=2) if as_json else page(facts))
    return 0 if facts["fits"] and not facts.get("hangs") else EXIT_USER_ERROR


def plan(question: Question) -> dict[str, Any]:
    planner = make_planner(question)
    has_stages = planner.parallel(planner.config).pipeline > 1  # whose ranks differ
    is_simulated = question.simulate or question.ranks is not None or has_stages
    if not is_simulated:
        planner.check()
    facts = planner.estimate(planner.config, planner.gpus)
    if is_simulated:
        with warnings.catch_warnings():
            # torch's own FSDP calls them.
            deprecated = r"`torch\.distributed\.\w+` is deprecated"
            warnings.filterwarnings("ignore", deprecated, FutureWarning)
            facts = planner.simulate(facts)
    return facts if facts["fits"] else {**facts, **advise(planner, facts)}


def make_planner(question: Question) -> Planner:
    """The planner of the recipe's engine."""
    composed, is_assumed = _compose(question)
    config: Any = composed.config
    if config.model.type == "module":
        types = ", ".join(sorted(model_types() - {"module"}))
        raise UserError(f"mvp plan supports Hugging Face models: model.type is one of {types}")
    tokens_key = f"{data_section(config)[0]}.pack_tokens"
    is_given = any(override_key(word) == tokens_key for word in question.overrides)
    if question.tokens is not None and not is_given:
        config = changed(config, {tokens_key: question.tokens})
    engine_class = composed.engine_class
    planner_class = Planner
    if spec := getattr(engine_class, "planner", None):
        module, name = load_spec(spec, Path(), "planner")
        planner_class = getattr(module, name or "")
    return planner_class(
        question, config, lambda config: config_data_kit(engine_class, config), is_assumed
    )


def _compose(question: Question) -> tuple[Composed, bool]:
    """The config, and whether its packs are assumed: it names no data, or the user gives the tokens."""
    file: str | Path = question.what
    words = list(question.overrides)
    if _is_model(question.what):
        file = MODEL_CONFIG
        words.insert(0, f"model.path={question.what}")
        if model_type := plugins.folder_type(read_config(question.what, {})):
            words.insert(0, f"model.type={model_type}")
    try:
        return compose(file, words), question.tokens is not None
    except MissingKeys as error:
        of_data = [key for key in error.keys if ".sources." in key or key == "processor"]
        others = [key for key in error.keys if key not in of_data]
        if others:
            raise MissingKeys(Path(file), others) from None
        return compose(file, [*words, *(f"{key}=assumed" for key in of_data)]), True


def _is_model(what: str) -> bool:
    """A folder, or a Hub id such as org/name; everything else is a config, which may be misspelt."""
    path = Path(what).expanduser()
    if path.is_dir() or path.suffix in (".yaml", ".yml"):
        return path.is_dir()
    return hub_model(what) is not None and not shipped_configs(path.parts[0])


# ---- Text ----------------------------------------------------------------------------------------------------------


def page(facts: dict[str, Any]) -> str:
    """The plan as text."""
    kinds = facts.get("kinds", [])
    source = "simulated" if kinds else "estimated"
    lines = [f"{facts['config']} on {facts['gpus']:,} x {facts['gpu']}, {source}"]
    lines.append(f"  {facts['packs']}")
    if facts["auto"]:
        lines.append(f"  auto: {facts['auto']['reason']}")
    if kinds:
        lines.append(f"  {count(facts['micro_batches'], 'micro-batch')} per rank and step")
        lines.append(f"  {facts['parameters']:,} parameters")
        lines.append(f"  simulated: {ranks_text(tuple(facts['simulated_ranks']))}")
    lines.append("")
    for kind in kinds:
        lines += _kind_lines(kind, facts)
    if not kinds:
        lines += [*_memory_lines(facts, facts), ""]
    lines += _host_lines(facts)
    lines += _time_lines(facts) if facts["fits"] else _advice_lines(facts)
    if kinds:
        lines += ["", *(f"HANG: {text}" for text in facts["hangs"])]
        if not facts["hangs"]:
            lines.append("All simulated ranks call the same collectives in the same order.")
    return "\n".join(lines)


def _memory_lines(part: dict[str, Any], facts: dict[str, Any]) -> list[str]:
    """`part`: the facts themselves, or those of a kind of ranks."""
    lines = []
    for name, size in part["memory_gib"].items():
        if size or name != IN_BACKWARD:
            lines.append(f"  {name:<22}{size:8.2f} GiB")
    verdict = "fits" if part["fits"] else "does NOT fit"
    peak = f"{part['peak_gib']:8.2f} GiB of {facts['room_gib']:.0f} GiB: {verdict}"
    return [*lines, f"  {'peak memory per GPU':<22}{peak}"]


def _kind_lines(kind: dict[str, Any], facts: dict[str, Any]) -> list[str]:
    stage = f" of stage {kind['stage']}" if facts["stages"] > 1 else ""
    ranks = ranks_text(tuple(kind["ranks"]))
    lines = [f"{ranks}{stage}: {kind['parameters']:,} parameters", *_memory_lines(kind, facts)]
    spread = f"{kind['held_gib_smallest']:8.2f} to {kind['held_gib_largest']:.2f} GiB"
    lines.append(f"  {'over the ranks':<22}{spread} of weights, gradients and states")
    title = f"  {'collective':<16}{'group':<24}{'dtype':<10}{'calls':>7}{'GB':>10}{'ms':>10}"
    lines += ["", title]
    for row in kind["collectives"]:
        group = f"{row['group']} ({row['size']})"
        text = f"  {row['kind']:<16}{group:<24}{row['dtype']:<10}{row['calls']:>7,}"
        overlap = "  overlaps" if row["overlaps"] else ""
        lines.append(f"{text}{row['bytes'] / 1e9:>10.3f}{1e3 * row['seconds']:>10.2f}{overlap}")
    waits = kind["communication"]
    exposed = f"{1e3 * waits['exposed_s']:8.1f} ms of {1e3 * waits['total_s']:.1f} ms"
    return [*lines, f"  {'exposed communication':<22}{exposed}", ""]


def _host_lines(facts: dict[str, Any]) -> list[str]:
    """Host memory that optimizer states and inputs of blocks need."""
    sizes = {what: size for what, size in facts.get("host_memory_gib", {}).items() if size}
    lines = []
    for what, size in sizes.items():
        text = f"{size:8.2f} GiB per GPU, pinned: {what} ({OFFLOAD_KEYS[what]})"
        lines += [f"  {'host memory':<22}{text}", ""]
    return lines


def _time_lines(facts: dict[str, Any]) -> list[str]:
    throughput = f"{rate(facts['tokens_per_s'])} tokens/s, MFU {facts['mfu']:.1%}"
    texts = {name: f"{1e3 * seconds:8.1f} ms" for name, seconds in facts["seconds"].items()}
    texts["step"] = (
        f"{1e3 * facts['step_s']:8.1f} ms, {facts['tokens_per_step']:,} tokens: {throughput}"
    )
    if facts["idle_ranks"]:
        text = "data parallel ranks have no pack: raise data.global_batch_size"
        texts["idle"] = f"{facts['idle_ranks']} {text}"
    if facts["steps"] is not None:
        texts["training"] = f"{facts['steps']:8,} steps, about {duration(facts['eta_s'])}"
    left_out = "Waiting for data or host is not included."
    if "kinds" in facts:
        texts["host collectives"] = f"{facts['host_collectives']:8,} in a step"
    elif facts["gpus"] > 1:
        left_out = "Communication (--simulate) and waiting for data or host are not included."
    lines = [f"  {name:<22}{text}" for name, text in texts.items()]
    return [*lines, "", f"{left_out} Accuracy: docs/plan.md"]


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
        text = "Times are without communication, which --simulate adds to the plan of a config."
        lines += [text, ""]
    if not facts["advice"] and facts.get("stages", 1) == 1:
        lines += ["No setting makes it fit, not even LoRA or 64 of these GPUs.", ""]
    if facts["fits_on"]:
        lines.append(f"Without a change it fits on: {', '.join(facts['fits_on'])}")
    return lines

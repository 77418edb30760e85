"""Parts of a multimodal model: `vision`, `audio`, `projector`, `llm`, and those of kits. Each parameter has one.

Config keys such as `model.freeze` or `optim.lr_by_part` accept these names. Parts are found by
structure, not by a table of models: the decoder marks the text layers, and an encoder is a
sub-model built from a vision or audio sub-config. Other children of the base connect the two, so
they are the projector; without any, the projector is what follows the blocks inside the encoder.
Heads (`lm_head`, the head of a value model) belong to `llm`; a model of a kit names its further parts in `own_parts`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import nn

from mvp_engine.config.schema import PARTS, Part
from mvp_engine.distributed.data_parallel import blocks
from mvp_engine.errors import UserError
from mvp_engine.hf.model.packed_model import PackedModel
from mvp_engine.ops.nf4 import num_parameters

if TYPE_CHECKING:
    from mvp_engine.hf.model.pipeline import OtherTensor

# Words in the name of a sub-config, and the part that its sub-model is.
_ENCODER_PARTS: dict[str, Part] = {
    "vision": "vision",
    "image": "vision",
    "video": "vision",
    "audio": "audio",
}


# ---- Which parameter belongs to which part -----------------------------------------------------


def parts_of(model: nn.Module) -> dict[str, Part]:
    """The part of each parameter, by parameter name; empty for a model outside of Hugging Face."""
    if not isinstance(model, PackedModel):
        return {}
    roots = _part_roots(model)
    found: dict[str, Part] = {}

    def walk(module: nn.Module, prefix: str, part: Part) -> None:
        part = roots.get(module, part)
        for name, _ in module.named_parameters(recurse=False):
            found[prefix + name] = part
        for name, child in module.named_children():
            walk(child, f"{prefix}{name}.", part)

    walk(model, "", "llm")
    # A tied parameter only counts under its first name, as in named_parameters().
    return {name: found[name] for name, _ in model.named_parameters()}


def _part_roots(model: PackedModel) -> dict[nn.Module, Part]:
    """The modules at which a part begins; a part ends where another one begins below it."""
    base = model.base()
    decoder = model.decoder()
    roots: dict[nn.Module, Part] = {model: "llm", **model.own_parts}
    if decoder is base:
        return roots
    roots |= {base: "projector", decoder: "llm"}
    encoders = _encoders(base, decoder)
    roots |= encoders
    connectors = [child for child in base.children() if child not in (decoder, *encoders)]
    if not any(True for child in connectors for _ in child.parameters()):
        for encoder in encoders:
            roots |= dict.fromkeys(_after_blocks(encoder), "projector")
    return roots


def _encoders(base: Any, decoder: nn.Module) -> dict[nn.Module, Part]:
    """Children of the base, except the decoder, built from a sub-config for vision or audio."""
    encoders: dict[nn.Module, Part] = {}
    for key in base.config.sub_configs:
        config = getattr(base.config, key, None)
        part = next((part for word, part in _ENCODER_PARTS.items() if word in key), None)
        if part is None or config is None:
            continue
        for child in base.children():
            if getattr(child, "config", None) is config and child is not decoder:
                encoders[child] = part
    return encoders


def _after_blocks(encoder: nn.Module) -> Iterator[nn.Module]:
    """Mergers and projections that an encoder has after its first list of blocks.

    Norms have no matrices and are skipped; so are convolutions, which embed the input wherever
    they are declared.
    """
    seen_blocks = False
    for name, child in encoder.named_children():
        has_matrix = any(param.ndim > 1 for param in child.parameters())
        if seen_blocks and has_matrix and not name.startswith("conv"):
            yield child
        seen_blocks = seen_blocks or isinstance(child, nn.ModuleList)


def blocks_by_part(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Each transformer block with its part. In a model without parts all get the same one."""
    return _with_parts(model, blocks(model))


def norms_by_part(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Each norm next to a list of blocks, such as a decoder's last one, with its part."""
    entries = set(blocks(model))
    norms: list[nn.Module] = []
    for module in model.modules():
        children = list(module.children())
        if any(
            isinstance(child, nn.ModuleList) and entries.intersection(child) for child in children
        ):
            norms += [child for child in children if _is_norm(child)]
    return _with_parts(model, norms)


def _is_norm(module: nn.Module) -> bool:
    """Whether a module has vectors alone."""
    params = list(module.parameters(recurse=False))
    return bool(params) and not list(module.children()) and all(param.ndim == 1 for param in params)


def _with_parts(model: nn.Module, modules: list[nn.Module]) -> list[tuple[nn.Module, str]]:
    parts = parts_of(model)
    names = {param: name for name, param in model.named_parameters()}
    return [(one, parts.get(names[next(one.parameters())], PARTS[0])) for one in modules]


# ---- Parts in a config -------------------------------------------------------------------------


def by_part(model: nn.Module, setting: Any, key: str) -> Mapping[str, Any]:
    """A config value as a mapping from part to value; a single value holds for all parts."""
    if not isinstance(setting, Mapping):
        return dict.fromkeys(PARTS, setting)
    known = {*parts_of(model).values(), *_parts_elsewhere(model)}
    for part in setting:
        if part not in known:
            raise _no_part(model, part, key, known)
    return setting


def matching(model: nn.Module, pattern: str, key: str) -> list[str]:
    """Names of the parameters of a part, or of those that fit a glob pattern; at least one."""
    parts = parts_of(model)
    elsewhere = _elsewhere(model)
    known = {*parts.values(), *_parts_elsewhere(model)}
    names = [name for name, _ in model.named_parameters()]
    if pattern in known:
        return [name for name in names if parts[name] == pattern]
    if pattern in PARTS and known:
        raise _no_part(model, pattern, key, known)
    found = [name for name in names if fnmatchcase(name, pattern)]
    if not found and not any(fnmatchcase(name, pattern) for name in elsewhere):
        similar = difflib.get_close_matches(pattern, [*names, *sorted(known)], 3, 0.0)
        raise UserError(
            f"{key}: no parameter name matches {pattern!r}. Similar names: {', '.join(similar)}"
        )
    return found


def _elsewhere(model: nn.Module) -> dict[str, OtherTensor]:
    """The tensors that other pipeline stages hold."""
    stage = model.stage if isinstance(model, PackedModel) else None
    return {} if stage is None else stage.elsewhere


def _parts_elsewhere(model: nn.Module) -> set[str]:
    return {one.part for one in _elsewhere(model).values()} - {""}


def _no_part(model: nn.Module, part: str, key: str, known: set[Any]) -> UserError:
    listed = ", ".join(part for part in PARTS if part in known)
    reason = f"it has {listed}" if known else "only Hugging Face models have parts"
    return UserError(f"{key}: {type(model).__name__} has no part {part}; {reason}")


# ---- What is trained ---------------------------------------------------------------------------


def trained_parts(
    model: nn.Module, param_groups: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """One dict per part, then one for `all` of the model; `param_groups` are those of its optimizer.

    A module that was added next to the backbone, such as a head, has a row of its own under its name.
    Keys: `part`, `parameters`, `trained` (how many are not frozen), `rates` (their learning rates
    before any schedule) and `adapters` (LoRA layers). A model without parts has `all` alone.
    """
    added = _added_modules(model)

    def row(name: str, part: str) -> str:
        module = name.partition(".")[0]
        return module if module in added else part

    parts = {name: row(name, part) for name, part in parts_of(model).items()}
    named = dict(model.named_parameters())
    learning_rates = _learning_rates(param_groups)
    sizes = num_parameters(model)
    facts = []
    others = [(row(name, one.part), one) for name, one in _elsewhere(model).items() if one.part]
    for part in [*PARTS, *added]:
        members = {name: param for name, param in named.items() if parts.get(name) == part}
        of_part = [one for own, one in others if own == part]
        if members or of_part:
            facts.append(_summary(part, members, of_part, sizes, learning_rates))
    everywhere = [one for _, one in others]
    return [*facts, _summary("all", named, everywhere, sizes, learning_rates)]


def _added_modules(model: nn.Module) -> list[str]:
    """Names of modules with parameters that are no part of the backbone, nor of a kit's model."""
    if not isinstance(model, PackedModel):
        return []
    model = model if model.stage is None else model.stage.whole
    if model in model.own_parts:
        return []
    others = [(name, child) for name, child in model.named_children() if name != "hf"]
    others = [(name, child) for name, child in others if child not in model.own_parts]
    return [name for name, child in others if any(True for _ in child.parameters())]


def _learning_rates(param_groups: Sequence[dict[str, Any]]) -> dict[nn.Parameter, float]:
    rates: dict[nn.Parameter, float] = {}
    for group in param_groups:
        rate = group.get("initial_lr", group["lr"])
        rates |= dict.fromkeys(group["params"], rate)
    return rates


def _summary(
    part: str,
    params: dict[str, nn.Parameter],
    others: list[OtherTensor],
    sizes: dict[str, int],
    learning_rates: dict[nn.Parameter, float],
) -> dict[str, Any]:
    """`others`: parameters of other pipeline stages, whose optimizers have the same learning rates."""
    trained = {name: param for name, param in params.items() if param.requires_grad}
    rates = {learning_rates[param] for param in trained.values() if param in learning_rates}
    return {
        "part": part,
        "parameters": sum(sizes[name] for name in params) + sum(one.size for one in others),
        "trained": sum(sizes[name] for name in trained)
        + sum(one.size for one in others if one.trained),
        "rates": sorted(rates),
        "adapters": sum(name.endswith((".lora_A.weight", ".lora_A")) for name in trained),
    }


def names_by_part(model: nn.Module, names: Sequence[str], most: int) -> str:
    """Names of parameters that train, for a message: first parts that are complete, then at most so many names."""
    parts = parts_of(model)
    trained = [name for name, param in model.named_parameters() if param.requires_grad]
    kept = {parts.get(name) for name in trained if name not in names}
    affected = {parts.get(name) for name in names}
    whole = [part for part in dict.fromkeys(parts.values()) if part in affected - kept]
    others = [name for name in names if parts.get(name) not in whole]
    more = [f"{len(others) - most} more"] if len(others) > most else []
    return ", ".join([*(f"all of {part}" for part in whole), *others[:most], *more])


def table(facts: list[dict[str, Any]]) -> str:
    """`trained_parts` as a text table for the log; empty for a model without parts."""
    if len(facts) == 1:
        return ""
    rows = [("part", "parameters", "trained", "", "learning rate"), *map(_table_row, facts)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = []
    for row in rows:
        figures = [row[column].rjust(widths[column]) for column in (1, 2, 3)]
        lines.append("  ".join([row[0].ljust(widths[0]), *figures, row[4]]).rstrip())
    return "\n".join(lines)


def _table_row(facts: dict[str, Any]) -> tuple[str, ...]:
    percent = 100 * facts["trained"] / max(1, facts["parameters"])
    remark = ", ".join(f"{rate:g}" for rate in facts["rates"])
    if facts["adapters"]:
        remark += f"  LoRA on {facts['adapters']} layers"
    if facts["part"] == "all":
        remark = ""
    if not facts["trained"]:
        remark = "frozen"
    figures = (f"{facts['parameters']:,}", f"{facts['trained']:,}", f"{percent:.4g} %")
    return (facts["part"], *figures, remark)

"""The parts of a model by name: `vision`, `audio`, `projector`, `llm`. Each parameter belongs to exactly one.

They are found by structure, not by a table of models. The decoder says where the text layers are; an encoder is a
sub-model that was built from a sub-config of its own; what stands beside both leads from one to the other. Where
nothing does, the encoder ends with its projector itself. Heads (`lm_head`, that of a value model) belong to the `llm`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, get_args

import torch
from torch import nn

from mvp_engine.config.schema import Part
from mvp_engine.distributed.fsdp import blocks
from mvp_engine.errors import UserError
from mvp_engine.hf.packed_model import PackedModel

PARTS: tuple[Part, ...] = get_args(Part)


def parts_of(model: nn.Module) -> dict[str, Part]:
    """The part of each parameter, by its name; of a model that is no Hugging Face model, nothing is known."""
    if not isinstance(model, PackedModel):
        return {}
    base, decoder = model.base(), model.decoder()
    owners: dict[nn.Module, Part] = {model: "llm"}
    if decoder is not base:
        owners |= {base: "projector", decoder: "llm"}
        encoders = dict(_encoders(base, decoder))
        owners |= encoders
        beside = [
            child for child in base.children() if child is not decoder and child not in encoders
        ]
        if not any(True for child in beside for _ in child.parameters()):
            owners |= {
                child: "projector" for encoder in encoders for child in _after_blocks(encoder)
            }
    found: dict[str, Part] = {}

    def walk(module: nn.Module, prefix: str, part: Part) -> None:
        part = owners.get(module, part)
        for name, _ in module.named_parameters(recurse=False):
            found[prefix + name] = part
        for name, child in module.named_children():
            walk(child, f"{prefix}{name}.", part)

    walk(model, "", "llm")
    return {
        name: found[name] for name, _ in model.named_parameters()
    }  # a tied one under its first name


def blocks_by_part(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Each block, and the part that it belongs to; without parts, all belong to the same."""
    parts, names = parts_of(model), {param: name for name, param in model.named_parameters()}
    return [
        (block, parts.get(names[next(block.parameters())], PARTS[0])) for block in blocks(model)
    ]


def _encoders(base: Any, decoder: nn.Module) -> Iterator[tuple[nn.Module, Part]]:
    """Sub-models beside the decoder that have a config of their own for something to see or to hear."""
    kinds: dict[str, Part] = {
        "vision": "vision",
        "image": "vision",
        "video": "vision",
        "audio": "audio",
    }
    for key in base.config.sub_configs:
        part = next((part for word, part in kinds.items() if word in key), None)
        config = getattr(base.config, key, None)
        if part is not None and config is not None:
            yield from (
                (c, part)
                for c in base.children()
                if getattr(c, "config", None) is config and c is not decoder
            )


def _after_blocks(encoder: nn.Module) -> Iterator[nn.Module]:
    """What an encoder has after its blocks, but for norms: mergers and projections. Convolutions are its beginning,
    wherever they stand."""
    children = list(encoder.named_children())
    lists = [index for index, (_, child) in enumerate(children) if isinstance(child, nn.ModuleList)]
    for name, child in children[lists[0] + 1 :] if lists else ():
        if not name.startswith("conv") and any(param.ndim > 1 for param in child.parameters()):
            yield child


def by_part(model: nn.Module, setting: Any, key: str) -> Mapping[str, Any]:
    """A setting for all parts alike, or for some of them, as one for each part that the model has."""
    known = set(parts_of(model).values())
    if not isinstance(setting, Mapping):
        return dict.fromkeys(PARTS, setting)
    if unknown := [part for part in setting if part not in known]:
        has = (
            f"it has {', '.join(part for part in PARTS if part in known)}"
            if known
            else "parts are not known of it"
        )
        raise UserError(f"{key}: {type(model).__name__} has no part {unknown[0]}; {has}")
    return setting


def trained_parts(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> list[dict[str, Any]]:
    """What trains: for each part, and for `all`, its `parameters`, how many are `trained`, at which `rates` (before any
    schedule), and the `adapters` in it. Of a model of which no parts are known there is `all` alone."""
    parts, params = parts_of(model), dict(model.named_parameters())
    groups = optimizer.param_groups if optimizer else []
    rates = {
        param: group.get("initial_lr", group["lr"]) for group in groups for param in group["params"]
    }
    facts = []
    for part in (*(part for part in PARTS if part in parts.values()), "all"):
        own = {name: param for name, param in params.items() if part in (parts.get(name), "all")}
        trained = {name: param for name, param in own.items() if param.requires_grad}
        total, train = (sum(param.numel() for param in some.values()) for some in (own, trained))
        seen = sorted({rates[param] for param in trained.values() if param in rates})
        adapters = sum(".lora_A." in name for name in trained)
        facts.append(
            {
                "part": part,
                "parameters": total,
                "trained": train,
                "rates": seen,
                "adapters": adapters,
            }
        )
    return facts


def table(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> str:
    """`trained_parts` for people; empty for a model of which no parts are known."""
    facts = trained_parts(model, optimizer)
    rows = [("part", "parameters", "train", "", "rate")]
    for one in facts:
        what = ", ".join(f"{rate:g}" for rate in one["rates"])
        what += f"  LoRA on {one['adapters']} layers" if one["adapters"] else ""
        share = f"{100 * one['trained'] / max(1, one['parameters']):.4g} %"
        what = "frozen" if not one["trained"] else "" if one["part"] == "all" else what
        rows.append((one["part"], f"{one['parameters']:,}", f"{one['trained']:,}", share, what))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in (1, 2, 3)), row[4]]
        ).rstrip()
        for row in rows
    ]
    return "\n".join(lines) if len(facts) > 1 else ""


def matching(model: nn.Module, pattern: str, key: str) -> list[str]:
    """The names of the parameters that a pattern fits, or of those of the part that it names; it must fit some."""
    parts, names = parts_of(model), [name for name, _ in model.named_parameters()]
    if pattern in parts.values():
        return [name for name in names if parts[name] == pattern]
    if pattern in PARTS and parts:
        has = ", ".join(part for part in PARTS if part in parts.values())
        raise UserError(f"{key}: {type(model).__name__} has no part {pattern}; it has {has}")
    if not (found := [name for name in names if fnmatchcase(name, pattern)]):
        near = difflib.get_close_matches(pattern, [*names, *sorted(set(parts.values()))], 3, 0.0)
        raise UserError(f"{key}: no parameter is called {pattern!r}. Near it are {', '.join(near)}")
    return found

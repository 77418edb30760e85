"""LoRA: small trained matrices beside frozen linear layers, named and stored as `peft` does.

A layer keeps its class, its forward and its name; `lora_A` and `lora_B` become its children, and a forward hook adds
what they say. So all that works on a model (meta build, sharding, recomputing, compiling, checkpoints) works with
adapters too, and nothing has to be renamed to merge them. The second matrix is zero at first: training begins with the
base model itself.
"""

from __future__ import annotations

import difflib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mvp_engine.config.schema import Count, Positive, Section
from mvp_engine.distributed import World
from mvp_engine.distributed.collective_errors import raise_on_all_ranks
from mvp_engine.errors import UserError
from mvp_engine.files import atomic_path, temporary_path
from mvp_engine.hf.packed_model import PackedModel
from mvp_engine.hf.parts import PARTS, matching, parts_of

Fetch = Callable[[str], Tensor]


class Lora(Section):
    """The settings, for a recipe's config."""

    rank: Count = 16
    alpha: Positive | None = None  # the adapter's weight is alpha / rank; None: twice the rank
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of the adapter's inputs
    targets: list[str] = Field(
        ["llm"], min_length=1
    )  # linear layers: of parts, or by patterns of names
    train: list[str] = Field(
        []
    )  # parts, or patterns of parameter names, that train in full beside the adapters
    rslora: bool = False  # alpha / sqrt(rank) instead: larger ranks learn as fast as small ones
    dora: bool = False  # the length of each row is learnt apart from its direction

    @property
    def strength(self) -> float:
        alpha = 2.0 * self.rank if self.alpha is None else self.alpha
        return alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class _Down(nn.Linear):
    def _init_weights(self, _: nn.Module) -> None:
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))


class _Up(nn.Linear):
    def _init_weights(self, _: nn.Module) -> None:
        nn.init.zeros_(self.weight)


class _Magnitude(nn.Module):
    def __init__(self, rows: int, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(rows, device=device))

    def _init_weights(self, _: nn.Module) -> None:
        nn.init.ones_(self.weight)  # until the base's weights are there: see `set_magnitudes`


def add_adapters(model: PackedModel, settings: Lora) -> None:
    """Freeze the model, but for what its folder cannot have and `settings.train`; put adapters beside its layers."""
    full = {name for pattern in settings.train for name in matching(model, pattern, "lora.train")}
    full |= {
        name
        for name, _ in model.named_parameters()
        if any(fnmatchcase(name, new) for new in model.fresh)
    }
    layers = _targets(model, settings.targets)
    if both := sorted(full & {f"{name}.weight" for name in layers}):
        raise UserError(
            f"lora: {both[0]} is to train in full (lora.train), so it takes no adapter (lora.targets)"
        )
    for name, param in model.named_parameters():
        param.requires_grad_(name in full)
    linear: Any
    for linear in layers.values():
        like: Any = {"bias": False, "device": linear.weight.device, "dtype": torch.float32}
        linear.lora_A = _Down(linear.in_features, settings.rank, **like)
        linear.lora_B = _Up(settings.rank, linear.out_features, **like)
        parts: list[Any] = [linear.lora_A, linear.lora_B]
        if settings.dora:
            linear.lora_magnitude_vector = _Magnitude(linear.out_features, linear.weight.device)
            parts.append(linear.lora_magnitude_vector)
        for part in parts:
            part._init_weights(part)
        linear.lora_strength, linear.lora_dropout = settings.strength, settings.dropout
        linear.register_forward_hook(_adapted)
    model.lora, model.fresh = settings, (*model.fresh, "*.lora_*")


def _targets(model: PackedModel, wanted: list[str]) -> dict[str, nn.Linear]:
    head = model.hf.get_output_embeddings()  # type: ignore[operator]
    parts = parts_of(model)
    linears = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and name.startswith("hf.")
        and module is not head
        and f"{name}.weight" in parts
    }
    if not linears:
        raise UserError(
            f"lora: {type(model.hf).__name__} has no linear layers but its head, so it takes no adapters"
        )
    found: dict[str, nn.Linear] = {}
    for word in wanted:
        fits = {
            name: module
            for name, module in linears.items()
            if word == parts[f"{name}.weight"]
            or fnmatchcase(name, word)
            or fnmatchcase(name.rpartition(".")[2], word)
        }
        if not fits:
            last = {name.rpartition(".")[2] for name in linears}
            near = [
                *(part for part in PARTS if part in parts.values()),
                *difflib.get_close_matches(word, last, 4, 0.0),
            ]
            raise UserError(
                f"lora.targets: {type(model.hf).__name__} has no linear layers {word!r}, its head aside. Name a part "
                f"or a pattern of layers, such as {', '.join(near)}"
            )
        found |= fits
    return found


def _adapted(linear: Any, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
    x = F.dropout(args[0], linear.lora_dropout, linear.training) if linear.lora_dropout else args[0]
    more = linear.lora_B(linear.lora_A(x)) * linear.lora_strength
    if not hasattr(linear, "lora_magnitude_vector"):
        return out + more
    with (
        torch.no_grad(),
        torch.autocast(out.device.type, enabled=False),
    ):  # the length is taken as a constant
        lengths = _lengths(
            linear.weight.float(), linear.lora_A.weight, linear.lora_B.weight, linear.lora_strength
        )
    longer = (linear.lora_magnitude_vector.weight / lengths).to(
        out.dtype
    )  # 1 at first, so nothing is changed then
    plain = out if linear.bias is None else out - linear.bias.to(out.dtype)
    return out + (longer - 1) * plain + longer * more


def _lengths(weight: Tensor, a: Tensor, b: Tensor, strength: float) -> Tensor:
    return torch.linalg.vector_norm(weight + strength * (b.float() @ a.float()), dim=1)


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    return (
        (name, module) for name, module in model.named_modules() if hasattr(module, "lora_strength")
    )


@torch.no_grad()
def set_magnitudes(model: nn.Module) -> None:
    """The lengths of the rows of the base's weights, which are there now; each rank its own rows."""
    for _, linear in adapted_layers(model):
        if hasattr(linear, "lora_magnitude_vector"):
            length, weight = (
                tensor.to_local() if isinstance(tensor, DTensor) else tensor
                for tensor in (linear.lora_magnitude_vector.weight, linear.weight)
            )
            length.copy_(torch.linalg.vector_norm(weight.float(), dim=1))


def merging(model: nn.Module, fetch: Fetch) -> Fetch:
    """Like `fetch`, which gives tensors of the model by name, but weights come with what their adapters have learnt."""
    adapted = {f"{name}.weight": (name, linear) for name, linear in adapted_layers(model)}

    @torch.no_grad()
    def merged(name: str) -> Tensor:
        if name not in adapted:
            return fetch(name)
        layer, linear = adapted[name]
        weight, a, b = fetch(name), fetch(f"{layer}.lora_A.weight"), fetch(f"{layer}.lora_B.weight")
        both = weight.float() + linear.lora_strength * (b.float() @ a.float())
        if hasattr(linear, "lora_magnitude_vector"):
            both *= (fetch(f"{layer}.lora_magnitude_vector.weight").float() / both.norm(dim=1))[
                :, None
            ]
        return both

    return merged


def export_adapter(model: nn.Module, folder: Path, fetch: Fetch, world: World) -> None:
    """A folder that `PeftModel.from_pretrained` reads. All ranks call it; `fetch` may be a collective of theirs."""
    if not isinstance(model, PackedModel) or model.lora is None:
        raise UserError(
            f"{type(model).__name__} has no adapters to export: it was not trained with LoRA"
        )
    target = model.export_target()
    theirs = {own: name for name, own in target.names.items()}
    modules = _modules_to_save(model, target.skeleton, theirs)
    tensors: dict[str, Tensor] = {}
    for name, param in model.named_parameters():
        if ".lora_" in name:
            layer, _, rest = name.partition(".lora_")
            key = theirs[f"{layer}.weight"].removesuffix(".weight") + ".lora_" + rest
            tensors[f"base_model.model.{key.replace('_vector.weight', '_vector')}"] = fetch(name)
        elif param.requires_grad:
            tensors[f"base_model.model.{theirs[name]}"] = fetch(name)
    layers = [theirs[f"{name}.weight"].removesuffix(".weight") for name, _ in adapted_layers(model)]
    kind = type(target.skeleton).__name__
    about = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if kind.endswith("ForSequenceClassification") else "CAUSAL_LM",
        "base_model_name_or_path": str(model.source) if model.source else None,
        "r": model.lora.rank,
        "lora_alpha": 2 * model.lora.rank if model.lora.alpha is None else model.lora.alpha,
        "lora_dropout": model.lora.dropout,
        "use_rslora": model.lora.rslora,
        "use_dora": model.lora.dora,
        "target_modules": layers,
        "modules_to_save": modules or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    with raise_on_all_ranks(world.host_group):
        if world.is_main:
            _write(folder, about, tensors)


def _modules_to_save(model: PackedModel, skeleton: Any, theirs: dict[str, str]) -> list[str]:
    """The outermost modules that trained in full. `peft` stores whole modules, and forgets that weights were tied."""
    full = [
        name
        for name, param in model.named_parameters()
        if param.requires_grad and ".lora_" not in name
    ]
    used = Counter(map(id, model.state_dict(keep_vars=True).values()))
    owners = {theirs.get(name, name).rpartition(".")[0] for name in full}
    outer = [
        module for module in owners if not any(module.startswith(f"{other}.") for other in owners)
    ]
    stored = {
        f"{module}.{key}": module
        for module in outer
        for key in skeleton.get_submodule(module).state_dict()
    }
    kept = {theirs.get(name) for name in full if used[id(model.get_parameter(name))] == 1}
    for name in full:
        home = next(
            (module for module in outer if f"{theirs.get(name)}".startswith(f"{module}.")), ""
        )
        if not home or any(key not in kept for key, module in stored.items() if module == home):
            raise UserError(
                f"{name} trained in full, which peft cannot store beside adapters: export merged weights"
            )
    return sorted(outer)


def _write(folder: Path, about: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            f"{folder} is there already and not empty; choose another name, or remove it"
        )
    with atomic_path(folder, temporary_path(folder)) as temporary:
        temporary.mkdir(parents=True)
        save_file(
            {name: value.detach().cpu().contiguous() for name, value in tensors.items()},
            temporary / "adapter_model.safetensors",
        )
        (temporary / "adapter_config.json").write_text(json.dumps(about, indent=2) + "\n")

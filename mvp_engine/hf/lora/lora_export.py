"""Exports LoRA adapters as a folder that `PeftModel.from_pretrained` of `peft` loads into the base model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mvp_engine.checkpoint.format import write_safetensors
from mvp_engine.distributed import World
from mvp_engine.distributed.world import raise_on_all_ranks
from mvp_engine.errors import UserError
from mvp_engine.files import atomic_path, temporary_path
from mvp_engine.hf.experts.moe_layers import adapter_name
from mvp_engine.hf.lora.lora_layers import (
    Fetch,
    adapted_experts,
    adapted_layers,
    merge_adapters,
    peft_matrices,
    token_adapters,
)
from mvp_engine.hf.model.packed_model import PackedModel
from mvp_engine.hf.weights.hub import repo_of

PREFIX = "base_model.model."  # the path of the base model inside of a PeftModel


def export_adapter(model: nn.Module, folder: Path, fetch: Fetch, world: World) -> None:
    """Writes the adapters, and the modules that were trained in full, to `folder`.

    `fetch` returns the full tensor of a parameter by its name. All ranks must call this function, since `fetch` may be
    a collective; rank 0 writes.
    """
    config = adapter_config(model)
    tensors = dict(adapter_tensors(model, fetch))
    with raise_on_all_ranks(world.host_group):
        if world.is_main:
            _write(folder, config, tensors)


def _peft_names(model: nn.Module) -> tuple[nn.Module, dict[str, str]]:
    """The model that peft will wrap, on the meta device, and its names of our parameters."""
    if getattr(model, "lora", None) is None:
        raise UserError(
            f"{type(model).__name__} has no adapters to export: it was not trained with LoRA"
        )
    if not isinstance(model, PackedModel):
        return model, {name: name for name in model.state_dict()}
    target = model.export_target()
    return target.skeleton, {name: hf_name for hf_name, name in target.names.items()}


def adapter_tensors(model: nn.Module, fetch: Fetch) -> Iterator[tuple[str, Tensor]]:
    """Yields (peft's name, tensor) of adapters and of modules that were trained in full."""
    keys = peft_keys(model)
    tokens = {f"{name}.lora_tokens.weight": (name, one) for name, one in token_adapters(model)}
    stacked = {name for name in keys if name.endswith((".lora_A", ".lora_B"))}
    merged = merge_adapters(model, fetch)
    for name, key in keys.items():
        if name in tokens:
            embedding, adapter = tokens[name]
            yield key, merged(f"{embedding}.weight")[list(adapter.ids)]
        elif name not in stacked:
            yield key, fetch(name)
        elif name.endswith(".lora_A"):  # with its lora_B
            other = f"{name.removesuffix('A')}B"
            matrices = peft_matrices(fetch(name), fetch(other))
            yield from zip((key, keys[other]), matrices, strict=True)


def peft_keys(model: nn.Module) -> dict[str, str]:
    """The name in a peft folder of each parameter that is stored there."""
    _, hf_names = _peft_names(model)
    tokens = {f"{name}.lora_tokens.weight": name for name, _ in token_adapters(model)}
    experts = _expert_modules(model, hf_names)
    keys: dict[str, str] = {}
    for name, param in model.named_parameters():
        if name in experts:
            keys[name] = f"{experts[name]}.lora_{name[-1]}.weight"
        elif name in tokens:
            layer = _layer_name(tokens[name], hf_names)
            keys[name] = f"{layer}.token_adapter.trainable_tokens_delta"
        elif ".lora_" in name:
            layer, _, rest = name.partition(".lora_")
            keys[name] = f"{_layer_name(layer, hf_names)}.lora_{rest}"
        elif param.requires_grad:
            keys[name] = hf_names[name]
    return {name: PREFIX + key for name, key in keys.items()}


def _expert_modules(model: nn.Module, hf_names: dict[str, str]) -> dict[str, str]:
    """Returns, by parameter name, the module in which peft stores each matrix of the adapters of stacked experts.

    peft wraps the experts once for each adapted parameter, in their order. So the wrapper of the last one is the
    outermost module, and each one before it is a `.base_layer` further inside.
    """
    modules: dict[str, str] = {}
    for name, experts in adapted_experts(model):
        for depth, key in enumerate(reversed(experts.lora_names)):
            module = hf_names[f"{name}.{key}"].removesuffix(f".{key}") + ".base_layer" * depth
            for letter in "AB":
                modules[f"{name}.{adapter_name(key)}.lora_{letter}"] = module
    return modules


def adapter_config(model: nn.Module) -> dict[str, Any]:
    """The adapter_config.json of peft."""
    skeleton, hf_names = _peft_names(model)
    lora: Any = model.lora
    source: Any = getattr(model, "source", None)
    repo = repo_of(source) if source else None
    task = None  # peft wraps other models without methods for a task
    if isinstance(model, PackedModel):
        is_classifier = type(skeleton).__name__.endswith("ForSequenceClassification")
        task = "SEQ_CLS" if is_classifier else "CAUSAL_LM"
    return {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": repo.name if repo else str(source) if source else None,
        "revision": repo.revision if repo else None,
        "r": lora.rank,
        "lora_alpha": lora.resolved_alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": False,
        "target_modules": [_layer_name(name, hf_names) for name, _ in adapted_layers(model)],
        "target_parameters": [
            hf_names[f"{name}.{key}"]
            for name, experts in adapted_experts(model)
            for key in experts.lora_names
        ]
        or None,
        "trainable_token_indices": {
            _layer_name(name, hf_names): list(one.ids) for name, one in token_adapters(model)
        }
        or None,
        "modules_to_save": _modules_to_save(model, skeleton, hf_names) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _layer_name(layer: str, hf_names: dict[str, str]) -> str:
    return hf_names[f"{layer}.weight"].removesuffix(".weight")


def _modules_to_save(model: nn.Module, skeleton: nn.Module, hf_names: dict[str, str]) -> list[str]:
    """Returns the outermost modules that were trained in full. Raises if `peft` cannot store one of them.

    `peft` stores complete modules, so each tensor of such a module must have been trained, and none may be tied.
    """
    trained: list[str] = []
    for name, param in model.named_parameters():
        if param.requires_grad and ".lora_" not in name:
            trained.append(name)
    modules = {hf_names.get(name, name).rpartition(".")[0] for name in trained}
    outermost = {module for module in modules if not _is_inside(module, modules)}

    use_counts = Counter(id(value) for value in model.state_dict(keep_vars=True).values())
    untied = [name for name in trained if use_counts[id(model.get_parameter(name))] == 1]
    storable = {hf_names[name] for name in untied if name in hf_names}
    complete: set[str] = set()
    for module in outermost:
        keys = skeleton.get_submodule(module).state_dict()
        if all(f"{module}.{key}" in storable for key in keys):
            complete.add(module)

    for name in trained:
        if not _is_inside(hf_names.get(name, ""), complete):
            raise UserError(
                f"{name} was trained in full, which a peft folder cannot hold: export merged weights instead"
            )
    return sorted(outermost)


def _is_inside(name: str, modules: set[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not empty; choose another name, or remove it")
    with atomic_path(folder, temporary_path(folder)) as temporary:
        temporary.mkdir(parents=True)
        write_safetensors(tensors, temporary / "adapter_model.safetensors")
        text = json.dumps(config, indent=2) + "\n"
        (temporary / "adapter_config.json").write_text(text)

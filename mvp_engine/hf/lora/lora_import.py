"""Loads LoRA adapters in peft's format: to train on from them, or to merge them. `lora_export` writes them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from mvp_engine.distributed.dtensor import local_shards, shard_slices
from mvp_engine.errors import UserError
from mvp_engine.hf.lora.lora_export import PREFIX, peft_keys
from mvp_engine.hf.lora.lora_settings import Lora
from mvp_engine.hf.model.packed_model import PackedModel
from mvp_engine.hf.weights.hub import ADAPTER_CONFIG, fetch_weights

# Options of peft that change what an adapter computes, each with the only value that is supported.
_SUPPORTED = {
    "peft_type": "LORA",
    "use_dora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "fan_in_fan_out": False,
    "bias": "none",
}


class SavedAdapter(NamedTuple):
    folder: Path
    config: dict[str, Any]  # of peft
    tensors: dict[str, Tensor]  # by their names in the base model

    @property
    def alpha(self) -> float:
        """The alpha of an adapter that is scaled by alpha / rank; rsLoRA divides by the square root of the rank."""
        alpha, rank = self.config["lora_alpha"], self.config["r"]
        return float(alpha * math.sqrt(rank) if self.config.get("use_rslora") else alpha)


def read_adapter(folder: Path) -> SavedAdapter:
    """The adapter in `folder`. Raises for one that computes anything but alpha / rank * B A."""
    file = folder / ADAPTER_CONFIG
    config = json.loads(file.read_text())
    for option, supported in _SUPPORTED.items():
        if config.get(option, supported) not in (supported, None, {}, []):
            raise UserError(
                f"{file}: {option}={config[option]} is not supported; merge the adapter with peft, and give the "
                "merged folder"
            )
    weights = fetch_weights(folder) / "adapter_model.safetensors"
    if not weights.is_file():
        raise UserError(f"{folder} has no adapter_model.safetensors")
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in load_file(weights).items()}
    return SavedAdapter(folder, config, tensors)


def settings_of(model: PackedModel, lora: Lora) -> Lora:
    """The settings by which a model gets the adapters of `adapter_folder`: as they were saved, with our names.

    Dropout is no property of an adapter: it stays that of `lora`.
    """
    assert model.adapter_folder is not None
    saved = read_adapter(model.adapter_folder)
    if saved.config.get("trainable_token_indices") or model.new_rows is not None:
        raise UserError(
            f"model.path={saved.folder} is an adapter, and rows of new tokens are trained with it. Merge it (mvp "
            "export RUN OUT, or peft's merge_and_unload), and train on from the merged folder"
        )
    names = model.export_target().names  # ours, by those of Hugging Face
    layers: list[str] = []
    in_full: list[str] = []
    for key in saved.tensors:
        layer, is_lora_a, _ = key.partition(".lora_A.")
        if is_lora_a and f"{layer}.weight" in names:
            layers.append(names[f"{layer}.weight"].removesuffix(".weight"))
        elif ".lora_" not in key and key in names:
            in_full.append(names[key])
    stacked = [names.get(one, one) for one in saved.config.get("target_parameters") or []]
    return Lora(
        rank=saved.config["r"],
        alpha=saved.alpha,
        dropout=lora.dropout,
        target_modules=[*layers, *stacked] or None,
        modules_to_save=in_full,
    )


def load_adapter(model: PackedModel, skeleton: PackedModel) -> set[str]:
    """Load the adapters of `adapter_folder` into a model that is sharded; returns the names of all that it has.

    `skeleton` is the unsharded model on the meta device, with the same adapters.
    """
    assert model.adapter_folder is not None
    if model.lora is None:
        raise UserError(
            f"model.path={model.adapter_folder} is a LoRA adapter, so only a model with adapters is trained on from it "
            "(lora.rank). Merge it for everything else: mvp export RUN OUT, or peft's merge_and_unload"
        )
    saved = read_adapter(model.adapter_folder)
    keys = {
        key.removeprefix(PREFIX): name
        for name, key in peft_keys(skeleton).items()
        if skeleton.get_parameter(name).requires_grad
    }
    for missing, problem in (
        (saved.tensors.keys() - keys.keys(), "has {}, which the model has not"),
        (keys.keys() - saved.tensors.keys(), "lacks {}"),
    ):
        if missing:
            raise UserError(
                f"{saved.folder} {problem.format(min(missing))}: is it an adapter of {model.source}?"
            )
    state = model.state_dict(keep_vars=True)
    for key, name in keys.items():
        shape = skeleton.get_parameter(name).shape
        value = _as_stacked(saved.tensors[key], key, shape)
        if value.shape != shape:
            raise UserError(
                f"{saved.folder}: {key} has shape {list(value.shape)}, and the model needs {list(shape)}"
            )
        if name in state:  # not of another pipeline stage
            with torch.no_grad():
                for offset, shard in local_shards(state[name]):
                    shard.copy_(value[shard_slices(offset, shard)])
    return set(keys.values())


def _as_stacked(value: Tensor, key: str, shape: torch.Size) -> Tensor:
    """The matrices of all experts, of which peft stores one; the inverse of `peft_matrices`."""
    if len(shape) == value.ndim:
        return value
    if ".lora_A." in key:
        return value.unflatten(0, (shape[0], -1))
    return value.unflatten(1, (-1, shape[0])).permute(2, 0, 1)

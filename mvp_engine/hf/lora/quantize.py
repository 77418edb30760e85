"""Quantized base weights for LoRA (QLoRA): which layers of a model `model.quantize` stores in 4 bits.

A quantized layer keeps its name, its adapter and the name of its weight, so parts, checkpoints and exports find it as
before. The numbers are in `ops/nf4.py`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mvp_engine.errors import UserError, count
from mvp_engine.hf.lora.lora_layers import Fetch, linear_layers
from mvp_engine.hf.model.model_parts import by_part, parts_of
from mvp_engine.hf.model.packed_model import PackedModel
from mvp_engine.ops import nf4

LOGGER = logging.getLogger("mvp_engine")
FORMATS = ("nf4",)
KEY = "model.quantize"


def quantize_layers(model: nn.Module, setting: Mapping[Any, str], dtype: torch.dtype) -> None:
    """Quantize the linear layers of parts, in place; `dtype` is what the model computes in."""
    layers = layers_to_quantize(model, setting)
    assert isinstance(model, PackedModel)
    for layer in layers.values():
        nf4.use(layer, dtype)
    model.quantize = {str(part): format for part, format in setting.items()}
    quantized = sum(layer.weight.nbytes for layer in layers.values())
    stored = sum(param.nbytes for param in model.parameters())
    LOGGER.info(
        "%s: %s in NF4, %.2f GiB; embeddings, norms, head and other weights as before, %.2f GiB",
        KEY, count(len(layers), "linear layer"), quantized / 2**30, (stored - quantized) / 2**30,
    )  # fmt: skip


def layers_to_quantize(model: nn.Module, setting: Mapping[Any, str]) -> dict[str, nn.Linear]:
    """The frozen linear layers of the parts, by name: not the head, no adapter, and none with a tied weight."""
    for format in setting.values():
        if format not in FORMATS:
            raise UserError(f"{KEY}: {format!r} is no format; known: {', '.join(FORMATS)}")
    by_part(model, setting, KEY)  # raises for parts that the model does not have
    if getattr(model, "lora", None) is None:
        raise UserError(
            f"{KEY}: quantized weights cannot be trained, only adapters on them (QLoRA). Set lora.rank=16, "
            f"or remove {KEY}"
        )
    parts = parts_of(model)
    uses = Counter(id(value) for value in model.state_dict(keep_vars=True).values())
    found: dict[str, nn.Linear] = {}
    for name, layer in linear_layers(model).items():
        is_frozen = not layer.weight.requires_grad and uses[id(layer.weight)] == 1
        if parts[f"{name}.weight"] in setting and is_frozen and nf4.fits(layer):
            found[name] = layer
    for part in setting:
        if part not in {parts[f"{name}.weight"] for name in found}:
            raise UserError(
                f"{KEY}: the part {part} of {type(model).__name__} has no frozen linear layers with a multiple of "
                f"{nf4.BLOCK} inputs, so nothing would be quantized. Leave {part} out"
            )
    return found


def dequantized(model: nn.Module, fetch: Fetch) -> Fetch:
    """A `fetch` that returns quantized weights as float32 matrices."""
    layers = nf4.quantized_layers(model)

    def fetch_dequantized(name: str) -> Tensor:
        value = fetch(name)
        if name not in layers:
            return value
        return nf4.dequantize(value, layers[name].in_features, torch.float32)

    return fetch_dequantized


def unquantized_shape(model: nn.Module, like: Fetch) -> Fetch:
    """The same for tensors on the meta device."""
    layers = nf4.quantized_layers(model)

    def like_unquantized(name: str) -> Tensor:
        if name not in layers:
            return like(name)
        layer = layers[name]
        return torch.empty(layer.out_features, layer.in_features, device="meta")

    return like_unquantized

"""The weight table: which Hugging Face parameters of a decoder layer make up which weight of Megatron's layer.

Legend: G key/value heads of this rank, n query heads of each, d head size, D hidden size.

Megatron stores queries, keys and values in one matrix, by key/value head: (n queries, key, value) of the first head,
then of the second. Gate and up projections follow each other; a tensor-parallel rank has its rows of the gate, then its
rows of the other. Joining is differentiable, so gradients arrive at the Hugging Face parameters. It copies each weight
once in a forward. Experts and their router have no row: they stay modules of the Hugging Face layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mvp_engine.distributed.dtensor import local_tensor
from mvp_engine.model_engine.megatron.sequence import SummedGrads

Join = Callable[..., Tensor]


def by_kv_head(query: Tensor, key: Tensor, value: Tensor, head_dim: int) -> Tensor:
    """(G n d, D), (G d, D), (G d, D) -> (G (n + 2) d, D); biases without D."""
    heads = len(key) // head_dim
    parts = [part.unflatten(0, (heads, -1)) for part in (query, key, value)]
    return torch.cat(parts, 1).flatten(0, 1)


def one_after_the_other(gate: Tensor, up: Tensor, head_dim: int) -> Tensor:
    return torch.cat([gate, up])


def same(weight: Tensor, head_dim: int) -> Tensor:
    return weight


class Row(NamedTuple):
    """One weight of Megatron's layer."""

    megatron: str
    join: Join
    hf: tuple[str, ...]
    # Tensor-parallel ranks have parts of the gradient: "heads" always, "tokens" with Megatron's sequence parallel.
    partial: str = ""


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
ROWS = (
    Row("input_layernorm.weight", same, ("input_layernorm.weight",), "tokens"),
    Row("self_attention.linear_qkv.weight", by_kv_head, tuple(f"{name}.weight" for name in _QKV)),
    Row("self_attention.linear_qkv.bias", by_kv_head, tuple(f"{name}.bias" for name in _QKV)),
    Row("self_attention.q_layernorm.weight", same, ("self_attn.q_norm.weight",), "heads"),
    Row("self_attention.k_layernorm.weight", same, ("self_attn.k_norm.weight",), "heads"),
    Row("self_attention.linear_proj.weight", same, ("self_attn.o_proj.weight",)),
    Row("pre_mlp_layernorm.weight", same, ("post_attention_layernorm.weight",), "tokens"),
    Row(
        "mlp.linear_fc1.weight",
        one_after_the_other,
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    ),
    Row("mlp.linear_fc2.weight", same, ("mlp.down_proj.weight",)),
)


class _Place(NamedTuple):
    """Where a parameter is registered. During a forward FSDP2 puts the gathered one there."""

    module: nn.Module
    name: str


class _Entry(NamedTuple):
    row: Row
    places: tuple[_Place, ...]


class WeightTable:
    """The rows of the table that one decoder layer has."""

    def __init__(
        self, layer: nn.Module, head_dim: int, group: dist.ProcessGroup | None, sequence: bool
    ) -> None:
        """`group`: the tensor-parallel ranks, if there are several; `sequence`: tokens are cut over them."""
        self.head_dim = head_dim
        self.group = group
        self.entries: list[_Entry] = []
        known = {name for name, _ in layer.named_parameters()}
        for row in ROWS:
            if known.issuperset(row.hf):
                places = tuple(_place(layer, name) for name in row.hf)
                self.entries.append(_Entry(row, places))
                known -= set(row.hf)
        self.left = sorted(known)
        kinds = {"heads", "tokens"} if sequence else {"heads"}
        rows = [row for row, _ in self.entries if group is not None and row.partial in kinds]
        self.partial = [row.megatron for row in rows]  # whose gradients are summed

    def check(self, megatron_layer: nn.Module) -> None:
        """The table fills all weights of Megatron's layer, and leaves out nothing but experts."""
        assert all(name.startswith("mlp.") for name in self.left), self.left
        assert not self.left or not hasattr(megatron_layer.mlp, "linear_fc1"), self.left
        weights = {row.megatron for row, _ in self.entries}
        assert weights == {name for name, _ in megatron_layer.named_parameters()}

    def join(self, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """Megatron's weights of this rank, by Megatron's names, cast to `dtype` if given."""
        parts: dict[str, list[Tensor]] = {}
        for row, places in self.entries:
            params = [getattr(place.module, place.name) for place in places]
            local = [local_tensor(param) for param in params]
            parts[row.megatron] = local if dtype is None else [part.to(dtype) for part in local]
        if self.partial:
            whole = SummedGrads.apply(self.group, *(parts[name][0] for name in self.partial))
            parts |= {name: [weight] for name, weight in zip(self.partial, whole, strict=True)}
        return {
            row.megatron: row.join(*parts[row.megatron], head_dim=self.head_dim)
            for row, _ in self.entries
        }


def _place(layer: nn.Module, name: str) -> _Place:
    module, _, own = name.rpartition(".")
    return _Place(layer.get_submodule(module), own)

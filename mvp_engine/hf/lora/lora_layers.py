"""LoRA: trainable low-rank adapters on frozen linear layers, with the module names of `peft`.

An adapted layer keeps its class, its forward and its parameter names. `lora_A` and `lora_B` become its child modules,
and a forward hook adds their output, so meta-device builds, FSDP, activation checkpointing, compilation and checkpoints
treat an adapted model like any other. Writing a `peft` folder is in `lora_export`.
"""

from __future__ import annotations

import difflib
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from mvp_engine.config.schema import PARTS
from mvp_engine.distributed.data_parallel import blocks
from mvp_engine.distributed.dtensor import local_tensor
from mvp_engine.errors import UserError, count
from mvp_engine.hf.experts import moe_layers as local_experts
from mvp_engine.hf.experts.moe_layers import adapter_name
from mvp_engine.hf.lora.lora_settings import Lora
from mvp_engine.hf.model.model_parts import matching, parts_of
from mvp_engine.hf.model.packed_model import PackedModel
from mvp_engine.hf.model.tp_plan import SummedGrad

LOGGER = logging.getLogger("mvp_engine")
TARGETS = "lora.target_modules"

# Step sizes of selective scans: the mixer multiplies with the weight itself, so the layer's forward never runs.
READ_DIRECTLY = {"dt_proj"}

Fetch = Callable[[str], Tensor]  # returns the full tensor of a parameter name


class _LoraA(nn.Linear):
    def _init_weights(self, _: nn.Module) -> None:
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))


class _LoraB(nn.Linear):
    def _init_weights(self, _: nn.Module) -> None:
        nn.init.zeros_(self.weight)  # training starts with the outputs of the base model


def add_adapters(model: nn.Module, settings: Lora) -> None:
    """Freeze a model and add adapters to its target layers.

    Parameters in `settings.modules_to_save` stay trainable, and so do those that pretrained folders lack, such as a new
    head: a `PackedModel` knows them, another module may name patterns of them in an attribute `fresh`.
    """
    subject: Any = model
    fresh = getattr(model, "fresh", ())
    trained = _trained_in_full(model, settings, fresh)
    targets = settings.target_modules
    stacked = _stacked_targets(model, targets or [])
    if targets is not None:
        targets = [target for target in targets if target not in stacked]
    layers = _target_layers(model, targets, trained)
    for name in layers:
        if f"{name}.weight" in trained:
            raise UserError(
                f"lora: {name}.weight is trained in full (lora.modules_to_save), so it takes no adapter "
                "(lora.target_modules)"
            )
    for name, param in model.named_parameters():
        param.requires_grad_(name in trained)
    for layer in layers.values():
        _adapt(layer, settings)
    add_expert_adapters(model, settings, stacked)
    if getattr(model, "new_rows", None) is not None:
        add_token_adapters(subject, trained)
    subject.lora = settings
    subject.fresh = (*fresh, "*.lora_*")


def _trained_in_full(model: nn.Module, settings: Lora, fresh: tuple[str, ...]) -> set[str]:
    trained: set[str] = set()
    for pattern in settings.modules_to_save:
        trained.update(matching(model, pattern, "lora.modules_to_save"))
    for name, _ in model.named_parameters():
        if any(fnmatchcase(name, new) for new in fresh):
            trained.add(name)
    return trained


def _adapt(linear: Any, settings: Lora) -> None:
    options: Any = {"bias": False, "device": linear.weight.device, "dtype": torch.float32}
    linear.lora_A = _LoraA(linear.in_features, settings.rank, **options)
    linear.lora_B = _LoraB(settings.rank, linear.out_features, **options)
    for adapter in (linear.lora_A, linear.lora_B):
        adapter._init_weights(adapter)
    linear.lora_scaling = settings.scaling
    linear.lora_dropout = settings.dropout
    linear.lora_switch = None
    linear.lora_product = None
    linear.register_forward_hook(_add_adapter_output)


def _add_adapter_output(linear: Any, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
    x = args[0]
    if linear.lora_dropout:
        x = F.dropout(x, linear.lora_dropout, linear.training)
    scaling = linear.lora_scaling
    if linear.lora_switch is not None:
        scaling = scaling * linear.lora_switch
    if linear.lora_product is not None:  # adapters of a tensor-parallel layer
        return out + linear.lora_product(linear, x) * scaling
    return out + linear.lora_B(linear.lora_A(x)) * scaling


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """A context in which the model computes what it did without its adapters.

    The switch is a number in a tensor, which a compiled forward reads: a flag in Python would compile it again.
    """
    folder: Any = getattr(model, "adapter_folder", None)
    if folder is not None:
        raise UserError(
            f"training starts from the adapter {folder}, so the model without it is no reference. Merge it first (mvp "
            "export RUN OUT), or leave the reference out (rl.kl_coef=0)"
        )
    adapted = (*adapted_layers(model), *adapted_experts(model), *token_adapters(model))
    layers = [layer for _, layer in adapted]
    if not layers:
        raise UserError("adapters_off: the model has no LoRA adapters")
    if layers[0].lora_switch is None:
        switch = torch.ones(())
        for layer in layers:
            layer.lora_switch = switch
    switch = layers[0].lora_switch
    switch.zero_()
    try:
        yield
    finally:
        switch.fill_(1.0)


def _target_layers(
    model: nn.Module, targets: list[str] | None, trained: set[str]
) -> dict[str, nn.Linear]:
    """The linear layers that the targets name; the output head of a language model is never one of them."""
    parts = parts_of(model)
    linears = linear_layers(model)
    class_name = type(model.hf if isinstance(model, PackedModel) else model).__name__
    if not linears:
        raise UserError(
            f"lora: {class_name} has no linear layers apart from its head, so it takes no adapters"
        )
    if targets is None and not parts:
        untrained = {n: linear for n, linear in linears.items() if f"{n}.weight" not in trained}
        in_blocks = {module for block in blocks(model) for module in block.modules()}
        return {n: linear for n, linear in untrained.items() if linear in in_blocks} or untrained
    found: dict[str, nn.Linear] = {}
    for target in ["llm"] if targets is None else targets:
        matches = {n for n in linears if _matches(target, n, parts.get(f"{n}.weight"))}
        if not matches:
            last_names = sorted({name.rpartition(".")[2] for name in linears})
            known: list[str] = [part for part in PARTS if part in parts.values()]
            known += difflib.get_close_matches(target, last_names, n=4, cutoff=0.0)
            stacked = sorted(
                {f"experts.{name.rpartition('.')[2]}" for name in _stacked_names(model)}
            )
            known += stacked
            what = "linear layers or stacked experts" if stacked else "linear layers"
            raise UserError(
                f"{TARGETS}: {class_name} has no {what} {target!r} apart from its "
                f"head. Name a part or a pattern of layers, such as {', '.join(known)}"
            )
        found |= {name: linears[name] for name in linears if name in matches}
    return found


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """The plain linear layers of a model by name that its forward calls, without its head."""
    prefixes: tuple[str, ...] = ("",)
    heads: list[nn.Module | None] = []
    if isinstance(model, PackedModel):
        prefixes = model.adapted
        heads = model.heads()
    params = dict(model.named_parameters())  # a tied weight has its first name only
    linears: dict[str, nn.Linear] = {}
    for name, module in model.named_modules():
        is_linear = type(module) is nn.Linear and module not in heads
        if name.rpartition(".")[2] in READ_DIRECTLY:
            continue
        if is_linear and name.startswith(prefixes) and f"{name}.weight" in params:
            linears[name] = module
    return linears


def _matches(target: str, name: str, part: str | None) -> bool:
    """Whether a target is the layer's part, or a pattern of its full or last name."""
    last_name = name.rpartition(".")[2]
    return target == part or fnmatchcase(name, target) or fnmatchcase(last_name, target)


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The names and modules of the linear layers with an adapter."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_scaling") and isinstance(module, nn.Linear):
            yield name, module


def merge_adapters(model: nn.Module, fetch: Fetch) -> Fetch:
    """A `fetch` that returns the weights of adapted layers with their adapters merged into them."""
    adapted = {f"{name}.weight": name for name, _ in adapted_layers(model)}
    stacked = {
        f"{name}.{key}": one for name, one in adapted_experts(model) for key in one.lora_names
    }
    tokens = {f"{name}.weight": one for name, one in token_adapters(model)}

    @torch.no_grad()
    def fetch_merged(name: str) -> Tensor:
        if name in tokens:
            delta = fetch(f"{name.removesuffix('weight')}lora_tokens.weight").float()
            index = torch.tensor(tokens[name].ids, device=delta.device)
            weight = fetch(name).float()
            return weight if weight.is_meta else weight.index_add(0, index, delta)
        if name in stacked:
            factors = [fetch(f"{adapter_name(name)}.lora_{factor}") for factor in "AB"]
            return fetch(name).float() + stacked_delta(stacked[name], *factors)
        if name not in adapted:
            return fetch(name)
        layer = adapted[name]
        weight = fetch(name).float()
        lora_a = fetch(f"{layer}.lora_A.weight").float()
        lora_b = fetch(f"{layer}.lora_B.weight").float()
        linear: Any = model.get_submodule(layer)
        return weight + linear.lora_scaling * (lora_b @ lora_a)

    return fetch_merged


# New tokens: next to adapters, only the rows of tokens that were added to the vocabulary train.
#
# The frozen embedding has their first values. An adapter holds what is added to these rows, starts at zero, and is the
# child module `lora_tokens` of the embedding; a head that is not tied has one of its own. peft calls the same
# `trainable_token_indices`, and stores the sum.


class TokenAdapter(nn.Embedding):
    """What is added to some rows of an embedding, one row for each of `ids`."""

    def __init__(self, ids: Sequence[int], vocab_size: int, weight: Tensor) -> None:
        super().__init__(len(ids), weight.shape[1], device=weight.device, dtype=torch.float32)
        self.ids = tuple(ids)
        self.vocab_size = vocab_size
        self.lora_switch: Tensor | None = None
        self.scale = 1.0  # of the embedding's output: Gemma multiplies it
        # Indices, copied to the device once.
        self._places: Tensor | None = None  # by token id: the row here, or one of zeros
        self._in_head: tuple[Tensor, Tensor] | None = (
            None  # rows here, and their places in the head
        )
        self._init_weights(self)

    def _init_weights(self, _: nn.Module) -> None:
        nn.init.zeros_(self.weight)  # training starts with the first values of the new rows

    def _rows(self) -> Tensor:
        return self.weight if self.lora_switch is None else self.weight * self.lora_switch

    def add_to_output(self, embedding: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        """Forward hook of the embedding. It runs after the all-reduce of one that is sharded over its rows."""
        ids = args[0]
        if self._places is None or self._places.device != ids.device:
            places = torch.full((self.vocab_size,), len(self.ids))
            places[list(self.ids)] = torch.arange(len(self.ids))
            self._places = places.to(ids.device)
        rows = F.pad(self._rows() * self.scale, (0, 0, 0, 1))
        return out + F.embedding(self._places[ids], rows).to(out.dtype)

    def add_to(
        self, weight_VD: Tensor, start: int = 0, group: dist.ProcessGroup | None = None
    ) -> Tensor:
        """The weight of a head with these rows, or of the slice of it that begins at row `start`.

        With `group`, ranks have slices, so a rank's gradient has its own rows: they are summed.
        """
        rows = self._rows()
        if group is not None:
            rows = SummedGrad.apply(rows, group)
        if self._in_head is None or self._in_head[0].device != rows.device:
            here = [i for i, id in enumerate(self.ids) if 0 <= id - start < len(weight_VD)]
            places = torch.tensor([self.ids[i] - start for i in here], dtype=torch.long)
            self._in_head = (torch.tensor(here).long().to(rows.device), places.to(rows.device))
        index, places = self._in_head
        return weight_VD.index_add(0, places, rows[index].to(weight_VD.dtype))


def add_token_adapters(model: PackedModel, trained: set[str]) -> None:
    """Let the rows of new tokens train, in the embedding and in a head of its own, unless all rows do."""
    new_rows: Any = model.new_rows
    hf: Any = model.hf
    embedding, head = hf.get_input_embeddings(), hf.get_output_embeddings()
    names = {module: name for name, module in model.named_modules()}
    is_tied = head is not None and head.weight is embedding.weight
    for module in (embedding, *([] if head is None or is_tied else [head])):
        if f"{names[module]}.weight" in trained:
            continue
        is_head = module is head
        if not is_head and type(module) is not nn.Embedding and not hasattr(module, "embed_scale"):
            raise UserError(
                f"data.new_tokens: {type(module).__name__} of this model is no plain embedding, so its new rows cannot "
                f"train alone. Set lora.modules_to_save=[{names[module]}.weight]"
            )
        adapter = TokenAdapter(list(new_rows.sources), len(module.weight), module.weight)
        module.lora_tokens = adapter
        if not is_head:
            adapter.scale = float(getattr(module, "scalar_embed_scale", 1.0))
            module.register_forward_hook(adapter.add_to_output)


def token_adapters(model: nn.Module) -> Iterator[tuple[str, TokenAdapter]]:
    """The adapters of new tokens, with the names of their embeddings."""
    for name, module in model.named_modules():
        if isinstance(module, TokenAdapter):
            yield name.removesuffix(".lora_tokens"), module


# LoRA adapters on tensor-parallel layers.
#
# The output of a column-parallel layer is sharded, and so is `lora_B`, which makes it: each rank has the rows of its
# outputs. The input of a row-parallel layer is sharded, and so is `lora_A`, which reads it: each rank has the columns
# of its inputs. The other matrix is whole on every rank, with equal gradients: a rank's part of them is summed where it
# is smallest, in the `rank` numbers per token between the two. Where a layer has whole inputs and outputs, so have its
# adapters.

_COLUMN = ("colwise", "packed_colwise")
_ROW = ("rowwise",)
_WHOLE = ("colwise_gather_output", "colwise_rep", "rowwise_split_input", "rowwise_rep")


def shard_adapters(model: PackedModel, mesh: DeviceMesh, plan: Mapping[str, str]) -> None:
    """Shard the adapters of layers that are sharded already, by the styles of a tensor-parallel plan."""
    assert model.lora is not None
    if any(True for _ in adapted_experts(model)):
        raise UserError(
            f"{TARGETS}: adapters of stacked experts do not support parallel.tensor={mesh.size()}. Set "
            "parallel.shard and parallel.expert instead"
        )
    for name, layer in adapted_layers(model):
        if not isinstance(layer.weight, DTensor):
            continue
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name.removeprefix("hf.")), "")
        if style in _COLUMN:
            _shard(layer.lora_B, layer, mesh)
            layer.lora_product = _product(_column_product, mesh)
        elif style in _ROW:
            if model.lora.dropout and layer.in_features % mesh.size():
                raise UserError(
                    f"lora.dropout: parallel.tensor={mesh.size()} does not divide the {layer.in_features} inputs of "
                    f"{name}, so the ranks would draw different masks. Set lora.dropout=0, or parallel.tensor=1"
                )
            _shard(layer.lora_A, layer, mesh)
            layer.lora_product = _product(_row_product, mesh)
        elif style not in _WHOLE:
            raise UserError(
                f"lora: the tensor-parallel style {style!r} of {name} takes no adapter. Leave it out of "
                "lora.target_modules, or set parallel.shard instead of parallel.tensor"
            )


def _shard(adapter: Any, layer: Any, mesh: DeviceMesh) -> None:
    """As the layer's own weight: a fused one has a slice of each part on a rank."""
    weight = adapter.weight
    sharded = distribute_tensor(weight.detach(), mesh, layer.weight.placements, src_data_rank=None)
    adapter.weight = nn.Parameter(sharded, requires_grad=weight.requires_grad)


def _product(product: Callable[..., Tensor], mesh: DeviceMesh) -> Callable[..., Tensor]:
    return partial(product, group=mesh.get_group())


def _column_product(layer: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
    low = SummedGrad.apply(F.linear(x, layer.lora_A.weight), group)
    return F.linear(low, local_tensor(layer.lora_B.weight))


def _row_product(layer: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
    low = _AllReduce.apply(F.linear(x, local_tensor(layer.lora_A.weight)), group)
    return F.linear(low, layer.lora_B.weight)


class _AllReduce(Function):
    """A sum over a group; its backward is the identity, since what follows is equal on all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        out = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


# LoRA on stacked experts: adapters of whole 3-dimensional parameters, as peft's `target_parameters`.
#
# Legend: E experts, r rank, I inputs, O outputs of an expert's matrix.
#
# Each stacked parameter gets a child module with `lora_A` (E, r, I) and `lora_B` (E, O, r), which the grouped GEMMs of
# `moe_layers.py` multiply with the rows of each expert. peft computes the product of the two for all experts, and its
# gradient, the size of all experts, in every pass. FSDP and expert parallel shard the adapters as the experts
# themselves. peft stores them as two matrices, (E * r, I) and (O, r * E): `peft_matrices` converts.


class StackedAdapter(nn.Module):
    def __init__(self, experts: int, rank: int, inputs: int, outputs: int, device: Any) -> None:
        super().__init__()
        options: Any = {"device": device, "dtype": torch.float32}
        self.lora_A = nn.Parameter(torch.empty(experts, rank, inputs, **options))
        self.lora_B = nn.Parameter(torch.empty(experts, outputs, rank, **options))
        self._init_weights(self)

    def _init_weights(self, _: nn.Module) -> None:
        # In place, on the parameters themselves. Of a stack, kaiming_uniform_ would take another number of inputs.
        bound = 1.0 / math.sqrt(self.lora_A.shape[-1])
        nn.init.uniform_(self.lora_A, -bound, bound)
        nn.init.zeros_(self.lora_B)


def _stacked_names(model: nn.Module) -> list[str]:
    """The names of the stacked parameters of a model's experts."""
    found = local_experts.modules(model).items()
    params = [
        (f"{name}.{key}", p) for name, m in found for key, p in m.named_parameters(recurse=False)
    ]
    return [name for name, param in params if param.ndim == 3]


def _stacked_targets(model: nn.Module, targets: list[str]) -> set[str]:
    """The targets that name stacked parameters."""
    names = _stacked_names(model)
    return {target for target in targets if any(_names_parameter(target, name) for name in names)}


def add_expert_adapters(model: nn.Module, settings: Lora, targets: set[str]) -> None:
    """Add adapters to the stacked parameters that the targets name; say what stays without one."""
    found = local_experts.modules(model)
    if targets:
        _check_stacked(settings)
    frozen = 0
    for name, experts in found.items():
        experts.lora_names = []  # type: ignore[assignment]
        for key, param in list(experts.named_parameters(recurse=False)):
            if any(_names_parameter(target, f"{name}.{key}") for target in targets):
                _adapt_stacked(experts, key, param, settings)
            elif not param.requires_grad:
                frozen += param.numel()
    if frozen:
        sizes = {name: param.numel() for name, param in model.named_parameters()}
        total = sum(size for name, size in sizes.items() if ".lora_" not in name)
        LOGGER.warning(
            "lora: the stacked experts of %s have no adapter and stay frozen, %.0f %% of all weights: adapters of "
            "linear layers do not reach them. lora.target_modules=[llm,experts.gate_up_proj,experts.down_proj] adapts "
            "them, too",
            count(len(found), "layer"),
            100 * frozen / total,
        )


def _check_stacked(settings: Lora) -> None:
    if settings.dropout:
        raise UserError(
            f"{TARGETS}: stacked experts take no dropout (nor in peft). Set lora.dropout=0"
        )
    if settings.rank % local_experts.MULTIPLE:
        raise UserError(
            f"{TARGETS}: lora.rank={settings.rank} is no multiple of {local_experts.MULTIPLE}, which grouped GEMMs need"
        )


def _names_parameter(target: str, name: str) -> bool:
    """As peft matches: the name, or its end from a dot on."""
    return name == target or name.endswith(f".{target}")


def _adapt_stacked(experts: Any, key: str, param: nn.Parameter, settings: Lora) -> None:
    if param.requires_grad:
        raise UserError(
            f"{TARGETS}: {key} is trained in full (lora.modules_to_save), so it takes no adapter"
        )
    total, *sizes = param.shape
    outputs, inputs = reversed(sizes) if experts.is_transposed else sizes
    adapter = StackedAdapter(total, settings.rank, inputs, outputs, param.device)
    setattr(experts, local_experts.adapter_name(key), adapter)
    experts.lora_names.append(key)
    experts.lora_scaling = settings.scaling
    experts.lora_switch = None


def adapted_experts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The names and modules of stacked experts with an adapter."""
    for name, module in model.named_modules():
        if getattr(module, "lora_names", None):
            yield name, module


def stacked_delta(experts: Any, lora_a: Tensor, lora_b: Tensor) -> Tensor:
    """What an adapter adds to its stacked parameter."""
    product = experts.lora_scaling * (lora_b.float() @ lora_a.float())
    return product.mT if experts.is_transposed else product


def peft_matrices(lora_a: Tensor, lora_b: Tensor) -> tuple[Tensor, Tensor]:
    """The two matrices that peft stores: experts are rows of the first, and the inner columns of the second."""
    return lora_a.flatten(0, 1), lora_b.permute(1, 2, 0).flatten(1).contiguous()

"""Which layers of a model run in FP8 (`model.fp8`)."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_leaves, tree_map_only

from mvp_engine.distributed.dtensor import local_tensor
from mvp_engine.errors import UserError, count
from mvp_engine.hf.experts import moe_layers
from mvp_engine.hf.experts.grouped_mm import is_supported, quantize_experts
from mvp_engine.hf.model.model_parts import blocks_by_part
from mvp_engine.ops import fp8
from mvp_engine.ops.fp8 import Fp8Linear, Fp8Weight, quantize, quantized_name

LOGGER = logging.getLogger("mvp_engine")


def use_fp8(model: nn.Module, parts: Mapping[str, bool | str], device: torch.device) -> None:
    """Linear layers and stacked experts of the blocks of some parts run in FP8; logs which.

    A part with the value "all" has its weight gradients of linear layers in FP8, too.
    """
    if not any(parts.values()):
        return
    blocks = {block: parts[part] for block, part in blocks_by_part(model) if parts.get(part)}
    layers = {layer: blocks[block] for block in blocks for layer in moe_layers.fp8_layers(block)}
    for weight_gradients in (False, True):
        chosen_layers = [layer for layer in layers if (layers[layer] == "all") == weight_gradients]
        fp8.use(chosen_layers, weight_gradients)
    found = [module for block in blocks for module in moe_layers.modules(block).values()]
    chosen = [module for module in found if moe_layers.fit_fp8(module)]
    reason = f"their sizes are no multiples of {fp8.MULTIPLE}"
    if not is_supported(device):
        reason = f"torch has no FP8 grouped GEMM for {torch.cuda.get_device_name(device)}"
        chosen = []
    for module in chosen:
        moe_layers.use_fp8(module)
    if not layers and not chosen:
        why = f"; the experts of {count(len(found), 'layer')} would not: {reason}" if found else ""
        raise UserError(
            f"model.fp8: no block of {type(model).__name__} has linear layers with sizes that are multiples of "
            f"{fp8.MULTIPLE}{why}. So nothing would change: leave it out"
        )
    if "all" in blocks.values() and "all" not in layers.values():
        raise UserError(
            f"model.fp8=all is for weight gradients of linear layers in FP8, and {type(model).__name__} has only "
            "experts in FP8. Set model.fp8=true"
        )
    stacked = f" and the experts of {count(len(chosen), 'layer')}" if chosen else ""
    LOGGER.info("model.fp8: %s%s run in FP8", count(len(layers), "linear layer"), stacked)
    if left := len(found) - len(chosen):
        LOGGER.warning(
            "model.fp8: the experts of %s do not run in FP8: %s", count(left, "layer"), reason
        )
    others = {param for block in blocks for param in block.parameters() if param.ndim > 2}
    if others.difference(*(module.parameters() for module in found)):
        LOGGER.warning("model.fp8: convolutions and other stacked matrices stay in bf16")


@contextmanager
def run_in_bf16(model: nn.Module) -> Iterator[None]:
    """A context in which layers in FP8 run in bf16, for comparisons whose bounds are the rounding of bf16."""
    layers: list[nn.Module] = [one for one in model.modules() if isinstance(one, fp8.Fp8Linear)]
    stacked = [module for module in model.modules() if moe_layers.is_fp8(module)]
    for layer in layers:
        layer.__class__ = nn.Linear
    for module in stacked:
        moe_layers.use_fp8(module, False)
    try:
        yield
    finally:
        for layer in layers:
            layer.__class__ = fp8.Fp8Linear
        for module in stacked:
            moe_layers.use_fp8(module)


# FP8 all-gathers: FSDP2 gathers the weights of layers in FP8 as float8 values and a float32 scale for each row.
#
# Legend: N outputs, K inputs.
#
# Weights are quantized by rows and sharded by rows, so a rank can quantize its own. It does so from float32, as one GPU
# does, and gathers half the bytes of bf16. The sharded parameter stays a plain float32 DTensor: FSDP2's extensions,
# `fsdp_pre_all_gather` and `fsdp_post_all_gather`, are attributes of its local tensor.

aten = torch.ops.aten
# What FSDP2, nn.Parameter and autograd call to get another tensor object of the same values.
ALIASES = {aten.detach.default, aten.alias.default, aten.as_strided.default}
# They need shape, dtype and device only, and may be called when the values are freed.
FACTORIES = {
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.new_zeros.default,
}


def gather_fp8(model: nn.Module) -> None:
    """Make FSDP2 gather the weights of linear layers in FP8 as float8 values, and those of other layers as before.

    It is called whenever the local tensors are new: before the first forward, and after `model.to`. Weights whose rows
    do not divide evenly over the ranks are gathered in bf16: FSDP2 wants inputs of one padded size. So are weights that
    a layer in FP8 shares with another one. A pickle of such a local tensor names these functions; checkpoints hold
    detached ones, which have none.
    """
    users: dict[nn.Parameter, list[nn.Module]] = defaultdict(list)
    for module in model.modules():
        for param in module.parameters(recurse=False):
            users[param].append(module)
    for param, modules in users.items():
        is_fp8 = all(isinstance(module, Fp8Linear) for module in modules)
        if is_fp8 and param is modules[0].weight and isinstance(param, DTensor):
            ranks = param.device_mesh.shape[-1]
            if param.placements[-1] == Shard(0) and ranks > 1 and len(param) % ranks == 0:
                # With gradients, `to_local` returns another object.
                local: Any = param._local_tensor
                local.fsdp_pre_all_gather = _pre_all_gather
                local.fsdp_post_all_gather = _post_all_gather


def _pre_all_gather(
    mesh: object, outer_size: object, outer_stride: object, module: nn.Module, mp_policy: object
) -> tuple[tuple[Tensor, Tensor], None]:
    """What this rank puts into the all-gather: its rows of the weight of a layer, quantized."""
    return quantize(local_tensor(module.get_parameter("weight").detach())), None


def _post_all_gather(
    outputs: tuple[Tensor, Tensor], metadata: None, param_dtype: torch.dtype, out: Any = None
) -> tuple[Tensor, tuple[()]] | None:
    """The gathered weight. Once made it stays valid: FSDP2 frees and fills the storage of the same outputs."""
    if out is not None:
        return None
    return GatheredWeight(*outputs, param_dtype), ()


class GatheredWeight(Tensor):
    """A weight in FP8, (N, K), that `Fp8Linear` multiplies as it is; any other operator gets it dequantized.

    It reports the dtype of the other gathered parameters, which is also that of its gradient. The values cannot be
    changed: FSDP2 would not see it.
    """

    fp8_values: Tensor
    fp8_scale: Tensor  # (N, 1)

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor, dtype: torch.dtype) -> GatheredWeight:
        weight: GatheredWeight = Tensor._make_wrapper_subclass(
            cls, values.shape, dtype=dtype, device=values.device
        )
        weight.fp8_values = values
        weight.fp8_scale = scale
        return weight

    @property
    def quantized(self) -> Fp8Weight:
        """What `ops.fp8.quantize` returns for this weight."""
        return Fp8Weight(self.fp8_values, self.fp8_scale)

    def dequantize(self) -> Tensor:
        """Exact in bf16: scales are powers of two, and float8 values have fewer bits."""
        return (self.fp8_values.float() * self.fp8_scale).to(self.dtype)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GatheredWeight(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["fp8_values", "fp8_scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], dtype: torch.dtype, outer_size: object, outer_stride: object
    ) -> GatheredWeight:
        return GatheredWeight(inner["fp8_values"], inner["fp8_scale"], dtype)

    def _stable_hash_for_caching(self) -> str:
        """What the graphs in the compile cache depend on. torch warns without it."""
        return f"{self!r} on {self.device}, requires_grad={self.requires_grad}"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        weight = args[0] if args else None
        kwargs = kwargs or {}
        if isinstance(weight, cls):
            if func in ALIASES and _is_whole(weight, *args[1:]):
                return cls(weight.fp8_values, weight.fp8_scale, weight.dtype)
            if func in FACTORIES:
                like = weight.fp8_scale.new_empty((), dtype=weight.dtype).expand(weight.shape)
                return func(like, *args[1:], **kwargs)
        if _changes(func, args, kwargs, cls):
            raise RuntimeError(f"{func} would change a weight that was gathered in FP8")
        args, kwargs = tree_map_only(cls, cls.dequantize, (args, kwargs))
        return func(*args, **kwargs)


def _is_whole(weight: Tensor, size: Any = None, stride: Any = None, offset: Any = 0) -> bool:
    """Whether arguments of `as_strided` name the whole weight."""
    if size is None:
        return True
    return (tuple(size), tuple(stride), offset or 0) == (weight.shape, weight.stride(), 0)


def _changes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: type) -> bool:
    """Whether an operator writes to an argument of this kind, also in a list or as `out`."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        if any(isinstance(one, kind) for one in tree_leaves(value)):
            return True
    return False


# FP8 values of the weights of linear layers and stacked experts, made once for all forwards of a generation.


def fp8_places(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Modules and names of the weights that are multiplied in FP8: of experts the matrices, not the biases."""
    found: list[tuple[nn.Module, str]] = []
    for module in model.modules():
        if isinstance(module, Fp8Linear):
            found.append((module, "weight"))
        elif moe_layers.is_fp8(module):
            params = module.named_parameters(recurse=False)
            found += [(module, name) for name, param in params if param.ndim == 3]
    return found


@contextmanager
def quantized_once(model: nn.Module) -> Iterator[None]:
    """A context for forwards without gradients, in which no weight changes: each is quantized at its start."""
    places = fp8_places(model)
    try:
        for module, name in places:
            setattr(module, quantized_name(name), _quantized(module, name))
        yield
    finally:
        for module, name in places:
            setattr(module, quantized_name(name), None)


def _quantized(module: nn.Module, name: str) -> Fp8Weight:
    weight = module.get_parameter(name).detach()
    if isinstance(module, Fp8Linear):
        return Fp8Weight(*quantize(weight))
    return Fp8Weight(*quantize_experts(weight, bool(module.is_transposed)))

"""The model types on the Megatron backend: the FSDP engine, with Megatron's layers inside of the decoder.

Megatron's sequence parallel: between matrices, tensor-parallel ranks hold their share of the tokens only.

Differentiable collectives along dimension 0, on any device and without Megatron's global buffer. Tokens that do not
divide evenly are padded with rows of zeros at the first layer and cut off after the last one; attention never sees them
and no gradient reaches them.

`use_megatron_layers`: the decoder layers of a model instance compute with Megatron's TransformerLayer.

Each layer keeps its parameters and its place in the model; only its `forward` is another one. Under transformers' own
attention (the reference of the preflight) a layer runs transformers' code, so every start compares the two.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.func import functional_call

from mvp_engine.distributed import Layout
from mvp_engine.distributed.dtensor import local_tensor
from mvp_engine.distributed.pipeline import StageLink
from mvp_engine.errors import UserError
from mvp_engine.hf import PackedModel
from mvp_engine.hf.model import attention
from mvp_engine.hf.model.adapter import HFAdapter
from mvp_engine.model_engine.base import Settings
from mvp_engine.model_engine.fsdp.engine import FSDPEngine, LanguageModelEngine, ValueModelEngine
from mvp_engine.ops.precision import autocast_dtype

Group = dist.ProcessGroup


def all_gather(x: Tensor, group: Group) -> Tensor:
    operator = torch.ops._c10d_functional.all_gather_into_tensor
    gathered: Tensor = functional.wait_tensor(
        operator(x.contiguous(), group.size(), group.group_name)
    )
    return gathered


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    operator = torch.ops._c10d_functional.reduce_scatter_tensor
    share: Tensor = functional.wait_tensor(
        operator(x.contiguous(), "sum", group.size(), group.group_name)
    )
    return share


def split_tokens(x: Tensor, group: Group) -> Tensor:
    """This rank's share of tokens that all ranks have; short ones are padded with zeros."""
    missing = -len(x) % group.size()
    return Split.apply(F.pad(x, (0, 0) * (x.ndim - 1) + (0, missing)), group)


def join_tokens(x: Tensor, tokens: int, group: Group) -> Tensor:
    """All tokens, on every rank, for a computation that is the same on every rank."""
    return Join.apply(x, group)[:tokens]


class SummedGrads(Function):
    """The identity on some weights; backward sums their gradients over a group, in one all-reduce in float32."""

    @staticmethod
    def forward(ctx: Any, group: Group, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total = torch.cat([grad.flatten().float() for grad in grads])
        dist.all_reduce(total, group=ctx.group)
        parts = total.split([grad.numel() for grad in grads])
        pairs = zip(parts, grads, strict=True)
        return None, *(part.view_as(grad).to(grad.dtype) for part, grad in pairs)


class _GatheredGrad(Function):
    """The gradient of a rank's share is that of all shares."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather(grad, ctx.group), None


class Split(_GatheredGrad):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.chunk(group.size())[group.rank()].clone()


class Join(Function):
    """The gradient is the same on every rank, so a rank takes its share of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.group.size())[ctx.group.rank()].contiguous(), None


class ReduceScatter(_GatheredGrad):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return reduce_scatter(x, group)


class GatheredLinear(Function):
    """A linear layer on the tokens of all ranks. Only this rank's share is saved; backward gathers again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        ctx.has_bias = bias is not None
        return F.linear(all_gather(x, group), weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_x = reduce_scatter(grad.matmul(weight), ctx.group) if needs_x else None
        rows = grad.flatten(0, -2)
        grad_weight = None
        if needs_weight:
            grad_weight = rows.t().matmul(all_gather(x, ctx.group).flatten(0, -2))
        grad_bias = rows.sum(0) if ctx.has_bias and needs_bias else None
        return grad_x, grad_weight, grad_bias, None


def use_megatron_layers(model: PackedModel, layout: Layout) -> list[LayerForward]:
    """Replace the forward of each decoder layer; returns the new ones.

    Tensor-parallel ranks cut tokens among themselves in between: Megatron's sequence parallel.
    """
    modules = import_megatron()
    decoder: Any = model.decoder()
    layers = list(decoder.layers)
    group = None if layout.tensor_mesh is None else layout.tensor_mesh.get_group()
    first: Any = layers[0].self_attn
    with warnings.catch_warnings():  # of defaults that are not used here
        warnings.simplefilter("ignore")
        megatron_config = modules.transformer_config(model.hf.config, first, layout.tensor)
        cores = [
            modules.build_layer(megatron_config, i + 1, group, hasattr(layer.mlp, "experts"))
            for i, layer in enumerate(layers)
        ]
    for index, layer in enumerate(layers):
        table = WeightTable(layer, first.head_dim, group)
        table.check(cores[index])
        layer.forward = LayerForward(layer, cores[index], table, modules.make_viewless_tensor)
        layer.forward.sequence_group = group
    forwards = [layer.forward for layer in layers]
    mark_ends(forwards)
    return forwards


def mark_ends(forwards: list[LayerForward]) -> None:
    """Note the layers that get and return all tokens: the first and the last one of a model or pipeline stage."""
    for index, forward in enumerate(forwards):
        forward.splits = index == 0 and forward.sequence_group is not None
        forward.joins = index == len(forwards) - 1 and forward.sequence_group is not None


def require_megatron() -> None:
    if not (find_spec("megatron") and find_spec("megatron.core")):
        raise UserError(
            "model.backend=megatron needs the package megatron-core: pip install 'mvp-engine[megatron]', or set "
            "model.backend=fsdp"
        )


def import_megatron() -> Any:
    """`modules.py`, which imports megatron; slow, so nothing imports it earlier."""
    require_megatron()
    with warnings.catch_warnings():  # of packages that are not used here
        warnings.simplefilter("ignore")
        from mvp_engine.model_engine.megatron import modules
    return modules


class LayerForward:
    """The forward of one decoder layer, with transformers' signature: (1, T, D) in and out.

    With Megatron's sequence parallel a layer in between gets and returns this rank's share of the tokens.
    """

    sequence_group: Any = None  # the tensor-parallel ranks that tokens are cut over
    splits = False
    joins = False

    def __init__(self, layer: Any, core: Any, table: WeightTable, without_view: Any) -> None:
        self.without_view = without_view
        self.layer = layer
        self.core = core
        self.table = table
        self.transformers_forward = layer.forward

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.layer.self_attn.config._attn_implementation != attention.NAME:
            return self.transformers_forward(hidden_states, *args, **kwargs)
        return self._forward(hidden_states, *args, **kwargs)

    def _forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        **kwargs: Any,
    ) -> Tensor:
        kwargs.pop("past_key_values", None)  # always None: a packed batch has a KV cache of its own
        if self.core.training != self.layer.training:
            self.core.train(self.layer.training)
        cos_Td = position_embeddings[0][0]
        sin_Td = position_embeddings[1][0]
        attend = _Attend(self.layer.self_attn, attention_mask, cos_Td, sin_Td, kwargs)
        self.core.self_attention.core_attention.attend = attend
        x_T1D = hidden_states.transpose(0, 1)
        if self.splits:
            x_T1D = split_tokens(x_T1D, self.sequence_group)
        if hasattr(self.layer.mlp, "experts"):
            self.core.mlp.run = _RunExperts(self.layer.mlp, self.sequence_group, len(cos_Td))
        weights = self.table.join(autocast_dtype(hidden_states))
        out_T1D, _ = functional_call(self.core, weights, (x_T1D, None))
        if self.joins:
            out_T1D = join_tokens(out_T1D, len(cos_Td), self.sequence_group)
        out_1TD = out_T1D.transpose(0, 1)
        if torch.compiler.is_compiling():
            return out_1TD
        # FSDP2 hooks the output, and warns of a view.
        return self.without_view(out_1TD, out_1TD.requires_grad, True)


class _RunExperts:
    """Router and experts of the Hugging Face layer, whose ranks may share experts (parallel.expert).

    Tensor-parallel ranks run them on the same tokens, so with sequence parallel all tokens are gathered.
    """

    def __init__(self, mlp: nn.Module, sequence_group: Any, tokens: int) -> None:
        self.mlp = mlp
        self.sequence_group = sequence_group
        self.tokens = tokens

    def __call__(self, x_T1D: Tensor) -> Tensor:
        if self.sequence_group is None:
            return self.mlp(x_T1D.transpose(0, 1)).transpose(0, 1)
        whole_T1D = join_tokens(x_T1D, self.tokens, self.sequence_group)
        out_T1D = self.mlp(whole_T1D.transpose(0, 1)).transpose(0, 1)
        return split_tokens(out_T1D, self.sequence_group)


class _Attend:
    """Packed attention of one forward of one layer; rows of padding after the last token come out as zeros."""

    def __init__(
        self, module: nn.Module, mask: Any, cos_Td: Tensor, sin_Td: Tensor, options: dict[str, Any]
    ) -> None:
        self.module: Any = module
        self.mask = mask
        self.cos_Td = cos_Td
        self.sin_Td = sin_Td
        self.options = options

    def __call__(self, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        tokens = len(self.cos_Td)
        module = self.module
        out, _ = attention.packed_attention(
            module,
            self._rotate(q_THd[:tokens].transpose(0, 1))[None],
            self._rotate(k_TKd[:tokens].transpose(0, 1))[None],
            v_TKd[:tokens].transpose(0, 1)[None],
            self.mask,
            dropout=module.attention_dropout if module.training else 0.0,
            scaling=module.scaling,
            sliding_window=getattr(module, "sliding_window", None),
            **self.options,
        )
        out_TD = out[0].flatten(1)
        return F.pad(out_TD, (0, 0, 0, len(q_THd) - tokens))

    def _rotate(self, x_HTd: Tensor) -> Tensor:
        first, second = x_HTd.chunk(2, -1)
        from_other = torch.cat([-second, first], -1)
        return x_HTd * self.cos_Td + from_other * self.sin_Td


# The weight table: which Hugging Face parameters of a decoder layer make up which weight of Megatron's layer.
#
# Legend: G key/value heads of this rank, n query heads of each, d head size, D hidden size.
#
# Megatron stores queries, keys and values in one matrix, by key/value head: (n queries, key, value) of the first head,
# then of the second. Gate and up projections follow each other; a tensor-parallel rank has its rows of the gate, then
# its rows of the other. Joining is differentiable, so gradients arrive at the Hugging Face parameters. It copies each
# weight once in a forward. Experts and their router have no row: they stay modules of the Hugging Face layer.

JoinWeights = Callable[..., Tensor]


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
    join: JoinWeights
    hf: tuple[str, ...]
    partial: bool = (
        False  # tensor-parallel ranks have parts of the gradient, of their heads or tokens
    )


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
ROWS = (
    Row("input_layernorm.weight", same, ("input_layernorm.weight",), True),
    Row("self_attention.linear_qkv.weight", by_kv_head, tuple(f"{name}.weight" for name in _QKV)),
    Row("self_attention.linear_qkv.bias", by_kv_head, tuple(f"{name}.bias" for name in _QKV)),
    Row("self_attention.q_layernorm.weight", same, ("self_attn.q_norm.weight",), True),
    Row("self_attention.k_layernorm.weight", same, ("self_attn.k_norm.weight",), True),
    Row("self_attention.linear_proj.weight", same, ("self_attn.o_proj.weight",)),
    Row("pre_mlp_layernorm.weight", same, ("post_attention_layernorm.weight",), True),
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

    def __init__(self, layer: nn.Module, head_dim: int, group: dist.ProcessGroup | None) -> None:
        """`group`: the tensor-parallel ranks, if there are several."""
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
        rows = [row for row, _ in self.entries if group is not None and row.partial]
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


class MegatronAdapter(HFAdapter):
    compiles_by_default = False

    def replace_layers(self, layout: Layout, settings: Settings) -> None:
        self._layers = use_megatron_layers(self.model, layout)

    def cut_stage(self, link: StageLink, skeleton: nn.Module | None) -> None:
        super().cut_stage(link, skeleton)
        held = set(self.model.modules())
        mark_ends([forward for forward in self._layers if forward.layer in held])

    def preflight(self, layout: Layout, exact: bool) -> None:
        super().preflight(layout, exact)
        if self.model.padded_rows:  # which run transformers' own layers
            raise UserError(
                f"model.backend=megatron runs packed sequences only: {self.model.padded_rows}. "
                "Set model.backend=fsdp"
            )


class _MegatronEngine(FSDPEngine):
    check_packages = staticmethod(require_megatron)

    def __init__(self, model: nn.Module, layout: Layout, settings: Settings | None = None) -> None:
        super().__init__(model, layout, settings)
        check_supported(model, layout, self.settings)
        require_megatron()
        self.adapter = MegatronAdapter(model)  # type: ignore[arg-type]


class MegatronLanguageModelEngine(_MegatronEngine, LanguageModelEngine):
    """A language model: per-token log-probs, entropy and loss."""


class MegatronValueModelEngine(_MegatronEngine, ValueModelEngine):
    """A value model: one number per token."""


# Which models the Megatron backend supports, and what it refuses, with the fix.

FAMILIES = ("llama", "mixtral", "qwen2", "qwen3", "qwen3_moe")
BIASED = ("q_proj.bias", "k_proj.bias", "v_proj.bias")  # parameters that may have a bias


def check_supported(model: Any, layout: Layout, settings: Settings) -> None:
    """Raise `UserError` for a model, a layout or a setting that this backend does not run exactly."""
    if not isinstance(model, PackedModel):
        raise _refuse(f"{type(model).__name__} is no Hugging Face model")
    config: Any = model.hf.config
    if config.model_type not in FAMILIES:
        raise _refuse(f"{config.model_type} is none of {', '.join(FAMILIES)}")
    if config.hidden_act != "silu":
        raise _refuse(f"{config.model_type} with hidden_act={config.hidden_act} is not supported")
    layers: Any = model.decoder()
    for name, _ in layers.layers.named_parameters():
        if name.endswith(".bias") and not name.endswith(BIASED):
            raise _refuse(f"{name.removesuffix('.bias')} has a bias")
    if getattr(config, "router_jitter_noise", 0.0):
        raise _refuse(f"{config.model_type} with router_jitter_noise is not supported")
    if model.lora is not None:
        raise _refuse("LoRA adapters are not supported")
    if settings.quantize or _is_set(settings.fp8):
        raise _refuse("model.fp8 and model.quantize are not supported")
    if layout.tensor > 1 and _is_set(settings.compile) and settings.compile != "auto":
        raise UserError(
            f"model.backend=megatron: model.compile is not supported with parallel.tensor={layout.tensor}. "
            "Set model.compile=null"
        )


def _is_set(setting: Any) -> bool:
    """Whether a setting, which may be given by part, is on anywhere."""
    return any(setting.values()) if isinstance(setting, Mapping) else bool(setting)


def _refuse(reason: str) -> UserError:
    return UserError(f"model.backend=megatron: {reason}. Set model.backend=fsdp")

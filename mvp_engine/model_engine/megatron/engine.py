"""The model engines of the Megatron backend: the FSDP engines, with decoder layers that Megatron computes.

`use_megatron_layers` replaces the `forward` of each decoder layer by a call of Megatron's TransformerLayer. The layer
keeps its Hugging Face parameters and its place in the model. Under transformers' own attention it runs transformers'
code: the checks at the start of a run (`preflight`) compare the two.

With tensor parallel, layers use Megatron's sequence parallel: outside of attention and MLP each rank holds its share of
the tokens only. The collectives for it are defined here: they are differentiable, along dimension 0, and need neither a
GPU nor Megatron's global buffer. Where the number of tokens is not divisible by the ranks, rows of zeros are appended
before the first layer and cut off after the last one; attention never sees them and no gradient reaches them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
    """Returns this rank's share of tokens that all ranks have. Zeros are appended to make all shares equally long."""
    missing = -len(x) % group.size()
    return Split.apply(F.pad(x, (0, 0) * (x.ndim - 1) + (0, missing)), group)


def join_tokens(x: Tensor, tokens: int, group: Group) -> Tensor:
    """Gathers the shares of all ranks and removes the padding. Ranks must compute the same from the result."""
    return Join.apply(x, group)[:tokens]


class SummedGrads(Function):
    """Returns the weights as they are. Backward sums their gradients over a group, in one float32 all-reduce."""

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
    """Backward of functions that give each rank its share: it gathers the gradients of all shares."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather(grad, ctx.group), None


class Split(_GatheredGrad):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.chunk(group.size())[group.rank()].clone()


class Join(Function):
    """All-gather. Backward takes this rank's share without a sum, since the gradient is equal on every rank."""

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
    """A linear layer on the tokens of all ranks.

    Only this rank's share of the input is saved for backward, which gathers the others again.
    """

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
    """Replaces the forward of each decoder layer and returns the new forwards.

    With tensor parallel, the first layer splits the tokens over the ranks and the last one joins them.
    """
    modules = import_megatron()
    decoder: Any = model.decoder()
    layers = list(decoder.layers)
    group = None if layout.tensor_mesh is None else layout.tensor_mesh.get_group()
    first_attention: Any = layers[0].self_attn
    with warnings.catch_warnings():  # Megatron warns about defaults that are not used here
        warnings.simplefilter("ignore")
        megatron_config = modules.transformer_config(
            model.hf.config, first_attention, layout.tensor
        )
        megatron_layers = [
            modules.build_layer(megatron_config, i + 1, group, hasattr(layer.mlp, "experts"))
            for i, layer in enumerate(layers)
        ]
    for index, layer in enumerate(layers):
        table = WeightTable(layer, first_attention.head_dim, group)
        table.check(megatron_layers[index])
        layer.forward = LayerForward(
            layer, megatron_layers[index], table, modules.make_viewless_tensor
        )
        layer.forward.sequence_group = group
    forwards = [layer.forward for layer in layers]
    mark_ends(forwards)
    return forwards


def mark_ends(forwards: list[LayerForward]) -> None:
    """Let the first layer of a model, or pipeline stage, split the tokens over ranks, and the last one join them."""
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
    """Imports `modules.py`, and with it megatron: here, since megatron is optional and slow to import."""
    require_megatron()
    with warnings.catch_warnings():  # Megatron warns about packages that are not used here
        warnings.simplefilter("ignore")
        from mvp_engine.model_engine.megatron import modules
    return modules


class LayerForward:
    """The forward of one decoder layer, with transformers' signature: (1, T, D) in and out.

    With sequence parallel, layers other than the first get this rank's share of the tokens, and layers other than the
    last return it.
    """

    sequence_group: Any = None  # the tensor-parallel ranks, if there are several
    splits = False  # whether it gets all tokens and splits them over the ranks
    joins = False  # whether it gathers all tokens to return them

    def __init__(self, layer: Any, core: Any, table: WeightTable, without_view: Any) -> None:
        self.without_view = without_view  # Megatron's make_viewless_tensor
        self.layer = layer  # of transformers: it has the parameters
        self.core = core  # Megatron's layer: it has no weights, each call gets them
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
        kwargs.pop("past_key_values", None)  # always None: packed batches use another KV cache
        if self.core.training != self.layer.training:
            self.core.train(self.layer.training)
        cos_Td = position_embeddings[0][0]
        sin_Td = position_embeddings[1][0]
        # Megatron's layer has no arguments for these: its modules get them as attributes, for this call.
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
        # FSDP2 registers a hook on the output, and warns if it is a view. True: keep the autograd graph.
        return self.without_view(out_1TD, out_1TD.requires_grad, True)


@dataclass(eq=False)
class _RunExperts:
    """Runs the router and the experts of the Hugging Face layer, which may be spread over ranks (parallel.expert).

    Tensor-parallel ranks all run them on all tokens, so with sequence parallel the tokens are gathered first.
    """

    mlp: nn.Module
    sequence_group: Any
    tokens: int

    def __call__(self, x_T1D: Tensor) -> Tensor:
        if self.sequence_group is None:
            return self.mlp(x_T1D.transpose(0, 1)).transpose(0, 1)
        all_T1D = join_tokens(x_T1D, self.tokens, self.sequence_group)
        out_T1D = self.mlp(all_T1D.transpose(0, 1)).transpose(0, 1)
        return split_tokens(out_T1D, self.sequence_group)


class _Attend:
    """Runs packed attention for one call of one layer. Rows of padding after the last token become zeros."""

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
        rotated_half = torch.cat([-second, first], -1)
        return x_HTd * self.cos_Td + rotated_half * self.sin_Td


# The weight table: which Hugging Face parameters of a decoder layer make up which weight of Megatron's layer.
#
# Legend: G key/value heads of this rank, n query heads of each, d head size, D hidden size.
#
# Megatron stores queries, keys and values in one matrix, ordered by key/value head: (n queries, key, value) of the
# first head, then of the second. It stores the gate projection above the up projection; a tensor-parallel rank has its
# rows of the gate, then its rows of the up projection. Weights are joined in each forward, which copies them once.
# Joining is differentiable, so the gradients reach the Hugging Face parameters. Experts and their router have no row in
# the table: they stay modules of the Hugging Face layer.

JoinWeights = Callable[..., Tensor]


def by_kv_head(query: Tensor, key: Tensor, value: Tensor, head_dim: int) -> Tensor:
    """(G n d, D), (G d, D), (G d, D) -> (G (n + 2) d, D); biases have no dimension D."""
    heads = len(key) // head_dim
    parts = [part.unflatten(0, (heads, -1)) for part in (query, key, value)]
    return torch.cat(parts, 1).flatten(0, 1)


def one_after_the_other(gate: Tensor, up: Tensor, head_dim: int) -> Tensor:
    return torch.cat([gate, up])


def same(weight: Tensor, head_dim: int) -> Tensor:
    return weight


class Row(NamedTuple):
    """One weight of Megatron's layer, and the Hugging Face parameters that it is joined from."""

    megatron: str
    join: JoinWeights
    hf: tuple[str, ...]
    # True: a tensor-parallel rank computes the gradient of its heads or tokens only, so ranks sum them.
    partial: bool = False


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
    """The module and name of a parameter, to be read in each forward: FSDP2 puts the gathered one there."""

    module: nn.Module
    name: str


class _Entry(NamedTuple):
    row: Row
    places: tuple[_Place, ...]


class WeightTable:
    """The rows of `ROWS` whose parameters one decoder layer has."""

    def __init__(self, layer: nn.Module, head_dim: int, group: dist.ProcessGroup | None) -> None:
        """`group`: the tensor-parallel ranks, or None without tensor parallel."""
        self.head_dim = head_dim
        self.group = group
        self.entries: list[_Entry] = []
        without_row = {name for name, _ in layer.named_parameters()}
        for row in ROWS:
            if without_row.issuperset(row.hf):
                places = tuple(_place(layer, name) for name in row.hf)
                self.entries.append(_Entry(row, places))
                without_row -= set(row.hf)
        self.left = sorted(without_row)  # parameters that are in no row
        rows = [row for row, _ in self.entries if group is not None and row.partial]
        # Megatron's names of the weights whose gradients are summed over ranks.
        self.partial = [row.megatron for row in rows]

    def check(self, megatron_layer: nn.Module) -> None:
        """Asserts that the rows fill all weights of Megatron's layer, and leave out experts and routers only."""
        assert all(name.startswith("mlp.") for name in self.left), self.left
        assert not self.left or not hasattr(megatron_layer.mlp, "linear_fc1"), self.left
        weights = {row.megatron for row, _ in self.entries}
        assert weights == {name for name, _ in megatron_layer.named_parameters()}

    def join(self, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """Returns this rank's weights for Megatron's layer, by Megatron's names, cast to `dtype` if given."""
        parts: dict[str, list[Tensor]] = {}
        for row, places in self.entries:
            params = [getattr(place.module, place.name) for place in places]
            local = [local_tensor(param) for param in params]
            parts[row.megatron] = local if dtype is None else [part.to(dtype) for part in local]
        if self.partial:
            weights = SummedGrads.apply(self.group, *(parts[name][0] for name in self.partial))
            parts |= {name: [weight] for name, weight in zip(self.partial, weights, strict=True)}
        return {
            row.megatron: row.join(*parts[row.megatron], head_dim=self.head_dim)
            for row, _ in self.entries
        }


def _place(layer: nn.Module, name: str) -> _Place:
    module_name, _, param_name = name.rpartition(".")
    return _Place(layer.get_submodule(module_name), param_name)


class MegatronAdapter(HFAdapter):
    compiles_by_default = False

    def replace_layers(self, layout: Layout, settings: Settings) -> None:
        self._layers = use_megatron_layers(self.model, layout)

    def cut_stage(self, link: StageLink, skeleton: nn.Module | None) -> None:
        super().cut_stage(link, skeleton)
        stage_modules = set(self.model.modules())
        mark_ends([forward for forward in self._layers if forward.layer in stage_modules])

    def preflight(self, layout: Layout, exact: bool) -> None:
        super().preflight(layout, exact)
        if self.model.padded_rows:  # padded rows run transformers' own layers
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


# The models and settings that the Megatron backend supports. Errors for others name the setting to change.

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
    decoder: Any = model.decoder()
    for name, _ in decoder.layers.named_parameters():
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
    """Whether a setting is on: for the whole model, or in a mapping for any part of it."""
    return any(setting.values()) if isinstance(setting, Mapping) else bool(setting)


def _refuse(reason: str) -> UserError:
    return UserError(f"model.backend=megatron: {reason}. Set model.backend=fsdp")

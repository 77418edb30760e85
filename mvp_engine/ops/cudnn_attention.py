"""cuDNN's attention over packed sequences, without a host sync: a fast kernel on Hopper and Blackwell.

Legend: T tokens of all sequences, H query heads, K key/value heads, d head size.

Graphs and plans are in `mvp_engine.ops.cudnn_attention`.
"""

from __future__ import annotations

import atexit
import importlib.util
import threading
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from mvp_engine.ops.attn_spec import AttnSpec, attention_operator, round_up_to_bucket

INSTALLED = importlib.util.find_spec("cudnn") is not None
_MAX_ELEMENTS = 2**31 - 1  # ragged offsets are 32-bit numbers of elements
COMMON_HEAD = 128  # the largest head that all versions support
LARGEST_HEAD = 256  # as Gemma and Qwen3.5 have them


def _has_ragged_kernels(device: int) -> bool:
    """Hopper and Blackwell have kernels for packed sequences, forward and backward."""
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


def _has_large_heads(device: int) -> bool:
    """Whether this cuDNN has kernels for heads of more than 128, forward and backward: it can plan both."""
    return can_build(device, LARGEST_HEAD)


# What torch.compiler.assume_constant_result sets; calling it imports torch._dynamo, which takes half a second.
for _constant in (_has_ragged_kernels, _has_large_heads):
    _constant._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_supported(q: Tensor, spec: AttnSpec, k: Tensor | None = None) -> bool:
    """cuDNN computes this attention: a window must be causal, and torch's FlashAttention is faster where no sequence is
    longer than 64 tokens."""
    if not INSTALLED or not q.is_cuda or q.dtype not in DTYPES:
        return False
    head_size = q.shape[-1]
    if head_size % 16 or head_size > LARGEST_HEAD or spec.max_seqlen_k <= 64:
        return False
    if spec.window is not None and not spec.causal:
        return False
    elements = max(q.numel(), 0 if k is None else k.numel())
    device = q.device.index
    if elements > _MAX_ELEMENTS or not _has_ragged_kernels(device):
        return False
    return head_size <= COMMON_HEAD or _has_large_heads(device)


def _forward(  # type: ignore[no-untyped-def]
    q, k, v, cu_seqlens, cu_seqlens_k, *options
) -> tuple[Tensor, Tensor]:
    q = q.contiguous()
    k = k.contiguous()
    out = torch.empty_like(q)
    stats = q.new_empty(_stats_shape(q), dtype=torch.float32)
    plan = Plan.of(q, k, len(cu_seqlens) - 1, *options)
    tensors = {"q": q, "k": k, "v": v.contiguous(), "o": out, "stats": stats}
    run(plan, cu_seqlens, False, tensors, cu_seqlens_k)
    return out, stats


def _backward(  # type: ignore[no-untyped-def]
    d_out, q, k, v, out, stats, cu_seqlens, cu_seqlens_k, *options
) -> tuple[Tensor, ...]:
    q = q.contiguous()
    k = k.contiguous()
    v = v.contiguous()
    gradients = {"dq": torch.empty_like(q), "dk": torch.empty_like(k), "dv": torch.empty_like(v)}
    plan = Plan.of(q, k, len(cu_seqlens) - 1, *options)
    inputs = {"q": q, "k": k, "v": v, "o": out, "do": d_out.contiguous(), "stats": stats}
    run(plan, cu_seqlens, True, inputs | gradients, cu_seqlens_k)
    return tuple(gradients.values())


def _stats_shape(q_THd: Tensor) -> tuple[int, ...]:
    return (*q_THd.shape[:2], 1)


cudnn_attention = attention_operator("ragged_attention", _forward, _backward, _stats_shape)


# cuDNN graphs of attention over packed sequences: build an execution plan once, run it on tensors.
#
# Legend: T tokens of all sequences, S sequences, H query heads, K key/value heads, d head size.
#
# `nvidia-cudnn-frontend` describes one attention as a graph; cuDNN, which torch ships, plans and runs it. A plan takes
# a tenth of a second to build and fits one number of sequences and one maximum length, so both are rounded up: the
# extra sequences have length 0. The autograd operator on top of this is in `mvp_engine.ops.cudnn_attention`.

DTYPES = {torch.bfloat16: "BFLOAT16", torch.float16: "HALF"}  # torch's dtype -> cuDNN's
_FORWARD_INPUTS = ("q", "k", "v")
_BACKWARD_INPUTS = ("q", "k", "v", "o", "do", "stats")
_KV_TENSORS = ("k", "v", "dk", "dv")
_OFFSETS = WeakTensorKeyDictionary()  # cu_seqlens -> its ragged offsets, which die with it
_thread_local = threading.local()


@dataclass(frozen=True)
class Plan:
    """All values that an execution plan of cuDNN depends on: the key of the cache of built graphs."""

    device: int
    dtype: torch.dtype
    sequences: int
    max_seqlen: int
    tokens: int  # upper bound for all sequences together
    heads: int
    kv_heads: int
    head_size: int
    scale: float
    causal: bool
    window: int  # 0: no window
    deterministic: bool
    max_seqlen_k: int  # of the keys
    tokens_k: int
    bottom_right: bool  # causality and window count from the end of the keys, else from their begin

    @classmethod
    def of(
        cls,
        q_THd: Tensor,
        k_TKd: Tensor,
        sequences: int,
        max_seqlen: int,
        max_seqlen_k: int,
        scale: float,
        causal: bool,
        window: int,
        bottom_right: bool = False,
    ) -> Plan:
        """The plan for these tensors, with sizes rounded up so that packed batches share plans."""
        return cls(
            device=q_THd.device.index,
            dtype=q_THd.dtype,
            sequences=round_up_to_bucket(sequences, 2),
            max_seqlen=round_up_to_bucket(max_seqlen, 128),
            # The number of tokens only sizes a buffer, so powers of two are enough: fewer plans to build.
            tokens=_power_of_two(len(q_THd)),
            heads=q_THd.shape[1],
            kv_heads=k_TKd.shape[1],
            head_size=q_THd.shape[2],
            scale=scale,
            causal=causal,
            window=window,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            max_seqlen_k=round_up_to_bucket(max_seqlen_k, 128),
            tokens_k=_power_of_two(len(k_TKd)),
            bottom_right=bottom_right,
        )


def _power_of_two(tokens: int) -> int:
    return 1 << max(12, (tokens - 1).bit_length())


class _Shape(NamedTuple):
    """How cuDNN addresses a packed tensor: dense strides of (S, heads, max_seqlen, d), and an offset per sequence."""

    dim: list[int]
    stride: list[int]
    dtype: Any
    offsets: str  # the name of the tensor of ragged offsets


class _Graph(NamedTuple):
    """A built graph that is ready to run."""

    graph: Any
    tensors: dict[str, Any]  # cuDNN's tensor handles by name
    workspace_bytes: int


def run(
    plan: Plan,
    cu_seqlens: Tensor,
    backward: bool,
    tensors: dict[str, Tensor],
    cu_seqlens_k: Tensor | None = None,
) -> None:
    """Run the forward or backward graph of a plan, without a host sync.

    `tensors` holds inputs and outputs by name, contiguous, (T, heads, d); `stats` is (T, heads, 1). Outputs are written
    in place. `cu_seqlens_k`: the boundaries of the keys, if they are not those of the queries.
    """
    built = _build(plan, backward)
    cu_seqlens_k = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
    row = plan.head_size
    of_queries = _offsets(cu_seqlens, len(tensors["q"]), plan.sequences, row * plan.heads)
    of_keys = _offsets(cu_seqlens_k, len(tensors["k"]), plan.sequences, row * plan.kv_heads)
    offsets = {
        "lengths": of_queries.lengths,
        "lengths_k": of_keys.lengths,
        "at_q": of_queries.at,
        "at_kv": of_keys.at,
        "at_stats": _offsets(cu_seqlens, len(tensors["q"]), plan.sequences, plan.heads).at,
    }
    arguments = {built.tensors[name]: tensor for name, tensor in (tensors | offsets).items()}
    workspace = torch.empty(built.workspace_bytes, dtype=torch.uint8, device=cu_seqlens.device)
    built.graph.execute(arguments, workspace, handle=_handle(plan.device))


@lru_cache(maxsize=256)
def _build(plan: Plan, backward: bool) -> _Graph:
    import cudnn

    graph = cudnn.pygraph(
        io_data_type=getattr(cudnn.data_type, DTYPES[plan.dtype]),
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=_handle(plan.device),
    )
    tensors = _index_tensors(graph, plan)
    for name in _BACKWARD_INPUTS if backward else _FORWARD_INPUTS:
        shape = _shape(plan, name)
        tensors[name] = graph.tensor(dim=shape.dim, stride=shape.stride, data_type=shape.dtype)
        tensors[name].set_ragged_offset(tensors[shape.offsets])
    add_attention = _add_backward if backward else _add_forward
    outputs = add_attention(graph, plan, tensors)
    for name, tensor in outputs.items():
        shape = _shape(plan, name)
        tensor.set_output(True)
        tensor.set_dim(shape.dim)
        tensor.set_stride(shape.stride)
        tensor.set_data_type(shape.dtype)
        tensor.set_ragged_offset(tensors[shape.offsets])
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    workspace_bytes = max(1, graph.get_workspace_size())  # an empty tensor has no address
    return _Graph(graph, tensors | outputs, workspace_bytes)


atexit.register(_build.cache_clear)  # graphs must be freed before Python unloads cuDNN's library


@cache
def can_build(device: int, head_size: int) -> bool:
    """Whether cuDNN plans causal attention with heads of this size, forward and backward."""
    import cudnn

    plan = Plan(
        device=device,
        dtype=torch.bfloat16,
        sequences=2,
        max_seqlen=256,
        tokens=4096,
        heads=8,
        kv_heads=1,
        head_size=head_size,
        scale=1.0,
        causal=True,
        window=0,
        deterministic=False,
        max_seqlen_k=256,
        tokens_k=4096,
        bottom_right=False,
    )
    try:
        _build(plan, False)
        _build(plan, True)
    except (RuntimeError, cudnn.cudnnGraphNotSupportedError):
        return False
    return True


def _index_tensors(graph: Any, plan: Plan) -> dict[str, Any]:
    """The int32 inputs: the length of each sequence, and where it begins in each kind of tensor."""
    import cudnn

    rows = {
        "lengths": plan.sequences,
        "lengths_k": plan.sequences,
        "at_q": plan.sequences + 1,
        "at_kv": plan.sequences + 1,
        "at_stats": plan.sequences + 1,
    }
    stride = [1, 1, 1, 1]
    int32 = cudnn.data_type.INT32
    return {
        name: graph.tensor(dim=[count, 1, 1, 1], stride=stride, data_type=int32)
        for name, count in rows.items()
    }


def _shape(plan: Plan, name: str) -> _Shape:
    import cudnn

    is_kv = name in _KV_TENSORS
    length = plan.max_seqlen_k if is_kv else plan.max_seqlen
    if name == "stats":
        dim = [plan.sequences, plan.heads, length, 1]
        stride = [length * plan.heads, 1, plan.heads, 1]
        return _Shape(dim, stride, cudnn.data_type.FLOAT, "at_stats")
    heads = plan.kv_heads if is_kv else plan.heads
    size = plan.head_size
    dim = [plan.sequences, heads, length, size]
    stride = [length * heads * size, size, heads * size, 1]
    dtype = getattr(cudnn.data_type, DTYPES[plan.dtype])
    return _Shape(dim, stride, dtype, "at_kv" if is_kv else "at_q")


def _attention_options(plan: Plan, tensors: dict[str, Any]) -> dict[str, Any]:
    import cudnn

    options: dict[str, Any] = {"attn_scale": plan.scale, "use_padding_mask": True}
    options["seq_len_q"] = tensors["lengths"]
    options["seq_len_kv"] = tensors["lengths_k"]
    if plan.causal:
        alignment = cudnn.diagonal_alignment
        options["diagonal_alignment"] = (
            alignment.BOTTOM_RIGHT if plan.bottom_right else alignment.TOP_LEFT
        )
        options["diagonal_band_right_bound"] = 0
    if plan.window:
        options["diagonal_band_left_bound"] = plan.window
    return options


def _add_forward(graph: Any, plan: Plan, tensors: dict[str, Any]) -> dict[str, Any]:
    inputs = [tensors[name] for name in _FORWARD_INPUTS]
    out, stats = graph.sdpa(*inputs, generate_stats=True, **_attention_options(plan, tensors))
    return {"o": out, "stats": stats}


def _add_backward(graph: Any, plan: Plan, tensors: dict[str, Any]) -> dict[str, Any]:
    inputs = [tensors[name] for name in _BACKWARD_INPUTS]
    options = _attention_options(plan, tensors)
    options["max_total_seq_len_q"] = plan.tokens
    options["max_total_seq_len_kv"] = plan.tokens_k
    options["use_deterministic_algorithm"] = plan.deterministic
    gradients = graph.sdpa_backward(*inputs, **options)
    return dict(zip(("dq", "dk", "dv"), gradients, strict=True))


def _handle(device: int) -> Any:
    """cuDNN's handle of this thread and device, on the current stream. Autograd's backward thread has its own."""
    import cudnn

    handles = _thread_local.__dict__.setdefault("handles", {})
    if device not in handles:
        with torch.cuda.device(device):
            handles[device] = cudnn.create_handle()
    cudnn.set_stream(handle=handles[device], stream=torch.cuda.current_stream(device).cuda_stream)
    return handles[device]


class _Offsets(NamedTuple):
    lengths: Tensor  # of each sequence
    at: Tensor  # where each begins, in elements


def _offsets(cu_seqlens: Tensor, tokens: int, sequences: int, row_size: int) -> _Offsets:
    """Lengths and ragged offsets, in elements (int32: `is_supported` limits their size) of rows of this size.

    All layers of a forward share them; they must run on one stream. The last offset is the number of tokens, so the
    sequences that pad a plan have length 0. An in-place edit of `cu_seqlens` changes its version, and so the key.
    """
    cached = _OFFSETS.setdefault(cu_seqlens, {})
    key = (cu_seqlens._version, sequences, row_size)
    if key not in cached:
        missing = sequences + 1 - len(cu_seqlens)
        padded = F.pad(cu_seqlens, (0, missing), value=tokens) if missing else cu_seqlens
        cached[key] = _Offsets(padded.diff(), padded * row_size)
    return cached[key]

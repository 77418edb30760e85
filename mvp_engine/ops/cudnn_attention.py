"""cuDNN's attention over packed sequences as a torch operator: the fastest kernel there is on Hopper and Blackwell.

Legend: T tokens of all sequences, S sequences, H query heads, K key/value heads, d head size.

`nvidia-cudnn-frontend` describes one attention as a graph; cuDNN, which torch ships, plans and runs it. A plan takes a
tenth of a second to make and is good for one number of sequences and one longest length, so both are rounded up: to the
missing sequences cuDNN is told that they are empty. The operator knows its shapes without running (torch.compile),
computes gradients by a second operator (recomputation), and never waits for the GPU.
"""

from __future__ import annotations

import atexit
import importlib.util
import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

INSTALLED = importlib.util.find_spec("cudnn") is not None
_MOST_ELEMENTS = 2**31 - 1  # offsets are 32-bit numbers of elements
_DTYPES = {torch.bfloat16: "BFLOAT16", torch.float16: "HALF"}
_OFFSETS = WeakTensorKeyDictionary()  # of boundaries, for as long as these live
_threads = threading.local()


def _served(device: int) -> bool:
    """Are there ragged kernels, forward and backward, for this GPU?"""
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


_served._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler's decorator imports half a second


def can(q_THd: Tensor, longest: int, causal: bool, window: int | None) -> bool:
    """Is this attention one that cuDNN computes here, and quickest? A window must be a causal one; where no sequence
    is longer than 64, FlashAttention is quicker."""
    size = q_THd.shape[-1]
    if (
        not INSTALLED
        or not q_THd.is_cuda
        or q_THd.dtype not in _DTYPES
        or size % 16
        or size > 128
        or longest <= 64
    ):
        return False
    return (
        (causal or window is None)
        and q_THd.numel() <= _MOST_ELEMENTS
        and _served(q_THd.device.index)
    )


def ragged_attention(
    q_THd: Tensor,
    k_TKd: Tensor,
    v_TKd: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    scale: float | None,
    causal: bool,
    window: int | None,
) -> Tensor:
    """(T, H, d); with a window, a token sees itself and `window - 1` before it."""
    scale = q_THd.shape[-1] ** -0.5 if scale is None else scale
    out, _ = _forward(q_THd, k_TKd, v_TKd, cu_seqlens, longest, scale, causal, window or 0)
    return out


@dataclass(frozen=True)
class _Plan:
    """All that a graph depends on."""

    device: int
    dtype: torch.dtype
    sequences: int
    longest: int
    tokens: int  # at most
    heads: int
    kv_heads: int
    size: int
    scale: float
    causal: bool
    window: int  # 0: none
    deterministic: bool


def round_up(n: int, least: int) -> int:
    """To a power of two, or one and a half of one."""
    size = least
    while size < n:
        if size * 3 // 2 >= n:
            return size * 3 // 2
        size *= 2
    return size


def _plan(
    q_THd: Tensor,
    k_TKd: Tensor,
    sequences: int,
    longest: int,
    scale: float,
    causal: bool,
    window: int,
) -> _Plan:
    tokens, heads, size = q_THd.shape
    deterministic = torch.are_deterministic_algorithms_enabled()
    # The number of tokens only sizes a buffer, so it is rounded more: fewer plans to make.
    rounded = (
        round_up(sequences, 2),
        round_up(longest, 128),
        1 << max(12, (tokens - 1).bit_length()),
    )
    shape = (*rounded, heads, k_TKd.shape[1], size)
    return _Plan(q_THd.device.index, q_THd.dtype, *shape, scale, causal, window, deterministic)


@lru_cache(maxsize=256)
def _graph(plan: _Plan, backward: bool) -> tuple[Any, dict[str, Any], int]:
    """A graph that is ready to run, its tensors by name, and how many bytes it wants to work in."""
    import cudnn

    kinds = cudnn.data_type
    io = getattr(kinds, _DTYPES[plan.dtype])
    graph = cudnn.pygraph(
        io_data_type=io,
        intermediate_data_type=kinds.FLOAT,
        compute_data_type=kinds.FLOAT,
        handle=_handle(plan.device),
    )
    count, length, size = plan.sequences, plan.longest, plan.size
    made: dict[str, Any] = {}
    for name, rows in {
        "lengths": count,
        "at_q": count + 1,
        "at_kv": count + 1,
        "at_stats": count + 1,
    }.items():
        made[name] = graph.tensor(dim=[rows, 1, 1, 1], stride=[1, 1, 1, 1], data_type=kinds.INT32)

    def described(name: str) -> tuple[list[int], list[int], Any, str]:
        """Dimensions, strides, type, and which offsets say where sequences begin: as if each had `longest` tokens."""
        if name == "stats":
            return (
                [count, plan.heads, length, 1],
                [length * plan.heads, 1, plan.heads, 1],
                kinds.FLOAT,
                "at_stats",
            )
        kv = name in ("k", "v", "dk", "dv")
        heads = plan.kv_heads if kv else plan.heads
        strides = [length * heads * size, size, heads * size, 1]
        return [count, heads, length, size], strides, io, "at_kv" if kv else "at_q"

    for name in ("q", "k", "v", "o", "do", "stats") if backward else ("q", "k", "v"):
        dim, stride, kind, where = described(name)
        made[name] = graph.tensor(dim=dim, stride=stride, data_type=kind)
        made[name].set_ragged_offset(made[where])
    options: dict[str, Any] = {"attn_scale": plan.scale, "use_padding_mask": True}
    options |= {"seq_len_q": made["lengths"], "seq_len_kv": made["lengths"]}
    if plan.causal:
        options |= {
            "diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT,
            "diagonal_band_right_bound": 0,
        }
    if plan.window:
        options["diagonal_band_left_bound"] = plan.window
    if backward:
        options |= {"max_total_seq_len_q": plan.tokens, "max_total_seq_len_kv": plan.tokens}
        inputs = (made[name] for name in ("q", "k", "v", "o", "do", "stats"))
        given = graph.sdpa_backward(
            *inputs, use_deterministic_algorithm=plan.deterministic, **options
        )
        outputs = dict(zip(("dq", "dk", "dv"), given, strict=True))
    else:
        given = graph.sdpa(made["q"], made["k"], made["v"], generate_stats=True, **options)
        outputs = dict(zip(("o", "stats"), given, strict=True))
    for name, tensor in outputs.items():
        dim, stride, kind, where = described(name)
        tensor.set_output(True).set_dim(dim).set_stride(stride).set_data_type(
            kind
        ).set_ragged_offset(made[where])
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    return graph, made | outputs, max(1, graph.get_workspace_size())


atexit.register(_graph.cache_clear)  # before the library that the graphs belong to is gone


def _handle(device: int) -> Any:
    """cuDNN's handle of this thread (backward has its own) and device."""
    import cudnn

    handles = _threads.__dict__.setdefault("handles", {})
    if device not in handles:
        with torch.cuda.device(device):
            handles[device] = cudnn.create_handle()
    cudnn.set_stream(handle=handles[device], stream=torch.cuda.current_stream(device).cuda_stream)
    return handles[device]


def _run(plan: _Plan, cu_seqlens: Tensor, backward: bool, tensors: dict[str, Tensor]) -> None:
    graph, made, workspace = _graph(plan, backward)
    where = _offsets(
        cu_seqlens, len(tensors["q"]), plan.sequences, plan.heads, plan.kv_heads, plan.size
    )
    pack = {made[name]: tensor for name, tensor in (tensors | where).items()}
    room = torch.empty(workspace, dtype=torch.uint8, device=cu_seqlens.device)
    graph.execute(pack, room, handle=_handle(plan.device))


def _offsets(
    cu_seqlens: Tensor, tokens: int, sequences: int, heads: int, kv_heads: int, size: int
) -> dict[str, Tensor]:
    """Where sequences begin, in elements. All layers of a pass ask for the same, on the same stream."""
    kept = _OFFSETS.setdefault(cu_seqlens, {})
    key = (cu_seqlens._version, sequences, heads, kv_heads, size)
    if key not in kept:
        missing = sequences + 1 - len(cu_seqlens)
        ends = (
            torch.nn.functional.pad(cu_seqlens, (0, missing), value=tokens)
            if missing
            else cu_seqlens
        )
        kept[key] = {"lengths": ends.diff(), "at_stats": ends * heads}
        kept[key] |= {"at_q": ends * (heads * size), "at_kv": ends * (kv_heads * size)}
    return kept[key]


_HOW = "Tensor cu_seqlens, SymInt longest, float scale, bool causal, int window"


@torch.library.custom_op(
    "mvp::ragged_attention",
    mutates_args=(),
    device_types="cuda",
    schema=f"(Tensor q, Tensor k, Tensor v, {_HOW}) -> (Tensor, Tensor)",
)
def _forward(q, k, v, cu_seqlens, longest, scale, causal, window):  # type: ignore[no-untyped-def]
    q, k, v = (x.contiguous() for x in (q, k, v))
    out, stats = torch.empty_like(q), q.new_empty(*q.shape[:2], 1, dtype=torch.float32)
    plan = _plan(q, k, len(cu_seqlens) - 1, longest, scale, causal, window)
    _run(plan, cu_seqlens, False, {"q": q, "k": k, "v": v, "o": out, "stats": stats})
    return out, stats


@torch.library.custom_op(
    "mvp::ragged_attention_backward",
    mutates_args=(),
    device_types="cuda",
    schema=f"(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor stats, {_HOW}) "
    "-> (Tensor, Tensor, Tensor)",
)
def _backward(d_out, q, k, v, out, stats, cu_seqlens, longest, scale, causal, window):  # type: ignore[no-untyped-def]
    q, k, v, d_out = (x.contiguous() for x in (q, k, v, d_out))
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    plan = _plan(q, k, len(cu_seqlens) - 1, longest, scale, causal, window)
    tensors = {
        "q": q,
        "k": k,
        "v": v,
        "o": out,
        "do": d_out,
        "stats": stats,
        "dq": dq,
        "dk": dk,
        "dv": dv,
    }
    _run(plan, cu_seqlens, True, tensors)
    return dq, dk, dv


@_forward.register_fake
def _(q, k, v, *how):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape), q.new_empty(*q.shape[:2], 1, dtype=torch.float32)


@_backward.register_fake
def _(d_out, q, k, v, *more):  # type: ignore[no-untyped-def]
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, *ctx.how = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, d_out: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if d_out is None:
        return (None,) * 8
    *tensors, cu_seqlens = ctx.saved_tensors
    return (*_backward(d_out, *tensors, cu_seqlens, *ctx.how), None, None, None, None, None)


_forward.register_autograd(_differentiate, setup_context=_remember)

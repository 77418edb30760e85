"""Throughput of packed causal attention kernels on one GPU, by mix of sequence lengths.

    PYTHONPATH=. python benchmarks/packed_attention.py --out benchmarks/results/packed_attention.json
    python benchmarks/packed_attention.py --dry    # the mixes and their FLOPs, without a GPU
    python benchmarks/packed_attention.py --special    # soft caps and sinks: FlexAttention against the reference loop

Legend: T tokens of all sequences, L of one, S sequences, H query heads, K key/value heads, G = H / K, d head size.

Every kernel gets the same (T, H, d) and (T, K, d) tensors in bfloat16. Its output and its three gradients are first
compared with plain float32 attention, one sequence at a time: the table has the largest difference, relative to the
largest value. Forward and backward are timed separately with CUDA events, as the median of all rounds; before each, a
write of 1 GiB flushes the L2 cache and lets the host run ahead of the GPU. FLOPs count the causal triangles of the
sequences: 4 H d L (L + 1) / 2 for forward, 2.5 times that for backward. Reported separately: the time of the first call
(compilation, cuDNN's graphs), and of FlexAttention's block mask, which each new mix of lengths needs. The row of a
kernel that fails or is wrong has the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.sft.data import chat_pack
from mvp_engine.hf.model.attention import boundaries, packed_attention
from mvp_engine.ops import attention, cudnn_attention, flash_attention, flex_attention

H = 16
K = 8
D = 128
SCALE = D**-0.5
TOLERANCE = 2e-2  # relative to the largest value: bfloat16 has 8 significant bits, and probabilities are rounded to it
WARMUP = 3
FIGURES = ("forward_ms", "forward_tflops", "backward_ms", "backward_tflops")


@dataclass(frozen=True)
class Mix:
    name: str
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def forward_flops(self) -> int:
        return 4 * H * D * sum(n * (n + 1) // 2 for n in self.lengths)

    @property
    def backward_flops(self) -> int:
        return self.forward_flops * 5 // 2


def _drawn(count: int, low: int, high: int) -> Mix:
    dice = random.Random(0)
    return Mix(f"{count} of {low}..{high}", tuple(dice.randint(low, high) for _ in range(count)))


MIXES = [
    Mix("chats of recipes.py", tuple(chat_pack(65536))),
    Mix("8 x 4096", (4096,) * 8),
    _drawn(16, 200, 4000),
    Mix("1 x 16384", (16384,)),
    Mix("64 x 512", (512,) * 64),
    _drawn(128, 20, 500),
]


@dataclass
class Case:
    """One mix with its tensors, and the results of plain float32 attention on them: out, dq, dk, dv."""

    mix: Mix
    inputs: tuple[Tensor, ...]  # q (T, H, d), k and v (T, K, d)
    d_out: Tensor  # (T, H, d)
    cu_seqlens: Tensor
    expected: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, mix: Mix, device: str) -> Case:
        g = torch.Generator(device).manual_seed(0)
        *qkv, d_out = (torch.randn(mix.tokens, h, D, device=device, generator=g).bfloat16() for h in (H, K, K, H))
        ends = torch.tensor([0, *mix.lengths]).cumsum(0)
        case = cls(mix, tuple(x.requires_grad_() for x in qkv), d_out, ends.int().to(device))
        case.expected = reference(case)
        return case


def reference(case: Case) -> tuple[Tensor, ...]:
    """Plain attention, one sequence and one key/value head at a time, so that the longest fits into memory."""
    given = [t.detach().float() for t in (*case.inputs, case.d_out)]
    out_THd = torch.empty_like(given[0])
    dq_THd = torch.empty_like(given[0])
    dk_TKd = torch.empty_like(given[1])
    dv_TKd = torch.empty_like(given[2])
    start = 0
    for length in case.mix.lengths:
        rows = slice(start, start + length)
        start += length
        future_LL = torch.ones(length, length, dtype=torch.bool, device=given[0].device).triu(1)
        for head in range(K):
            group = slice(head * H // K, (head + 1) * H // K)
            q_GLd = given[0][rows, group].transpose(0, 1).detach().requires_grad_()
            k_Ld, v_Ld = (given[i][rows, head].detach().requires_grad_() for i in (1, 2))
            scores_GLL = (q_GLd @ k_Ld.T * SCALE).masked_fill(future_LL, float("-inf"))
            out_GLd = scores_GLL.softmax(-1) @ v_Ld
            d_out_GLd = given[3][rows, group].transpose(0, 1)
            grads = torch.autograd.grad(out_GLd, (q_GLd, k_Ld, v_Ld), d_out_GLd)
            out_THd[rows, group] = out_GLd.detach().transpose(0, 1)
            dq_THd[rows, group] = grads[0].transpose(0, 1)
            dk_TKd[rows, head] = grads[1]
            dv_TKd[rows, head] = grads[2]
    return out_THd, dq_THd, dk_TKd, dv_TKd


@dataclass
class Kernel:
    """`forward` returns (T, H, d); `backward` returns dq, dk, dv for it. `note` is a column of the table."""

    forward: Callable[[], Tensor]
    backward: Callable[[Tensor], tuple[Tensor, ...]]
    note: str = ""


def _with_autograd(case: Case, attend: Callable[..., Tensor], note: str = "") -> Kernel:
    def backward(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, case.inputs, case.d_out)

    return Kernel(lambda: attend(*case.inputs), backward, note)


def ours(case: Case) -> Kernel:
    """What the layers of a model call: FlashAttention 4 or cuDNN's ragged kernels, if they are installed."""
    layer: Any = nn.Module()
    where = boundaries(case.cu_seqlens, max(case.mix.lengths))

    def attend(*qkv: Tensor) -> Tensor:
        heads_first = [x.transpose(0, 1)[None] for x in qkv]
        return packed_attention(layer, *heads_first, None, **where)[0][0]

    return _with_autograd(case, attend)


# The function of each kernel that decides whether it supports a case.
FLASH = (flash_attention, "is_supported")
CUDNN = (cudnn_attention, "is_supported")
TORCH_VARLEN = (attention, "_torch_varlen_is_supported")
FLEX = (flex_attention, "is_supported")


def _without(*kernels: tuple[Any, str]) -> Callable[[Case], Kernel]:
    """The same call where these kernels report that they do not support it."""

    def build(case: Case) -> Kernel:
        kernel = ours(case)

        def attend(*_: Tensor) -> Tensor:
            with contextlib.ExitStack() as off:
                for module, name in kernels:
                    off.enter_context(mock.patch.object(module, name, return_value=False))
                return kernel.forward()

        return _with_autograd(case, attend)

    return build


@cache
def _compiled_flex() -> Any:
    # One kernel per number of tokens: the best case of FlexAttention.
    return torch.compile(torch_flex_attention, dynamic=False)


def flex(case: Case) -> Kernel:
    """FlexAttention, compiled, with a block mask for causal documents."""
    lengths = case.cu_seqlens.diff()
    sequence_T = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)

    def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (sequence_T[q] == sequence_T[k]) & (q >= k)

    sizes = (None, None, case.mix.tokens, case.mix.tokens)
    mask = create_block_mask(allowed, *sizes, device=str(lengths.device))
    mask_ms = timed(lambda _: create_block_mask(allowed, *sizes, device=str(lengths.device)), rounds=3)

    def attend(*qkv: Tensor) -> Tensor:
        heads_first = [x.transpose(0, 1)[None] for x in qkv]
        return _compiled_flex()(*heads_first, block_mask=mask, enable_gqa=True)[0].transpose(0, 1)

    return _with_autograd(case, attend, f"block mask, not compiled: {mask_ms:.1f} ms")


def dense(case: Case) -> Kernel | None:
    """An upper bound where all lengths are equal: cuDNN on an unpacked (S, H, L, d) batch."""
    if len(set(case.mix.lengths)) > 1:
        return None
    count, length = len(case.mix.lengths), case.mix.lengths[0]

    def attend(*qkv: Tensor) -> Tensor:
        batched = [x.unflatten(0, (count, length)).transpose(1, 2) for x in qkv]
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out_SHLd = F.scaled_dot_product_attention(*batched, is_causal=True, enable_gqa=True)
        return out_SHLd.transpose(1, 2).flatten(0, 1)

    return _with_autograd(case, attend)


KERNELS: dict[str, Callable[[Case], Kernel | None]] = {
    "as chosen: FlashAttention 4 on Hopper": ours,
    "cuDNN, ragged": _without(FLASH),
    "varlen_attn (FlashAttention 2)": _without(FLASH, CUDNN),
    "SDPA per sequence": _without(FLASH, CUDNN, TORCH_VARLEN, FLEX),
    "cuDNN SDPA, dense (ceiling)": dense,
    "FlexAttention": flex,
}


@cache
def _cache_filler() -> Tensor:
    return torch.empty(1 << 30, dtype=torch.int8, device="cuda")


def timed(run: Callable[[Any], Any], prepare: Callable[[], Any] = lambda: None, rounds: int = 15) -> float:
    """Median milliseconds of `run(prepare())`, without the preparation."""
    pairs = []
    for _ in range(WARMUP + rounds):
        given = prepare()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        _cache_filler().zero_()
        start.record()
        run(given)
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs[WARMUP:])


def measure(name: str, case: Case, rounds: int, late: bool = False) -> dict[str, Any] | None:
    """A row of the table: figures, or the reason why they are missing. None where the kernel has no such case."""
    row: dict[str, Any] = {"mix": case.mix.name, "kernel": name}
    try:
        if late:
            raise TimeoutError("not run, time was up")
        started = time.perf_counter()
        kernel = KERNELS[name](case)
        if kernel is None:
            return None
        out = kernel.forward()
        found = (out, *kernel.backward(out))
        worst = [float((a.detach() - b).abs().max() / b.abs().max()) for a, b in zip(found, case.expected, strict=True)]
        row |= {"first_call_s": round(time.perf_counter() - started, 2), "note": kernel.note}
        row["error"] = dict(zip(("out", "dq", "dk", "dv"), worst, strict=True))
        if not all(error <= TOLERANCE for error in worst):  # also for NaN
            raise ValueError(f"wrong by {', '.join(f'{key} {value:.1e}' for key, value in row['error'].items())}")
        del out, found
        forward_ms = timed(lambda _: kernel.forward(), rounds=rounds)
        backward_ms = timed(kernel.backward, kernel.forward, rounds)
        rates = (case.mix.forward_flops / forward_ms / 1e9, case.mix.backward_flops / backward_ms / 1e9)
        row |= dict(zip(FIGURES, (forward_ms, rates[0], backward_ms, rates[1]), strict=True))
    except Exception as error:  # noqa: BLE001 - goes into the table
        traceback.print_exc()
        row["why"] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200].replace("|", "/")
    return row


def special(rounds: int) -> str:
    """A layer with a soft cap, and one with sinks, on 16 log-normal lengths of 16k tokens."""
    dice = random.Random(0)
    drawn = [dice.lognormvariate(0, 1) for _ in range(16)]
    case = Case.of(Mix("log-normal", tuple(round(16384 * one / sum(drawn)) for one in drawn)), "cuda")
    layer: Any = nn.Module()
    where = boundaries(case.cu_seqlens, max(case.mix.lengths))
    sinks = torch.zeros(H, device="cuda", requires_grad=True)
    kinds: dict[str, dict[str, Any]] = {"soft cap": {"softcap": 50.0}, "sinks": {"s_aux": sinks}}
    lines = [f"lengths {case.mix.lengths}", "| layer | way | forward ms | backward ms | peak GiB | first call s |"]
    lines.append("| --- | --- | ---: | ---: | ---: | ---: |")
    for kind, how in kinds.items():
        for way in ("FlexAttention", "reference loop"):

            def attend(*qkv: Tensor, how: dict[str, Any] = how, way: str = way) -> Tensor:
                heads_first = [x.transpose(0, 1)[None] for x in qkv]
                with mock.patch.object(*FLEX, return_value=way == "FlexAttention"):
                    return packed_attention(layer, *heads_first, None, **where, **how)[0][0]

            kernel, started = _with_autograd(case, attend), time.perf_counter()
            torch.cuda.reset_peak_memory_stats()
            kernel.backward(kernel.forward())
            torch.cuda.synchronize()
            first, peak = time.perf_counter() - started, torch.cuda.max_memory_allocated() / 2**30
            times = (
                timed(lambda _, run=kernel: run.forward(), rounds=rounds),
                timed(kernel.backward, kernel.forward, rounds),
            )
            lines.append(f"| {kind} | {way} | {times[0]:.3f} | {times[1]:.3f} | {peak:.2f} | {first:.2f} |")
            print(lines[-1], file=sys.stderr, flush=True)
    spec = attention.AttnSpec(case.cu_seqlens, max(case.mix.lengths))
    mask_ms = timed(
        lambda _: (
            flex_attention._BLOCK_MASKS.clear(),
            flex_attention.block_mask_of(spec, case.mix.tokens),
        )
    )
    lines.append(f"block mask, once per pack and kind of layer: {mask_ms:.2f} ms")
    return "\n".join(lines)


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| mix | kernel | forward ms | TFLOP/s | backward ms | TFLOP/s | worst error | first call s | note |"]
    lines += ["| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |"]
    for row in rows:
        figures = [f"{row[key]:.3f}" if key in row else "-" for key in FIGURES]
        figures.append(f"{max(row['error'].values()):.1e}" if "error" in row else "-")
        figures.append(str(row.get("first_call_s", "-")))
        lines.append("| " + " | ".join([row["mix"], row["kernel"], *figures, row.get("why") or row["note"]]) + " |")
    return "\n".join(lines)


def mixes_table() -> str:
    lines = ["| mix | sequences | tokens | longest | forward TFLOP | backward TFLOP |"]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: |"]
    for mix in MIXES:
        flops = f"{mix.forward_flops / 1e12:.4f} | {mix.backward_flops / 1e12:.4f}"
        lines.append(f"| {mix.name} | {len(mix.lengths)} | {mix.tokens} | {max(mix.lengths)} | {flops} |")
    return "\n".join(lines)


def about() -> dict[str, Any]:
    gpu = torch.cuda.get_device_properties(0)
    versions = {name: getattr(sys.modules.get(name), "__version__", None) for name in ("torch", "triton", "cudnn")}
    versions |= {"python": platform.python_version(), "cuda": torch.version.cuda}
    versions["cudnn_frontend"], versions["cudnn"] = versions["cudnn"], torch.backends.cudnn.version()
    return {
        "hardware": f"{gpu.name}, {gpu.multi_processor_count} multiprocessors, {gpu.total_memory >> 30} GiB",
        "versions": versions,
        "command": "python benchmarks/packed_attention.py " + " ".join(sys.argv[1:]),
        "shape": {"query_heads": H, "key_value_heads": K, "head_size": D, "dtype": "bfloat16"},
        "mixes": {mix.name: list(mix.lengths) for mix in MIXES},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write all results to this JSON file")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=110, help="start no new measurement after this time")
    parser.add_argument("--kernels", nargs="*", default=[""], help="only kernels with one of these words in their name")
    parser.add_argument("--special", action="store_true", help="measure soft caps and sinks instead")
    parser.add_argument("--dry", action="store_true", help="only print the mixes and their FLOPs")
    args = parser.parse_args()
    if args.dry:
        print(mixes_table())
        return
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a GPU; --dry prints the mixes")
    torch.set_float32_matmul_precision("highest")
    if args.special:
        print(special(args.rounds))
        return
    started = time.perf_counter()
    cases = [Case.of(mix, "cuda") for mix in MIXES]
    rows: list[dict[str, Any]] = []
    selected = [name for name in KERNELS if any(word in name for word in args.kernels)]
    for name in selected:
        for case in cases:
            row = measure(name, case, args.rounds, time.perf_counter() - started > args.seconds)
            rows += [] if row is None else [row]
            print(row, file=sys.stderr, flush=True)
        if args.out:  # after each kernel: the next one may crash the process
            result = {**about(), "seconds": round(time.perf_counter() - started, 1), "rows": rows}
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(result, indent=2) + "\n")
    order = [mix.name for mix in MIXES]
    print(table(sorted(rows, key=lambda row: order.index(row["mix"]))))


if __name__ == "__main__":
    main()

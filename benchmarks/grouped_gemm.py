"""Grouped GEMMs of an experts layer with the permutation of tokens around them, on one GPU.

    PYTHONPATH=. python benchmarks/grouped_gemm.py --out benchmarks/results/grouped_gemm.json
    PYTHONPATH=. python benchmarks/grouped_gemm.py --tokens 64 --experts 8 --hidden 64 --inner 32    # on a CPU

A layer as in Qwen3-30B-A3B: 128 experts of 2,048 x 768, 8 of them for each token, float32 weights under bf16 autocast.
Tokens choose experts at random (`uniform`), or half of all choices are for an eighth of the experts (`skewed`). A line
is the forward and backward of one layer: from hidden states to their gradient and those of the weights. `ours` is what
models use in this engine, `transformers` its own grouped GEMM on weights that are bf16 already, and `compiled` ours by
Inductor; `fp8` and `compiled, fp8` are ours with `model.fp8`. `host_syncs` counts the times that the host waits for the
GPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.attempt import failure
from mvp_engine.files import atomic_write_text
from mvp_engine.hf.experts import moe_layers as ours

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CHOSEN = 8  # experts of a token
SIDES = ["ours", "transformers", "compiled", "fp8", "compiled, fp8"]


def layer(args: argparse.Namespace, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=args.hidden, moe_intermediate_size=args.inner, num_experts=args.experts
    )
    torch.manual_seed(0)
    with DEVICE:
        experts = Qwen3MoeExperts(config).to(dtype)
    for weight in experts.parameters():
        nn.init.normal_(weight, std=0.02)
    return experts


def routes(args: argparse.Namespace, skewed: bool) -> tuple[Tensor, Tensor]:
    """Experts of each token, and their weights."""
    scores = torch.rand(args.tokens, args.experts, device=DEVICE)
    if skewed:
        scores[:, : args.experts // 8] += 0.45
    index_TK = scores.topk(min(CHOSEN, args.experts)).indices
    return index_TK, torch.full(index_TK.shape, 1 / CHOSEN, device=DEVICE)


def measure(name: str, args: argparse.Namespace, skewed: bool) -> dict[str, Any]:
    from transformers.integrations.moe import grouped_mm_experts_forward

    is_theirs = name == "transformers"
    experts = layer(args, torch.bfloat16 if is_theirs else torch.float32)
    function: Callable[..., Tensor] = grouped_mm_experts_forward if is_theirs else ours.grouped_experts
    if name.endswith("fp8"):
        ours.use_fp8(experts)
    if name.startswith("compiled"):
        function = torch.compile(function)
    index_TK, weights_TK = routes(args, skewed)
    hidden_TD = torch.randn(args.tokens, args.hidden, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn_like(hidden_TD)

    def step() -> None:
        for value in (hidden_TD, *experts.parameters()):
            value.grad = None
        with torch.autocast(DEVICE.type, torch.bfloat16):
            out = function(experts, hidden_TD, index_TK, weights_TK)
        out.backward(gradient.to(out.dtype))

    times = []
    for _ in range(args.repeats):
        _wait()
        begin = time.perf_counter()
        for _ in range(5):
            step()
        _wait()
        times.append((time.perf_counter() - begin) / 5)
    seconds = statistics.median(times[1:])
    flops = 6 * index_TK.numel() * 3 * args.hidden * args.inner
    counts = index_TK.flatten().bincount(minlength=args.experts)
    return {
        "most_over_mean": float(counts.max() / counts.float().mean()),
        "ms": seconds * 1e3,
        "tflops_per_s": flops / seconds / 1e12,
        "host_syncs": _host_syncs(step),
    }


def _wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def _host_syncs(step: Callable[[], None]) -> int | None:
    if DEVICE.type != "cuda":
        return None
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(one.message) for one in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=768)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--sides", nargs="+", default=SIDES, choices=SIDES)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.repeats < 2:
        parser.error(f"--repeats {args.repeats}: the first one warms up, take 2 or more")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    gpu = torch.cuda.get_device_name() if DEVICE.type == "cuda" else None
    result: dict[str, Any] = {"gpu": gpu, "torch": torch.__version__, "python": platform.python_version(), "rows": []}
    for skewed in (False, True):
        for name in args.sides:
            row = {"side": name, "routing": "skewed" if skewed else "uniform"}
            try:
                row |= measure(name, args, skewed)
            except Exception as error:  # noqa: BLE001 - no such kernel on this GPU, say; the others are measured
                row |= failure(error)
            result["rows"].append(row)
            print(json.dumps(row), flush=True)
            if args.out:
                atomic_write_text(args.out, json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

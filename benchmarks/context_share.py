"""Speed of one context rank's attention against the same kernel on the whole pack, on one GPU, without communication.

    PYTHONPATH=. python benchmarks/context_share.py --out benchmarks/results/context_share.json
    PYTHONPATH=. python benchmarks/context_share.py --dry    # pairs and keys of each rank, without a GPU

Legend: T tokens of the pack, H query heads, K key/value heads, d head size.

The whole pack is the square case: each sequence attends to itself. A rank's share has the queries of its zigzag chunks
and the keys up to the end of each. Its time includes what the layer does after the gather: the rows of its keys out of
those of all ranks, and in backward their gradients added up again. FLOPs count attended pairs: 4 H d for each in
forward, 2.5 times that in backward. "of square" is a rank's FLOP/s over those of the whole pack with the same kernel.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mvp_engine.distributed.sequence_parallel import (
    Chunk,
    KeyExchange,
    Keys,
    causal_keys,
    offsets_of,
    ranges_of,
    zigzag,
)
from mvp_engine.hf.model.attention import context_spec
from mvp_engine.ops import cudnn_attention, flash_attention
from mvp_engine.ops.attention import AttnSpec, varlen_attention

H = 32
K = 8
D = 128
MIXES: dict[str, list[int]] = {
    "1 x 256k": [262_144],
    "8 x 32k": [32_768] * 8,
    "128k and 64 x 2k": [131_072] + [2_048] * 64,
}
KERNELS: dict[str, list[tuple[Any, str]]] = {
    "as chosen": [],
    "cuDNN": [(flash_attention, "is_supported")],
    "FlashAttention 2 (varlen_attn)": [(flash_attention, "is_supported"), (cudnn_attention, "is_supported")],
}


@dataclass
class Share:
    """The chunks of one rank as attention gets them."""

    spec: AttnSpec
    queries: Tensor  # tokens of the pack
    keys: Keys
    pairs: int


def share_of(rank: int, ranks: int, lengths: list[int], window: int | None, device: torch.device) -> Share:
    of_ranks = zigzag(lengths, ranks)
    chunks = of_ranks[rank]
    counts = [chunk.tokens for chunk in chunks]
    queries = ranges_of([(chunk.begin, chunk.end) for chunk in chunks]).to(device)
    shard: Any = SimpleNamespace(queries=queries, cu_queries=offsets_of(counts, device), max_queries=max(counts))
    shard.keys = lambda window: KeyExchange.of(of_ranks, rank, causal_keys(window), device)
    whole = AttnSpec(offsets_of(lengths, device), max(lengths), window=window)
    spec, exchange = context_spec(whole, shard)
    return Share(spec, queries, exchange.keys, sum(_pairs(chunk, window) for chunk in chunks))


def _pairs(chunk: Chunk, window: int | None) -> int:
    if window is None:
        return chunk.pairs
    return sum(min(window, at - chunk.first + 1) for at in range(chunk.begin, chunk.end))


def timed(run: Callable[[Any], Any], prepare: Callable[[], Any] = lambda: None, rounds: int = 5) -> float:
    """Median milliseconds of `run(prepare())` by CUDA events."""
    found = []
    for number in range(rounds + 1):
        given = prepare()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run(given)
        end.record()
        torch.cuda.synchronize()
        if number:
            found.append(begin.elapsed_time(end))
        del given
    return statistics.median(found)


def times(spec: AttnSpec, qkv: list[Tensor], keys: Keys | None, rounds: int) -> dict[str, float]:
    """Forward and backward milliseconds. `qkv` is (T, heads, d); `keys` selects those of the chunks."""
    inputs = [x.detach().requires_grad_() for x in qkv]
    d_out = torch.randn_like(qkv[0]).transpose(0, 1)

    def forward(_: Any = None) -> Tensor:
        keys_values = inputs[1:] if keys is None else [keys.select(x) for x in inputs[1:]]
        return varlen_attention(*(x.transpose(0, 1) for x in (inputs[0], *keys_values)), spec)

    def backward(out: Tensor) -> None:
        torch.autograd.grad(out, inputs, d_out)

    return {"forward_ms": timed(forward, rounds=rounds), "backward_ms": timed(backward, forward, rounds)}


def speeds(pairs: int, ms: dict[str, float]) -> dict[str, float]:
    flops = 4 * H * D * pairs
    both = ms["forward_ms"] + ms["backward_ms"]
    return {
        **ms,
        "forward_tflops": flops / ms["forward_ms"] / 1e9,
        "backward_tflops": 2.5 * flops / ms["backward_ms"] / 1e9,
        "tflops": 3.5 * flops / both / 1e9,
    }


def measure(mix: str, kernel: str, ranks: int, window: int | None, rounds: int) -> list[dict[str, Any]]:
    device = torch.device("cuda", torch.cuda.current_device())
    lengths = MIXES[mix]
    g = torch.Generator(device).manual_seed(0)
    qkv = [torch.randn(sum(lengths), heads, D, device=device, generator=g).bfloat16() for heads in (H, K, K)]
    spec = AttnSpec(offsets_of(lengths, device), max(lengths), window=window)
    whole = [Chunk(c.first, c.last, c.first, c.last) for c in zigzag(lengths, 1)[0]]
    with contextlib.ExitStack() as off:
        for module, name in KERNELS[kernel]:
            off.enter_context(mock.patch.object(module, name, return_value=False))
        pairs = sum(_pairs(chunk, window) for chunk in whole)
        square = speeds(pairs, times(spec, qkv, None, rounds))
        found: list[dict[str, Any]] = [{"rank": "whole pack", "pairs": pairs, **square, "of_square": 1.0}]
        for rank in range(ranks):
            share = share_of(rank, ranks, lengths, window, device)
            received = share.keys.tokens.new_empty(int(share.keys.rows.max()) + 1)
            received[share.keys.rows] = share.keys.tokens
            given = [qkv[0][share.queries], *(x[received] for x in qkv[1:])]
            one = speeds(share.pairs, times(share.spec, given, share.keys, rounds))
            found.append({"rank": rank, "pairs": share.pairs, **one, "of_square": one["tflops"] / square["tflops"]})
    same = {"mix": mix, "kernel": kernel, "context": ranks, "window": window}
    return [same | row for row in found]


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| mix | kernel | window | rank | forward ms | backward ms | TFLOP/s | of square |"]
    lines.append("| --- | --- | ---: | --- | ---: | ---: | ---: | ---: |")
    for row in rows:
        figures = f"{row['forward_ms']:.2f} | {row['backward_ms']:.2f} | {row['tflops']:.0f} | {row['of_square']:.3f}"
        lines.append(f"| {row['mix']} | {row['kernel']} | {row['window'] or '-'} | {row['rank']} | {figures} |")
    return "\n".join(lines)


def dry(ranks: int) -> str:
    lines = [
        "| mix | rank | tokens | chunks | rows of keys | pairs over the mean |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for mix, lengths in MIXES.items():
        of_ranks = zigzag(lengths, ranks)
        mean = sum(chunk.pairs for chunks in of_ranks for chunk in chunks) / ranks
        for rank, chunks in enumerate(of_ranks):
            tokens = sum(chunk.tokens for chunk in chunks)
            keys = sum(chunk.end - chunk.first for chunk in chunks)
            pairs = sum(chunk.pairs for chunk in chunks) / mean
            lines.append(f"| {mix} | {rank} | {tokens} | {len(chunks)} | {keys} | {pairs:.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=8, help="context ranks that share the pack")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--window", type=int, default=None, help="also with a sliding window of this size")
    parser.add_argument("--mix", choices=MIXES, default=None, help="this mix alone")
    parser.add_argument("--kernel", choices=KERNELS, default=None, help="this choice of kernels alone")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.dry:
        print(dry(args.context))
        return
    rows: list[dict[str, Any]] = []
    for mix in [args.mix] if args.mix else MIXES:
        for kernel in [args.kernel] if args.kernel else KERNELS:
            for window in dict.fromkeys([None, args.window]):
                rows += measure(mix, kernel, args.context, window, args.rounds)
                print(table(rows[-1 - args.context :]), flush=True)
                torch.cuda.empty_cache()
    worst = min(row["of_square"] for row in rows if row["kernel"] == "as chosen" and row["rank"] != "whole pack")
    print(f"slowest share: {worst:.3f} of the square speed (target 0.90)")
    if args.out:
        facts = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "cudnn_frontend": cudnn_attention.INSTALLED,
            "python": platform.python_version(),
            "command": " ".join(sys.argv),
            "heads": [H, K, D],
        }
        args.out.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Optimizer states on the host (`optim.offload`): time and memory of an update, next to states on the GPU.

    PYTHONPATH=. python benchmarks/offload.py --out benchmarks/results/offload.json    # the parameters of Qwen3-8B
    PYTHONPATH=. python benchmarks/offload.py --dtypes bfloat16 --rounds 5
    PYTHONPATH=. python benchmarks/offload.py --model tiny                             # the default without a GPU

Every row updates the same float32 parameters with the same gradients. Columns:

- step: milliseconds per update, median of all rounds, by CUDA events from an idle GPU
- GB/s: bytes of the states by that time; they are copied to the GPU and back, in both directions at once
- GPU: GiB on top of weights and gradients at the peak of an update, states included
- host: GiB of states on the host; first: seconds of the first step, which allocates and pins them
- equal: whether weights and states after all steps are bit-equal to those of the row without offload, by a checksum

`benchmarks/recipes.py --only full_8b full_8b_offload` measures whole trainings.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.optimizer_states import (
    HYPERPARAMETERS,
    MODELS,
    WEIGHT_DECAY,
    Parameters,
    about,
    count,
    qwen3_shapes,
    step_milliseconds,
    synchronize,
)
from mvp_engine.kit.optim import KitOptimizer

GIB = 2**30
WARMUP = 2
SHAPES = {"qwen3-8b": {**qwen3_shapes(36, 4096, 12288, 1024, 151936), "head": (151936, 4096)}, **MODELS}
COLUMNS = {"step ms": "step_ms", "GB/s": "gb_per_s", "GPU GiB": "gpu_gib", "host GiB": "host_gib", "first s": "first_s"}


def optimizer_of(model: nn.Module, state_dtype: str, offload: bool) -> KitOptimizer:
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    groups = [{"params": list(model.parameters()), "weight_decay": WEIGHT_DECAY}]
    return KitOptimizer(groups, names, state_dtype=state_dtype, offload=offload, **HYPERPARAMETERS)


def measure(shapes: dict[str, Any], device: str, state_dtype: str, offload: bool, rounds: int) -> dict[str, Any]:
    row: dict[str, Any] = {"states": state_dtype, "offload": offload}
    on_gpu = device == "cuda"
    try:
        model = Parameters(shapes, device)
        for param in model.parameters():
            param.grad = 0.01 * torch.randn_like(param)
        before = torch.cuda.memory_allocated() if on_gpu else 0
        optimizer = optimizer_of(model, state_dtype, offload)
        row["host_gib"] = optimizer.host_bytes / GIB
        started = time.perf_counter()
        optimizer.step()
        synchronize()
        row["first_s"] = time.perf_counter() - started
        for _ in range(WARMUP):
            optimizer.step()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        row["step_ms"] = statistics.median(step_milliseconds(optimizer) for _ in range(rounds))
        states = [value for state in optimizer.state.values() for value in state.values()]
        size = sum(value.nbytes for value in states)
        row["gb_per_s"] = size / row["step_ms"] / 1e6
        row["state_bytes_per_param"] = size / count(model)
        if on_gpu:
            row["gpu_gib"] = (torch.cuda.max_memory_allocated() - before) / GIB
        row["checksum"] = sum(map(checksum, [*model.parameters(), *states]))
    except (torch.OutOfMemoryError, RuntimeError) as error:  # a row that does not fit has the reason
        row["why"] = str(error).splitlines()[0][:200]
    return row


def checksum(tensor: Tensor) -> int:
    """The sum of the bytes of a tensor, weighted by their place modulo 251."""
    if tensor.ndim == 0:
        return int(tensor)
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    total = 0
    for part in flat.split(251 * 2**18):
        values = part.to("cuda" if torch.cuda.is_available() else "cpu").long()
        total += int((values * (torch.arange(len(values), device=values.device) % 251 + 1)).sum())
    return total


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"| states | offload | {' | '.join(COLUMNS)} | equal |",
        "| --- | --- |" + " ---: |" * len(COLUMNS) + " --- |",
    ]
    for row in rows:
        figures = [f"{row[key]:,.2f}" if key in row else "-" for key in COLUMNS.values()]
        equal = {True: "yes", False: "NO"}.get(row.get("equal"), "-")
        last = row.get("why", equal)
        lines.append(f"| {row['states']} | {'yes' if row['offload'] else 'no'} | {' | '.join(figures)} | {last} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--out", type=Path, help="also write all results to this JSON file")
    parser.add_argument("--model", choices=SHAPES, default="qwen3-8b" if on_gpu else "tiny")
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16", "int8"], help="of the states")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for state_dtype in args.dtypes:
        pair = []
        for offload in (False, True):
            pair.append(measure(SHAPES[args.model], "cuda" if on_gpu else "cpu", state_dtype, offload, args.rounds))
            gc.collect()
            if on_gpu:
                torch.cuda.empty_cache()
        sums = [row.get("checksum") for row in pair]
        if None not in sums:
            pair[1]["equal"] = sums[0] == sums[1]
        rows += pair
        print(table(rows), flush=True)
        if args.out:
            result = {**about(args.model, SHAPES[args.model]), "rows": rows}
            result["command"] = f"python benchmarks/offload.py {' '.join(sys.argv[1:])}"
            args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

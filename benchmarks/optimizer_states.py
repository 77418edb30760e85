"""AdamW with low-precision states: memory, time per step and resharding, against torchao's AdamW8bit and torch's own.

    PYTHONPATH=. python benchmarks/optimizer_states.py --out benchmarks/results/optimizer_states.json
    PYTHONPATH=. python benchmarks/optimizer_states.py --model tiny    # the default without a GPU

Every optimizer updates the same float32 parameters with the same float32 gradients: those of Qwen3-1.7B on a GPU, of a
tiny Qwen3 elsewhere. Columns:

- state: bytes of optimizer state per parameter (codes, scales, lookup tables; not the step counts)
- peak: bytes per parameter that a step allocates for its time, on top of weights, gradients and states
- step: milliseconds per step, median of all rounds after warm-up. On a GPU by CUDA events around `step()`, from an idle
  GPU: the host's launches count. `kernels` is the sum of all GPU kernels of one step, by torch's profiler.
- first: seconds of the first step (compilation)
- a column per resharding: the bytes of state per parameter on N FSDP2 shards, and the number of states that are
  bit-equal, as float32, after a save there and a load on M shards (gloo, CPU). Ours by the model engine's checkpoints,
  torchao's by torch.distributed.checkpoint. `qwen3`: rows of 256 and 768 elements; `siglip`: rows of 1152 and 1076,
  where torchao's blocks of 256 in row-major order do not fit each shard.

torchao compiles its step for each shape. On the CPU, and in the resharding processes, it runs eagerly instead, with
the same results. A row that fails has the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

sys.path.append(str(Path(__file__).parents[1]))  # for mvp_engine, if it is not installed
Shapes = dict[str, tuple[int, ...]]
HYPERPARAMETERS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8}
WEIGHT_DECAY = 0.1
WARMUP = 3


# ---- Parameters ---------------------------------------------------------------------------------------------------


def qwen3_shapes(layers: int, hidden: int, intermediate: int, kv_size: int, vocab: int) -> Shapes:
    """The parameters of a Qwen3 with tied embeddings and as many query heads as fit its hidden size."""
    shapes: Shapes = {"embed": (vocab, hidden), "norm": (hidden,)}
    for i in range(layers):
        shapes[f"{i}.q"] = (hidden, hidden)
        shapes[f"{i}.k"] = (kv_size, hidden)
        shapes[f"{i}.v"] = (kv_size, hidden)
        shapes[f"{i}.o"] = (hidden, hidden)
        shapes[f"{i}.gate"] = (intermediate, hidden)
        shapes[f"{i}.up"] = (intermediate, hidden)
        shapes[f"{i}.down"] = (hidden, intermediate)
        shapes[f"{i}.q_norm"] = (128,)
        shapes[f"{i}.k_norm"] = (128,)
        shapes[f"{i}.norm1"] = (hidden,)
        shapes[f"{i}.norm2"] = (hidden,)
    return shapes


MODELS: dict[str, Shapes] = {
    "qwen3-1.7b": qwen3_shapes(28, 2048, 6144, 1024, 151936),
    "tiny": qwen3_shapes(2, 256, 768, 128, 1000),
}


class Parameters(nn.Module):
    """A module of random parameters with the given shapes."""

    def __init__(self, shapes: Shapes, device: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterDict()
        for name, shape in shapes.items():
            self.weights[name.replace(".", "_")] = nn.Parameter(0.02 * torch.randn(shape, device=device))


# ---- Optimizers ---------------------------------------------------------------------------------------------------


def kit_optimizer(model: nn.Module, state_dtype: str) -> torch.optim.Optimizer:
    from mvp_engine.kit.optim import KitOptimizer

    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    groups = [{"params": list(model.parameters()), "weight_decay": WEIGHT_DECAY}]
    return KitOptimizer(groups, names, state_dtype=state_dtype, **HYPERPARAMETERS)


def torchao_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(model.parameters(), weight_decay=WEIGHT_DECAY, **HYPERPARAMETERS)


def torch_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), weight_decay=WEIGHT_DECAY, fused=True, **HYPERPARAMETERS)


OURS = "ours, int8"
TORCHAO = "torchao AdamW8bit"
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    OURS: lambda model: kit_optimizer(model, "int8"),
    "ours, bfloat16": lambda model: kit_optimizer(model, "bfloat16"),
    TORCHAO: torchao_optimizer,
    "torch fused AdamW, float32": torch_optimizer,
}


# ---- Memory and speed ---------------------------------------------------------------------------------------------


@dataclass
class Bench:
    """An optimizer after its first step, with the figures that are known so far."""

    row: dict[str, Any]
    optimizer: torch.optim.Optimizer | None = None


def start(name: str, model: nn.Module) -> Bench:
    """Build an optimizer and take its first step, which compiles and creates the states."""
    bench = Bench({"optimizer": name})
    started = time.perf_counter()
    try:
        bench.optimizer = OPTIMIZERS[name](model)
        bench.optimizer.step()
        synchronize()
    except Exception as error:  # noqa: BLE001 (the row of a library that is missing or fails has the reason)
        return failed(bench, error)
    bench.row["first_step_s"] = round(time.perf_counter() - started, 2)
    bench.row["state_bytes_per_param"] = state_bytes(bench.optimizer) / count(model)
    return bench


def measure(bench: Bench, model: nn.Module, rounds: int) -> dict[str, Any]:
    if bench.optimizer is None:
        return bench.row
    on_gpu = torch.cuda.is_available()
    try:
        for _ in range(WARMUP):
            bench.optimizer.step()
        synchronize()
        if on_gpu:
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        times = [step_milliseconds(bench.optimizer) for _ in range(rounds)]
        bench.row["step_ms"] = round(statistics.median(times), 3)
        if on_gpu:
            peak = torch.cuda.max_memory_allocated() - before
            bench.row["peak_bytes_per_param"] = peak / count(model)
            bench.row["kernels_ms"] = round(kernel_milliseconds(bench.optimizer), 3)
    except Exception as error:  # noqa: BLE001
        failed(bench, error)
    bench.optimizer = None  # frees its states
    return bench.row


def failed(bench: Bench, error: Exception) -> Bench:
    traceback.print_exc()
    bench.row["why"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    bench.optimizer = None
    return bench


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def step_milliseconds(optimizer: torch.optim.Optimizer) -> float:
    synchronize()
    if not torch.cuda.is_available():
        started = time.perf_counter()
        optimizer.step()
        return 1000 * (time.perf_counter() - started)
    first = torch.cuda.Event(enable_timing=True)
    last = torch.cuda.Event(enable_timing=True)
    first.record()
    optimizer.step()
    last.record()
    synchronize()
    return first.elapsed_time(last)


def kernel_milliseconds(optimizer: torch.optim.Optimizer) -> float:
    """The GPU time of one step without gaps between kernels."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        optimizer.step()
        synchronize()
    microseconds = 0.0
    for event in profile.events():
        is_label = event.name.startswith("Optimizer.step") or getattr(event, "is_user_annotation", False)
        if event.device_type.name == "CUDA" and not is_label:
            microseconds += event.time_range.elapsed_us()
    return microseconds / 1000


def count(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    total = 0
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor) and value.ndim:
                total += sum(part.numel() * part.element_size() for part in stored_tensors(value))
    return total


def stored_tensors(value: Tensor) -> list[Tensor]:
    """What this rank stores of a tensor: itself, or the tensors inside of a tensor subclass."""
    if isinstance(value, DTensor):
        value = value.to_local()
    if not hasattr(value, "__tensor_flatten__"):
        return [value]
    names, _ = value.__tensor_flatten__()
    return [getattr(value, name) for name in names]


# ---- Report -------------------------------------------------------------------------------------------------------


def table(rows: list[dict[str, Any]]) -> str:
    columns = {
        "state B/param": "state_bytes_per_param",
        "peak B/param": "peak_bytes_per_param",
        "step ms": "step_ms",
        "kernels ms": "kernels_ms",
        "first s": "first_step_s",
    }
    reshard_columns = list(next((row["reshard"] for row in rows if row.get("reshard")), {}))
    head = ["optimizer", *columns, *reshard_columns, "note"]
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    for row in rows:
        figures = [f"{row[key]:.3f}" if key in row else "-" for key in columns.values()]
        figures += [row.get("reshard", {}).get(column, "-") for column in reshard_columns]
        lines.append("| " + " | ".join([row["optimizer"], *figures, row.get("why", "")]) + " |")
    return "\n".join(lines)


def about(model: str, shapes: Shapes) -> dict[str, Any]:
    hardware = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        hardware = f"{gpu.name}, {gpu.multi_processor_count} multiprocessors, {gpu.total_memory >> 30} GiB"
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in ("torch", "triton", "torchao"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {
        "hardware": hardware,
        "versions": versions,
        "command": "python benchmarks/optimizer_states.py " + " ".join(sys.argv[1:]),
        "model": model,
        "parameters": sum(torch.Size(shape).numel() for shape in shapes.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write all results to this JSON file")
    parser.add_argument("--model", choices=MODELS, default="qwen3-1.7b" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--rounds", type=int, default=20 if torch.cuda.is_available() else 3)
    parser.add_argument("--reshard", nargs="*", default=["4:2", "2:3"], help="pairs N:M; none to leave it out")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.compiler.set_stance("force_eager")
    from optimizer_resharding import reshard_all  # which imports this module

    started = time.perf_counter()
    shapes = MODELS[args.model]
    model = Parameters(shapes, device)
    for param in model.parameters():
        param.grad = 0.01 * torch.randn_like(param)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max_workers=1) as pool:
        # While the optimizers compile; the timing waits for both.
        future = pool.submit(reshard_all, args.reshard, Path(folder))
        benches = [start(name, model) for name in OPTIMIZERS]
        resharding = future.result()
    rows = []
    for bench in benches:
        bench.row["reshard"] = resharding.get(bench.row["optimizer"], {})
        rows.append(measure(bench, model, args.rounds))
    print(table(rows))
    if args.out:
        seconds = round(time.perf_counter() - started, 1)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        result = {**about(args.model, shapes), "seconds": seconds, "rows": rows}
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

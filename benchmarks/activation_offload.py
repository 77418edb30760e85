"""Inputs of blocks on the host (`model.activation_checkpointing=offload`) next to `full`: time and memory of steps.

    PYTHONPATH=. python benchmarks/activation_offload.py --out benchmarks/results/activation_offload.json
    PYTHONPATH=. python benchmarks/activation_offload.py --layers 36 --tokens 131072 --steps 2    # Qwen3-8B, all layers
    PYTHONPATH=. python benchmarks/activation_offload.py --shape Qwen/Qwen3-1.7B --no-lora
    PYTHONPATH=. python benchmarks/activation_offload.py --tiny                                   # anywhere

LoRA of rank 16 on twelve layers of the shape of Qwen3-8B, with random weights that are filled on the GPU. A step is one
pack of 65,536 tokens in rows of 8,192: forward, backward and AdamW, with compiled blocks. Columns:

- step: milliseconds, median; tokens per second follow from it
- peak: GiB that tensors take at most during the steps; host: GiB of pinned buffers, which a step copies each way
- first: seconds of the first step, which compiles; second: that of the second one, when all buffers are pinned
- equal: whether losses of all steps and trained weights after them are bit-equal to those of the first row. Backward of
  attention on a GPU adds in any order, so that two runs of `full` are not

Before the rows: GB/s of copies of pinned memory to the host and to the GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.attempt import failure
from benchmarks.qlora import fill_at_random, shape_of
from mvp_engine.config.schema import CHECKPOINTING_MODES
from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.files import atomic_write_text
from mvp_engine.kit import Lora, MLLMModelKit
from mvp_engine.model_engine import ModelEngine, ModelSource, Settings, engine_class
from mvp_engine.model_engine.fsdp import base_engine, parallelize
from mvp_engine.ops.host_memory import GIB, pinned_zeros

COLUMNS = {"step ms": "step_ms", "tokens/s": "tokens_per_s", "peak GiB": "peak_gib", "host GiB": "host_gib"}
COLUMNS |= {"first s": "first_s", "second s": "second_s"}


def measure(mode: str, config: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """A row; `same` in it must be equal in all rows."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    torch.manual_seed(0)
    model = MLLMModelKit(Lora(rank=16) if args.lora else None).build(ModelSource(None, config))
    compiled = "inductor" if args.compile and on_gpu else None
    settings = Settings(precision="bf16", compile=compiled, activation_checkpointing=mode, clip_grad_norm=1.0)
    engine: ModelEngine = engine_class("language_model")(model, Layout(World(0, 1, 0, 1, device)), settings)
    engine.initialize(lambda m: torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], 1e-4, fused=on_gpu))
    ids = torch.randint(1000, 100_000, (args.tokens // args.row, args.row), generator=torch.Generator().manual_seed(0))
    batch = PackedBatch.from_sequences(list(ids))
    if on_gpu:
        batch = batch.pin_memory()
        torch.cuda.reset_peak_memory_stats()

    def forward_step(one: PackedBatch) -> Any:
        return engine.model(one, ["loss"])["loss"], one.num_loss_tokens

    times: list[float] = []
    same: list[Any] = []
    with engine.train_mode():
        for step in range(args.steps + 2):
            if on_gpu and step == 2:
                torch.cuda.reset_peak_memory_stats()
            synchronize()
            begin = time.perf_counter()
            numbers = engine.train_batch([batch], forward_step)
            synchronize()
            times.append(time.perf_counter() - begin)
            same.append(float(numbers.loss_sum))
    for param in model.parameters():
        if param.requires_grad:
            same.append(param.detach().view(torch.int32).sum().item())  # of the bits, in int64
    step_s = statistics.median(times[2:])
    row: dict[str, Any] = {"same": same, "step_ms": 1e3 * step_s, "tokens_per_s": ids.numel() / step_s}
    row |= {"first_s": times[0], "second_s": times[1], "loss": same[0] / float(numbers.weight)}
    row["host_gib"] = parallelize.host_bytes(model) / GIB
    if on_gpu:
        row["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
    return row


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def link() -> dict[str, float]:
    """GB/s of copies of 1 GiB between pinned memory of the host and the GPU."""
    host = pinned_zeros((GIB,), torch.uint8, "benchmark", "")
    on_gpu = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    found = {}
    for name, target, source in (("to_host_gb_per_s", host, on_gpu), ("to_gpu_gb_per_s", on_gpu, host)):
        target.copy_(source, non_blocking=True)
        synchronize()
        begin = time.perf_counter()
        for _ in range(3):
            target.copy_(source, non_blocking=True)
        synchronize()
        found[name] = 3 * GIB / (time.perf_counter() - begin) / 1e9
    return found


def attempt(part: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """What a part measured, or why it failed: the others are measured all the same."""
    try:
        return part(*args)
    except Exception as error:  # noqa: BLE001 - out of memory of the GPU or the host, or a kernel that fails
        return failure(error)


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"| mode | {' | '.join(COLUMNS)} | equal |", "| --- |" + " ---: |" * len(COLUMNS) + " --- |"]
    for row in rows:
        figures = [f"{row[key]:,.2f}" if key in row else "-" for key in COLUMNS.values()]
        last = row.get("why") or {True: "yes", False: "NO"}.get(row.get("equal"), "-")
        lines.append(f"| {row['mode']} | {' | '.join(figures)} | {last} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="Qwen/Qwen3-8B", help="a text model of benchmarks/hardware/shapes.yaml")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=65536, help="of a pack")
    parser.add_argument("--row", type=int, default=8192, help="tokens of a row")
    parser.add_argument("--steps", type=int, default=3)
    modes = ["full", "full", "offload"]
    parser.add_argument("--modes", nargs="+", default=modes, choices=CHECKPOINTING_MODES, metavar="MODE")
    parser.add_argument("--no-lora", dest="lora", action="store_false")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not 0 < args.row <= args.tokens:
        parser.error(f"--tokens {args.tokens} do not hold a row of --row {args.row} tokens")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    base_engine.materialize_weights = fill_at_random
    config = shape_of(args.shape, args.tiny)
    config["num_hidden_layers"] = args.layers
    if args.tiny:
        args.tokens, args.row = 128, 64
        parallelize.SMALL = 1024
    result: dict[str, Any] = {"command": "python benchmarks/activation_offload.py " + " ".join(sys.argv[1:])}
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    result |= {"shape": args.shape, "layers": args.layers, "tokens": args.tokens, "row": args.row, **versions}
    if torch.cuda.is_available():
        result |= {"gpu": torch.cuda.get_device_name(), **attempt(link)}
    print(json.dumps(result), flush=True)
    rows: list[dict[str, Any]] = []
    first: list[Any] = []
    for mode in args.modes:
        row = attempt(measure, mode, config, args)
        same = row.pop("same", [])
        if first and same:
            row["equal"] = same == first
        first = first or same
        rows.append({"mode": mode, **row})
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        print(table(rows), flush=True)
        if args.out:
            atomic_write_text(args.out, json.dumps({**result, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()

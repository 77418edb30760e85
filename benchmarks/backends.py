"""The Megatron backend against `fsdp` on one GPU: milliseconds and peak memory of a training step, and losses.

    PYTHONPATH=. python benchmarks/backends.py --out benchmarks/results/backends.json    # five minutes on an H200
    PYTHONPATH=. python benchmarks/backends.py --tiny    # anywhere; figures mean nothing

Rows: each backend, with compiled layers (Inductor) and without. All start from the same random weights in the shape of
a model of the Hub, and take the same steps of AdamW in bf16 on one pack of rows of 2,048 tokens. Needs megatron-core.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.hf import LanguageModel
from mvp_engine.model_engine import Settings, engine_class

SHAPES = Path(__file__).parent / "hardware" / "shapes.yaml"
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "vocab_size": 512,
}  # fmt: skip
ON_GPU = torch.cuda.is_available()
ROWS = [("fsdp", "inductor"), ("megatron", "inductor"), ("fsdp", None), ("megatron", None)]


def measure(backend: str, compiled: str | None, config: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    world = World(0, 1, 0, 1, torch.device("cuda" if ON_GPU else "cpu"))
    settings = Settings(precision="bf16", compile=compiled if ON_GPU else None, clip_grad_norm=1.0)
    model = LanguageModel.on_meta(None, dict(config))
    engine = engine_class("language_model", backend)(model, Layout(world), settings)
    engine.initialize(lambda m: torch.optim.AdamW(m.parameters(), 1e-5, fused=ON_GPU))
    g = torch.Generator().manual_seed(1)
    rows = [torch.randint(config["vocab_size"], (args.row,), generator=g) for _ in range(args.tokens // args.row)]
    batch = PackedBatch.from_sequences(rows)

    def forward_step(one: PackedBatch) -> Any:
        return engine.model(one, ["loss"])["loss"], one.num_loss_tokens

    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    times = []
    losses = []
    with engine.train_mode():
        for _ in range(args.steps + 3):
            begin = time.perf_counter()
            numbers = engine.train_batch([batch], forward_step)
            if ON_GPU:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
            losses.append(float(numbers.loss_sum / numbers.weight))
    return {
        "backend": backend,
        "compile": compiled,
        "step_ms": statistics.median(times[3:]) * 1e3,
        "tokens_per_s": args.tokens / statistics.median(times[3:]),
        "first_s": times[0],
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if ON_GPU else None,
        "losses": losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="Qwen/Qwen3-1.7B")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--row", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config = yaml.safe_load(SHAPES.read_text())[args.shape]
    if args.tiny:
        config |= TINY
        args.tokens = 256
        args.row = 64
        args.steps = 2
    found = []
    for backend, compiled in ROWS:
        found.append(row := measure(backend, compiled, config, args))
        print({key: value for key, value in row.items() if key != "losses"}, flush=True)
        gc.collect()
        if ON_GPU:
            torch.cuda.empty_cache()
    first = found[0]["losses"]
    apart = [max(abs(a - b) for a, b in zip(row["losses"], first, strict=True)) for row in found]
    result = {
        "device": torch.cuda.get_device_name() if ON_GPU else platform.processor(),
        "torch": torch.__version__,
        "megatron-core": version("megatron-core"),
        "shape": args.shape,
        "tokens": args.tokens,
        "rows": found,
        "loss_difference": dict(zip([f"{b} {c}" for b, c in ROWS], apart, strict=True)),
    }
    print("loss differences from the first row:", result["loss_difference"])
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

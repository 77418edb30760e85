"""Loading a Hugging Face folder onto four sharded ranks: memory and time per rank, against `from_pretrained`.

    python benchmarks/load_model.py [--ranks 4] [--layers 12] [--out FILE]

A random model of the Qwen3 architecture, about 1 GB in float32, is written to a temporary folder. Each way to load it
runs in fresh processes. Memory is the growth of a process's peak resident size (VmHWM: files that are mapped count as
far as they were touched) over what it was after the imports.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPE = {
    "model_type": "qwen3",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "tie_word_embeddings": True,
}


def peak() -> int:
    """The largest resident size that this process had so far, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--out", default=None)
    parser.add_argument("--way", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--folder", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(load(args.way, args.folder)), flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        size = write_model(folder, args.layers)
        rows = []
        for way, ranks in (("ours, sharded", args.ranks), ("from_pretrained", args.ranks), ("from_pretrained", 1)):
            found = run(way, ranks, folder)
            rows.append(
                {
                    "way": f"{way}, {ranks} process(es)",
                    "seconds": max(rank["seconds"] for rank in found),
                    "peak_of_model": max(rank["grown"] for rank in found) / size,
                }
            )
    print(f"model: {size / 1e9:.2f} GB in float32")
    print("| way | seconds, slowest rank | peak memory per rank, of the model |\n| --- | --- | --- |")
    for row in rows:
        print(f"| {row['way']} | {row['seconds']:.2f} | {row['peak_of_model']:.0%} |")
    if args.out:
        about = {"command": " ".join(sys.argv), "python": platform.python_version(), "cores": os.cpu_count()}
        Path(args.out).write_text(json.dumps({**about, "bytes": size, "rows": rows}, indent=2) + "\n")


def write_model(folder: str, layers: int) -> int:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**SHAPE, num_hidden_layers=layers)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder, max_shard_size="300MB")
    return sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))


def run(way: str, ranks: int, folder: str) -> list[dict[str, Any]]:
    """All ranks at once, as they would be started on one machine."""
    port = str(29000 + os.getpid() % 1000)
    common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = []
    for rank in range(ranks):
        env = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        words = [sys.executable, __file__, "--way", way, "--folder", folder]
        processes.append(subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True))
    return [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]


def load(way: str, folder: str) -> dict[str, float]:
    import torch
    from transformers import AutoModelForCausalLM

    from mvp_engine.config.schema import Parallel
    from mvp_engine.distributed import Layout, World
    from mvp_engine.model_engine import LanguageModelEngine, ModelSource

    world = World.join("cpu")
    sizes = {"shard": world.size, "ulysses": 1, "tensor": 1, "timeout": 600.0}
    layout = Layout.of(world, Parallel.model_validate(sizes))
    # Both ways once on a model of no size, so that what is imported late does not count.
    tiny = {**SHAPE, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 64, "num_hidden_layers": 1}
    LanguageModelEngine(LanguageModelEngine.build_model(ModelSource(None, tiny)), layout).initialize()
    world.barrier()
    before, started = peak(), time.monotonic()
    if way == "from_pretrained":
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        sum(float(param.detach().flatten()[::1024].sum()) for param in model.parameters())  # mapped pages are read late
    else:
        engine = LanguageModelEngine(LanguageModelEngine.build_model(ModelSource(folder)), layout)
        engine.initialize()
    result = {"seconds": time.monotonic() - started, "grown": float(peak() - before)}
    world.close()
    return result


if __name__ == "__main__":
    main()

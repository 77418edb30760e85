"""One all-reduce over all ranks, started and connected as a training is: NCCL on GPUs, gloo on CPUs.

`--nodes JSON` starts the ranks of this node; each of them runs this module again, and rank 0 writes the result.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from mvp_engine.distributed import World

MODULE = "mvp_engine.tools.doctor.all_reduce"
ELEMENTS = {"cuda": 2**26, "cpu": 2**20}  # float32: 256 MiB and 4 MiB
JOIN_SECONDS = 60.0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=MODULE)
    parser.add_argument("--out", required=True)
    parser.add_argument("--nodes", help="the fields of Nodes")
    args = parser.parse_args(argv)
    if args.nodes is not None:
        from mvp_engine.tools.launcher import run_module
        from mvp_engine.tools.nodes import Nodes

        return run_module(MODULE, Nodes(**json.loads(args.nodes)), ["--out", args.out])
    world = World.join("auto", JOIN_SECONDS)
    if world.size == 1:
        # A world of one rank has no process group; this one shows that NCCL loads.
        backend = "nccl" if world.device.type == "cuda" else "gloo"
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    facts = _measure(world)
    if world.is_main:
        Path(args.out).write_text(json.dumps(facts))
    if world.size == 1:
        dist.destroy_process_group()
    world.close()
    return 0


def _measure(world: World) -> dict[str, object]:
    tensor = torch.empty(ELEMENTS[world.device.type], device=world.device)
    expected = world.size * (world.size + 1) / 2
    for _ in range(2):  # the first one connects the ranks
        tensor.fill_(world.rank + 1)
        dist.all_reduce(tensor)
    right = bool((tensor == expected).all())
    _wait(world)
    start = time.perf_counter()
    for _ in range(5):
        dist.all_reduce(tensor)
    _wait(world)
    seconds = (time.perf_counter() - start) / 5
    # What each rank sends and receives: the bus bandwidth, which does not depend on the number of ranks.
    sent = 2 * (world.size - 1) / world.size * tensor.numel() * tensor.element_size()
    hosts = sorted(set(world.all_gather(os.uname().nodename)))
    return {
        "ranks": world.size,
        "hosts": hosts,
        "backend": _backend(world),
        "right": right,
        "bytes_per_s": sent / seconds,
    }


def _backend(world: World) -> str:
    name = dist.get_backend_config()
    if world.device.type == "cuda" and "nccl" in str(name):
        return f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    return "gloo"


def _wait(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    world.barrier()


if __name__ == "__main__":
    sys.exit(main())

"""Seconds of one weight sync by CUDA IPC: weights in bf16, over HTTP, into another process on the same GPU.

    PYTHONPATH=. python benchmarks/rollouts/ipc_sync.py --out benchmarks/results/ipc_sync.json

The receiver answers vLLM's `/update_weights` as its workers do: it opens the buffer by its IPC handle and copies every
tensor into weights of its own. After the timed syncs the hashes of both ends are compared.
"""

from __future__ import annotations

import argparse
import base64
import json
import multiprocessing
import pickle
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))
from preference import SHAPES, about, model_config


def receive(port: Any, hashes: Any) -> None:
    """The worker of a server, until a request without a body."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    from mvp_engine.worker.worker import checksum

    weights: dict[str, torch.Tensor] = {}

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/update_weights":
                self.load(body["update_info"])
            elif self.path == "/hashes":
                hashes.put({name: checksum(value) for name, value in weights.items()})
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def load(self, info: dict[str, Any]) -> None:
            handles = pickle.loads(base64.b64decode(info["ipc_handles_pickled"]))
            data = rebuild_cuda_tensor(*handles[str(torch.cuda.get_device_properties(0).uuid)])
            parts = data[: sum(info["tensor_sizes"])].split(info["tensor_sizes"])
            for name, dtype, shape, part in zip(info["names"], info["dtype_names"], info["shapes"], parts, strict=True):
                value = part.view(getattr(torch, dtype)).view(shape)
                weights.setdefault(name, torch.empty_like(value)).copy_(value)
            torch.cuda.synchronize()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    torch.cuda.init()
    port.put(server.server_port)
    server.serve_forever()


def main() -> None:
    from mvp_engine.kit.rl.server_rollout import Server
    from mvp_engine.kit.rl.vllm_rollout import IPCTransfer
    from mvp_engine.worker import WorkerGroup, WorkerSpec

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--shape", default="qwen3_1_7b", choices=SHAPES)
    parser.add_argument("--syncs", type=int, default=4)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    port, hashes = context.Queue(), context.Queue()
    worker = context.Process(target=receive, args=(port, hashes), daemon=True)
    worker.start()
    spec = WorkerSpec.of(model={"config": model_config(args.shape, False)}, precision="bf16")
    seconds = []
    with WorkerGroup.start(spec, ranks=1, where="local") as group:
        server = Server(f"http://127.0.0.1:{port.get(timeout=120)}")
        transfer = IPCTransfer()
        for version in range(args.syncs):
            torch.cuda.synchronize()
            started = time.perf_counter()
            transfer.keep(group.weights(dtype=torch.bfloat16, on_device=True), version)
            kept = time.perf_counter()
            transfer.send(server)
            seconds.append({"gather_s": kept - started, "send_s": time.perf_counter() - kept})
            print(seconds[-1], flush=True)
        server.post("/hashes", {})
        equal = hashes.get(timeout=300) == group.checksums(torch.bfloat16)
        gib = sum(bucket.data.numel() for bucket in transfer.buckets) / 2**30
    worker.kill()
    found = {"gib": gib, "equal_hashes": equal, "sync_s": min(sum(one.values()) for one in seconds), "syncs": seconds}
    print(found)
    if args.out:
        args.out.write_text(json.dumps({**about(), **found}, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""The resharding part of `optimizer_states.py`: states saved on N FSDP2 shards and loaded on M, on the CPU.

Each rank is a process of this script. It trains and saves, or loads, and writes its states to a file as float32; the
caller puts the files of all ranks together and compares.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from optimizer_states import OPTIMIZERS, OURS, TORCHAO, Parameters, Shapes, qwen3_shapes, state_bytes
from torch import Tensor, nn

STEPS = 3
TIMEOUT = 240  # seconds
MODELS: dict[str, Shapes] = {
    "qwen3": qwen3_shapes(1, 256, 768, 128, 1000),
    "siglip": {"up": (1076, 1152), "down": (1152, 1076), "norm": (1152,)},
}


def reshard_all(pairs: list[str], folder: Path) -> dict[str, dict[str, str]]:
    """For both libraries: the result of each pair "N:M" on each model, by column."""
    jobs = [(library, pair) for library in (OURS, TORCHAO) for pair in pairs]
    results: dict[str, dict[str, str]] = {OURS: {}, TORCHAO: {}}
    with ThreadPoolExecutor(max_workers=max(1, (os.cpu_count() or 1) // 4)) as pool:
        futures = [pool.submit(reshard, *job, folder / f"{i}") for i, job in enumerate(jobs)]
        for (library, _), future in zip(jobs, futures, strict=True):
            results[library] |= future.result()
    return results


def reshard(library: str, pair: str, folder: Path) -> dict[str, str]:
    """Save on N ranks and load on M; for each model how many states are equal, or the reason of a failure."""
    folder.mkdir()
    why = ""
    try:
        for phase, ranks in zip(("save", "load"), pair.split(":"), strict=True):
            run_ranks(int(ranks), library, phase, folder)
    except Exception as error:  # noqa: BLE001 (the models before the one that failed have results)
        why = f"fails: {error}"
    results = {}
    for model in MODELS:
        is_complete = len(list(folder.glob(f"{model}.load.*.pt"))) == int(pair.split(":")[1])
        column = f"{model} {pair.replace(':', ' -> ')}"
        has_saved = list(folder.glob(f"{model}.save.*.pt"))
        size = f"{saved_bytes(folder, model):.2f} B/param, " if has_saved else ""
        results[column] = size + (compare(folder, model) if is_complete else why)
    return results


def compare(folder: Path, model: str) -> str:
    saved = full_states(folder, model, "save")
    loaded = full_states(folder, model, "load")
    different = [key for key in saved if not torch.equal(saved[key], loaded[key])]
    note = f" (not {different[0]})" if different else ""
    return f"{len(saved) - len(different)} of {len(saved)} equal{note}"


def run_ranks(ranks: int, library: str, phase: str, folder: Path) -> None:
    """One process per rank on this machine; raises with the last line of the first failure."""
    common = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCHDYNAMO_DISABLE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    processes = []
    for rank in range(ranks):
        env = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, __file__, library, phase, str(folder)]
        processes.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
    failures = []
    try:
        for process in processes:
            _, errors = process.communicate(timeout=TIMEOUT)
            if process.returncode:
                failures.append(errors.strip().splitlines()[-1] if errors.strip() else "no output")
    finally:
        for process in processes:
            process.kill()
    if failures:
        # Ranks that lost their neighbour report that; the cause is with the others.
        causes = [text for text in failures if "onnection" not in text]
        raise RuntimeError((causes or failures)[0].split("]: ")[-1][:200])


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def reshard_worker(library: str, phase: str, folder: Path) -> None:
    """One rank: for each model train and save, or load. Either way its states are written to a file as float32."""
    from mvp_engine.distributed import World

    world = World.join("cpu")
    for name, shapes in MODELS.items():
        model = Parameters(shapes, "cpu")
        side = _OurSide(model, world) if library == OURS else _TorchaoSide(model, world)
        if phase == "save":
            train(model, side.optimizer)
            side.save(folder / name)
        else:
            side.load(folder / name)
        values = {"states": local_states(model, side), "bytes": state_bytes(side.optimizer)}
        torch.save(values, folder / f"{name}.{phase}.{world.rank}.pt")
        world.barrier()
    world.close()


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Some steps with gradients that do not depend on the layout."""
    from mvp_engine.distributed.dtensor import local_shards, shard_slices

    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            full = torch.randn(param.shape, generator=generator)
            param.grad = torch.empty_like(param)
            for offset, shard in local_shards(param.grad):
                shard.copy_(full[shard_slices(offset, shard)])
        optimizer.step()


class _OurSide:
    def __init__(self, model: nn.Module, world: Any) -> None:
        from mvp_engine.config.schema import Parallel
        from mvp_engine.distributed import Layout
        from mvp_engine.model_engine import FSDPEngine

        sizes = {"shard": world.size, "ulysses": 1, "tensor": 1, "timeout": 600.0}
        self.engine = FSDPEngine(model, Layout.of(world, Parallel.model_validate(sizes)))
        self.engine.initialize(OPTIMIZERS[OURS])
        self.optimizer = self.engine.optimizer

    def save(self, folder: Path) -> None:
        self.engine.save_checkpoint(folder)

    def load(self, folder: Path) -> None:
        self.engine.load_checkpoint(folder)

    def value(self, state: dict[str, Any], key: str) -> Tensor:
        from mvp_engine.distributed.dtensor import local_tensor
        from mvp_engine.kit.optim.state_tensor import dequantize

        if key in state:
            return local_tensor(state[key])
        return dequantize(local_tensor(state[f"{key}_codes"]), local_tensor(state[f"{key}_scales"]))


class _TorchaoSide:
    def __init__(self, model: nn.Module, world: Any) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.model = fully_shard(model, mesh=init_device_mesh("cpu", (world.size,)))
        self.optimizer = OPTIMIZERS[TORCHAO](model)

    def save(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        dcp.save(get_optimizer_state_dict(self.model, self.optimizer), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

        state_dict = get_optimizer_state_dict(self.model, self.optimizer)
        dcp.load(state_dict, checkpoint_id=folder)
        set_optimizer_state_dict(self.model, self.optimizer, state_dict)

    def value(self, state: dict[str, Any], key: str) -> Tensor:
        local = state[key].to_local()
        return local.dequantize() if hasattr(local, "dequantize") and type(local) is not Tensor else local


def local_states(model: nn.Module, side: _OurSide | _TorchaoSide) -> dict[str, tuple[tuple[int, ...], Tensor]]:
    """This rank's shard of each state as float32, with its offset in the full tensor."""
    from mvp_engine.distributed.dtensor import shard_offsets

    found = {}
    for name, param in model.named_parameters():
        for offset, index in shard_offsets(param):
            for key in ("exp_avg", "exp_avg_sq"):
                value = side.value(side.optimizer.state[param], key)[index]
                found[f"{name}/{key}"] = (offset, value.detach().clone())
    return found


def full_states(folder: Path, model: str, phase: str) -> dict[str, Tensor]:
    """The full states, put together from the files of all ranks."""
    found: dict[str, Tensor] = {}
    for name, shape in MODELS[model].items():
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"weights.{name.replace('.', '_')}/{key}"] = torch.full(shape, torch.nan)
    for file in folder.glob(f"{model}.{phase}.*.pt"):
        for name, (offset, value) in torch.load(file)["states"].items():
            index = tuple(slice(o, o + n) for o, n in zip(offset, value.shape, strict=True))
            found[name][index] = value
    return found


def saved_bytes(folder: Path, model: str) -> float:
    """Bytes of state per parameter, over all ranks that saved."""
    total = sum(torch.load(file)["bytes"] for file in folder.glob(f"{model}.save.*.pt"))
    return total / sum(torch.Size(shape).numel() for shape in MODELS[model].values())


if __name__ == "__main__":
    reshard_worker(sys.argv[1], sys.argv[2], Path(sys.argv[3]))

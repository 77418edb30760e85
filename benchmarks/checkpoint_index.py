"""Resume on one of 1,024 ranks: time, memory and opened files, with the index of a checkpoint and without it.

Files of all writers are written with the engine's own code; their tensors are tiny, the number of shards is that of
Qwen3-235B-A22B on pipeline 4 x shard 256: 283 tensors of a stage, each with two moments and a step count.

    PYTHONPATH=. python benchmarks/checkpoint_index.py --writers 1024 --out FILE
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from mvp_engine import files
from mvp_engine.checkpoint import format as checkpoint_format
from mvp_engine.checkpoint.format import INDEX, write_index
from mvp_engine.checkpoint.state import RankStates

STAGES = 4
TENSORS = 283  # of a stage


class Writer:
    """A process group for `format.write`: one rank, which waits for nobody."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def names_of(stage: int) -> list[str]:
    return [f"hf.model.layers.{stage * 24 + n // 12}.part_{n % 12}.weight" for n in range(TENSORS)]


def shards_of(rank: int, writers: int) -> Iterator[checkpoint_format.Shard]:
    """What a rank writes: its row of every tensor of its stage; scalars if it is the first of the stage."""
    in_stage = writers // STAGES
    stage, row = divmod(rank, in_stage)
    shape = torch.Size([in_stage, 2])
    for name in names_of(stage):
        for entry in (f"model.{name}", f"optim.{name}.exp_avg", f"optim.{name}.exp_avg_sq"):
            yield checkpoint_format.Shard(entry, shape, (row, 0), torch.full((1, 2), float(rank)))
        if row == 0:
            yield checkpoint_format.Shard(f"optim.{name}.step", torch.Size([]), (), torch.tensor(1.0))
    own = checkpoint_format.to_bytes({"rank": rank})
    yield checkpoint_format.Shard(f"rank.{rank:05d}", own.shape, (0,), own)
    if rank == 0:
        shared = checkpoint_format.to_bytes({"step": 1})
        yield checkpoint_format.Shard("shared", shared.shape, (0,), shared)


def write(folder: Path, writers: int) -> float:
    """Write the checkpoint; returns the seconds that the index took."""
    checkpoint_format.raise_on_all_ranks = lambda _: _Nothing()  # type: ignore[assignment]
    files.fsync_path = lambda _: None  # type: ignore[assignment]
    for rank in range(writers):
        checkpoint_format.write(folder, shards_of(rank, writers), Writer(rank, writers))  # type: ignore[arg-type]
    started = time.process_time()
    write_index(folder, [checkpoint_format.rank_file(folder, rank) for rank in range(writers)])
    return time.process_time() - started


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def resume(folder: Path, rank: int, writers: int) -> dict[str, float]:
    """Open the checkpoint and fill the tensors of one rank, on the layout that wrote it."""
    opened: set[str] = set()
    sys.addaudithook(lambda event, args: opened.add(str(args[0])) if event == "open" else None)
    before = resident_mib()
    started = time.process_time()
    reader = checkpoint_format.Reader(folder)
    in_stage = writers // STAGES
    stage, row = divmod(rank, in_stage)
    for name in names_of(stage):
        for entry in (f"model.{name}", f"optim.{name}.exp_avg", f"optim.{name}.exp_avg_sq"):
            assert reader.read(entry, (row, 0), (1, 2)).tolist() == [[float(rank)] * 2]
        assert reader.read(f"optim.{name}.step") == 1.0
    states = RankStates(reader, [0, rank])
    assert states[rank] == {"rank": rank}
    mapped = {str(path) for path in reader._files._files}
    headers = 0 if reader._index is not None else writers
    return {
        "cpu_s": round(time.process_time() - started, 2),
        "memory_mib": round(resident_mib() - before, 1),
        "files": max(headers, len(mapped)) + len([one for one in opened if one.endswith(INDEX)]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--writers", type=int, default=1024)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path, help="of a checkpoint that a child process reads")
    parser.add_argument("--rank", type=int, default=700)
    options = parser.parse_args()
    if options.folder:
        print(json.dumps(resume(options.folder, options.rank, options.writers)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        result: dict[str, object] = {"writers": options.writers, "torch": torch.__version__}
        result["index_write_cpu_s"] = round(write(folder, options.writers), 2)
        result["index_mib"] = round((folder / INDEX).stat().st_size / 2**20, 1)
        words = [sys.executable, __file__, "--writers", str(options.writers), "--folder", str(folder)]
        words += ["--rank", str(options.rank * options.writers // 1024)]
        for way in ("index", "headers"):
            result[way] = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
            (folder / INDEX).unlink(missing_ok=True)
    print(json.dumps(result, indent=2))
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

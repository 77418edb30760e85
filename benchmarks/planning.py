"""Planning an epoch of many rows: seconds and memory of the one process that plans, and of a rank of 1,024 that reads.

    PYTHONPATH=. python benchmarks/planning.py [--rows 1000000 10000000 100000000] [--out FILE]

Rows have lengths like those of texts (32 to 4,096 tokens), or of texts, images and videos, and no content: costs are a
file as `mvp_engine` writes it, and all that happens is what a start does with them. Each figure is of a process of its
own. `first_step` are the bytes that a rank reads from disk (/proc/self/io, with the file out of the page cache) to open
the plan and to look up its packs of the first step; `slice` those of all its packs of an epoch.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from mvp_engine.kit.data.pack import packs as packing
from mvp_engine.kit.data.pack.costs import Costs, read_costs, write_costs
from mvp_engine.kit.data.pack.packs import PackDataset, PackLoader
from mvp_engine.kit.data.pack.plan import Mixture

RANKS = 1024
RANK = 517
BUDGET = 8192
BUILD = Path(__file__).parents[1] / "build"  # on a disk, which /tmp may not be
RESULTS = Path(__file__).parent / "results" / "planning.json"


def lengths(rows: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and encoder work, drawn in blocks."""
    tokens, work = np.empty(rows, np.int64), np.zeros(rows, np.int64)
    for begin in range(0, rows, 1 << 22):
        rng = np.random.default_rng(begin)
        part = slice(begin, min(rows, begin + (1 << 22)))
        count = part.stop - begin
        tokens[part] = np.clip(np.exp(rng.normal(6, 1, count)), 32, 4096)
        if kind == "media":
            seen = rng.choice(4, count, p=[0.5, 0.35, 0.1, 0.05])
            media = np.choose(
                seen,
                [
                    0 * seen,
                    rng.integers(64, 1024, count),
                    rng.integers(128, 3072, count),
                    rng.integers(1000, 6000, count),
                ],
            )
            tokens[part] = np.clip(tokens[part] // 4, 16, BUDGET - media) + media
            work[part] = media * 6144
    return tokens, work


class Rows:
    fingerprint = "synthetic"

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows


def dataset(folder: Path, rows: int) -> PackDataset:
    costs = read_costs(folder / "costs.npz")
    encoder: Any = SimpleNamespace(max_tokens=BUDGET, overlong="drop", media_names=frozenset)
    source: Any = Rows(rows)
    mixture = Mixture([("rows", source, 1.0)])
    options = {"budget": BUDGET, "packs_per_step": RANKS, "seed": 1, "cache": folder}
    return PackDataset(mixture, [None], [costs], encoder, **options)


def make(folder: Path, rows: int, kind: str) -> dict[str, Any]:
    tokens, work = lengths(rows, kind)
    write_costs(folder / "costs.npz", Costs(tokens, work, (work > 0).astype(np.uint8)))
    return {}


def plan(folder: Path, rows: int, kind: str) -> dict[str, Any]:
    packing.LARGE_ROWS = 0  # also plans of few rows are stored
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began, cpu = time.monotonic(), time.process_time()
    made = dataset(folder, rows)
    seconds = time.process_time() - cpu
    [file] = folder.glob("*.plan")
    return {
        "cpu_seconds": round(seconds, 1),
        "seconds": round(time.monotonic() - began, 1),
        "gib": round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20, 2),
        "file_gib": round(file.stat().st_size / 2**30, 3),
        "packs": len(made),
        "fill": round(made.plan.fill_ratio, 4),
    }


def bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def rank(folder: Path, rows: int, kind: str) -> dict[str, Any]:
    packing.LARGE_ROWS = 0
    for file in folder.glob("*.[np]*"):
        with open(file, "rb") as data:
            os.fsync(data.fileno())
            os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun, start = time.monotonic(), bytes_read()
    made = dataset(folder, rows)
    loader = PackLoader(made, None, "data", rank=RANK, world_size=RANKS)  # type: ignore[arg-type]
    loader.step_plan(0)
    packs = [pack for batch in loader._micro_batches() for pack in batch]
    made.plan.pack(packs[0])
    seconds = time.monotonic() - begun
    first = bytes_read() - start
    for pack in packs:
        made.plan.pack(pack)
    return {
        "start_seconds": round(seconds, 2),
        "first_step_mib": round(first / 2**20, 2),
        "slice_mib": round((bytes_read() - start) / 2**20, 2),
        "packs": len(packs),
        "gib": round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[10**6, 10**7, 10**8])
    parser.add_argument("--kinds", nargs="+", default=["text", "media"])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--job", nargs=3, metavar=("STAGE", "FOLDER", "KIND"), help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.job:
        stage, folder, kind = words.job
        print(json.dumps(globals()[stage](Path(folder), words.rows[0], kind)))
        return
    found: list[dict[str, Any]] = []
    for kind in words.kinds:
        for rows in words.rows:
            BUILD.mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory(dir=BUILD) as folder:
                line: dict[str, Any] = {"rows": rows, "kind": kind}
                for stage in ("make", "plan", "rank"):
                    arguments = [__file__, "--rows", str(rows), "--job", stage, folder, kind]
                    done = subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, text=True, check=True)
                    line[stage] = json.loads(done.stdout.splitlines()[-1])
                del line["make"]
                print(json.dumps(line), flush=True)
                found.append(line)
    about = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "numpy": np.__version__}
    command = "PYTHONPATH=. python benchmarks/planning.py"
    words.out.write_text(json.dumps({"command": command, **about, "results": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What the tests share: the guinea-pig recipe, launching it in this process, in subprocesses, or on ranks kept warm."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ranks import RankPool

ROOT = Path(__file__).parents[1]
TINY = ROOT / "tests" / "recipes" / "tiny" / "train.yaml"
MAGIC = ROOT / "recipes" / "magic_transformer" / "configs" / "train.yaml"

os.environ["OMP_NUM_THREADS"] = "1"


def read_metrics(folder: Path, split: str = "train") -> list[dict[str, Any]]:
    """The records of the newest run in `folder`, without what time has a say in."""
    from mvp_engine.runs import list_runs

    records = [json.loads(line) for line in (list_runs(folder)[-1].dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if k != "perf"} for r in records if r["split"] == split]


def readme_commands(recipe: str) -> list[list[str]]:
    """The words of each `mvp` command in a recipe's README; a trailing comment is none of them."""
    text = (ROOT / "recipes" / recipe / "README.md").read_text().replace("\\\n", "")
    lines = [line for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("mvp ")]


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(folder)]


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., int]:
    """Launch the tiny recipe in this process: train("loop.total_steps=3", dir=...) -> exit code."""
    from mvp_engine.launch import launch

    def run(*overrides: str, config: Path = TINY, dir: Path = tmp_path) -> int:
        return launch(str(config), [f"project.dir={dir}", *overrides])

    return run


def spawn(*args: str, env: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
    """A process of its own, in a group of its own, with its output captured."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})}
    return subprocess.Popen(
        [sys.executable, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
        cwd=options.pop("cwd", ROOT),
        **options,
    )


def run_process(*args: str, **options: Any) -> tuple[int, str]:
    process = spawn(*args, **options)
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


@pytest.fixture(scope="session")
def ranks2() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks4() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool

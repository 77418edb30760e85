"""Goldens: what every config for a CPU computes, to compare a refactoring with the commit before it, bit by bit.

    python scripts/goldens.py record FILE      # on the commit before: some minutes on two cores
    python scripts/goldens.py compare FILE     # on the commit after: prints what differs, exit code 1 if anything does

For each config, on one thread: the metrics of three steps and of an evaluation, every tensor of the checkpoint at their
end, the same of a run that resumes after step 2, the exported folder, `mvp check --json` and `mvp data inspect --json`.
Times and memory are left out. Figures of different machines are not comparable.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "recipes")]

RUN_ONLY = ("log.", "checkpoint.")  # overrides that `check` and `inspect` do not need
MEASURED = {
    "perf",
    "seconds",
    "first_seconds",
    "tokens_per_s",
    "data_wait",
    "mfu",
    "memory",
    "eta_s",
    "warnings",
    "says",
}
MEASURED |= {"grad_difference"}  # summed in the order of a set
# Controllers start the ranks of these configs, which test_any_ranks.py leaves out.
CONTROLLERS = {
    "reverse_rl/grpo": ["made.rows=60", "rl.prompts_per_step=4", "rl.num_generations=4"],
    "reverse_rl/ppo": ["made.rows=60", "rl.prompts_per_step=4", "rl.num_generations=4"],
    "digits_rl/grpo": ["made.digits=60", "rl.prompts_per_step=4", "rl.num_generations=4"],
    "calculator_rl/rl": ["made.rows=60", "rl.prompts_per_step=4", "rl.num_generations=4"],
    "grid_rl/rl": ["made.rows=60", "rl.prompts_per_step=16"],
    "zoom_rl/rl": ["made.rows=60", "rl.prompts_per_step=4"],
    "agent_rl/rl": ["made.chats=60", "rl.prompts_per_step=4", "rl.num_generations=2"],
}


def plain(value: Any, folder: Path) -> Any:
    """`value` without what is measured, and with the temporary folder by one name."""
    if isinstance(value, dict):
        return {key: plain(child, folder) for key, child in value.items() if key not in MEASURED}
    if isinstance(value, list):
        return [plain(child, folder) for child in value]
    if isinstance(value, str):
        return value.replace(str(folder), "FOLDER").replace(str(ROOT), "ROOT")
    return value


def tensors(folder: Path) -> dict[str, str]:
    """A hash of every tensor in the safetensors files of a folder."""
    import torch
    from safetensors import safe_open

    hashes = {}
    for file in sorted(folder.rglob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in sorted(opened.keys()):
                tensor = opened.get_tensor(name).contiguous()
                content = tensor.flatten().view(torch.uint8).numpy().tobytes()
                head = f"{tensor.dtype} {tuple(tensor.shape)} "
                hashes[f"{file.parent.relative_to(folder)}/{name}"] = head + hashlib.sha256(content).hexdigest()[:16]
    return hashes


def texts(folder: Path) -> dict[str, str]:
    """A hash of every other file in a folder."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file.suffix != ".safetensors"]
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in files}


def metrics(folder: Path, run: str) -> list[Any]:
    return [plain(json.loads(line), folder) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]


def printed_json(folder: Path, *words: str) -> Any:
    from mvp_engine.cli import main

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = main(list(words))
    text = output.getvalue()
    start = re.search(r"^\{", text, re.MULTILINE)
    return {"code": code, **(plain(json.loads(text[start.start() :]), folder) if start else {})}


def golden(name: str, words: list[str], folder: Path) -> dict[str, Any]:
    from test_any_ranks import FEW_STEPS, config_file

    from mvp_engine.cli import main
    from mvp_engine.launch import launch

    config = str(config_file(name))
    words = [f"output_dir={folder}", *FEW_STEPS, *words]
    words[words.index("checkpoint.interval=null")] = "checkpoint.interval=2"
    run = f"run_{name.partition('/')[2]}"  # not the name of an export
    result: dict[str, Any] = {"code": launch(config, [*words, f"run_id={run}"])}
    checkpoints = folder / run / "checkpoints"
    result["metrics"] = metrics(folder, run)
    result["checkpoint"] = tensors(checkpoints / "step_00000003")
    resumed = [*words, f"run_id={run}_resumed", f"resume={checkpoints / 'step_00000002'}"]
    result["resumed code"] = launch(config, resumed)
    result["resumed metrics"] = metrics(folder, f"{run}_resumed")
    result["resumed checkpoint"] = tensors(folder / f"{run}_resumed" / "checkpoints" / "step_00000003")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        result["export code"] = main(["export", str(folder / run), str(folder / f"{run}_merged")])
    result["export"] = tensors(folder / f"{run}_merged") | texts(folder / f"{run}_merged")
    few = [word for word in words if not word.startswith(RUN_ONLY)]
    result["check"] = printed_json(folder, "check", config, *few, "--json")
    result["inspect"] = printed_json(folder, "data", "inspect", config, *few, "--json")
    return result


def of_recipe(configs: dict[str, list[str]], folder: str) -> dict[str, Any]:
    """The goldens of a recipe's configs, in the order in which one starts from the export of another."""
    recipe = next(iter(configs)).partition("/")[0]
    results = {}
    with open(Path(folder) / f"{recipe}.log", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        for name, words in configs.items():
            place = Path(folder) / recipe
            place.mkdir(exist_ok=True)
            os.chdir(place)
            results[name] = golden(name, words, place)
    return results


def differences(before: Any, after: Any, where: str) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            yield from differences(before.get(key), after.get(key), f"{where} > {key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from differences(one, other, f"{where}[{index}]")
    elif before != after:
        yield f"{where}: {str(before)[:80]} -> {str(after)[:80]}"


def leaves(value: Any) -> int:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 1 if children is None else sum(leaves(child) for child in children)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", help="configs whose name contains this")
    options = parser.parse_args()
    from test_any_ranks import SIZES

    recipes: dict[str, dict[str, list[str]]] = {}
    for name, words in {**SIZES, **CONTROLLERS}.items():
        recipes.setdefault(name.partition("/")[0], {})[name] = words
    folder = tempfile.mkdtemp(prefix="goldens_")
    results: dict[str, Any] = {}
    with ProcessPoolExecutor(2, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        chosen = [configs for configs in recipes.values() if any(options.only in name for name in configs)]
        for found in pool.map(of_recipe, chosen, [folder] * len(chosen)):
            results |= found
            print(*found, flush=True)
    if options.action == "record":
        options.file.parent.mkdir(parents=True, exist_ok=True)
        options.file.write_text(json.dumps(results, indent=1))
        print(f"recorded {leaves(results):,} values of {len(results)} configs")
        shutil.rmtree(folder)
        return 0
    before = {name: value for name, value in json.loads(options.file.read_text()).items() if options.only in name}
    lines = [line for name in before for line in differences(before[name], results.get(name), name)]
    print(*lines, sep="\n")
    print(f"compared {leaves(before):,} values of {len(before)} configs: {len(lines)} differ")
    shutil.rmtree(folder)
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())

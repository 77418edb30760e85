"""The size of the package, as figures to compare from one day to the next.

    python scripts/house.py            # lines, files, tokens, one-importer modules, config keys, commands
    python scripts/house.py --trace    # also what one training step runs through: half a minute

A token is one of Python's own tokenizer, without comments, docstrings, line ends and indentation; a line of code holds
at least one. `tests/test_layers.py` compares these figures with the limits that docs/architecture.md states.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import re
import subprocess
import sys
import tempfile
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mvp_engine"
DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}

# Runs a short vision-language SFT and records what is called between the start of step 2 and the start of step 3.
TRACE = """
import collections, runpy, sys, threading
from mvp_engine.model_engine.base import ModelEngine

root, folder = sys.argv[1:]
train_batch, steps, seen = ModelEngine.train_batch, 0, collections.defaultdict(set)

def watch(frame, event, arg):
    code = frame.f_code
    if steps == 2 and event == "call" and code.co_filename.startswith((f"{root}/mvp_engine/", f"{root}/recipes/")):
        if not code.co_name.startswith("<"):
            seen[code.co_filename].add(code.co_qualname)

def watched_train_batch(*arguments, **options):
    global steps
    steps += 1
    sys.setprofile(watch if steps == 2 else None)
    return train_batch(*arguments, **options)

ModelEngine.train_batch = watched_train_batch
threading.setprofile(watch)
sys.argv = ["mvp", "train", f"{root}/recipes/digits_vlm/configs/train.yaml", "train.max_steps=3", "export_link=null"]
sys.argv += ["eval.steps=null", "data.num_workers=0", "log.backends=[jsonl]", f"output_dir={folder}"]
try:
    runpy.run_module("mvp_engine.cli", run_name="__main__")
except SystemExit as exit:
    assert not exit.code, exit.code
modules = sum(name.split(".")[0] == "mvp_engine" for name in sys.modules)
print("traced", modules, len(seen), sum(map(len, seen.values())))
"""


@dataclass(frozen=True)
class Size:
    """Size of one file, or of several together."""

    files: int = 0
    lines: int = 0
    code_lines: int = 0
    tokens: int = 0

    @property
    def density(self) -> float:
        """Tokens per line of code."""
        return self.tokens / max(1, self.code_lines)


def measure(file: Path) -> Size:
    source = file.read_text()
    docs: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DEFINITIONS) and ast.get_docstring(node, clean=False) is not None:
            docs |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    code: set[int] = set()
    tokens = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT and token.start[0] not in docs:
            tokens += 1
            code.add(token.start[0])
    return Size(1, source.count("\n"), len(code), tokens)


def total(sizes: Iterable[Size]) -> Size:
    result = Size()
    for size in sizes:
        result = Size(*(getattr(result, name) + getattr(size, name) for name in Size.__dataclass_fields__))
    return result


def rooms() -> dict[str, list[Size]]:
    """The files of each room: a folder of the package, or of its kits."""
    sizes: dict[str, list[Size]] = defaultdict(list)
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE).parts[:-1]
        sizes["/".join(parts[: 2 if parts[:1] == ("kit",) else 1]) or "top level"].append(measure(file))
    return sizes


def one_importer_modules() -> list[str]:
    """Modules that exactly one other module of the package imports: candidates to be merged into it."""
    files = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in PACKAGE.rglob("*.py")}
    modules = {name.removesuffix(".__init__"): file for name, file in files.items()}
    importers: dict[str, set[str]] = defaultdict(set)
    for name, file in modules.items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mvp_engine"):
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    importers[full if full in modules else node.module or ""].add(name)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    importers[alias.name].add(name)
    single = [name for name, users in importers.items() if name in modules and len(users - {name}) == 1]
    return sorted(name for name in single if modules[name].name != "__init__.py")


def mvp(*arguments: str) -> str:
    command = [sys.executable, "-m", "mvp_engine.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def config_keys() -> list[str]:
    """The keys of the reference page, `NAME` for the names of sources and groups; not those that recipes add."""
    rows = (line for line in mvp("config", "--reference").splitlines() if line.startswith("| `"))
    return [row.split("`")[1] for row in rows]


def unset_keys() -> list[str]:
    """The keys that no shipped config sets: each of them waits for a reader who finds it by its page alone."""
    used: set[str] = set()
    for file in (ROOT / "recipes").glob("*/configs/*.yaml"):
        used.update(dotted(yaml.safe_load(file.read_text()) or {}))
    patterns = {key: re.escape(key).replace("NAME", r"\w+") for key in config_keys()}
    return [key for key, pattern in patterns.items() if not any(re.fullmatch(pattern, name) for name in used)]


def dotted(value: Any, prefix: str = "") -> Iterator[str]:
    """The keys of a config, with the keys below them; the items of a list have the name 0."""
    items = (
        value.items() if isinstance(value, dict) else [(0, item) for item in value] if isinstance(value, list) else []
    )
    for name, below in items:
        yield f"{prefix}{name}"
        yield from dotted(below, f"{prefix}{name}.")


def commands() -> int:
    """Commands of `mvp`, those below a group such as `mvp runs` counted each, and one with several names once."""
    from mvp_engine.cli import build_parser

    def leaves(parser: argparse.ArgumentParser) -> int:
        groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        children = {id(child): child for group in groups for child in group.choices.values()}
        return sum(map(leaves, children.values())) or 1

    return leaves(build_parser())


def trace() -> tuple[int, int, int]:
    """Modules that a vision-language SFT imports; files and functions that one steady step runs through."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", TRACE, str(ROOT), folder]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    line = next((line for line in result.stdout.splitlines() if line.startswith("traced ")), None)
    if line is None:
        raise RuntimeError(f"the traced training failed:\n{result.stdout[-2000:]}{result.stderr[-2000:]}")
    modules, files, functions = (int(figure) for figure in line.split()[1:])
    return modules, files, functions


def main() -> None:
    every = rooms()
    folders = {
        name: [measure(file) for file in (ROOT / name).rglob("*.py")] for name in ("tests", "benchmarks", "recipes")
    }
    package = total(size for sizes in every.values() for size in sizes)
    print(f"{'room':20}{'files':>7}{'lines':>8}{'ktokens':>9}{'tokens/line':>13}")
    rows = sorted(every.items(), key=lambda item: -total(item[1]).lines)
    for room, sizes in [*rows, ("package", [package]), *folders.items()]:
        size = total(sizes)
        print(f"{room:20}{size.files:7}{size.lines:8}{size.tokens / 1000:9.1f}{size.density:13.1f}")
    print(f"modules with exactly one importer: {len(one_importer_modules())}")
    print(f"config keys: {len(config_keys())}; set by no shipped config: {len(unset_keys())}")
    print(f"commands: {commands()}")
    if "--trace" in sys.argv:
        modules, files, functions = trace()
        print(f"modules that a vision-language SFT imports: {modules}")
        print(f"one steady step: {files} files, {functions} functions")


if __name__ == "__main__":
    main()

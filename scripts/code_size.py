"""Size and density of the package: files, lines and Python tokens of each room, tokens per line of code.

    python scripts/code_size.py [ROOT]

A token is one of Python's own tokenizer, without comments, docstrings, line ends and indentation. A line of code is a
line that holds at least one. `core` is what every training runs through; kits and tools are called on top of it, and
`hf` adapts one library, and `report` shows what a run folder holds.
"""

from __future__ import annotations

import ast
import io
import statistics
import sys
import tokenize
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "mvp_engine"
NOT_CORE = {"kit", "tools", "hf", "report", "rl", "worker", "cli.py"}
READING_PATH = ["launch.py", "engine/engine.py", "model_engine/base.py", "model_engine/fsdp/engine.py"]
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


@dataclass(frozen=True)
class Size:
    lines: int
    code_lines: int
    tokens: int


def docstring_lines(source: str) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            text = node.body[0]
            lines |= set(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return lines


def measure(file: Path) -> Size:
    source = file.read_text()
    docs = docstring_lines(source)
    code: set[int] = set()
    tokens = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in _LAYOUT or token.start[0] in docs:
            continue
        tokens += 1
        code |= set(range(token.start[0], token.end[0] + 1))
    return Size(len(source.splitlines()), len(code), tokens)


def room_of(file: Path, package: Path = PACKAGE) -> str:
    parts = file.relative_to(package).parts
    return parts[0] if len(parts) > 1 or parts[0] == "cli.py" else "top level"


def sizes(package: Path = PACKAGE, left_out: Set[str] = frozenset()) -> dict[str, list[Size]]:
    """The files of each room, except for those `left_out`: a second of a CPU for 20,000 lines."""
    rooms: dict[str, list[Size]] = {}
    for file in sorted(package.rglob("*.py")):
        room = room_of(file, package)
        if room not in left_out:
            rooms.setdefault(room, []).append(measure(file))
    return rooms


def core(rooms: dict[str, list[Size]]) -> list[Size]:
    return [size for room, files in rooms.items() if room not in NOT_CORE for size in files]


def density(files: list[Size]) -> float:
    """Tokens per line of code."""
    return sum(size.tokens for size in files) / sum(size.code_lines for size in files)


def _row(name: str, files: list[Size]) -> str:
    lines = [size.lines for size in files]
    tokens = sum(size.tokens for size in files)
    return (
        f"| {name} | {len(files)} | {sum(lines):,} | {tokens:,} | {density(files):.2f} "
        f"| {statistics.median(lines):.0f} | {max(lines)} |"
    )


def main() -> None:
    package = Path(sys.argv[1]) if len(sys.argv) > 1 else PACKAGE
    rooms = sizes(package)
    every = [size for files in rooms.values() for size in files]
    print("| room | files | lines | tokens | tokens per line of code | median file | largest |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for room, files in sorted(rooms.items()):
        print(_row(room, files))
    print(_row("**core**", core(rooms)))
    print(_row("**core and hf**", core(rooms) + rooms.get("hf", [])))
    print(_row("**all**", every))
    if package == PACKAGE:
        path = sum(measure(package / file).lines for file in READING_PATH)
        print(f"\nReading path from launch to optimizer step: {path} lines in {len(READING_PATH)} files")


if __name__ == "__main__":
    main()

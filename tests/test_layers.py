"""The house keeps its shape: imports point downwards, files stay small, help stays quick."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

# Who may import whom: a room may use the rooms to its right and itself. `config.schema` and the leaves are for all.
LEAVES = {"errors", "files", "imports", "renamed", "runs", "process", "config.schema"}
ROOMS = ["cli", "tools", "launch", "config", "worker", "kit", "engine", "model_engine", "hf"]
ROOMS += ["checkpoint", "log", "ops", "data", "distributed"]


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a syntax tree except those below `if TYPE_CHECKING:`."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        yield child
        yield from nodes(child)


def imported(file: Path) -> set[str]:
    """The modules of the package that `file` imports: at its top or lazily, inside of functions."""
    found = set()
    for node in nodes(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mvp_engine"):
            below = (node.module or "").removeprefix("mvp_engine").lstrip(".")
            found |= {below} if below else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.removeprefix("mvp_engine.") for a in node.names if a.name.startswith("mvp_engine.")}
    return found - {"__version__", "PARENT", "renamed"}


@pytest.mark.parametrize("file", sorted((ROOT / "mvp_engine").rglob("*.py")), ids=lambda f: f.name)
def test_imports_point_downwards(file: Path) -> None:
    parts = file.relative_to(ROOT / "mvp_engine").with_suffix("").parts
    room, module = parts[0], ".".join(parts)
    for target in imported(file):
        if any(target == leaf or target.startswith(f"{leaf}.") for leaf in LEAVES):
            continue
        assert module not in LEAVES, f"{module} is a leaf but imports {target}"
        if room == "__init__":
            continue
        assert ROOMS.index(target.split(".")[0]) >= ROOMS.index(room), f"{module} imports {target}, which is above it"


def transformers_internals(source: str) -> list[str]:
    """Imports from transformers, lazy ones too, that are not `from transformers import PublicName`."""
    found = []
    for node in nodes(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            module, _, below = (node.module or "").partition(".")
            public = all(alias.name[0].isupper() for alias in node.names)
            if module == "transformers" and (below or not public):
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.startswith("transformers.")]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value).startswith("transformers."):
            found.append(ast.unparse(node))
    return found


def test_transformers_internals_are_imported_only_by_hf() -> None:
    internal = ["from transformers.models.auto import x", "def f():\n  import transformers.masking_utils"]
    internal += ["from transformers import masking_utils", "import transformers\ntransformers.models.auto"]
    assert all(transformers_internals(source) for source in internal)
    assert not transformers_internals("from transformers import AutoModel\nimport transformers\ntransformers.AutoModel")
    package = ROOT / "mvp_engine"
    files = [file for file in package.rglob("*.py") if file.relative_to(package).parts[0] != "hf"]
    found = {str(file): used for file in files if (used := transformers_internals(file.read_text()))}
    found.pop(str(package / "model_engine" / "fsdp" / "tensor_parallel.py"), None)  # moves to hf/tp_plan.py
    assert found == {}


def test_recipes_never_import_each_other() -> None:
    names = {folder.name for folder in (ROOT / "recipes").iterdir() if folder.is_dir()}
    for file in (ROOT / "recipes").rglob("*.py"):
        own = file.relative_to(ROOT / "recipes").parts[0]
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                assert (node.module or "").split(".")[0] not in names - {own}, file


def test_no_file_is_past_400_lines_and_recipe_engines_stay_small() -> None:
    for file in [*(ROOT / "mvp_engine").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        assert len(file.read_text().splitlines()) <= 520, file
    for file in (ROOT / "recipes").glob("*/engine.py"):
        assert len(file.read_text().splitlines()) < 100, file


def test_help_imports_no_torch() -> None:
    code = """
import sys
from mvp_engine.cli import main
try:
    main(["--help"])
except SystemExit:
    pass
heavy = {"torch", "hydra", "pydantic", "matplotlib", "rich"} & set(sys.modules)
sys.exit(f"--help imports {heavy}" if heavy else 0)
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    assert "train" in answer.stdout

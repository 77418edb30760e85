"""Structure of the package: imports point downwards, files stay small and legible, prose uses the field's terms."""

from __future__ import annotations

import ast
import functools
import io
import re
import subprocess
import sys
import tokenize

import pytest
from conftest import ROOT

from mvp_engine.imports import import_file

# Who may import whom: a room may use the rooms to its right and itself. `config.schema` and the leaves are for all.
LEAVES = {"errors", "files", "imports", "plugins", "runs", "process", "stores"}
LEAVES |= {"config.schema", "log.format"}
ROOMS = [
    "cli",
    "tools",
    "api",
    "launch",
    "config",
    "plug-in kits",
    "worker",
    "kit",
    "engine",
    "model_engine",
    "hf",
]
ROOMS += ["checkpoint", "log", "ops", "data", "distributed", "report"]
# Folders of kit/ that plug in: they may use everything below `config`, and only their plugin.py says what they add.
PLUGIN_KITS = {"actions", "flow", "plan", "preference", "rl", "speech"}
# Those that nothing else imports: `mvp plan` is the command of kit/plan.
APART = PLUGIN_KITS - {"plan"}
# What a reader feels of the size of the package, from scripts/house.py. They go down; one that goes up needs a line in
# docs/architecture.md, "Size", which says what the reader gets for it.
FILES = 280
ONE_IMPORTER_MODULES = 37
CONFIG_KEYS = 158
UNSET_KEYS = 22  # that no shipped config sets
COMMANDS = 18
SFT_MODULES = 162
STEP_FILES = 55
STEP_FUNCTIONS = 324
READING_PATH = [
    "launch.py",
    "engine/engine.py",
    "model_engine/base.py",
    "model_engine/fsdp/engine.py",
]
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

# Words that stood for a term of the field (docs/glossary.md), as regular expressions.
BANNED = [
    "beside",
    "aside",
    "anew",
    "mend(s|ed|ing)?",
    "told",
    "tells?",
    "films?",
    "honou?r(s|ed|ing)?",
]
BANNED += ["recomput(e|es|ed|ing)", "go(es)? on", "went on", r"so many[- ]th", "few bits"]
FIELD_TERMS = [
    "gradient accumulation",
    "micro-batch",
    "global batch",
    "activation checkpointing",
    "learning rate",
]
FIELD_TERMS += ["all-gather", "reduce-scatter", "all-reduce", "data parallel", "tensor parallel"]
FIELD_TERMS += [
    "sequence parallel",
    "fsdp",
    "prefetch",
    "pinned memory",
    "host sync",
    "packed sequences",
]
FIELD_TERMS += ["variable-length", "optimizer state", "kv cache"]
FIELD_TERMS += [
    "loss spike",
    "skipped step",
    "mfu",
    "all-to-all",
    "stochastic rounding",
    "peak memory",
    "throughput",
]
FIELD_TERMS += [
    "low-precision",
    "loss scale",
    "non-finite",
    "gemm",
    "matmul",
    "dtensor",
    "dummy",
    "completion",
]


PACKAGE = ROOT / "mvp_engine"


def nodes(tree):
    """All nodes of a syntax tree except those below `if TYPE_CHECKING:`."""
    left = [tree]
    while left:
        for child in ast.iter_child_nodes(left.pop()):
            if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
                continue
            yield child
            left.append(child)


def imported(file):
    """The modules of the package that `file` imports: at its top or lazily, inside of functions."""
    found = set()
    for node in nodes(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mvp_engine"):
            below = (node.module or "").removeprefix("mvp_engine").lstrip(".")
            found |= {below} if below else {alias.name for alias in node.names}
            if below == "kit":  # `from mvp_engine.kit import flow`
                found |= {
                    f"kit.{alias.name}"
                    for alias in node.names
                    if (PACKAGE / "kit" / alias.name).is_dir()
                }
        elif isinstance(node, ast.Import):
            found |= {
                a.name.removeprefix("mvp_engine.")
                for a in node.names
                if a.name.startswith("mvp_engine.")
            }
    return found - {"__version__", "PARENT"}


@pytest.mark.parametrize(
    "first", sorted({file.relative_to(PACKAGE).parts[0] for file in PACKAGE.rglob("*.py")})
)
def test_imports_point_downwards(first):
    for file in [PACKAGE / first] if first.endswith(".py") else (PACKAGE / first).rglob("*.py"):
        check_imports(file)


def check_imports(file):
    parts = file.relative_to(ROOT / "mvp_engine").with_suffix("").parts
    room, module = parts[0], ".".join(parts)
    for target in imported(file):
        if any(target == leaf or target.startswith(f"{leaf}.") for leaf in LEAVES):
            continue
        assert module not in LEAVES, f"{module} is a leaf but imports {target}"
        if room == "__init__":
            continue
        assert ROOMS.index(room_of(target)) >= ROOMS.index(room_of(module)), (
            f"{module} imports {target}, above it"
        )


def room_of(module):
    names = module.split(".")
    return (
        "plug-in kits" if names[0] == "kit" and names[1:] and names[1] in PLUGIN_KITS else names[0]
    )


def test_core_and_tools_import_no_plugin_kit():
    """Not at the top of a file and not inside of a function: a config, a row or a command names what it needs."""
    for file in PACKAGE.rglob("*.py"):
        module = ".".join(file.relative_to(PACKAGE).with_suffix("").parts)
        if room_of(module) == "plug-in kits":
            continue
        kits = {target for target in imported(file) if room_of(target) == "plug-in kits"}
        assert not [target for target in kits if target.split(".")[1] in APART], (
            f"{module} imports {kits}"
        )


# Plug-in kits with models of their own, next to those of hf/.
MODEL_KITS = ("kit/actions", "kit/speech")


def transformers_internals(source):
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
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value).startswith(
            "transformers."
        ):
            found.append(ast.unparse(node))
    return found


def test_transformers_internals_are_imported_only_by_hf():
    internal = [
        "from transformers.models.auto import x",
        "def f():\n  import transformers.masking_utils",
    ]
    internal += [
        "from transformers import masking_utils",
        "import transformers\ntransformers.models.auto",
    ]
    assert all(transformers_internals(source) for source in internal)
    assert not transformers_internals(
        "from transformers import AutoModel\nimport transformers\ntransformers.AutoModel"
    )
    package = ROOT / "mvp_engine"
    folders = ("hf", *MODEL_KITS)
    files = [
        file
        for file in package.rglob("*.py")
        if not file.relative_to(package).as_posix().startswith(folders)
    ]
    sources = {
        str(file): source for file in files if "transformers" in (source := file.read_text())
    }
    assert {
        file: used for file, source in sources.items() if (used := transformers_internals(source))
    } == {}


def test_changes_to_module_instances_are_in_the_table_of_the_docs():
    page = (
        (ROOT / "docs" / "model_engine.md")
        .read_text()
        .partition("## What changes on an instance")[2]
    )
    named = set(
        re.findall(
            r"`((?:hf|ops|kit|model_engine)/[\w/]+\.py)`", page.partition("\nTo choose a path")[0]
        )
    )
    changing: set[str] = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else []
            if any(
                isinstance(target, ast.Attribute) and target.attr in ("forward", "__class__")
                for target in targets
            ):
                changing.add(file.relative_to(PACKAGE).as_posix())
    assert named == changing


def test_recipes_never_import_each_other():
    names = {folder.name for folder in (ROOT / "recipes").iterdir() if folder.is_dir()}
    for file in (ROOT / "recipes").rglob("*.py"):
        own = file.relative_to(ROOT / "recipes").parts[0]
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                assert (node.module or "").split(".")[0] not in names - {own}, file


def test_no_file_is_past_700_lines_and_recipe_engines_stay_small():
    for file in [*(ROOT / "mvp_engine").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        assert len(file.read_text().splitlines()) <= 700, file
    for file in (ROOT / "recipes").glob("*/engine.py"):
        assert len(file.read_text().splitlines()) <= 150, file


def test_entry_point_of_a_module_comes_last():
    """`python -m`, by which torchrun starts ranks, calls it before what follows it is defined."""
    for file in PACKAGE.rglob("*.py"):
        source = file.read_text()
        if '\nif __name__ == "__main__":' in source:
            last = ast.parse(source).body[-1]
            assert isinstance(last, ast.If), f"{file}: move `if __name__ == ...` to the end"


@pytest.fixture(scope="module")
def house():
    return import_file(ROOT / "scripts" / "house.py")


def test_package_size_stays_within_its_figures(house):
    assert len(list(PACKAGE.rglob("*.py"))) <= FILES
    assert len(house.one_importer_modules()) <= ONE_IMPORTER_MODULES
    assert len(house.config_keys()) <= CONFIG_KEYS
    assert len(house.unset_keys()) <= UNSET_KEYS
    assert house.commands() <= COMMANDS
    path = [house.measure(PACKAGE / file) for file in READING_PATH]
    assert house.total(path).lines <= 2000
    assert house.total(path).density <= 9  # tokens per line of code; 8.0 in nanochat


@pytest.mark.slow
def test_vision_language_sft_runs_through_few_files(house):
    modules, files, functions = house.trace()
    assert modules <= SFT_MODULES
    assert files <= STEP_FILES
    assert functions <= STEP_FUNCTIONS


@functools.cache
def prose(file):
    """(line number, text) of every comment and docstring line of a file, without `quoted code`."""
    source, found = file.read_text(), []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            found.append((token.start[0], re.sub(r"`[^`]*`", "", token.string)))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            first = node.body[0].lineno
            text = re.sub(r"`[^`]*`", "", ast.literal_eval(ast.unparse(node.body[0])))
            found += [(first + i, line) for i, line in enumerate(text.splitlines())]
    return found


def test_prose_of_package_holds_no_banned_word():
    banned = re.compile(rf"\b({'|'.join(BANNED)})\b", re.IGNORECASE)
    found = []
    for file in sorted((ROOT / "mvp_engine").rglob("*.py")):
        # Tokens take long: first whether the word is anywhere.
        if not banned.search(file.read_text()):
            continue
        for line, text in prose(file):
            found += [
                f"{file.relative_to(ROOT)}:{line}: {match[0]}" for match in banned.finditer(text)
            ]
    assert not found, "\n".join(["docs/glossary.md has a term for each of these:", *found])


def test_prose_of_package_uses_the_terms_of_the_field():
    missing = set(FIELD_TERMS)
    for file in sorted((ROOT / "mvp_engine").rglob("*.py")):
        if any(term.split()[-1] in file.read_text().lower() for term in missing):
            text = " ".join(" ".join(line.strip("# ") for _, line in prose(file)).lower().split())
            missing = {term for term in missing if term not in text}
    assert missing == set()


def test_help_imports_no_torch():
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
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    assert "train" in answer.stdout


def test_test_files_have_names_of_their_own():
    """pytest imports them as top-level modules, and ranks find functions by module name."""
    names = [file.name for file in (ROOT / "tests").rglob("test_*.py")]
    assert [name for name in set(names) if names.count(name) > 1] == []


def test_lazy_export_has_no_submodule_of_its_name():
    """An import of the submodule would put itself in place of the export."""
    for file in (ROOT / "mvp_engine").rglob("__init__.py"):
        text = file.read_text()
        if "lazy_exports(" not in text:
            continue
        lazy = text.partition("if TYPE_CHECKING:")[2]
        names = set(re.findall(r"^    from \S+ import (.+)$", lazy, re.MULTILINE))
        exported = {name.strip() for line in names for name in line.split(",")}
        modules = {path.stem for path in file.parent.iterdir()}
        assert not exported & modules, file

"""`mvp config` finds the schema of a recipe in its source: the same as that of the imported engine, without torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, TINY

from mvp_engine.cli import main
from mvp_engine.config import compose
from mvp_engine.config.compose import read_draft
from mvp_engine.tools.config import config_keys
from mvp_engine.tools.recipe_schema import find_schema

FILES = [
    "recipes/magic_transformer/configs/train.yaml",
    "recipes/digits_vlm/configs/train.yaml",
    "recipes/qwen3/configs/sft_cpu.yaml",
    "recipes/qwen3_vl/configs/instruct_lora.yaml",
    "recipes/qwen_audio/configs/cpu.yaml",
    "recipes/vit_classification/configs/cpu.yaml",
]
CONFIGS = [*(ROOT / file for file in FILES), TINY]


def no_engine(folder: Path) -> Path:
    file = folder / "mine.yaml"
    file.write_text(
        "engine: mvp_engine.kit:MLLMEngine\nmllm: {sources: [{path: a.jsonl}], micro_batch_tokens: 64}\n"
    )
    return file


def test_config_commands_import_no_torch(tmp_path: Path) -> None:
    """Of every shipped recipe, of one with no engine of its own, and without a config."""
    code = """
import sys
from mvp_engine.cli import main
for file in sys.argv[1:]:
    assert main(["config", "show", file]) == 0
assert main(["config", "explain", "optim.lr"]) == main(["config", "schema", sys.argv[1]]) == 0
assert main(["train", sys.argv[1], "optim.lrr=1"]) == 2  # a typo is an error at once
print({"torch", "transformers", "numpy"} & set(sys.modules))
"""
    words = [str(file) for file in [*CONFIGS, no_engine(tmp_path)]]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "set()"), done.stderr
    assert done.stderr.count("\n") == 1


# Without vit_classification: its import takes seconds.
@pytest.mark.parametrize(
    "file", [CONFIGS[1], CONFIGS[2], TINY], ids=lambda file: str(file.relative_to(ROOT))
)
def test_parsed_schema_equals_that_of_the_imported_engine(file: Path) -> None:
    draft = read_draft(file, [])
    schema, spec = find_schema(draft)
    composed = compose(file)
    assert schema is not composed.engine_class.config_class  # it was not imported
    assert draft.validated(schema, spec).to_yaml() == composed.config.to_yaml()
    assert config_keys(schema) == config_keys(composed.engine_class.config_class)


def test_inherited_schema_is_that_of_the_package(tmp_path: Path) -> None:
    (tmp_path / "base.py").write_text(
        "import torch\nfrom mvp_engine.kit import MLLMEngine as Kit\nclass Base(Kit):\n    pass\n"
    )
    (tmp_path / "engine.py").write_text(
        "from torch import nn\nfrom .base import Base as Own\n"
        "class Net(nn.Module):\n    pass\nclass Mine(Own):\n    pass\n"
    )
    file = no_engine(tmp_path)
    file.write_text(file.read_text().replace("mvp_engine.kit:MLLMEngine", "engine.py"))
    schema, spec = find_schema(read_draft(file, []))
    assert (schema, spec) == (compose(file).engine_class.config_class, compose(file).config.engine)


UNUSUAL = [
    "class Other(TinyEngine):\n    pass\n\n\nOther.config_class = TinyConfig\n",
    "TinyEngine.config_class = TinyConfig\nclass Other(TinyEngine):\n    config_class = type('X', (TinyConfig,), {})\n",
    "if True:\n    TinyConfig.model_rebuild(force=True)\n    class Second(TinyEngine):\n        pass\n",
]


@pytest.mark.parametrize("code", UNUSUAL)
def test_unusual_engine_is_imported(tmp_path: Path, capsys, code: str) -> None:
    folder = tmp_path / f"recipe_{tmp_path.name}"
    shutil.copytree(TINY.parent, folder)
    with open(folder / "engine.py", "a") as file:
        file.write(f"\n\n{code}")
    assert main(["config", "show", str(folder / "train.yaml"), "engine=engine.py:TinyEngine"]) == 0
    assert "TinyEngine" in capsys.readouterr().out
    assert main(["config", "show", str(folder / "train.yaml")]) == 2  # several engines
    assert "defines several engines" in capsys.readouterr().err

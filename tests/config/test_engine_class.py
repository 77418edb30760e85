"""The config class of an engine is found in the engine's source where this imports it: without an import of torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, TINY

from mvp_engine.cli import main
from mvp_engine.config.compose import compose, read_draft
from mvp_engine.config.engine_class import EngineSource

CONFIGS = [
    file for file in sorted((ROOT / "recipes").glob("*/configs/*.yaml")) if file.stem != "base"
]


def no_engine(folder: Path) -> Path:
    file = folder / "mine.yaml"
    file.write_text(
        "engine: mvp_engine.kit:MLLMEngine\nmllm: {sources: [{path: a.jsonl}], micro_batch_tokens: 64}\n"
    )
    return file


@pytest.mark.slow
def test_config_commands_import_no_torch(tmp_path: Path) -> None:
    """Of every shipped recipe, of one with no engine of its own, and without a config."""
    code = """
import sys
from mvp_engine.cli import main
from mvp_engine.config.compose import read_draft
for file in sys.argv[1:]:
    read_draft(file).schema
assert main(["config", sys.argv[-1]]) == main(["config", "sft/lora"]) == 0
assert main(["config", "--explain", "optim.lr"]) == main(["config", "digits_vlm/train", "--schema"]) == 0
assert main(["train", "digits_vlm/train", "optim.lrr=1"]) == 2  # a typo is an error at once
print({"torch", "transformers", "numpy"} & set(sys.modules))
"""
    words = [str(file) for file in [*CONFIGS, no_engine(tmp_path)]]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "set()"
    assert done.stderr.count("\n") == 2


# Without vit_classification: its import takes seconds.
@pytest.mark.parametrize("name", ["digits_vlm/train", "qwen3/sft_cpu", "reverse_rl/sft"])
def test_config_class_in_the_source_is_that_of_the_imported_engine(name: str) -> None:
    composed = compose(name)
    assert type(composed.config) is composed.engine_class.config_class


def test_inherited_config_class_is_that_of_the_package(tmp_path: Path) -> None:
    (tmp_path / "base.py").write_text(
        "import torch\nfrom mvp_engine.kit import MLLMEngine as Kit\nclass Base(Kit):\n    pass\n"
    )
    (tmp_path / "engine.py").write_text(
        "from torch import nn\nfrom .base import Base as OwnEngine\n"
        "class Net(nn.Module):\n    pass\nclass Mine(OwnEngine):\n    pass\n"
    )
    source = EngineSource(tmp_path / "engine.py")
    file = no_engine(tmp_path)
    file.write_text(file.read_text().replace("mvp_engine.kit:MLLMEngine", "engine.py"))
    schema = read_draft(file).schema
    assert (
        source.config_class(source.only_engine) is schema is compose(file).engine_class.config_class
    )


def test_name_of_a_shipped_recipe_stands_for_its_engine(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "preference").mkdir()
    (tmp_path / "mine.yaml").write_text(
        "engine: preference\nmllm: {pairs: true, sources: [{path: a.jsonl}], micro_batch_tokens: 64}\n"
    )
    composed = compose(tmp_path / "mine.yaml")
    shipped = compose("preference/dpo_text")
    assert composed.config.engine == shipped.config.engine
    assert composed.engine_class is shipped.engine_class


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
    assert main(["config", str(folder / "train.yaml"), "engine=engine.py:TinyEngine"]) == 0
    assert "TinyEngine" in capsys.readouterr().out
    assert main(["config", str(folder / "train.yaml")]) == 2  # several engines
    assert "defines several engines" in capsys.readouterr().err


def test_config_class_that_the_source_does_not_say_is_an_error(tmp_path: Path, capsys) -> None:
    (tmp_path / "settings.py").write_text(
        "from mvp_engine.config import Config\nclass Mine(Config):\n    pass\n"
    )
    code = "from mvp_engine.engine import Engine\nfrom .settings import Mine\nclass MyEngine(Engine):\n"
    code += "    config_class = Mine\nsetattr(MyEngine, 'config_class', type('X', (Mine,), {}))\n"
    (tmp_path / "engine.py").write_text(code)
    (tmp_path / "train.yaml").write_text("seed: 1\n")
    assert main(["train", str(tmp_path / "train.yaml"), f"project.dir={tmp_path}"]) == 2
    assert (
        "another config_class than its source says: set it in the class body"
        in capsys.readouterr().err
    )

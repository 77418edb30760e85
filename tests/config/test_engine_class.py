"""The config class of an engine is found in the settings file next to it: without an import of torch."""

import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, TINY, mvp

from mvp_engine.config.compose import compose

CONFIGS = [
    file for file in sorted((ROOT / "recipes").glob("*/configs/*.yaml")) if file.stem != "base"
]


@pytest.mark.slow
def test_config_commands_import_no_torch():
    """Of every shipped recipe, and without a config."""
    code = """
import sys
from mvp_engine.cli import main
from mvp_engine.config.compose import read_draft
for file in sys.argv[1:]:
    read_draft(file).schema
assert main(["config", "sft/lora"]) == 0
assert main(["config", "--explain", "optim.lr"]) == main(["config", "digits_vlm/train", "--schema"]) == 0
assert main(["train", "digits_vlm/train", "optim.lrr=1"]) == 2  # a typo is an error at once
print({"torch", "transformers", "numpy"} & set(sys.modules))
"""
    words = [str(file) for file in CONFIGS]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "set()"
    assert done.stderr.count("\n") == 2


# Without vit_classification: its import takes seconds.
@pytest.mark.parametrize("name", ["digits_vlm/train", "qwen3/sft_cpu", "reverse_rl/sft"])
def test_config_class_in_the_settings_is_that_of_the_imported_engine(name):
    composed = compose(name)
    assert type(composed.config) is composed.engine_class.config_class


def test_engine_without_settings_is_imported(tmp_path):
    (tmp_path / "engine.py").write_text(
        "from mvp_engine.kit import MLLMEngine as Kit\nclass Mine(Kit):\n    pass\n"
    )
    file = tmp_path / "mine.yaml"
    file.write_text("data: {sources: [{path: a.jsonl}], pack_tokens: 64}\n")
    composed = compose(file)
    assert type(composed.config) is composed.engine_class.config_class


def test_name_of_a_shipped_recipe_stands_for_its_engine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "preference").mkdir()
    (tmp_path / "mine.yaml").write_text(
        "engine: preference\ndata: {pairs: true, sources: [{path: a.jsonl}], pack_tokens: 64}\n"
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
def test_unusual_engine_is_imported(tmp_path, capsys, code):
    folder = tmp_path / f"recipe_{tmp_path.name}"
    shutil.copytree(TINY.parent, folder)
    with open(folder / "engine.py", "a") as file:
        file.write(f"\n\n{code}")
    assert mvp(f"config {folder}/train.yaml engine=engine.py:TinyEngine") == 0
    assert "TinyEngine" in capsys.readouterr().out
    assert mvp(f"config {folder}/train.yaml") == 2  # several engines
    assert "defines several engines" in capsys.readouterr().err


def test_engine_with_another_config_class_than_its_settings_is_an_error(tmp_path, capsys):
    settings = "from mvp_engine.config import Config\nclass Mine(Config):\n    pass\n"
    (tmp_path / "settings.py").write_text(settings)
    code = "from mvp_engine.engine import Engine\nclass MyEngine(Engine):\n    pass\n"
    (tmp_path / "engine.py").write_text(code)
    (tmp_path / "train.yaml").write_text("seed: 1\n")
    assert mvp(f"train {tmp_path}/train.yaml output_dir={tmp_path}") == 2
    assert "engine.py:MyEngine: its config_class is Config" in (printed := capsys.readouterr().err)
    assert printed.rstrip().endswith("defines Mine: set config_class = Mine")

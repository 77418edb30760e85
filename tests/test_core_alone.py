"""The core without its plug-in kits: a copy of the package without their folders trains and passes its tests."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, losses
from test_layers import PLUGIN_KITS

DEMO = "recipes/digits_vlm/configs/train.yaml"
FEW = ["train.max_steps=2", "eval.steps=null", "log.interval=1", "log.backends=[jsonl]"]
FEW += ["data.num_workers=0", "digits.count=64", "export_link=null", "run_id=run"]
SELECTION = ["test_batch.py", "kit/test_loss.py", "kit/test_text_files.py"]
OF_KIT = re.compile(rf"\bmvp_engine\.kit(\.| import .*)\b({'|'.join(PLUGIN_KITS)})\b")  # an import
# Tests of the repository as a whole: its docs, skills, tables, wheel, and who uses which name.
OF_REPOSITORY = {
    "test_docs",
    "test_doors",
    "test_skills_install",
    "test_wheel",
    "test_benchmarks",
    "test_recipe_new",
}
# What only kits have: their modules, and tests and recipes of their models and data.
OF_KITS = re.compile(
    rf"\b(kit[./ ](import )?({'|'.join(PLUGIN_KITS)})\b|action_model|omni_model|(digits|reverse)_rl|rl\.)"
    r"|\bmvp plan\b|\"plan\"|gpu_memory|qwen_omni|table_vla|digits_flow|preference|reward|distil|contrastive"
    r"|tiny_rl|ten_updates|value_model\.md|\"csm\""
)


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    """The repository without plug-in kits."""
    folder = tmp_path_factory.mktemp("core")
    of_kits = {
        file.relative_to(ROOT / "recipes").parts[0]
        for file in (ROOT / "recipes").rglob("*.py")
        if OF_KIT.search(file.read_text())
    }
    unwanted = shutil.ignore_patterns("__pycache__", "outputs", *PLUGIN_KITS, *of_kits)
    for name in ("mvp_engine", "recipes", "tests"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=unwanted)
    left_out = {".git", ".venv", ".venvs", "outputs", "build", "mvp_engine", "recipes", "tests"}
    for path in ROOT.iterdir():
        if path.name not in left_out:
            (folder / path.name).symlink_to(path)
    assert not any((folder / "mvp_engine" / "kit" / kit).exists() for kit in PLUGIN_KITS)
    return folder


def run(core, *words):
    """Run Python on the copy, and see that it, not the installed package, was imported."""
    environment = {**os.environ, "PYTHONPATH": str(core)}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, *words]
    answer = subprocess.run(
        command, cwd=core, env=environment, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, f"{answer.stdout[-6000:]}\n{answer.stderr[-6000:]}"


@pytest.mark.slow
def test_core_without_plugin_kits_trains_and_passes_its_tests(core, tmp_path):
    code = f"""
import sys
from pathlib import Path
import mvp_engine, pytest
assert Path(mvp_engine.__file__).is_relative_to({str(core)!r}), mvp_engine.__file__
from mvp_engine.cli import main
assert main(["train", {DEMO!r}, "output_dir={tmp_path}", *{FEW!r}]) == 0
kits = tuple(f"mvp_engine.kit.{{kit}}" for kit in {sorted(PLUGIN_KITS)})
assert not [name for name in sys.modules if name.startswith(kits)]
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *{[f"tests/{name}" for name in SELECTION]!r}]))
"""
    run(core, "-c", code)
    assert len(losses(tmp_path)) == 2


@pytest.mark.campaign(only=True)
@pytest.mark.timeout(1800)  # five minutes of two idle cores
def test_core_without_plugin_kits_passes_all_of_its_tests(core, campaign_size):
    files = sorted((core / "tests").rglob("test_*.py"))
    files = [file for file in files if file.stem not in OF_REPOSITORY]
    chosen = [str(file) for file in files if not OF_KITS.search(file.read_text())]
    assert len(chosen) > 60
    run(
        core,
        "-m",
        "pytest",
        "-q",
        "-n",
        "2",
        "--dist",
        "loadfile",
        "-p",
        "no:cacheprovider",
        *chosen,
    )

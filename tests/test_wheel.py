"""The built wheel, used by a stranger: from an empty folder to a trained model that answers. And what the package
resolves to next to other packages."""

import json
import os
import shutil
import subprocess
import sys
import zipfile

import pytest
from conftest import CAMPAIGN, ROOT

SIZES = "digits.drawings=1 digits.count=60 data.num_workers=0 train.max_steps=2 log.backends=[jsonl]".split()
SIZES += ["eval.generation.max_new_tokens=2"]
NEW = ["recipe", "mine", "--from", "digits_vlm"]
CONFIG = "mine/configs/train.yaml"
# One process for all commands, since it imports torch once. The last one finds the run that `train` has written.
COMMANDS = """
import glob, json, sys
from mvp_engine.cli import main
for words in json.loads(sys.argv[1]):
    code = main([word if word != "RUN" else glob.glob("outputs/mine-*")[0] for word in words])
    assert code == 0, (words, code)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy of the files that it is made of."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__", "outputs")
    for name in ("mvp_engine", "recipes", "skills", "docs"):
        shutil.copytree(ROOT / name, folder / "checkout" / name, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "checkout")
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", build, folder],
        cwd=folder / "checkout",
        check=True,
        capture_output=True,
    )
    shutil.rmtree(folder / "checkout")
    (file,) = folder.glob("mvp_engine-*.whl")
    return file


def commands(run="RUN"):
    """A recipe of one's own, then the four commands: look at the data, check, train, chat."""
    ask = ["chat", run, "-p", "Which digit is this?", "--max-new-tokens", "2"]
    return [
        NEW,
        ["data", "inspect", CONFIG, *SIZES],
        ["check", CONFIG, *SIZES],
        ["train", CONFIG, *SIZES],
        ask,
    ]


@pytest.mark.slow
def test_wheel_from_an_empty_folder_runs_a_recipe_from_data_to_chat(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(tmp_path / "site")
    assert (tmp_path / "site/mvp_engine/_skills/recipe-from-scratch/SKILL.md").is_file()
    assert (tmp_path / "site/mvp_engine/_docs/data.md").is_file()
    empty = tmp_path / "empty"
    empty.mkdir()
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    words = [*commands(), ["recipe", "--skills"]]
    subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(words)], cwd=empty, env=env, check=True
    )
    assert list(empty.glob("outputs/mine-*/checkpoints/step_00000002"))
    skill = (empty / ".claude/skills/change-the-loss/SKILL.md").read_text()
    assert f"{tmp_path}/site/mvp_engine/_docs/loss.md" in skill


@CAMPAIGN
def test_wheel_installed_without_and_with_extras_trains_or_names_the_extra(wheel, tmp_path):
    """In an environment of its own, with the versions of constraints.txt."""
    subprocess.run(["uv", "venv", "--quiet", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [
        "uv",
        "pip",
        "install",
        "--quiet",
        "--python",
        python,
        "--constraint",
        ROOT / "constraints.txt",
    ]
    empty = tmp_path / "empty"
    empty.mkdir()
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def mvp(*words):
        command = [python.with_name("mvp"), *words]
        return subprocess.run(command, cwd=empty, env=env, capture_output=True, text=True)

    subprocess.run([*pip, wheel], check=True)
    assert mvp(*NEW).returncode == 0
    failed = mvp("check", CONFIG, *SIZES)
    assert failed.returncode == 2
    assert "pip install 'mvp-engine[demo]'" in failed.stderr
    (empty / "rows.parquet").write_bytes(b"PAR1")
    failed = mvp("data", "inspect", "rows.parquet")
    assert failed.returncode == 2
    assert "pip install 'mvp-engine[data]'" in failed.stderr
    subprocess.run([*pip, f"{wheel}[demo]"], check=True)
    for words in commands()[1:]:
        run = [str(path.relative_to(empty)) for path in empty.glob("outputs/mine-*")]
        done = mvp(*(run[0] if word == "RUN" else word for word in words))
        assert done.returncode == 0, (words, done.stderr)
    assert done.stdout.strip()


@CAMPAIGN
@pytest.mark.parametrize("other", ["vllm", "sglang"])
def test_package_resolves_next_to_the_newest(other, tmp_path):
    """The newest release that pip would choose alone is also chosen with this package, and its transformers is ours."""
    alone = resolve(tmp_path, other)
    together = resolve(tmp_path, f"{other}=={alone[other]}", f"{ROOT}[data,cuda]")
    for name in (other, "torch", "transformers"):
        assert together[name] == alone[name]


def resolve(folder, *requirements):
    """Versions by package, as uv chooses them for this Python on a GPU host."""
    file = folder / "requirements.in"
    file.write_text("\n".join(requirements))
    options = "--no-header --no-annotate --quiet --python-platform=x86_64-manylinux_2_34".split()
    options += ["--python", sys.executable]
    done = subprocess.run(
        ["uv", "pip", "compile", file, *options], check=True, capture_output=True, text=True
    )
    pins = [line.partition(" ")[0].partition("==") for line in done.stdout.splitlines()]
    return {name: version for name, _, version in pins}

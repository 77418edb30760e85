"""`mvp recipe`: a copy runs at once and shares nothing with its origin."""

import json
import re

import pytest
from conftest import ROOT, TINY, mvp
from run_files import printed_json

from mvp_engine.cli import main
from mvp_engine.config import compose
from mvp_engine.errors import EXIT_USER_ERROR, UserError
from mvp_engine.runs import list_runs
from mvp_engine.tools import recipe as recipes
from mvp_engine.tools.recipe import is_recipe

RECIPES = sorted(folder.name for folder in (ROOT / "recipes").iterdir() if is_recipe(folder))
QUICK = {
    "magic_transformer": ["task.train_problems=500", "task.eval_problems=50"],
    "digits_vlm": "digits.drawings=1 digits.count=60 data.num_workers=0 eval.generation.max_new_tokens=2".split(),
}


def composed(file):
    """The config, or the error: some configs need a path on the command line."""
    try:
        return compose(file).config
    except UserError as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.parametrize("origin", RECIPES)
def test_recipe_new_all_configs_compose_under_the_new_name(origin, tmp_path, capsys):
    assert mvp(f"recipe mine_2 --from {origin} --dir {tmp_path}") == 0
    assert str(tmp_path / "mine_2") in capsys.readouterr().out
    source, copy = ROOT / "recipes" / origin, tmp_path / "mine_2"
    files = {
        file.relative_to(source)
        for file in source.rglob("*")
        if file.is_file() and file.suffix != ".pyc"
    }
    assert {file.relative_to(copy) for file in copy.rglob("*") if file.is_file()} == files
    for file in (file for file in files if file.suffix == ".yaml"):
        old, new = composed(source / file), composed(copy / file)
        if isinstance(old, str):
            assert isinstance(new, str)
            continue
        files_of_engines = [config.engine.partition(":")[0] for config in (old, new)]
        assert files_of_engines[1] == files_of_engines[0].replace(str(source), str(copy))
        assert old.run_name == "run" or new.run_name == old.run_name.replace(origin, "mine_2")
        theirs = [
            text
            for text in _texts(new.model_dump())
            if text.startswith(new.output_dir) and "/" in text
        ]
        assert all(text.startswith(f"{new.output_dir}/mine_2/") for text in theirs), theirs
        same = {"run_name", "output_dir", "run_id", "engine"}
        strip = f"{new.output_dir}/mine_2/"
        flat = _flat(new, same, strip).replace(
            str(copy), str(source)
        )  # made.by is a file of the copy
        assert flat == _flat(old, same, f"{old.output_dir}/{origin}/")
    assert "class Mine2Engine(" in (copy / "engine.py").read_text()
    for file in (file for file in copy.rglob("*.*") if file.suffix != ".pyc"):
        assert f"recipes/{origin}/" not in file.read_text()


def test_recipe_new_of_sft_is_the_readable_file_and_names_the_keys_to_give(workspace):
    assert mvp("recipe mine --from sft") == 0
    for name in ("engine.py", "settings.py"):
        shipped = (ROOT / "recipes" / "sft" / name).read_text()
        assert (workspace / "mine" / name).read_text() == shipped.replace("SFTEngine", "MineEngine")
    commands = re.findall(r"^mvp .*", (workspace / "mine" / "README.md").read_text(), re.M)
    keys = "mine/configs/full.yaml data.sources.rows.path=... model.path=..."
    assert commands[:3] == [f"mvp {name} {keys}" for name in ("check", "train", "evaluate")]
    assert any(command.startswith("mvp train mine/configs/lora.yaml ") for command in commands[3:])


def test_recipe_new_readme_has_the_stages_data_and_results_of_the_original(tmp_path):
    assert mvp(f"recipe mine --from qwen3 --dir {tmp_path}") == 0
    text = (tmp_path / "mine" / "README.md").read_text()
    original = (ROOT / "recipes" / "qwen3" / "README.md").read_text()
    configs = tmp_path / "mine" / "configs"
    commands = [line for line in re.findall(r"^mvp .*", original, re.M) if "_cpu.yaml" in line]
    assert len(commands) > 3
    for command in commands:
        renamed = command.replace("recipes/qwen3/configs", str(configs))
        assert renamed.replace("outputs/qwen3", "outputs/mine/qwen3") in text
    assert (
        f"`{configs}/sft_cpu.yaml`: Use it to see SFT on chats, on a CPU, after pretrain_cpu"
        in text
    )
    sentences = re.findall(r"^- `.*\.yaml`: (.*)", text, re.M)
    assert len(sentences) > 3
    assert all(one.endswith(".") for one in sentences)
    assert "**Expected results**" in text
    assert "the first run writes it to `outputs/mine/qwen3_data`" in text
    links = re.findall(r"\]\(([^)#]+)", text)
    assert links
    assert all((tmp_path / "mine" / link).exists() for link in links)


def test_recipe_list_has_one_whole_sentence_for_each_recipe(capsys):
    assert mvp("recipe --json") == 0
    for name, recipe in printed_json(capsys).items():
        about, readme = recipe["about"], (ROOT / "recipes" / name / "README.md").read_text()
        assert about.endswith((".", ':"', '."')), about
        assert "](" not in about
        assert len(about) <= 210, f"{name}: {len(about)} characters in the first sentence"
        assert about[:20] in " ".join(readme.split())


def _texts(tree):
    if isinstance(tree, dict | list):
        return [
            text
            for one in (tree.values() if isinstance(tree, dict) else tree)
            for text in _texts(one)
        ]
    return [tree] if isinstance(tree, str) else []


def _flat(config, without, strip):
    text = json.dumps(config.model_dump(exclude=without), sort_keys=True)
    return text.replace(strip, f"{config.output_dir}/")


@pytest.mark.slow
@pytest.mark.parametrize("origin", QUICK)
def test_recipe_new_copy_trains_from_any_folder(origin, capsys, workspace, monkeypatch):
    (workspace / "recipes").mkdir()
    assert mvp(f"recipe mine --from {origin}") == 0
    config, elsewhere = (
        workspace / "recipes" / "mine" / "configs" / "train.yaml",
        workspace / "elsewhere",
    )
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    words = [*QUICK[origin], "train.max_steps=2", "log.backends=[jsonl]"]
    assert mvp(f"check {config}", *words) == 0
    assert not list_runs(elsewhere / "outputs")
    assert mvp(f"train {config}", *words) == 0
    (run,) = list_runs(elsewhere / "outputs")
    assert run.info["name"] == "mine"
    assert not (elsewhere / "outputs" / "digits_data").exists()
    capsys.readouterr()
    monkeypatch.chdir(workspace)
    assert mvp("recipe --json") == 0
    found = printed_json(capsys)
    assert set(found) == {*RECIPES, "mine"}
    assert found["mine"]["about"].startswith(f"Started as a copy of recipes/{origin}")


def test_recipe_new_training_stages_keep_their_name_endings(tmp_path):
    origin = tmp_path / "vl"
    (origin / "configs").mkdir(parents=True)
    (origin / "engine.py").write_text(
        "from mvp_engine.engine import Engine\n\nclass A(Engine): ...\n\nclass BEngine(A): ...\n"
    )
    first = "defaults: [base, _self_]\nrun_name: vl_one\nmodel: {path: '${output_dir}/vl/x'}\n"
    second = "run_name: other\nmodel: {config: {model_type: vl}}\nexport_link: ${output_dir}/vl/x\n"
    texts = {
        "one": first,
        "two": second,
        "base": "engine: ../engine.py:A\n",
        "more": "defaults: [one, _self_]\n",
    }
    texts |= {"a_gpu1": "defaults: [base, _self_]\n"}
    for name, text in texts.items():
        (origin / "configs" / f"{name}.yaml").write_text(text)
    (origin / "outputs").mkdir()
    folder, configs = recipes.new_recipe("mine", str(origin), tmp_path)
    assert [file.stem for file in configs] == ["two", "more", "one", "a_gpu1"]
    text = (folder / "configs" / "one.yaml").read_text()
    assert text == first.replace("vl_one", "mine_one").replace("/vl/x", "/mine/x")
    text = (folder / "configs" / "two.yaml").read_text()
    assert text == second.replace("other", "mine_other").replace("/vl/x", "/mine/x")
    # With several engines none is renamed.
    assert "class BEngine(A)" in (folder / "engine.py").read_text()
    assert not (folder / "outputs").exists()


def test_recipe_new_user_errors_are_explained(workspace, capsys):
    (workspace / "taken").mkdir()
    for words, expected in (
        (["taken", "--from", "magic_transformer"], "taken exists already"),
        (["my-recipe", "--from", "magic_transformer"], "'my-recipe' is not a valid recipe name"),
        (["class", "--from", "magic_transformer"], "is not a valid recipe name"),
        (["mine", "--from", "magic_transfomer"], "Did you mean magic_transformer? Known recipes: "),
        (["mine", "--from", "taken"], "taken is not a recipe: it needs an engine.py"),
        (["mine", "--from", str(TINY.parent), "--dir", str(TINY.parent)], "would lie inside"),
        (["mine", "--from", str(TINY.parent), "--dir", "/proc"], "cannot write /proc/mine"),
    ):
        assert main(["recipe", *words]) == EXIT_USER_ERROR
        assert expected in capsys.readouterr().err
    (workspace / "taken" / "engine.py").write_text("")
    (workspace / "taken" / "train.yaml").write_text("a: [")
    assert mvp("recipe mine --from taken") == EXIT_USER_ERROR
    assert "has a file that cannot be read" in capsys.readouterr().err
    assert [entry.name for entry in workspace.iterdir()] == ["taken"]


def test_recipe_new_from_a_config_with_open_keys_prints_a_command_that_sets_them(tmp_path, capsys):
    assert mvp(f"recipe mine --from sft --dir {tmp_path}") == 0
    assert "data.sources.rows.path=... model.path=..." in capsys.readouterr().out

"""Configs: precedence, validation, and error messages that name the problem, its place and the fix."""

import json
import shutil

import pytest
import yaml
from conftest import MAGIC, ROOT, TINY, user_error

from mvp_engine.config import compose
from mvp_engine.errors import UserError
from mvp_engine.tools.config import json_schema


@pytest.fixture
def recipe(tmp_path):
    """The train.yaml of a copy of the tiny recipe, outside the repository and under another name."""
    folder = tmp_path / f"recipe_{tmp_path.name}"
    shutil.copytree(TINY.parent, folder)
    return folder / "train.yaml"


def error(config, *words):
    with pytest.raises(UserError) as caught:
        compose(config, list(words))
    return str(caught.value)


def test_precedence_is_command_line_recipe_inherited_defaults(recipe):
    config = compose(recipe, ["optim.lr=0.5"]).config
    assert config.optim.lr == 0.5  # the command line, over base.yaml's 0.02
    assert config.log.interval == 2  # train.yaml, over base.yaml's 1
    assert config.train.max_steps == 12  # base.yaml, over default.yaml's null
    assert config.checkpoint.keep_n == 3  # default.yaml


def test_shipped_config_is_found_by_recipe_and_name_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    composed = compose("sft/lora", ["model.path=model", "data.sources.rows.path=rows.jsonl"])
    assert composed.config.run_name == "sft_lora"
    assert composed.files[-1] == ROOT / "recipes/sft/configs/lora.yaml"
    assert "The recipe has: sft/base, sft/full, sft/full_gpu8, sft/lora" in error("sft/qlora")
    words = ["model.path=m", "data.sources.rows.path=r.jsonl", "data.global_batch_tokens=1000"]
    assert error("sft/lora", *words).startswith(
        "data.global_batch_tokens=1000 is less than one row may have"
    )
    assert "config file not found: nothing/lora" in error("nothing/lora")
    assert "The recipe has: digits_vlm/qlora, digits_vlm/qlora_base, digits_vlm/train" in error(
        "digits_vlm"
    )
    assert "Did you mean sft/lora?" in error("stf/lora")
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft/lora.yaml").write_text("run_name: mine")
    assert "no engine.py" in error("sft/lora.yaml")  # a file of one's own comes first


def test_misspelt_key_next_to_keys_without_a_value_is_reported_first():
    lines = error("sft/lora", "model.pth=folder", "optim.lr=fast").splitlines()
    assert (
        lines[0]
        == "command line (model.pth=folder): unknown key 'model.pth'. Did you mean 'model.path'?"
    )
    assert lines[1].endswith("give on the command line: data.sources.rows.path=... model.path=...")
    assert len(lines) == 2


def test_default_yaml_and_schema_have_the_same_keys():
    from mvp_engine.config.compose import DEFAULTS
    from mvp_engine.config.schema import Config

    Config.model_validate(
        yaml.safe_load(DEFAULTS.read_text().replace("1.0e-3", "0.001").replace("1.0e-8", "1.0e-08"))
    )


def test_recipe_outside_the_repository_composes_with_its_own_keys(recipe):
    # A key that is in the schema and in no YAML file.
    composed = compose(recipe, ["tiny.dropout=0.25"])
    assert composed.config.tiny.dropout == 0.25
    assert composed.engine_class.__name__ == "TinyEngine"


def test_resolved_config_composes_again_from_another_folder(recipe, tmp_path):
    first = compose(recipe, ["seed=7", "resume=auto"]).config
    (tmp_path / "saved.yaml").write_text(first.to_yaml())
    assert compose(tmp_path / "saved.yaml").config == first


def test_config_group_is_selected_by_name_and_interpolation_resolves(recipe):
    (recipe.parent / "tiny").mkdir()
    (recipe.parent / "tiny" / "big.yaml").write_text("samples: 99\n")
    (recipe.parent / "tiny" / "small.yaml").write_text("samples: 9\n")
    recipe.write_text("defaults:\n  - base\n  - tiny: small\n  - _self_\nseed: ${tiny.samples}\n")
    assert compose(recipe).config.tiny.samples == 9
    assert compose(recipe, ["tiny=big"]).config.seed == 99
    assert compose(recipe, ["tiny={samples: 7}"]).config.seed == 7
    assert f"{recipe} inherits 'tiny/huge': {recipe.parent} has no tiny/huge.yaml" in error(
        recipe, "tiny=huge"
    )
    (recipe.parent / "optim").mkdir()  # no group of the config: the word is a key
    assert "'optim' is 'big'. It is a section" in error(recipe, "optim=big")


def test_config_in_a_subfolder_inherits_from_the_configs_folder(recipe):
    folder = recipe.parent / "configs"
    (folder / "gpu").mkdir(parents=True)
    shutil.copy(recipe.parent / "base.yaml", folder / "base.yaml")
    (folder / "gpu" / "one.yaml").write_text("defaults: [base, _self_]\nseed: 3\n")
    assert compose(folder / "gpu" / "one.yaml").config.run_name == "tiny"


def test_typo_in_a_file_names_line_and_suggested_key(recipe):
    recipe.write_text(recipe.read_text() + "optim:\n  lrr: 0.1\n")
    text = error(recipe)
    assert f"{recipe}:8" in text
    assert "unknown key 'optim.lrr'" in text
    assert "Did you mean 'optim.lr'?" in text


def test_typo_in_an_inherited_file_names_that_file(recipe):
    base = recipe.parent / "base.yaml"
    base.write_text(base.read_text().replace("warmup:", "warmupz:"))
    assert f"{base}:10: unknown key 'optim.warmupz'. Did you mean 'optim.warmup'?" in error(recipe)


@pytest.mark.parametrize(
    "word, expected",
    [
        ("optim.lerning_rate=1", "unknown key 'optim.lerning_rate'"),
        ("trai.max_steps=1", "unknown key 'trai.max_steps'. Here it is train.max_steps"),
        ("total_steps=1", "Did you mean 'train.max_steps'?"),
        ("tiny.sample=1", "Did you mean 'tiny.samples'?"),
        ("qqq=1", "Known keys: run_name, output_dir"),
    ],
)
def test_typo_on_the_command_line_names_it_and_the_suggested_key(recipe, word, expected):
    text = error(recipe, word)
    assert expected in text
    assert f"command line ({word})" in text


@pytest.mark.parametrize(
    "word, key",
    [
        ("seed=abc", "seed"),
        ("seed=-1", "seed"),
        ("optim.lr=fast", "optim.lr"),
        ("optim.lr=-1", "optim.lr"),
        ("train.max_steps=1.5", "train.max_steps"),
        ("train.max_steps=0", "train.max_steps"),
        ("train.precision=fp8", "train.precision"),
        ("deterministic=1", "deterministic"),
        ("parallel.shard=0", "parallel.shard"),
        ("optim.betas=[0.9]", "optim.betas"),
        ("run_name=a/b", "run_name"),
        ("tiny.loader=magic", "tiny.loader"),
        ("optim=3", "optim"),
    ],
)
def test_invalid_value_names_key_and_place(recipe, word, key):
    text = error(recipe, word)
    assert f"command line ({word}): '{key}' is" in text
    assert "\n" not in text


LISTED = "- {path: a.jsonl}\n    - {path: b.jsonl,\n       splitt: eval}\n"
NAMED = "a: {path: a.jsonl}\n    b: {path: b.jsonl,\n       splitt: eval}\n"


@pytest.mark.parametrize("sources", [LISTED, NAMED])
def test_typo_in_a_list_item_names_line_and_suggested_key(tmp_path, sources):
    file = tmp_path / "train.yaml"
    file.write_text(
        "engine: mvp_engine.kit:MLLMEngine\ndata:\n  pack_tokens: 8\n  sources:\n    " + sources
    )
    with pytest.raises(UserError) as error:
        compose(file)
    expected = (
        "train.yaml:7: unknown key 'data.sources.1.splitt'. Did you mean 'data.sources.split'?"
    )
    assert str(error.value).endswith(expected)
    file.write_text(
        "engine: mvp_engine.kit:MLLMEngine\ndata:\n  pack_tokens: 8\n  sources: [{path: 3}]\n"
    )
    with user_error(r"train.yaml:4: 'data.sources.0.path"):
        compose(file)


def test_wrong_type_in_a_file_names_the_line(recipe):
    recipe.write_text(recipe.read_text().replace("interval: 2", "interval: '2'"))
    assert f"{recipe}:6: 'log.interval' is '2'" in error(recipe)


def test_missing_required_key_is_named(recipe):
    base = recipe.parent / "base.yaml"
    base.write_text(base.read_text().replace("  samples: 44\n", "  dropout: 0.0\n"))
    assert "key 'tiny.samples' is missing" in error(recipe)


def test_missing_config_file_suggests_similar_names(recipe):
    assert f"Did you mean {recipe}?" in error(recipe.with_name("trian.yaml"))
    assert f"Did you mean {recipe}?" in error(
        recipe.parent.with_name(recipe.parent.name[:-1]) / "train.yml"
    )
    assert "has: base.yaml, train.yaml" in error(recipe.with_name("zzz.yaml"))
    assert "Did you mean" in error(recipe.with_suffix(""))
    assert "/nowhere/at has no YAML file" in error("/nowhere/at/all.yaml")
    assert "is a folder; name a YAML file." in error(recipe.parent)
    assert (
        "digits_vlm has: configs/qlora.yaml, configs/qlora_base.yaml, configs/train.yaml"
        in error(ROOT / "recipes" / "digits_vlm")
    )


@pytest.mark.parametrize(
    "text, expected",
    [
        ("a: [1\n", "not valid YAML"),
        ("- 1\n- 2\n", "must be a mapping"),
        ("seed: ${nothing}\n", "does not compose"),
    ],
)
def test_broken_config_file_is_one_message(recipe, text, expected):
    recipe.write_text(text)
    assert expected in error(recipe)


def test_override_with_several_values_says_that_a_training_takes_one(recipe):
    text = error(recipe, "optim.lr=1e-4,1e-3")
    assert (
        "'optim.lr=1e-4,1e-3' on the command line has several values, and a training takes one"
        in text
    )
    assert "multirun" not in text
    assert "A list is optim.betas=[0.9,0.95]" in error(recipe, "optim.betas=0.9,0.95")
    assert (
        compose(recipe, ["optim.betas=[0.9,0.95]", "output_dir='a,b'"]).config.output_dir == "a,b"
    )


def test_engine_file_is_relative_to_the_config_or_else_to_the_working_directory(
    tmp_path, monkeypatch
):
    (tmp_path / "configs").mkdir()
    recipe = tmp_path / "configs" / "train.yaml"
    recipe.write_text("seed: 1\n")
    here = tmp_path / "here"
    here.mkdir()
    (here / "mine.py").write_text(
        "from mvp_engine.engine import Engine\n\n\nclass Mine(Engine):\n    pass\n"
    )
    monkeypatch.chdir(here)
    assert compose(recipe, ["engine=mine.py:Mine"]).config.engine == f"{here / 'mine.py'}:Mine"
    text = error(recipe, "engine=nope.py:Mine")
    assert f"there is no file {here / 'nope.py'}, nor one in {recipe.parent}" in text


def test_source_in_a_list_is_overridden_by_its_name(tmp_path):
    """As the config.yaml of a run has them, for `mvp evaluate RUN data.sources.NAME.path=FILE`."""
    given = ["model.path=x", "data.sources.rows.path=a", "data.sources.held={path: b, split: eval}"]
    file = tmp_path / "config.yaml"
    file.write_text(compose("sft/lora", given).config.to_yaml())
    sources = compose(file, ["data.sources.held.path=c"]).config.data.sources  # type: ignore[attr-defined]
    assert [(one.name, one.path) for one in sources] == [("rows", "a"), ("held", "c")]
    assert "a list without an item of the name 'hled'. Its names: rows, held" in error(
        file, "data.sources.hled.path=c"
    )
    again = file.read_text().replace("name: held", "name: rows")
    file.write_text(again)
    words = "has 2 items with the name rows: write data.sources.0 or data.sources.1"
    assert words in error(file, "data.sources.rows.path=c")


def test_malformed_override_is_explained(recipe):
    assert "'fast' on the command line is not of the form key=value" in error(recipe, "fast")
    assert "cannot be read" in error(recipe, "seed=[1")
    assert "cannot be read: @ is no part of a key" in error(recipe, "tiny@big=1")
    assert "'+seed=1' on the command line adds a key that has a value: write seed=..." in error(
        recipe, "+seed=1"
    )
    assert "'~sed' on the command line removes nothing: there is no key sed" in error(
        recipe, "~sed"
    )
    assert "'~seed=1' on the command line removes nothing: its value is 0" in error(
        recipe, "~seed=1"
    )
    assert "optim.betas is a list without an item of the name 'first'" in error(
        recipe, "optim.betas.first=1"
    )


def test_overrides_add_remove_and_merge_keys(recipe):
    words = [
        "+model.config={a: 1, b: {c: 2}}",
        "model.config.b.d=3",
        "++model.config.e=4",
        "~model.config.a",
    ]
    assert compose(recipe, words).config.model.config == {"b": {"c": 2, "d": 3}, "e": 4}
    assert "key 'seed' is missing" in error(recipe, "~seed")


def test_missing_value_in_an_heir_hides_the_inherited_one(recipe):
    recipe.write_text("defaults: [base]\nseed: ???\n")
    assert error(recipe).endswith(
        "has keys without a value (???); give on the command line: seed=..."
    )
    assert compose(recipe, ["seed=3"]).config.seed == 3
    recipe.write_text("defaults: [base]\ntrain: null\n")
    assert "'train' is None" in error(recipe)


def test_missing_inherited_file_is_named(recipe):
    recipe.write_text("defaults: [nobody, _self_]\n")
    assert error(recipe) == f"{recipe} inherits 'nobody': {recipe.parent} has no nobody.yaml"
    recipe.write_text("defaults: [base@here]\n")
    assert "'base@here' in `defaults:` is no name of a file" in error(recipe)


def test_engine_is_found_or_the_error_names_the_fix(recipe, tmp_path):
    engine = recipe.parent / "engine.py"
    assert compose(recipe, ["engine=engine.py:TinyEngine"]).engine_class.__name__ == "TinyEngine"
    assert "it has: TinyEngine" in error(recipe, "engine=engine.py:Nope")
    assert "there is no file" in error(recipe, "engine=nope.py:TinyEngine")
    assert "no module 'no_such_module'" in error(recipe, "engine=no_such_module:Engine")
    (tmp_path / "alone.yaml").write_text("seed: 1\n")
    assert "no engine.py next to the config" in error(tmp_path / "alone.yaml")
    engine.rename(recipe.parent / "other.py")
    (recipe.parent / "engine_two.py").write_text("from mvp_engine.engine import Engine\nX = 1\n")
    assert "defines no subclass" in error(recipe, "engine=engine_two.py")


@pytest.mark.parametrize("name", ["numpy", "qwen2.5-vl", "random", "test"])
def test_recipe_folder_may_have_any_name(recipe, tmp_path, name):
    shutil.copytree(recipe.parent, tmp_path / name)
    composed = compose(tmp_path / name / "train.yaml")
    assert composed.engine_class.__name__ == "TinyEngine"
    assert compose(tmp_path / name / "train.yaml").engine_class is composed.engine_class


def test_typo_in_a_group_file_names_that_file(recipe):
    (recipe.parent / "tiny").mkdir()
    (recipe.parent / "tiny" / "small.yaml").write_text("samples: 9\nnoize: 0.5\n")
    recipe.write_text("defaults:\n  - base\n  - tiny: small\n  - _self_\n")
    assert (
        f"{recipe.parent / 'tiny' / 'small.yaml'}:2: unknown key 'tiny.noize'. Did you mean 'tiny.noise'"
        in error(recipe)
    )


def test_circular_inheritance_is_an_error(recipe):
    base = recipe.parent / "base.yaml"
    base.write_text("defaults: [train, _self_]\n" + base.read_text())
    assert "inherits from itself" in error(recipe)


def test_unsupported_engine_override_and_suffix_are_one_message(recipe):
    assert "'engine' is 3. Write file.py:Class" in error(recipe, "engine=3")
    recipe.rename(recipe.with_suffix(".yml"))
    assert "must be called *.yaml" in error(recipe.with_suffix(".yml"))


def test_json_schema_covers_core_and_recipe_with_defaults():
    schema = json_schema(compose(TINY).config)
    assert schema["properties"]["seed"]["default"] == 0
    assert "required" not in schema
    assert schema["$defs"]["Tiny"]["properties"]["samples"]["default"] == 44
    assert schema["additionalProperties"] is False
    json.dumps(schema)


def test_common_config_keys_are_stable():
    keys = {
        "run_name",
        "output_dir",
        "seed",
        "deterministic",
        "workflow",
        "resume",
        "parallel.shard",
    }
    keys |= {"train.max_steps", "train.epochs", "log.interval", "log.backends", "optim.lr"}
    keys |= {"checkpoint.interval", "checkpoint.keep_n"}
    from mvp_engine.runs import flat_keys

    assert keys <= set(flat_keys(compose(MAGIC).config.model_dump()))


def test_error_for_a_config_in_the_current_folder_has_no_absolute_path(
    monkeypatch,
):
    monkeypatch.chdir(ROOT)
    assert error(TINY, "log.intervall=3").startswith("command line")

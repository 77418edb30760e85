"""Descriptions of config keys: `mvp config --explain`, the reference page, names of other trainers, hints of `mvp`."""

from __future__ import annotations

import importlib
import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import user_error

from mvp_engine.cli import COMMANDS, METHODS, MOVED, OVERVIEW, build_parser, main, read_commands
from mvp_engine.config.compose import (
    all_keys,
    compose,
    other_trainers,
    read_draft,
    suggest_key,
)
from mvp_engine.kit import MLLMConfig
from mvp_engine.kit.actions.settings import ActionConfig
from mvp_engine.kit.rl.settings import RLConfig
from mvp_engine.tools.config import (
    config_keys,
    json_schema,
    recipe_schemas,
    reference_page,
    schemas_of,
)

ROOT = Path(__file__).parents[2]


def test_every_key_of_engine_and_kits_has_a_description():
    keys = config_keys(*schemas_of())
    assert [key.name for key in keys if not key.description] == []
    names = {key.name.replace(".NAME", "") for key in keys}
    assert set(all_keys(MLLMConfig)) <= names


RECIPES = "sft/lora digits_vlm/train magic_transformer/train qwen3/sft_cpu qwen3_vl/instruct qwen_audio/cpu"


@pytest.mark.parametrize("name", [*RECIPES.split(), "vit_classification/cpu"])
def test_every_key_of_a_shipped_recipe_has_a_description(name):
    assert [key.name for key in config_keys(read_draft(name).schema) if not key.description] == []


def test_reference_page_is_up_to_date():
    page = (ROOT / "docs/config.md").read_text()
    assert page == reference_page(*schemas_of()), "run: mvp config --reference > docs/config.md"


@pytest.mark.parametrize(
    "key, words",
    [
        ("optim.lr", ["number >= 0", "learning rate", "default: 0.001"]),
        ("data.sources.mine.path", ["data.sources.NAME.path", "default: none, it must be set"]),
        ("lora.target_modules", ["list of string, or null", "default: null"]),
        ("preference.beta", ["implicit reward", "default: 0.1"]),
        ("guard", ["guard.spike_sigmas", "skipped on all ranks"]),
        ("groups.actor", ["policy that is trained", "groups.NAME.ranks"]),
        ("groups.reference", ["frozen reference", "groups.NAME.parallel"]),
    ],
)
def test_explain_prints_type_default_and_description(key, words, capsys):
    assert main(["config", "--explain", key]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in words), printed


def test_explain_with_a_config_knows_the_keys_of_its_recipe(capsys):
    config = str(ROOT / "recipes/magic_transformer/configs/train.yaml")
    assert main(["config", config, "--explain", "task.digits"]) == 0
    assert "task.digits: integer" in capsys.readouterr().out


def test_explain_of_a_misspelt_key_suggests_the_right_one(capsys):
    assert main(["config", "--explain", "optim.lrr"]) == 2
    assert "Did you mean 'optim.lr'?" in capsys.readouterr().err


def test_json_schema_has_the_descriptions():
    from mvp_engine.config import compose

    config = compose(ROOT / "recipes/digits_vlm/configs/train.yaml").config
    schema = json_schema(config)
    assert schema["$defs"]["OptimSettings"]["properties"]["lr"]["description"] == "learning rate"
    assert "pack" in schema["$defs"]["MLLMData"]["properties"]["pack_tokens"]["description"]


def test_names_of_other_trainers_with_the_same_meaning_are_accepted(tmp_path, capsys):
    file = tmp_path / "train.yaml"
    source = "data: {sources: {a: {path: rows.jsonl}}, pack_tokens: 64}"
    file.write_text(
        f"engine: mvp_engine.kit:MLLMEngine\n{source}\nlearning_rate: 0.5\nlora_r: 8\neval_steps: 7\n"
    )
    words = "num_train_epochs=3.0 warmup_ratio=0 max_grad_norm=0.25 max_steps=9".split()
    config: Any = compose(file, [*words, "eval_steps=null"]).config
    assert (config.optim.lr, config.lora.rank, config.eval.steps) == (0.5, 8, None)
    assert (config.train.epochs, config.train.max_steps) == (3, 9)
    assert (config.optim.warmup, config.optim.max_grad_norm) == (0.0, 0.25)
    printed = capsys.readouterr().err
    assert f"mvp: {file}: learning_rate sets optim.lr\n" in printed
    assert "mvp: command line: warmup_ratio sets optim.warmup\n" in printed
    with user_error(r"lora_r and lora\.rank are the same key: remove one"):
        compose(file, ["lora_r=4", "lora.rank=4"])
    file.write_text(f"{file.read_text()}optim: {{lr: 1.0}}\n")
    with user_error(r"learning_rate and optim\.lr are the same key"):
        compose(file)
    rl = ROOT / "recipes/reverse_rl/configs/grpo.yaml"
    assert compose(rl, ["model.path=x", "beta=0.5"]).config.rl.kl_coef == 0.5  # type: ignore[attr-defined]


def test_names_of_other_trainers_are_answered_with_ours(capsys):
    config = str(ROOT / "recipes/digits_vlm/configs/train.yaml")
    words = "optim.learning_rate=1 train.max_grad_norm=1 model.lora_r=8 gradient_accumulation_steps=4".split()
    assert main(["config", config, *words]) == 2
    printed = capsys.readouterr().err
    for ours in ("optim.lr", "optim.max_grad_norm", "lora.rank", "data.global_batch_size"):
        assert f"Here it is {ours}" in printed, printed


@pytest.mark.parametrize(
    "names",
    [  # of the Trainer, TRL, LLaMA-Factory, axolotl, ms-swift, and of scripts
        "learning_rate per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps",
        "gradient_checkpointing lora_r bf16 fp16 model_name_or_path output_dir save_steps eval_steps logging_steps",
        "max_length packing completion_only_loss cutoff_len finetuning_type template val_size image_max_pixels",
        "base_model sequence_len sample_packing val_set_size flash_attention load_in_4bit micro_batch_size num_epochs",
        "train_type freeze_vit split_dataset_ratio attn_impl vit_lr lr batch_size epochs seed model_name tokenizer",
    ],
)
def test_name_of_another_trainer_is_answered(names):
    for name in names.split():
        assert suggest_key(name, MLLMConfig).startswith(("Here it is", "Did you mean")), name


def test_name_of_another_rl_trainer_is_answered_with_a_key_of_rl():
    for name in [
        "num_generations",
        "max_completion_length",
        "kl_coef",
        "ppo_mini_batch_size",
        "rl.beta",
    ]:
        assert re.match(r"Here it is (rl|generation)\.", suggest_key(name, RLConfig)), name


def test_section_that_is_given_a_value_names_its_keys(capsys):
    config = str(ROOT / "recipes/digits_vlm/configs/train.yaml")
    assert main(["config", config, "model=org/name", "lora=true"]) == 2
    printed = capsys.readouterr().err
    assert (
        "'model' is 'org/name'. It is a section, so set one of its keys: model.type, model.backend, mod"
        in printed
    )
    assert "'lora' is True. It is a section, so set one of its keys: lora.rank, " in printed


@pytest.mark.parametrize(
    "schema, key, answer",
    [
        (RLConfig, "rl.value_clip", r"ValueLoss\(clip=0\.2\)"),
        (RLConfig, "rl.dual_clip", r"third number of rl\.clip"),
        (RLConfig, "generation.gap_interval", "in every tenth step"),
        (MLLMConfig, "lora.target_parameters", r"stacked experts in lora\.target_modules"),
        (ActionConfig, "actions.cameras", r"actions\.features=\{cameras"),
        (ActionConfig, "simulation.episodes", r"section `simulation` of recipes"),
    ],
)
def test_key_that_is_gone_is_answered_with_what_replaces_it(schema, key, answer):
    assert re.match(rf"(This key is gone|Here it is).*{answer}", suggest_key(key, schema))


def test_unknown_section_is_answered_with_the_known_sections():
    assert suggest_key("sugar.spice", MLLMConfig).startswith("Known keys: run_name, ")


def test_names_that_replace_those_of_other_trainers_exist():
    known = {
        key.name
        for schema in (MLLMConfig, RLConfig, recipe_schemas()["preference"])
        for key in config_keys(schema)
    }
    same, hints, gone = other_trainers().values()
    assert not same.keys() & hints.keys()
    assert not {name for name in gone if name in known}
    keys = [
        key for value in same.values() for key in ([value] if isinstance(value, str) else value)
    ]
    for text in [*keys, *hints.values()]:
        first = text.split()[0].split("=")[0].split("[")[0].strip(",:")
        assert "." not in first or first in known, text


@pytest.mark.parametrize(
    "words, hint",
    [
        (["trian", "x.yaml"], "Did you mean train?"),
        (["train", "x.yaml", "--nprocs", "2"], "Did you mean --nproc?"),
        (["data", "inspct", "x"], "Did you mean inspect?"),
        (["runs", "--jsn"], "Did you mean --json?"),
        (
            ["train", "x.yaml", "--learning-rate", "1"],
            "written as key=value, without dashes. Here it is optim.lr",
        ),
        (["train", "x.yaml", "--lr=1e-5"], "without dashes. Here it is optim.lr"),
        (["train", "--config", "x.yaml"], "Write the file without --config."),
    ],
)
def test_misspelt_command_or_option_gets_a_hint(words, hint, capsys):
    with pytest.raises(SystemExit) as exited:
        main(words)
    assert exited.value.code == 2
    assert hint in capsys.readouterr().err


def test_mvp_without_a_command_prints_its_help(capsys):
    assert main([]) == 2
    assert "fine-tune a model on your own rows, in four commands:" in capsys.readouterr().out
    with pytest.raises(SystemExit) as exited:
        main(["data"])
    assert exited.value.code == 2
    assert "show rows as the model sees them" in capsys.readouterr().err
    assert main(["config"]) == 2
    assert main("config sft/lora --schema --reference".split()) == 2
    printed = capsys.readouterr().err
    assert "name a CONFIG, or a key with --explain KEY" in printed
    assert "give one of --explain, --schema and --reference" in printed


@pytest.mark.parametrize("old", MOVED)
def test_earlier_spelling_of_a_command_names_the_new_one(old, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([*old.split(), "something"])
    assert f"`mvp {old}` is now `{MOVED[old]}`" in capsys.readouterr().err
    words = MOVED[old].replace("METRIC", "loss").split()[1:]
    assert build_parser().parse_args(words).run


@pytest.mark.parametrize("command", list(read_commands()), ids=lambda command: command.name)
def test_function_of_a_command_takes_its_options(command):
    words = [word.strip() for word in command.arguments if not word.strip().startswith("-")]
    needed = [word.split()[0] for word in words if word.split()[0][-1] not in "?*"]
    choices = [word.partition("=")[2] for word in needed]
    given = [choice.partition("|")[0] if choice.islower() else "x" for choice in choices]
    options = vars(build_parser().parse_args([*command.name.partition("|")[0].split(), *given]))
    if options["run"] != METHODS:
        del options["command"]
    module, _, name = options.pop("run").partition(":")
    signature = inspect.signature(getattr(importlib.import_module(f"mvp_engine.{module}"), name))
    signature.bind(**{name: None for name in options if name != "parser"})


def examples():
    lines = f"{OVERVIEW}\n{COMMANDS}".splitlines()
    return [line.strip() for line in lines if line.startswith("  mvp ")]


@pytest.mark.parametrize("line", examples())
def test_example_of_a_help_text_is_a_valid_command(line):
    words = shlex.split(line.partition(" > ")[0], comments=True)[1:]
    args, rest = build_parser().parse_known_args(words)
    known = {key.name.replace(".NAME", ".rows") for key in config_keys(MLLMConfig)}
    if args.run == "tools.serve:serve":  # the rest goes to vLLM or SGLang
        rest = []
    for word in [*getattr(args, "overrides", []), *rest]:
        assert word.partition("=")[0] in known
    assert args.run


def test_config_show_prints_keys_without_a_value(tmp_path, capsys):
    assert main(["config", "sft/lora", "optim.lr=0.5"]) == 0
    printed = capsys.readouterr()
    values = yaml.safe_load(printed.out)
    assert (values["model"]["path"], values["optim"]["lr"]) == ("???", 0.5)
    assert "to be set before training: data.sources.rows.path, model.path" in printed.err
    assert main(["config", "sft/lora", "--explain", "optim.lr"]) == 0
    (tmp_path / "shown.yaml").write_text(printed.out)
    again = [str(tmp_path / "shown.yaml"), "data.sources.0.path=a"]
    assert main(["config", *again]) == 0
    assert "to be set before training: model.path\n" in capsys.readouterr().err
    assert main(["train", *again]) == 2
    assert (
        "has keys without a value (???); give on the command line: model.path=..."
        in capsys.readouterr().err
    )

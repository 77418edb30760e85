"""mvp sft, dpo, rm, distil and grpo: a shipped config with the model and the rows of the command line."""

import itertools

import pytest
from conftest import mvp
from run_files import json_lines
from tiny_vlm import with_images, write

from mvp_engine.cli import main
from mvp_engine.config import compose
from mvp_engine.errors import EXIT_USER_ERROR
from mvp_engine.runs import list_runs
from mvp_engine.tools import launcher


@pytest.fixture
def launched(monkeypatch):
    """The config and the overrides of a command that would train."""
    found = []

    def keep(config, words, options):
        found.append(compose(config, words).config)
        return 0

    monkeypatch.setattr(launcher, "_launch", keep)
    return found


@pytest.mark.parametrize(
    "method, way", list(itertools.product(launcher.METHODS, ["--lora", "--qlora", "--full"]))
)
def test_every_method_trains_the_model_and_the_rows_that_it_is_given(method, way, launched):
    words = [
        method,
        "--model",
        "org/model",
        "--data",
        "a b.jsonl",
        "--eval-data",
        "held.jsonl",
        way,
    ]
    assert main([*words, *(["--teacher", "org/teacher"] if method == "distil" else [])]) == 0
    (config,) = launched
    assert config.model.path == "org/model"
    sources = {source.path: source for source in config.data.sources}
    assert sources.keys() == {"a b.jsonl", "held.jsonl"}
    assert sources["held.jsonl"].split == "eval"
    assert sources["a b.jsonl"].hold_out is None
    assert (config.lora is None) == (way == "--full")
    assert bool(config.model.quantize) == (way == "--qlora")


def test_full_training_shards_over_the_ranks_that_are_started(launched):
    assert mvp("dpo --model org/model --data pairs.jsonl --full --nproc 2") == 0
    assert launched[0].parallel.shard == 2


def test_sft_trains_the_bits_of_its_config(vlm_folder, capsys):
    rows = with_images(vlm_folder, 8)
    write(vlm_folder / "rows.jsonl", rows)
    more = "train.max_steps=2 eval.steps=null data.pack_tokens=256 data.num_workers=0 log.backends=[jsonl]"
    assert mvp(f"sft --model model --data rows.jsonl {more} run_id=short") == 0
    (line,) = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("mvp train ")
    ]
    assert mvp(line.removeprefix("mvp ").replace("run_id=short", "run_id=long")) == 0
    short, long = (
        json_lines(run.dir / "metrics.jsonl") for run in list_runs(vlm_folder / "outputs")
    )
    assert [one["loss"] for one in short] == [one["loss"] for one in long]


@pytest.mark.parametrize(
    "words, error",
    [
        ("sft", "mvp sft needs --data and --model"),
        ("distil --model m --data d", "mvp distil needs --teacher"),
        ("sft --model m --data d --lora --full", "--lora and --full exclude each other"),
        ("sft --model m --data d --teacher t", "--teacher is of mvp distil"),
        ("dpo --model m --data d --engine e.py", "--engine is of mvp grpo"),
        ("grpo --model m --data d --engine e.py", "there is no file"),
        ("sft --model m --data d optim.lrr=1", "unknown key 'optim.lrr'"),
    ],
)
def test_what_is_missing_or_wrong_is_named(words, error, capsys):
    assert mvp(words) == EXIT_USER_ERROR
    assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, error",
    [
        ("export run", "give a folder to write"),
        ("export run out --push me/it", "leave OUT out"),
        ("export run --push me/it --ema --dtype float16", "leave --dtype, --ema out"),
        ("export run out --public", "--public without --push"),
    ],
)
def test_export_writes_or_uploads_and_not_both(words, error, capsys):
    assert mvp(words) == EXIT_USER_ERROR
    assert error in capsys.readouterr().err


def test_old_names_are_answered(capsys):
    for old, new in (("merge a b", "mvp export RUN OUT"), ("push a b/c", "--push ORG/NAME")):
        with pytest.raises(SystemExit):
            mvp(old)
        assert new in capsys.readouterr().err

"""Checkpoints of a model engine by itself, and merging them: with a recipe's own model type, in another process."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from conftest import ROOT, mvp, run_process, user_error
from families import overrides_of
from folders import entries, same, without_checksums
from run_files import read_json, write_json
from test_api import adam, constant
from tiny_engines import ALONE, LM, counting, engine_of, scores_of

from mvp_engine.cli import main
from mvp_engine.errors import EXIT_USER_ERROR
from mvp_engine.model_engine import (
    FSDPEngine,
    LanguageModelEngine,
    ModelEngine,
    ModelSource,
    register,
)
from mvp_engine.model_engine.base import _REGISTRY

BATCH = counting(9, 4, start=3)


def language_model(seed, layout=ALONE, train=True):
    model = LanguageModelEngine.build_model(ModelSource(None, overrides_of("qwen3")))
    return engine_of(model, layout, adam if train else None, seed=seed)


def step(engine):
    engine.train_batch([BATCH], scores_of(engine, entropy=0.0))


def assert_loads(path, state):
    engine = language_model(2, train=False)
    engine.load_checkpoint(path)
    assert same(engine.model.state_dict(), state)


def test_save_checkpoint_again_replaces_a_checkpoint_but_no_other_folder(workspace):
    engine = language_model(1)
    engine.save_checkpoint("runs/saved")
    step(engine)
    engine.save_checkpoint(str(workspace / "runs" / "saved"))
    again = language_model(2)
    again.load_checkpoint("runs/saved")
    assert same(again.model.state_dict(), engine.model.state_dict())
    assert len(again.optimizer.state) == len(engine.optimizer.state) > 0
    assert [path.name for path in (workspace / "runs").iterdir()] == ["saved"]
    (workspace / "mine").mkdir()
    (workspace / "mine" / "thesis.txt").write_text("!")
    for path in ("mine", "mine/thesis.txt"):
        with user_error("exists and is not a checkpoint"):
            engine.save_checkpoint(path)
    assert (workspace / "mine" / "thesis.txt").read_text() == "!"


def test_save_checkpoint_failure_keeps_the_old_checkpoint(tmp_path, monkeypatch):
    engine = language_model(1)
    engine.save_checkpoint(tmp_path / "saved")
    before = {name: value.clone() for name, value in engine.model.state_dict().items()}
    step(engine)
    monkeypatch.setattr(engine, "describe", lambda folder: 1 / 0)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        engine.save_checkpoint(tmp_path / "saved")
    assert_loads(tmp_path / "saved", before)


@pytest.mark.parametrize("then", ["load", "save", "merge"])
def test_save_checkpoint_killed_during_the_swap_keeps_a_checkpoint(tmp_path, monkeypatch, then):
    """Whatever the last thing was that happened, there is a whole one under its name for the next who looks."""
    engine = language_model(1)
    engine.save_checkpoint(tmp_path / "saved")
    step(engine)
    real = os.replace

    def killed(source, target):
        if Path(target) == tmp_path / "saved":
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        engine.save_checkpoint(tmp_path / "saved")
    monkeypatch.setattr(os, "replace", real)
    assert not (tmp_path / "saved").exists()
    if then == "save":  # and this one dies before it is whole
        monkeypatch.setattr(engine, "describe", lambda folder: 1 / 0)
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            engine.save_checkpoint(tmp_path / "saved")
    if then == "merge":
        assert mvp(f"export {tmp_path}/saved {tmp_path}/out") == 0
    assert_loads(tmp_path / "saved", engine.model.state_dict())


def test_save_checkpoint_deletes_the_old_one_after_the_rename(tmp_path, monkeypatch):
    engine, real = language_model(1, train=False), shutil.rmtree
    engine.save_checkpoint(tmp_path / "saved")
    seen = []

    def rmtree(path, **options):
        if Path(path).exists():
            seen.append((tmp_path / "saved" / "meta.json").is_file())
        real(path, **options)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    engine.save_checkpoint(tmp_path / "saved")
    assert seen == [True]


def test_save_checkpoint_to_an_unwritable_folder_names_it(tmp_path):
    (tmp_path / "file").write_text("")
    with user_error(r"checkpoint .*file/saved cannot be written: .*Not a directory"):
        language_model(1, train=False).save_checkpoint(tmp_path / "file" / "saved")


def test_engine_checkpoint_can_be_merged_and_evaluated_but_not_resumed(train, tmp_path, capsys):
    engine = language_model(1)
    saved, out = tmp_path / "saved", tmp_path / "out"
    engine.save_checkpoint(saved)
    meta = read_json(saved / "meta.json")
    assert (meta["world_size"], meta["torch"]) == (1, torch.__version__)
    assert mvp(f"export {saved} {out}") == 0
    merged = engine_of(LanguageModelEngine.build_model(ModelSource(str(out))), optimizer=None)
    assert same(merged.model.state_dict(), engine.model.state_dict())
    words = [f"resume={saved}", "lm.family=qwen3"]
    assert train("workflow=evaluate", *words, config=LM, dir=tmp_path / "runs") == 0
    assert train(*words, config=LM, dir=tmp_path / "runs") == EXIT_USER_ERROR
    assert "is of a model engine, not of a training" in capsys.readouterr().err


def log_probs(engine):
    return engine.infer_batch(BATCH, ["log_probs"])["log_probs"]


def test_engine_without_an_optimizer_saves_and_loads(on_ranks, tmp_path):
    engine = language_model(1, train=False)
    engine.save_checkpoint(tmp_path / "weights")
    for found in on_ranks({"shard": 2}, reshard, tmp_path / "weights", tmp_path / "two"):
        assert torch.allclose(found, log_probs(engine), atol=1e-6)
    assert_loads(tmp_path / "two", engine.model.state_dict())
    with user_error("holds weights only, since it was saved without an optimizer"):
        language_model(4).load_checkpoint(tmp_path / "weights")


def reshard(layout, path, out):
    engine = language_model(2, layout, train=False)
    engine.load_checkpoint(path)
    engine.save_checkpoint(out)
    engine.save_checkpoint(out)  # replaced by all ranks together
    return log_probs(engine)


def test_learning_rates_without_scheduler_are_constant_and_without_optimizer_empty(
    tmp_path,
):
    engine = language_model(1)
    scheduled = LanguageModelEngine(language_model(1, train=False).model, ALONE)
    scheduled.initialize(adam, constant)
    for each in (engine, scheduled):
        step(each)
        step(each)
    assert same(engine.model.state_dict(), scheduled.model.state_dict())
    engine.save_checkpoint(tmp_path / "saved")
    engine.load_checkpoint(tmp_path / "saved")
    model = LanguageModelEngine.build_model(ModelSource(None, overrides_of("qwen3")))
    with user_error(r"initialize\(scheduler=\.\.\.\) needs an optimizer"):
        LanguageModelEngine(model, ALONE).initialize(scheduler=constant)


def test_merge_of_a_checkpoint_that_does_not_match_is_refused(tmp_path, capsys):
    saved, out = tmp_path / "saved", tmp_path / "out"
    language_model(1).save_checkpoint(saved)
    without_checksums(saved)

    def refused(*words):
        assert mvp(f"export {saved} {out}", *words) == EXIT_USER_ERROR
        assert not out.exists()
        return capsys.readouterr().err

    config, about = (saved / "hf" / name for name in ("config.json", "mvp.json"))
    good = read_json(config)
    fewer = {"num_hidden_layers": 1, "layer_types": good["layer_types"][:1]}
    for text, message in (
        (json.dumps(good | {"intermediate_size": 64}), "the shape (48, 32) there and (64, 32) in"),
        (json.dumps(good | fewer), "it also has model.hf.model.layers.1."),
        ('{"model_type": "qw', "config.json cannot be read"),
    ):
        config.write_text(text)
        assert message in refused()
    write_json(config, good)
    for text in ('{"model_type"', "[]", '{"model_type": "language_model", "dtype": "float31"}'):
        about.write_text(text)
        assert "mvp.json is damaged" in refused()
    about.write_text('{"model_type": "mine", "dtype": "float32", "engine": "/nowhere/engine.py"}')
    message = "there is no file /nowhere/engine.py. Name the file or module that registers it"
    assert message in refused()
    assert "which json does not register" in refused("--engine", "json")
    about.unlink()
    assert "has no hf/mvp.json" in refused()


@pytest.mark.slow
def test_merge_of_a_model_type_defined_in_a_recipe_writes_its_weights(
    train, tmp_path, monkeypatch, capsys
):
    """The recipe's folder is of no package and the command knows nothing of it but what the checkpoint says."""
    registry = {
        key: kind for key, kind in _REGISTRY.items() if kind.__module__.startswith("mvp_engine.")
    }
    monkeypatch.setattr("mvp_engine.model_engine.base._REGISTRY", registry)
    page = (ROOT / "docs" / "model_engine.md").read_text().split("## Adding a model type\n")[1]
    folder = tmp_path / "tagger"
    folder.mkdir()
    (folder / "types.py").write_text(page.split("```python\n")[1].split("```")[0])
    (folder / "engine.py").write_text(RECIPE)
    model = {"type": "token_classifier", "config": overrides_of("qwen3")}
    write_json(folder / "train.yaml", {"model": model, "train": {"max_steps": 1}})
    assert train("run_id=a", config=folder / "train.yaml", dir=tmp_path) == 0
    words = ["export", str(tmp_path / "a"), str(tmp_path / "out")]
    code, said = run_process("-m", "mvp_engine.cli", *words, cwd=tmp_path)
    assert code == 0, said
    assert [name for name, _ in entries(tmp_path / "out" / "heads.safetensors")] == [
        "classes.bias",
        "classes.weight",
    ]
    del registry["token_classifier", "fsdp"]  # as in another process
    folder.rename(tmp_path / "moved")
    words[-1] = str(tmp_path / "again")
    assert main(words) == EXIT_USER_ERROR
    assert "there is no file" in capsys.readouterr().err
    assert main([*words, "--engine", str(tmp_path / "moved" / "types.py")]) == 0


RECIPE = """
import torch
from mvp_engine.data.batch import PackedBatch
from mvp_engine.engine import Engine
from .types import TokenClassifierEngine


class Tagger(Engine):
    def prepare_dataloader(self, split):
        return [PackedBatch.from_sequences([torch.arange(3, 12)])]

    def forward_step(self, ctx, batch):
        return self.model(batch, ["class_logits"])["class_logits"].square().sum(), batch.num_loss_tokens
"""


def test_register_of_an_incomplete_model_engine_is_refused():
    class Half(ModelEngine):
        def settle(self):
            pass

    with pytest.raises(TypeError, match=r"\(mine, fsdp\): .*Half lacks collect, describe"):
        register("mine", "fsdp")(Half)
    for thing in (torch.nn.Linear, FSDPEngine(torch.nn.Linear(2, 2), ALONE), print):
        with pytest.raises(TypeError, match="is no class that derives from ModelEngine"):
            register("mine", "fsdp")(thing)

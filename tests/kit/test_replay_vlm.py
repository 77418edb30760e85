"""Faults planted into rows of a packed vision-language training lead to the row, the pack, the step and the parameter.

The faults are in sequences of packs, among others: a NaN weight, an image of 1e25, log(0) in the loss, and a label
outside of the vocabulary.
"""

import shlex

import pytest
from conftest import CAMPAIGN, mvp
from run_files import json_lines, printed_json
from tiny_vlm import with_images, write

from mvp_engine.cli import main
from mvp_engine.errors import EXIT_USER_ERROR
from mvp_engine.runs import list_runs

ENGINE = """
import torch
from mvp_engine.config import Section
from mvp_engine.kit import MLLMConfig, MLLMEngine

class Faults(Section):
    nan: int = -2
    huge: int = -2
    log: int = -2
    label: int = -2

class FaultyConfig(MLLMConfig):
    faults: Faults = Faults()

class FaultyEngine(MLLMEngine):
    config_class = FaultyConfig

    def train_pre_step(self, ctx):
        for batch in ctx.micro_batches:
            batch.token_fields["weight"] = torch.ones(batch.num_tokens)
            for kind, sample in self.config.faults:
                for sequence in (batch.sequence_fields["sample"] == sample).nonzero()[:, 0].tolist():
                    self.plant(batch, kind, sequence)
        super().train_pre_step(ctx)

    def plant(self, batch, kind, sequence):
        tokens = slice(*batch.cu_seqlens[sequence : sequence + 2].tolist())
        if kind == "nan":
            batch.token_fields["weight"][tokens] = torch.nan
        elif kind == "label":
            batch.labels[tokens] = 9999
        elif kind == "huge":
            images = batch.media["pixel_values"]
            owner = torch.repeat_interleave(images.sequence_ids, images.row_counts)
            images.values[owner == sequence] = 1e25

    def forward_step(self, ctx, batch):
        loss, weight = super().forward_step(ctx, batch)
        is_bad = batch.sequence_fields["sample"] == self.config.faults.log
        return loss - (~is_bad).float().log().sum(), weight
"""
CONFIG = """
engine: engine.py:FaultyEngine
run_name: tiny
output_dir: outputs
model: {type: language_model, path: model}
data:
  pack_tokens: 160
  sources:
    images: {path: images.jsonl}
  global_batch_size: 2
  num_workers: 0
train: {epochs: 1}
checkpoint: {interval: 2}
log: {backends: [jsonl, file]}
"""


@pytest.fixture
def config(vlm_folder):
    write(vlm_folder / "images.jsonl", with_images(vlm_folder, 24))
    (vlm_folder / "engine.py").write_text(ENGINE)
    (vlm_folder / "train.yaml").write_text(CONFIG)
    return str(vlm_folder / "train.yaml")


@pytest.mark.slow
def test_replay_of_a_packed_vlm_names_the_rows(config, tmp_path, capsys):
    planted = {"nan": 3, "huge": 11, "log": 18}
    assert mvp(f"train {config}", *(f"faults.{kind}={row}" for kind, row in planted.items())) == 0
    [run] = list_runs(tmp_path / "outputs")
    records = json_lines(run.dir / "skipped_steps.jsonl")
    found = {}
    for record in records:
        capsys.readouterr()
        assert mvp(f"check {run.id} --json --step", str(record["step"])) == 0
        for entry in printed_json(capsys)["rows"]:
            assert entry["step"] == record["step"]
            [name] = entry["rows"]
            found[name] = entry
    assert found.keys() == {f"images.jsonl:{row + 1}" for row in planted.values()}
    nan, huge, log = (found[f"images.jsonl:{row + 1}"] for row in planted.values())
    assert (nan["weight"], nan["module"], nan["parameter"] is not None) == ("nan", None, True)
    assert (log["loss"], log["module"]) == ("inf", None)
    assert "visual" in huge["module"]
    assert huge["parameter"] is not None


def test_label_outside_of_the_vocabulary_ends_with_step_row_and_value(config, capsys):
    assert mvp(f"train {config} faults.label=5") == EXIT_USER_ERROR
    text = capsys.readouterr().err
    assert "rank 0, micro-batch" in text
    assert "row images.jsonl:6: labels: 9999 at position 0" in text
    assert "Traceback" not in text


@CAMPAIGN
def test_learning_rate_blow_up_of_a_packed_vlm_blames_the_weights_and_the_advice_works(
    config, tmp_path, capsys
):
    words = "optim.lr=50 optim.warmup=0 checkpoint.interval=1 guard.max_skips=3".split()
    assert mvp(f"train {config}", *words, "train.epochs=3") == EXIT_USER_ERROR
    command = capsys.readouterr().err.rpartition("for example with: mvp ")[2]
    [run] = list_runs(tmp_path / "outputs")
    assert mvp(f"check {run.id}") == 0
    text = capsys.readouterr().out
    assert "the weights are to blame and not the data" in text
    assert "the learning rate 4" in text
    assert main(shlex.split(command)) == 0
    new = list_runs(tmp_path / "outputs")[-1]
    assert all(record["skipped"] == 0 for record in new.records("train"))


@pytest.mark.slow
def test_replay_on_a_stream_names_the_stream_and_the_row(config, tmp_path, capsys):
    words = ["data.sources.images.stream=true", "train.epochs=null", "train.max_steps=8"]
    assert mvp(f"train {config}", *words, "faults.nan=3") == 0
    [run] = list_runs(tmp_path / "outputs")
    assert mvp(f"check {run.id}") == 0
    assert "row images.jsonl, row 3\n" in capsys.readouterr().out

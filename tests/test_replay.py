"""`mvp check RUN`: planted faults lead to their row, micro-batch, step and parameter."""

from __future__ import annotations

import json
import shlex
from typing import NamedTuple

import pytest
import torch
from conftest import MAGIC, TINY, mvp
from run_files import json_lines, printed_json, read_json
from torch.distributed.run import parse_args

from mvp_engine.cli import main
from mvp_engine.data.batch import PackedBatch
from mvp_engine.errors import EXIT_BUG, EXIT_USER_ERROR, RowError
from mvp_engine.kit import check_labels
from mvp_engine.kit.row_checks import row_groups, select_rows
from mvp_engine.runs import Run, list_runs
from mvp_engine.tools.replay import config_of, nearest_checkpoint, rank_arguments, replay_step


def newest(folder):
    return list_runs(folder)[-1]


def replayed(capsys, folder, *words, code=0):
    capsys.readouterr()
    assert mvp(f"check {newest(folder).dir} --json", *words) == code
    return printed_json(capsys)


def where(run, step, sample):
    """The micro-batch of a sample in a step, counted from 1, by the record of the step."""
    lines = (run.dir / "skipped_steps.jsonl").read_text().splitlines()
    [record] = [one for line in lines if (one := json.loads(line))["step"] == step]
    return 1 + record["sample_ids"].index(sample) // 4


@pytest.mark.parametrize(
    "kind, parameter, module",
    [("weight", "4.bias", None), ("huge", "4.bias", "1"), ("log", None, None)],
)
def test_replay_planted_fault_names_row_micro_batch_step_and_parameter(
    train, tmp_path, capsys, kind, parameter, module
):
    words = (
        f"tiny.bad_rows=[17] tiny.bad_kind={kind} checkpoint.interval=2 train.max_steps=6".split()
    )
    assert train(*words, dir=tmp_path) == 0
    found = replayed(capsys, tmp_path)
    run = newest(tmp_path)
    [entry] = found["rows"]
    assert entry["rows"] == [17]
    assert entry["micro_batch"] == where(run, found["step"], 17)
    assert (entry["parameter"], entry["module"]) == (parameter, module)
    assert not found["weights_blamed"]
    assert mvp(f"check {run.dir}") == 0
    text = capsys.readouterr().out
    assert f"micro-batch {entry['micro_batch']}, row 17\n" in text
    assert len(list_runs(tmp_path)) == 1  # nothing is left behind


def test_replay_of_an_error_names_the_row_and_the_error(train, tmp_path, capsys):
    assert (
        train("tiny.bad_rows=[17] tiny.bad_kind=label train.max_steps=6", dir=tmp_path) == EXIT_BUG
    )
    text = capsys.readouterr().out
    found = replayed(capsys, tmp_path)
    hint = "If a row caused it, this finds the row"
    assert f"step {found['step']} failed. {hint}: mvp check {newest(tmp_path).dir}" in text
    [entry] = found["rows"]
    assert (entry["rows"], entry["error"]) == ([17], "IndexError: Target 7 is out of bounds.")


@pytest.mark.slow
def test_replay_after_a_learning_rate_blow_up_blames_the_weights(train, tmp_path, capsys):
    words = "optim.lr=50 optim.warmup=0 train.max_steps=20 guard.max_skips=4".split()
    words += ["task.train_problems=64", "data.micro_batch_size=8", "data.global_batch_size=8"]
    words += (
        "model.width=32 eval.steps=null checkpoint.best_metric=null checkpoint.interval=1".split()
    )
    assert train(*words, config=MAGIC, dir=tmp_path) == EXIT_USER_ERROR
    text = capsys.readouterr().err
    assert "optim.lr is too high" in text
    found = replayed(capsys, tmp_path)
    assert found["weights_blamed"]
    assert found["step"] == replay_step(newest(tmp_path), None)["step"] < 10
    assert found["largest_weight"]["value"] > 40
    assert found["lr"] > 40
    assert main(shlex.split(text.rpartition("for example with: mvp ")[2])) == 0
    assert all(record["skipped"] == 0 for record in newest(tmp_path).records("train"))


@pytest.mark.slow
def test_run_that_skips_a_third_of_its_steps_ends_with_a_warning_and_finds_each_row(
    train, tmp_path, capsys
):
    """log(0) in 0.3 % of the rows, in steps of 128 rows."""
    rows = list(range(0, 2000, 333))[:6]
    words = "tiny.bad_kind=log tiny.samples=2000 data.global_batch_size=128".split()
    words += (
        "data.micro_batch_size=32 train.max_steps=null train.epochs=1 checkpoint.interval=5".split()
    )
    assert train(f"tiny.bad_rows={rows}", *words, dir=tmp_path) == 0
    run = newest(tmp_path)
    records = json_lines(run.dir / "skipped_steps.jsonl")
    share = f"{len(records)} of 16 steps ({len(records) / 16:.0%}) were skipped"
    assert len(records) >= 5
    assert share in (run.dir / "log.txt").read_text()
    for record in records[-2:]:
        found = replayed(capsys, tmp_path, "--step", str(record["step"]))
        names = sorted(name for entry in found["rows"] for name in entry["rows"])
        assert names == sorted({*rows} & {*record["sample_ids"]})


@pytest.mark.slow
@pytest.mark.parametrize("shard", [1, 2])
def test_replay_on_two_ranks_names_the_rank(ranks2, tmp_path, shard):
    words = f"tiny.bad_rows=[17] parallel.shard={shard} data.micro_batch_size=2 train.max_steps=6".split()
    assert ranks2.launch(TINY, f"output_dir={tmp_path}", *words) == [0, 0]
    run = newest(tmp_path)
    step = replay_step(run, None)["step"]
    folder = tmp_path / "found"
    folder.mkdir()
    arguments = rank_arguments(run, step, folder)
    assert ranks2.run(_replay_rank, arguments) == [0, 0]
    # Of torchrun.
    parse_args(["--standalone", "--nproc_per_node=2", "-m", "mvp_engine.tools.replay", *arguments])
    [entry] = read_json(folder / "found.json")["rows"]
    name = "skipped_steps.jsonl" if entry["rank"] == 0 else "skipped_steps.rank1.jsonl"
    record = json.loads((run.dir / name).read_text().splitlines()[-1])
    assert entry["rows"] == [17]
    assert 17 in record["sample_ids"]
    assert record["nonfinite_micro_batches"] == [entry["micro_batch"] - 1]


def _replay_rank(arguments):
    from mvp_engine.tools.replay import main as replay_main

    return replay_main(arguments)


def test_replay_of_a_finite_step_lists_its_losses(train, tmp_path, capsys):
    assert train("train.max_steps=4", dir=tmp_path) == 0
    run = str(newest(tmp_path).dir)
    assert mvp(f"check {run}") == EXIT_USER_ERROR
    assert "--step N replays any step" in capsys.readouterr().err
    found = replayed(capsys, tmp_path, "--step", "3", code=EXIT_USER_ERROR)
    assert [entry["micro_batch"] for entry in found["micro_batches"]] == [1, 2]


def test_replay_uses_the_nearest_checkpoint_and_the_config_of_the_step(tmp_path):
    run = Run.create(tmp_path, "any", None)
    for name in ("step_00000004", "diverged-step_00000006", "step_00000008"):
        (run.checkpoints / name).mkdir(parents=True)
        (run.checkpoints / name / "meta.json").write_text("{}")
    steps = {step: nearest_checkpoint(run, step) for step in (4, 5, 7, 9)}
    names = [path.name if path else None for path in steps.values()]
    assert names == [None, "step_00000004", "diverged-step_00000006", "step_00000008"]
    for name in ("config", "config.until_step_5", "config.until_step_9"):
        (run.dir / f"{name}.yaml").write_text("")
    names = [config_of(run, step).name for step in (5, 6, 10)]
    assert names == ["config.until_step_5.yaml", "config.until_step_9.yaml", "config.yaml"]


class Pair(NamedTuple):
    x: torch.Tensor
    class_weights: torch.Tensor


def test_rows_of_nested_micro_batches_are_selected():
    batch = {
        "x": torch.arange(6).view(3, 2),
        "names": ["a", "b", "c"],
        "pair": (torch.arange(3), 5),
        "n": 3,
    }
    assert row_groups(batch) == [[0], [1], [2]]
    chosen = select_rows(batch, [2, 0])
    assert chosen["x"].tolist() == [[4, 5], [0, 1]]
    assert (chosen["names"], chosen["pair"][0].tolist(), chosen["pair"][1], chosen["n"]) == (
        ["c", "a"],
        [2, 0],
        5,
        3,
    )
    assert row_groups("text") == []
    pair = Pair(torch.arange(3), torch.arange(5))
    assert [value.tolist() for value in select_rows(pair, [1])] == [[1], [0, 1, 2, 3, 4]]


def test_rows_of_packed_batches_are_those_of_one_source():
    fields = {"sample": torch.tensor([4, 4, 4, 1]), "source": torch.tensor([0, 0, 1, 1])}
    batch = PackedBatch.from_sequences([torch.arange(2)] * 4, sequence_fields=fields)
    assert row_groups(batch) == [[0, 1], [2], [3]]


def test_check_labels_names_the_row_and_the_value():
    check_labels(torch.tensor([[0, 2], [-100, 1]]), 3)
    with pytest.raises(RowError, match="label 3 is outside of the 3 classes") as error:
        check_labels(torch.tensor([[0, 2], [-100, 3]]), 3)
    assert error.value.row == 1

"""Non-finite steps: what stays out of the metrics, what is saved, and whether the printed advice works."""

import re
import shlex

import pytest
import torch
from conftest import losses, read_metrics
from run_files import log_of

from mvp_engine.cli import main
from mvp_engine.engine.monitor import LossTrend
from mvp_engine.errors import EXIT_INTERRUPTED, EXIT_USER_ERROR
from mvp_engine.runs import list_runs


def newest(folder):
    return list_runs(folder)[-1]


def checkpoints(folder):
    return sorted(path.name for path in newest(folder).checkpoints.glob("*step_*") if path.is_dir())


def printed_command(text):
    """The words after `mvp` of the command that a message ends with."""
    return shlex.split(re.findall(r"(?:continue|example|with).*: mvp (train .*)", text)[-1])


@pytest.fixture
def bad_step(tiny_hooks):
    """bad_step(steps, loss, weight): in these steps, the loss is multiplied by `loss` and the weight by `weight`."""

    def plant(steps, loss=1.0, weight=1.0, grad=False):
        def planted(self, ctx, micro_batch):
            loss_sum, weight_sum = plain.forward_step(self, ctx, micro_batch)
            if ctx.split != "train" or ctx.step not in steps:
                return loss_sum, weight_sum
            ctx.log("huge", torch.tensor(1e20))
            if grad:  # a finite loss whose gradient is not
                first = self.model[0].weight
                loss_sum = loss_sum + (first - first.detach()).abs().sqrt().sum()
            return loss_sum * loss, weight_sum * weight

        plain = tiny_hooks(forward_step=planted)

    return plant


def test_finite_loss_of_a_skipped_step_is_left_out_of_all_means(train, bad_step, tmp_path):
    bad_step({3}, loss=1e22, grad=True)
    assert train("log.interval=4", dir=tmp_path) == 0
    assert max(losses(tmp_path)) < 100
    record = read_metrics(tmp_path)[1]  # of steps 2 to 4
    assert record["huge"] is None
    assert record["totals"]["tokens"] > 0  # computed, though not learnt


def test_nan_weight_is_the_reason_and_names_the_micro_batch(train, bad_step, tmp_path):
    bad_step({3}, weight=float("nan"))
    assert train(dir=tmp_path) == 0
    log = log_of(tmp_path)
    assert (
        "step 3 skipped on all ranks: the loss weight is not finite, in micro-batch 1, 2 of rank 0"
        in log
    )
    assert "1 of 12 steps (8%) were skipped: their samples were not learnt" in log


def test_no_checkpoint_is_written_while_steps_are_skipped(train, bad_step, tmp_path):
    bad_step(range(4, 7), loss=float("nan"))
    assert train("checkpoint.interval=4 checkpoint.keep_n=null", dir=tmp_path) == 0
    assert checkpoints(tmp_path) == ["step_00000007", "step_00000008", "step_00000012"]


@pytest.mark.parametrize("interval", [1, 100])  # with and without checkpoints from before
def test_advice_after_a_learning_rate_blow_up_works(train, tmp_path, capsys, interval):
    words = [
        f"checkpoint.interval={interval}",
        "guard.max_skips=4",
        "optim.warmup=0",
    ]
    if interval == 1:  # good steps first
        assert train("train.max_steps=3", *words, dir=tmp_path) == 0
        words.append("resume=auto")
    assert train("optim.lr=1e18 train.max_steps=20", *words, dir=tmp_path) == EXIT_USER_ERROR
    text = capsys.readouterr().err
    assert "the weights diverged, and optim.lr is too high" in text
    left = newest(tmp_path).checkpoint_list()
    assert [path.name for path in left] == (
        ["step_00000002", "step_00000003"] if interval == 1 else []
    )
    latest = newest(tmp_path).checkpoints / "latest"
    assert latest.resolve() == left[-1].resolve() if left else not latest.is_symlink()
    assert main(printed_command(text)) == 0
    assert newest(tmp_path).checkpoint_list()[-1].name == "step_00000020"
    records = read_metrics(tmp_path)
    assert all(record["loss"] < 100 and record["skipped"] == 0 for record in records)


def test_loss_trend_ends_with_a_loss_near_the_average():
    trend = LossTrend()
    seen = []
    for step, loss in enumerate(
        [2.0, 2.1, 9.0, float("nan"), None, 2.2, -50.0, float("inf")], start=1
    ):
        trend.add(step, loss)
        seen.append(trend.rising_since)
    assert seen == [None, None, 3, 3, 3, None, None, 8]


def test_interrupted_run_prints_the_command_that_continues_it(train, tmp_path, capsys):
    assert train("tiny.fault=sigterm train.max_steps=9", dir=tmp_path) == EXIT_INTERRUPTED
    assert main([*printed_command(capsys.readouterr().err), "tiny.fault=null"]) == 0
    assert [r["step"] for r in read_metrics(tmp_path)] == [
        1,
        2,
        4,
        6,
        8,
        9,
    ]  # not the 12 steps of the YAML file


def test_resume_beyond_the_end_neither_finishes_nor_changes_the_run(train, tmp_path, capsys):
    assert train("train.max_steps=15", dir=tmp_path) == 0
    config = (newest(tmp_path).dir / "config.yaml").read_text()
    assert train("resume=auto", dir=tmp_path) == EXIT_USER_ERROR
    text = capsys.readouterr().err
    assert "is at step 15, beyond the 12 steps of this config" in text
    assert newest(tmp_path).status() == "finished"  # as before
    assert (newest(tmp_path).dir / "config.yaml").read_text() == config
    assert main([*printed_command(text), "train.max_steps=16"]) == 0
    assert newest(tmp_path).checkpoint_list()[-1].name == "step_00000016"
    assert train("resume=auto train.max_steps=null train.epochs=1", dir=tmp_path) == EXIT_USER_ERROR
    assert "is at step 16, beyond the 6 steps of this config" in capsys.readouterr().err


def test_samples_per_second_count_the_rows_of_a_short_last_step(train, tmp_path):
    """44 samples in steps of 8: the sixth has 4."""
    assert train("train.max_steps=7 log.interval=1", dir=tmp_path) == 0
    perf = [record["perf"] for record in newest(tmp_path).records("train")]
    assert [round(one["samples_per_s"] * one["step_s"], 3) for one in perf] == [8, 8, 8, 8, 8, 4, 8]
